// Products with weights as they lie, a row an output: dot products of rows of x and rows of weights. Included once per
// instruction set, after simd/dot_*.h.
//
// Each output is summed in one fixed order whatever is computed beside it: over a block of `block_size` numbers each
// lane adds its own, then the lanes are added, then the blocks in rising order. Narrow weights are widened without
// rounding, in registers or beforehand, so that is all the same too.
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

// Adds kRows x 4 dot products over `size` numbers to totals, and reads what lies at *fetched (null: nothing) into the
// cache. One stream in memory's order is some 1.5 times as fast as four, a row each.
template <int kRows, typename Weight>
inline void add_dots(const float* const x[kRows], const Weight* const weights[kProductColumns], int64_t size,
                     const char** fetched, float totals[kRows][kProductColumns]) {
  constexpr int64_t kLine = 64, kLineNumbers = kLine / static_cast<int64_t>(sizeof(Weight));
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
  if (*fetched != nullptr) {
    for (; i + kLineNumbers <= size; i += kLineNumbers) {
      for (int c = 0; c < kProductColumns; ++c) __builtin_prefetch(*fetched + c * kLine);
      *fetched += kProductColumns * kLine;
      for (int64_t j = 0; j < kLineNumbers; j += kSumLanes) step(whole, i + j);
    }
  }
  for (; i + kSumLanes <= size; i += kSumLanes) step(whole, i);
  if (i < size) step([rest = size - i](const auto* p) { return load_rest(p, rest); }, i);
  for (int r = 0; r < kRows; ++r) {
    float block[kProductColumns];
    add_lanes(sums[r], block);
    for (int c = 0; c < kProductColumns; ++c) totals[r][c] += block[c];
  }
}

// Outputs of kRows rows of x and up to 4 rows of weights.
template <int kRows, typename Weight>
inline void multiply_block(const ProductTile& tile, int64_t row, int64_t column, const char** fetched) {
  const int64_t num_columns = tile.num_columns - column < kProductColumns ? tile.num_columns - column : kProductColumns;
  const auto* base = static_cast<const Weight*>(tile.weight);
  const Weight* weights[kProductColumns];
  for (int64_t c = 0; c < kProductColumns; ++c) {
    weights[c] = base + (column + (c < num_columns ? c : num_columns - 1)) * tile.weight_stride;
  }
  const float* x[kRows];
  float totals[kRows][kProductColumns] = {};
  for (int r = 0; r < kRows; ++r) x[r] = tile.x + (row + r) * tile.x_stride;
  if (tile.adds) {
    for (int r = 0; r < kRows; ++r) {
      const float* output = tile.output + (row + r) * tile.output_stride + column;
      for (int64_t c = 0; c < num_columns; ++c) totals[r][c] = output[c];
    }
  }
  for (int64_t first = 0; first < tile.size; first += tile.block_size) {
    const int64_t size = tile.size - first < tile.block_size ? tile.size - first : tile.block_size;
    add_dots<kRows, Weight>(x, weights, size, fetched, totals);
    for (int r = 0; r < kRows; ++r) x[r] += size;
    for (int c = 0; c < kProductColumns; ++c) weights[c] += size;
  }
  for (int r = 0; r < kRows; ++r) {
    float* output = tile.output + (row + r) * tile.output_stride + column;
    for (int64_t c = 0; c < num_columns; ++c) {
      float total = totals[r][c];
      if (tile.scale != nullptr) total *= tile.scale[column + c];
      if (tile.bias != nullptr) total += tile.bias[column + c];
      output[c] = total;
    }
  }
}

template <int kRows, typename Weight>
inline void multiply_rows(const ProductTile& tile, int64_t row) {
  const char* fetched = row == 0 ? tile.fetched : nullptr;
  for (int64_t column = 0; column < tile.num_columns; column += kProductColumns) {
    multiply_block<kRows, Weight>(tile, row, column, &fetched);
  }
}

template <int kRows, typename Weight>
inline void multiply_last_rows(const ProductTile& tile, int64_t row) {
  if (tile.num_rows - row == kRows) {
    multiply_rows<kRows, Weight>(tile, row);
  } else if constexpr (kRows > 1) {
    multiply_last_rows<kRows - 1, Weight>(tile, row);
  }
}

template <typename Weight>
inline void multiply_tile(const ProductTile& tile) {
  int64_t row = 0;
  for (; row + kProductRows <= tile.num_rows; row += kProductRows) multiply_rows<kProductRows, Weight>(tile, row);
  multiply_last_rows<kProductRows, Weight>(tile, row);
}

inline void multiply_float32(const ProductTile& tile) { multiply_tile<float>(tile); }
inline void multiply_bfloat16(const ProductTile& tile) { multiply_tile<uint16_t>(tile); }
inline void multiply_int8(const ProductTile& tile) { multiply_tile<int8_t>(tile); }

template <typename Weight>
inline void widen(const Weight* narrow, int64_t count, float* wide) {
  constexpr int64_t kAhead = 4096, kLineNumbers = 64 / static_cast<int64_t>(sizeof(Weight));
  int64_t i = 0;
  for (; i + kLineNumbers <= count; i += kLineNumbers) {
    __builtin_prefetch(reinterpret_cast<const char*>(narrow + i) + kAhead);
    for (int64_t j = i; j < i + kLineNumbers; j += kSumLanes) store_numbers(wide + j, load_numbers(narrow + j));
  }
  for (; i + kSumLanes <= count; i += kSumLanes) store_numbers(wide + i, load_numbers(narrow + i));
  if (i == count) return;
  float rest[kSumLanes];
  store_numbers(rest, load_rest(narrow + i, count - i));
  for (int64_t j = 0; i + j < count; ++j) wide[i + j] = rest[j];
}

inline void widen_bfloat16(const void* narrow, int64_t count, float* wide) {
  widen(static_cast<const uint16_t*>(narrow), count, wide);
}
inline void widen_int8(const void* narrow, int64_t count, float* wide) {
  widen(static_cast<const int8_t*>(narrow), count, wide);
}

}  // namespace vllm::cpu::VLLM_VARIANT
