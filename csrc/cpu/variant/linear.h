// Products of rows of x with rows of weights. Included once per instruction set, after simd/dot_*.h and attention.h.
//
// Each output is summed in one fixed order whatever is computed beside it. Dots: over a block of `block_size` numbers
// each lane adds its own, then the lanes are added, then the blocks in rising order. Panels: number by number, then the
// blocks. Narrow weights are widened without rounding.
#include <cstdint>

namespace vllm::cpu::VLLM_VARIANT {

// Rows of weights that are read side by side.
constexpr int kProductColumns = 4;

// The last, partial vector of a row, padded with 0.
template <typename Number>
inline Sums load_rest(const Number* p, int64_t count) {
  Number padded[kSumLanes] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = p[i];
  return load_numbers(padded);
}

// The numbers of one row that belong to the 4 columns of a block.
using Four = float __attribute__((vector_size(16)));

inline Four load_four(const float* p, int64_t count) {
  Four four = {};
  if (count == kProductColumns) {
    __builtin_memcpy(&four, p, sizeof four);
  } else {
    for (int64_t c = 0; c < count; ++c) four[c] = p[c];
  }
  return four;
}
inline void store_four(float* p, int64_t count, Four four) {
  if (count == kProductColumns) {
    __builtin_memcpy(p, &four, sizeof four);
  } else {
    for (int64_t c = 0; c < count; ++c) p[c] = four[c];
  }
}

// What is read into the cache during a tile: one stream in memory's order, spread evenly over the tile's steps. (A
// stream a row was 1.5 times as slow; fetching all of it with the first rows left the memory idle for the others.)
struct Fetcher {
  const char* next;
  const char* end;
  int lines_a_step;
};
constexpr int64_t kLineBytes = 64;

// Adds kRows x 4 dot products over `size` numbers to totals.
template <int kRows, typename Weight>
inline void add_dots(const float* const x[kRows], const Weight* const weights[kProductColumns], int64_t size,
                     Fetcher* fetcher, Four totals[kRows]) {
  constexpr int64_t kLineNumbers = kLineBytes / static_cast<int64_t>(sizeof(Weight));
  // Loops this short end where the branch predictor expects it.
  constexpr int64_t kUnrolled = 4 * kSumLanes;
  Sums sums[kRows][kProductColumns];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kProductColumns; ++c) sums[r][c] = zero_sums();
  }
  const auto step = [&](const auto& read, int64_t i) {
    Sums rows[kRows];
    for (int r = 0; r < kRows; ++r) rows[r] = read(x[r] + i);
    for (int c = 0; c < kProductColumns; ++c) {
      const Sums weight = read(weights[c] + i);
      for (int r = 0; r < kRows; ++r) sums[r][c] = multiply_add(rows[r], weight, sums[r][c]);
    }
  };
  const auto whole = [](const auto* p) { return load_numbers(p); };
  int64_t i = 0;
  for (; fetcher->next < fetcher->end && i + kLineNumbers <= size; i += kLineNumbers) {
    for (int line = 0; line < fetcher->lines_a_step; ++line) __builtin_prefetch(fetcher->next + line * kLineBytes);
    fetcher->next += fetcher->lines_a_step * kLineBytes;
    for (int64_t j = 0; j < kLineNumbers; j += kSumLanes) step(whole, i + j);
  }
  for (; i + kUnrolled <= size; i += kUnrolled) {
    for (int64_t j = 0; j < kUnrolled; j += kSumLanes) step(whole, i + j);
  }
  for (; i + kSumLanes <= size; i += kSumLanes) step(whole, i);
  if (i < size) step([rest = size - i](const auto* p) { return load_rest(p, rest); }, i);
  for (int r = 0; r < kRows; ++r) totals[r] += add_lanes(sums[r]);
}

// Outputs of kRows rows of x and up to 4 rows of weights.
template <int kRows, typename Weight>
inline void dot_block(const ProductTile& tile, int64_t row, int64_t column, Fetcher* fetcher) {
  const int64_t num_columns = tile.num_columns - column < kProductColumns ? tile.num_columns - column : kProductColumns;
  const auto* base = static_cast<const Weight*>(tile.weight) + column * tile.weight_stride;
  const Weight* weights[kProductColumns];
  for (int64_t c = 0; c < kProductColumns; ++c) {
    weights[c] = base + (c < num_columns ? c : num_columns - 1) * tile.weight_stride;
  }
  float* output = tile.output + row * tile.output_stride + column;
  const float* x[kRows];
  Four totals[kRows] = {};
  for (int r = 0; r < kRows; ++r) x[r] = tile.x + (row + r) * tile.x_stride;
  for (int64_t first = 0; first < tile.size; first += tile.block_size) {
    const int64_t size = tile.size - first < tile.block_size ? tile.size - first : tile.block_size;
    add_dots<kRows, Weight>(x, weights, size, fetcher, totals);
    for (int r = 0; r < kRows; ++r) x[r] += size;
    for (int c = 0; c < kProductColumns; ++c) weights[c] += size;
  }
  const Four bias = tile.bias == nullptr ? Four{} : load_four(tile.bias + column, num_columns);
  const Four scale = tile.scale == nullptr ? Four{1, 1, 1, 1} : load_four(tile.scale + column, num_columns);
  for (int r = 0; r < kRows; ++r) {
    store_four(output + r * tile.output_stride, num_columns, totals[r] * scale + bias);
  }
}

template <int kRows, typename Weight>
inline void dot_rows(const ProductTile& tile, int64_t row, Fetcher* fetcher) {
  for (int64_t column = 0; column < tile.num_columns; column += kProductColumns) {
    dot_block<kRows, Weight>(tile, row, column, fetcher);
  }
}

template <int kRows, typename Weight>
inline void dot_last_rows(const ProductTile& tile, int64_t row, Fetcher* fetcher) {
  if (tile.num_rows - row == kRows) {
    dot_rows<kRows, Weight>(tile, row, fetcher);
  } else if constexpr (kRows > 1) {
    dot_last_rows<kRows - 1, Weight>(tile, row, fetcher);
  }
}

template <typename Weight>
inline void dot_tile(const ProductTile& tile) {
  const int64_t num_passes = (tile.num_rows + kProductRows - 1) / kProductRows;
  const int64_t num_bytes = tile.num_columns * tile.weight_stride * static_cast<int64_t>(sizeof(Weight));
  Fetcher fetcher{tile.fetched, tile.fetched + num_bytes,
                  static_cast<int>((kProductColumns + num_passes - 1) / num_passes)};
  int64_t row = 0;
  for (; row + kProductRows <= tile.num_rows; row += kProductRows) dot_rows<kProductRows, Weight>(tile, row, &fetcher);
  dot_last_rows<kProductRows, Weight>(tile, row, &fetcher);
}

inline void dot_float32(const ProductTile& tile) { dot_tile<float>(tile); }
inline void dot_bfloat16(const ProductTile& tile) { dot_tile<uint16_t>(tile); }
inline void dot_int8(const ProductTile& tile) { dot_tile<int8_t>(tile); }

template <int kCount>
inline void multiply_panel_block(const ProductTile& tile, int64_t row) {
  float* output = tile.output + row * tile.output_stride;
  const bool is_whole = tile.num_columns == kPanelColumns;
  const auto read = [&](const float* p) { return is_whole ? load(p) : load_tail(p, tile.num_columns, 0.0f); };
  Floats sums[kCount];
  for (int r = 0; r < kCount; ++r) sums[r] = broadcast(0.0f);
  const float* x = tile.x + row * tile.x_stride;
  const auto* panel = static_cast<const float*>(tile.weight);
  for (int64_t i = 0; i < tile.size; ++i) {
    const Floats weights = load(panel + i * kPanelColumns);
    for (int r = 0; r < kCount; ++r) sums[r] = multiply_add(broadcast(x[r * tile.x_stride + i]), weights, sums[r]);
  }
  for (int r = 0; r < kCount; ++r) {
    // Blocks are summed apart and then added, which keeps rounding small.
    if (tile.adds) sums[r] = sums[r] + read(output + r * tile.output_stride);
    if (tile.scale != nullptr) sums[r] = sums[r] * read(tile.scale);
    if (tile.bias != nullptr) sums[r] = sums[r] + read(tile.bias);
    if (is_whole) {
      store(output + r * tile.output_stride, sums[r]);
    } else {
      store_head(output + r * tile.output_stride, tile.num_columns, sums[r]);
    }
  }
}

inline void multiply_panel(const ProductTile& tile) {
  for_each_block(tile.num_rows,
                 [&](auto rows, int64_t first) { multiply_panel_block<decltype(rows)::value>(tile, first); });
}

inline void pack_float32(const ProductTile& tile, float*, float* panel) {
  const float* rows[kPanelColumns];
  for (int64_t c = 0; c < kPanelColumns; ++c) {
    // Columns that are not there repeat the last one.
    rows[c] =
        static_cast<const float*>(tile.weight) + (c < tile.num_columns ? c : tile.num_columns - 1) * tile.weight_stride;
  }
  transpose(rows, kPanelColumns, tile.size, kPanelColumns, panel);
}

template <typename Weight>
inline void pack_narrow(const ProductTile& tile, float* scratch, float* panel) {
  for (int64_t c = 0; c < tile.num_columns; ++c) {
    const Weight* narrow = static_cast<const Weight*>(tile.weight) + c * tile.weight_stride;
    float* wide = scratch + c * tile.size;
    int64_t i = 0;
    for (; i + kSumLanes <= tile.size; i += kSumLanes) store_numbers(wide + i, load_numbers(narrow + i));
    if (i == tile.size) continue;
    float rest[kSumLanes];
    store_numbers(rest, load_rest(narrow + i, tile.size - i));
    for (int64_t j = 0; i + j < tile.size; ++j) wide[i + j] = rest[j];
  }
  ProductTile wide = tile;
  wide.weight = scratch;
  wide.weight_stride = tile.size;
  pack_float32(wide, nullptr, panel);
}
inline void pack_bfloat16(const ProductTile& tile, float* scratch, float* panel) {
  pack_narrow<uint16_t>(tile, scratch, panel);
}
inline void pack_int8(const ProductTile& tile, float* scratch, float* panel) {
  pack_narrow<int8_t>(tile, scratch, panel);
}

}  // namespace vllm::cpu::VLLM_VARIANT
