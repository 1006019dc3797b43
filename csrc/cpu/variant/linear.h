// Products of rows of x with rows of weights. Included once per instruction set, after simd/dot_*.h.
//
// Every output is summed in one order, whichever kernel makes it and whatever is computed beside it: number by number
// over a block, from 0; then block after block; then times scale, plus bias. Few rows: the weights are turned into
// vectors of columns in registers. Panels: the lanes are rows of x. Narrow weights are widened without rounding.
#include <cstdint>

namespace vllm::cpu::VLLM_VARIANT {

constexpr int kIntoSecondLevel = 2;  // for __builtin_prefetch

// (A stream a row was 1.5 times as slow as one in memory's order, and bursts 10 % slower than even steps.)
inline void fetch_step(Fetching* fetching) {
  if (fetching->next >= fetching->end) return;
  for (int line = 0; line < fetching->lines_a_step; ++line) {
    __builtin_prefetch(fetching->next + line * 64);
  }
  fetching->next += fetching->lines_a_step * 64;
}

inline float widen_number(float x) { return x; }
inline float widen_number(int8_t x) { return static_cast<float>(x); }
inline float widen_number(uint16_t x) {  // bfloat16
  const uint32_t word = static_cast<uint32_t>(x) << 16;
  float wide;
  __builtin_memcpy(&wide, &word, sizeof wide);
  return wide;
}

// The first `count` of 8 numbers; the rest is 0.
inline Columns load_some_columns(const float* p, int64_t count) {
  if (count == 8) return load_columns(p);
  float numbers[8] = {};
  for (int64_t c = 0; c < count; ++c) numbers[c] = p[c];
  return load_columns(numbers);
}

// How weights are stored, and how kGroups times 8 columns from `column` on are read: add() adds the products with the
// numbers [first, end) of x to sums. Of the last group, `last_columns` are there.

// Rows one after the other: they are turned into vectors of columns in registers.
template <typename Weight>
struct ByRow {
  static constexpr int64_t kNumberBytes = sizeof(Weight);

  template <int kRows, int kGroups>
  struct Reader {
    static constexpr int64_t kStep = 16 / static_cast<int64_t>(sizeof(Weight));  // numbers of one visit
    static constexpr int64_t kLine = 4 * kStep;

    const ProductTile& tile;
    const Weight* weights[kGroups][8];

    Reader(const ProductTile& all, int64_t column, int64_t last_columns) : tile(all) {
      const auto* base = static_cast<const Weight*>(tile.weight);
#pragma GCC unroll 8
      for (int g = 0; g < kGroups; ++g) {
        for (int c = 0; c < 8; ++c) {
          // Columns that are not there repeat the last one.
          const int64_t there = g == kGroups - 1 && c >= last_columns ? last_columns - 1 : c;
          weights[g][c] = base + (column + 8 * g + there) * tile.weight_stride;
        }
      }
    }

    // 16 bytes of each row; each group's 128 are fetched anew.
    void turn_and_add(int64_t at, Columns (&sums)[kGroups][kRows]) const {
      Turned<Weight> turned[kGroups];
#pragma GCC unroll 8
      for (int g = 0; g < kGroups; ++g) {
        fetch_step(tile.fetching);
        turned[g].turn(weights[g], at);
      }
#pragma GCC unroll 16
      for (int i = 0; i < Turned<Weight>::kCount; ++i) {
        Columns columns[kGroups];
#pragma GCC unroll 8
        for (int g = 0; g < kGroups; ++g) columns[g] = turned[g][i];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const Columns number = spread_column(tile.x[r * tile.x_stride + at + i]);
#pragma GCC unroll 8
          for (int g = 0; g < kGroups; ++g) sums[g][r] = multiply_add_columns(number, columns[g], sums[g][r]);
        }
      }
    }

    __attribute__((always_inline)) void add(int64_t first, int64_t end, Columns (&sums)[kGroups][kRows]) const {
      int64_t at = first;
      for (; at + kLine <= end; at += kLine) {
        for (int64_t step = at; step < at + kLine; step += kStep) turn_and_add(step, sums);
      }
      for (; at < end; ++at) {
#pragma GCC unroll 8
        for (int g = 0; g < kGroups; ++g) {
          float numbers[8];
          for (int c = 0; c < 8; ++c) numbers[c] = widen_number(weights[g][c][at]);
          const Columns columns = load_columns(numbers);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            sums[g][r] = multiply_add_columns(spread_column(tile.x[r * tile.x_stride + at]), columns, sums[g][r]);
          }
        }
      }
    }
  };
};

// Rows of int8 side by side: a vector of columns lies there as it is wanted.
template <bool kHasFactors>
struct SideBySide {
  static constexpr int64_t kNumberBytes = 1;

  template <int kRows, int kGroups>
  struct Reader {
    static constexpr int64_t kStep = 4;  // numbers of kRowGroup columns: two cache lines

    const ProductTile& tile;
    const int8_t* weights;
    int64_t column, last_columns;

    Reader(const ProductTile& all, int64_t first_column, int64_t num_last)
        : tile(all), column(first_column), last_columns(num_last) {
      const int64_t lane = column % kRowGroup;
      weights = static_cast<const int8_t*>(tile.weight) + (column - lane) * tile.weight_stride + lane;
    }

    void load_factors(int64_t at, Columns (&factors)[kGroups]) const {
      if constexpr (kHasFactors) {
        const float* row = tile.factors + at / kFactorBlock * tile.factor_stride + column;
#pragma GCC unroll 8
        for (int g = 0; g < kGroups; ++g) {
          factors[g] = load_some_columns(row + 8 * g, g == kGroups - 1 ? last_columns : 8);
        }
      }
    }

    void add_number(int64_t at, const Columns (&factors)[kGroups], Columns (&sums)[kGroups][kRows]) const {
      Columns numbers[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) numbers[r] = spread_column(tile.x[r * tile.x_stride + at]);
#pragma GCC unroll 8
      for (int g = 0; g < kGroups; ++g) {
        Columns columns = load_columns(weights + at * kRowGroup + 8 * g);
        if constexpr (kHasFactors) columns = columns * factors[g];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sums[g][r] = multiply_add_columns(numbers[r], columns, sums[g][r]);
      }
    }

    __attribute__((always_inline)) void add(int64_t first, int64_t end, Columns (&sums)[kGroups][kRows]) const {
      Columns factors[kGroups] = {};
      int64_t at = first;
      for (; at + kStep <= end; at += kStep) {
        fetch_step(tile.fetching);
        if (at % kFactorBlock == 0) load_factors(at, factors);
#pragma GCC unroll 4
        for (int i = 0; i < kStep; ++i) add_number(at + i, factors, sums);
      }
      for (; at < end; ++at) add_number(at, factors, sums);  // never with factors, which are of whole blocks
    }
  };
};

// Outputs of kRows rows of x and kGroups times 8 columns; of the last group, `last_columns` are there.
template <int kRows, int kGroups, typename Kind>
inline void multiply_few_block(const ProductTile& tile, int64_t column, int64_t last_columns) {
  const typename Kind::template Reader<kRows, kGroups> reader(tile, column, last_columns);
  Columns totals[kGroups][kRows];
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) totals[g][r] = spread_column(0.0f);
  }
  for (int64_t first = 0; first < tile.size; first += tile.block_size) {
    const int64_t end = first + tile.block_size < tile.size ? first + tile.block_size : tile.size;
    Columns sums[kGroups][kRows];
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[g][r] = spread_column(0.0f);
    }
    reader.add(first, end, sums);
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) totals[g][r] = first == 0 ? sums[g][r] : totals[g][r] + sums[g][r];
    }
  }
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; ++g) {
    const int64_t count = g == kGroups - 1 ? last_columns : 8, at = column + 8 * g;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      Columns result = totals[g][r];
      if (tile.scale != nullptr) result = result * load_some_columns(tile.scale + at, count);
      if (tile.bias != nullptr) result = result + load_some_columns(tile.bias + at, count);
      float* output = tile.output + r * tile.output_stride + at;
      if (count == 8) {
        store_columns(output, result);
      } else {
        float numbers[8];
        store_columns(numbers, result);
        for (int64_t c = 0; c < count; ++c) output[c] = numbers[c];
      }
    }
  }
}

template <int kRows, typename Kind>
inline void multiply_few_rows(const ProductTile& tile) {
  // The next addition to a sum waits for the last: the narrower the weights, the more groups at once keep up with the
  // memory, as far as the registers go.
  constexpr int kGroups = Kind::kNumberBytes == 4 ? 1 : Kind::kNumberBytes == 1 && kRows <= 2 ? 4 : 2;
  int64_t column = 0;
  for (; column + 8 * kGroups <= tile.num_columns; column += 8 * kGroups) {
    multiply_few_block<kRows, kGroups, Kind>(tile, column, 8);
  }
  for (; column < tile.num_columns; column += 8) {
    const int64_t rest = tile.num_columns - column;
    multiply_few_block<kRows, 1, Kind>(tile, column, rest < 8 ? rest : 8);
  }
}

template <typename Kind>
inline void multiply_few(const ProductTile& tile) {
  switch (tile.num_rows) {
    case 1:
      return multiply_few_rows<1, Kind>(tile);
    case 2:
      return multiply_few_rows<2, Kind>(tile);
    case 3:
      return multiply_few_rows<3, Kind>(tile);
    default:
      return multiply_few_rows<4, Kind>(tile);
  }
}
inline void multiply_few_float32(const ProductTile& tile) { multiply_few<ByRow<float>>(tile); }
inline void multiply_few_bfloat16(const ProductTile& tile) { multiply_few<ByRow<uint16_t>>(tile); }
inline void multiply_few_int8(const ProductTile& tile) { multiply_few<SideBySide<false>>(tile); }
inline void multiply_few_int8_blocks(const ProductTile& tile) { multiply_few<SideBySide<true>>(tile); }

// sums[c][v] += weights[c][at] * vector v of x, the vectors of one number
template <int kColumns, int kVectors>
inline void add_product(const float* x, const float* const (&weights)[kColumns], int64_t at,
                        Sums (&sums)[kColumns][kVectors]) {
  if constexpr (kVectors > kColumns) {
    Sums numbers[kColumns];
    for (int c = 0; c < kColumns; ++c) numbers[c] = spread_number(weights[c][at]);
    for (int v = 0; v < kVectors; ++v) {
      const Sums rows = load_numbers(x + v * kSumLanes);
      for (int c = 0; c < kColumns; ++c) sums[c][v] = multiply_add(numbers[c], rows, sums[c][v]);
    }
  } else {
    Sums rows[kVectors];
    for (int v = 0; v < kVectors; ++v) rows[v] = load_numbers(x + v * kSumLanes);
    for (int c = 0; c < kColumns; ++c) {
      const Sums number = spread_number(weights[c][at]);
      for (int v = 0; v < kVectors; ++v) sums[c][v] = multiply_add(number, rows[v], sums[c][v]);
    }
  }
}

// The same for 16 numbers on.
template <int kColumns, int kVectors>
inline void add_products_16(const float* x, const float* const (&weights)[kColumns], int64_t at,
                            Sums (&sums)[kColumns][kVectors]) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < 16; ++i) add_product(x + i * kVectors * kSumLanes, weights, at + i, sums);
}

// kColumns rows of weights times kVectors vectors of rows of x. The sums stay in registers where GCC unrolls what
// touches them before it places arrays: as it is told to, here and at the end.
template <int kVectors, int kColumns>
inline void multiply_panel_block(const ProductTile& tile, int64_t column) {
  constexpr int64_t kWidth = kVectors * kSumLanes;
  const float* weights[kColumns];
#pragma GCC unroll 16
  for (int c = 0; c < kColumns; ++c) {
    weights[c] = static_cast<const float*>(tile.weight) + (column + c) * tile.weight_stride;
  }
  Sums sums[kColumns][kVectors];
#pragma GCC unroll 16
  for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sums[c][v] = spread_number(0.0f);
  }
  int64_t at = 0;
  for (; at + 16 <= tile.size; at += 16) {
    fetch_step(tile.fetching);
    if (tile.ahead != 0) {
      for (int c = 0; c < kColumns; ++c) __builtin_prefetch(weights[c] + (at + tile.ahead), 0, kIntoSecondLevel);
    }
    add_products_16(tile.x + at * kWidth, weights, at, sums);
  }
  for (; at < tile.size; ++at) add_product(tile.x + at * kWidth, weights, at, sums);
  float* output = tile.output + column * kWidth;
  const float *scale = tile.scale, *bias = tile.bias;
  const bool adds = tile.adds;
#pragma GCC unroll 16
  for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      float* place = output + c * kWidth + v * kSumLanes;
      Sums result = sums[c][v];
      if (adds) result = load_numbers(place) + result;
      if (scale != nullptr) result = result * spread_number(scale[column + c]);
      if (bias != nullptr) result = result + spread_number(bias[column + c]);
      store_numbers(place, result);
    }
  }
}

// The block's code for a number of columns that is known at run time only.
template <int kVectors, int kColumns>
inline void multiply_some_columns(const ProductTile& tile, int64_t column, int64_t num_columns) {
  if (num_columns == kColumns) {
    multiply_panel_block<kVectors, kColumns>(tile, column);
  } else if constexpr (kColumns > 1) {
    multiply_some_columns<kVectors, kColumns - 1>(tile, column, num_columns);
  }
}

template <int kVectors>
inline void multiply_panel_columns(const ProductTile& tile) {
  constexpr int kColumns = count_block_columns(kVectors);
  int64_t column = 0;
  // The last two blocks share what is left: a block of one or two columns takes as long as a whole one.
  for (; column + 2 * kColumns <= tile.num_columns; column += kColumns) {
    multiply_panel_block<kVectors, kColumns>(tile, column);
  }
  for (int64_t rest = tile.num_columns - column; rest > 0; rest = tile.num_columns - column) {
    const int64_t count = rest <= kColumns ? rest : (rest + 1) / 2;
    multiply_some_columns<kVectors, kColumns>(tile, column, count);
    column += count;
  }
}

// Rows of x in a panel, at most.
constexpr int64_t kMostPanelRows = kSumLanes * kPanelVectors;

inline void multiply_panel(const ProductTile& tile) {
  switch (tile.num_rows / kSumLanes) {
    case 1:
      return multiply_panel_columns<1>(tile);
    case 2:
      return multiply_panel_columns<2>(tile);
    case 3:
      if constexpr (kPanelVectors >= 3) return multiply_panel_columns<3>(tile);
      return;
    default:
      if constexpr (kPanelVectors >= 4) return multiply_panel_columns<4>(tile);
  }
}

template <typename Weight>
inline void widen_rows(const ProductTile& tile, float* wide, int64_t wide_stride) {
  for (int64_t c = 0; c < tile.num_columns; ++c) {
    const Weight* narrow = static_cast<const Weight*>(tile.weight) + c * tile.weight_stride;
    float* row = wide + c * wide_stride;
    int64_t i = 0;
    for (; i + kSumLanes <= tile.size; i += kSumLanes) store_numbers(row + i, load_numbers(narrow + i));
    for (; i < tile.size; ++i) row[i] = widen_number(narrow[i]);
  }
}
inline void widen_float32(const ProductTile& tile, float* wide, int64_t wide_stride) {
  widen_rows<float>(tile, wide, wide_stride);
}
inline void widen_bfloat16(const ProductTile& tile, float* wide, int64_t wide_stride) {
  widen_rows<uint16_t>(tile, wide, wide_stride);
}
inline void widen_int8(const ProductTile& tile, float* wide, int64_t wide_stride) {
  for (int64_t c = 0; c < tile.num_columns;) {
    const int64_t column = tile.first_lane + c, lane = column % kRowGroup;
    const auto* narrow = static_cast<const int8_t*>(tile.weight) + (column - lane) * tile.weight_stride + lane;
    // Eight columns, or one where they are not all there or of two groups.
    const int64_t width = lane % 8 == 0 && c + 8 <= tile.num_columns ? 8 : 1;
    float* rows = wide + c * wide_stride;
    int64_t i = 0;
    for (; width == 8 && i + 8 <= tile.size; i += 8) turn_8(narrow + i * kRowGroup, kRowGroup, rows + i, wide_stride);
    for (; i < tile.size; ++i) {
      for (int64_t k = 0; k < width; ++k) rows[k * wide_stride + i] = widen_number(narrow[i * kRowGroup + k]);
    }
    c += width;
  }
}
inline void widen_int8_blocks(const ProductTile& tile, float* wide, int64_t wide_stride) {
  widen_int8(tile, wide, wide_stride);
  for (int64_t c = 0; c < tile.num_columns; ++c) {
    float* row = wide + c * wide_stride;
    for (int64_t first = 0; first < tile.size; first += kFactorBlock) {
      const float factor = tile.factors[first / kFactorBlock * tile.factor_stride + c];
      for (int64_t i = first; i < first + kFactorBlock; ++i) row[i] *= factor;
    }
  }
}

// panel[i][row] = rows[row][i], for a whole number of 8 rows of `size` numbers.
inline void turn_rows(const float* const* rows, int64_t num_rows, int64_t size, int64_t stride, float* panel) {
  transpose(rows, num_rows, size, stride, panel);
}

}  // namespace vllm::cpu::VLLM_VARIANT
