// Products of rows of x with rows of weights. Included once per instruction set, after simd/dot_*.h.
//
// Every output is summed in one order, whichever kernel makes it and whatever is computed beside it: element by element
// over a block, from 0; then block after block; then times scale, plus bias. Gemv (few rows): the weights become
// vectors of columns in registers. Panels: the lanes are rows of x. Narrow weights are widened without rounding.
#include <cstdint>

namespace vllm::cpu::VLLM_VARIANT {

constexpr int kIntoSecondLevel = 2;  // for __builtin_prefetch

// One stream in memory's order, in even steps: a stream a row, or bursts, are slower.
inline void fetch_step(Fetching* fetching) {
  if (fetching->next >= fetching->end) return;
  for (int line = 0; line < fetching->lines_a_step; ++line) {
    __builtin_prefetch(fetching->next + line * 64);
  }
  fetching->next += fetching->lines_a_step * 64;
}

// The first `count` of 8 elements; the rest is 0.
inline Columns load_some_columns(const float* p, int64_t count) {
  if (count == 8) return load_columns(p);
  float elements[8] = {};
  for (int64_t c = 0; c < count; ++c) elements[c] = p[c];
  return load_columns(elements);
}

// How weights are stored, and how kColumnVectors times 8 columns from `column` on are read: add() adds the products
// with the elements [first, end) of x to sums. Of the last group, `last_columns` are there.

// Rows one after the other: they are transposed into vectors of columns in registers.
template <typename Weight>
struct RowMajor {
  static constexpr int64_t kElementBytes = sizeof(Weight);

  template <int kRows, int kColumnVectors>
  struct Reader {
    static constexpr int64_t kStep = 16 / static_cast<int64_t>(sizeof(Weight));  // elements of one step
    static constexpr int64_t kLine = 4 * kStep;

    const ProductTile& tile;
    const Weight* weights[kColumnVectors][8];

    Reader(const ProductTile& all, int64_t column, int64_t last_columns) : tile(all) {
      const auto* base = static_cast<const Weight*>(tile.weight);
#pragma GCC unroll 8
      for (int g = 0; g < kColumnVectors; ++g) {
        for (int c = 0; c < 8; ++c) {
          // Columns that are not there repeat the last one.
          const int64_t there = g == kColumnVectors - 1 && c >= last_columns ? last_columns - 1 : c;
          weights[g][c] = base + (column + 8 * g + there) * tile.weight_stride;
        }
      }
    }

    // 16 bytes of each row; each group's 128 are fetched anew.
    void transpose_and_add(int64_t at, Columns (&sums)[kColumnVectors][kRows]) const {
      Transposed<Weight> transposed[kColumnVectors];
#pragma GCC unroll 8
      for (int g = 0; g < kColumnVectors; ++g) {
        fetch_step(tile.fetching);
        transposed[g].transpose(weights[g], at);
      }
#pragma GCC unroll 16
      for (int i = 0; i < Transposed<Weight>::kCount; ++i) {
        Columns columns[kColumnVectors];
#pragma GCC unroll 8
        for (int g = 0; g < kColumnVectors; ++g) columns[g] = transposed[g][i];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const Columns element = broadcast_column(tile.x[r * tile.x_stride + at + i]);
#pragma GCC unroll 8
          for (int g = 0; g < kColumnVectors; ++g) sums[g][r] = multiply_add_columns(element, columns[g], sums[g][r]);
        }
      }
    }

    __attribute__((always_inline)) void add(int64_t first, int64_t end, Columns (&sums)[kColumnVectors][kRows]) const {
      int64_t at = first;
      for (; at + kLine <= end; at += kLine) {
        for (int64_t step = at; step < at + kLine; step += kStep) transpose_and_add(step, sums);
      }
      for (; at < end; ++at) {
#pragma GCC unroll 8
        for (int g = 0; g < kColumnVectors; ++g) {
          float elements[8];
          for (int c = 0; c < 8; ++c) elements[c] = widen(weights[g][c][at]);
          const Columns columns = load_columns(elements);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            sums[g][r] = multiply_add_columns(broadcast_column(tile.x[r * tile.x_stride + at]), columns, sums[g][r]);
          }
        }
      }
    }
  };
};

// Interleaved rows of int8: a vector of columns is read as it is stored.
template <bool kHasGroups>
struct Interleaved {
  static constexpr int64_t kElementBytes = 1;

  template <int kRows, int kColumnVectors>
  struct Reader {
    static constexpr int64_t kStep = 4;  // elements of kInterleavedRows columns: two cache lines

    const ProductTile& tile;
    const int8_t* weights;
    int64_t column, last_columns;

    Reader(const ProductTile& all, int64_t first_column, int64_t num_last)
        : tile(all), column(first_column), last_columns(num_last) {
      const int64_t lane = column % kInterleavedRows;
      weights = static_cast<const int8_t*>(tile.weight) + (column - lane) * tile.weight_stride + lane;
    }

    void load_group_scales(int64_t at, Columns (&group_scales)[kColumnVectors]) const {
      if constexpr (kHasGroups) {
        const float* row = tile.group_scales + at / kGroupSize * tile.group_scale_stride + column;
#pragma GCC unroll 8
        for (int g = 0; g < kColumnVectors; ++g) {
          group_scales[g] = load_some_columns(row + 8 * g, g == kColumnVectors - 1 ? last_columns : 8);
        }
      }
    }

    void add_element(int64_t at, const Columns (&group_scales)[kColumnVectors],
                     Columns (&sums)[kColumnVectors][kRows]) const {
      Columns elements[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) elements[r] = broadcast_column(tile.x[r * tile.x_stride + at]);
#pragma GCC unroll 8
      for (int g = 0; g < kColumnVectors; ++g) {
        Columns columns = load_columns(weights + at * kInterleavedRows + 8 * g);
        if constexpr (kHasGroups) columns = columns * group_scales[g];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sums[g][r] = multiply_add_columns(elements[r], columns, sums[g][r]);
      }
    }

    __attribute__((always_inline)) void add(int64_t first, int64_t end, Columns (&sums)[kColumnVectors][kRows]) const {
      Columns group_scales[kColumnVectors] = {};
      int64_t at = first;
      for (; at + kStep <= end; at += kStep) {
        fetch_step(tile.fetching);
        if (at % kGroupSize == 0) load_group_scales(at, group_scales);
#pragma GCC unroll 4
        for (int i = 0; i < kStep; ++i) add_element(at + i, group_scales, sums);
      }
      for (; at < end; ++at) add_element(at, group_scales, sums);  // never with group_scales, which are of whole blocks
    }
  };
};

// Outputs of kRows rows of x and kColumnVectors times 8 columns; of the last group, `last_columns` are there.
template <int kRows, int kColumnVectors, typename Kind>
inline void gemv_block(const ProductTile& tile, int64_t column, int64_t last_columns) {
  const typename Kind::template Reader<kRows, kColumnVectors> reader(tile, column, last_columns);
  Columns totals[kColumnVectors][kRows];
#pragma GCC unroll 8
  for (int g = 0; g < kColumnVectors; ++g) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) totals[g][r] = broadcast_column(0.0f);
  }
  for (int64_t first = 0; first < tile.size; first += tile.block_size) {
    const int64_t end = first + tile.block_size < tile.size ? first + tile.block_size : tile.size;
    Columns sums[kColumnVectors][kRows];
#pragma GCC unroll 8
    for (int g = 0; g < kColumnVectors; ++g) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[g][r] = broadcast_column(0.0f);
    }
    reader.add(first, end, sums);
#pragma GCC unroll 8
    for (int g = 0; g < kColumnVectors; ++g) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) totals[g][r] = first == 0 ? sums[g][r] : totals[g][r] + sums[g][r];
    }
  }
#pragma GCC unroll 8
  for (int g = 0; g < kColumnVectors; ++g) {
    const int64_t count = g == kColumnVectors - 1 ? last_columns : 8, at = column + 8 * g;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      Columns result = totals[g][r];
      if (tile.scale != nullptr) result = result * load_some_columns(tile.scale + at, count);
      if (tile.bias != nullptr) result = result + load_some_columns(tile.bias + at, count);
      float* output = tile.output + r * tile.output_stride + at;
      if (count == 8) {
        store_columns(output, result);
      } else {
        float elements[8];
        store_columns(elements, result);
        for (int64_t c = 0; c < count; ++c) output[c] = elements[c];
      }
    }
  }
}

template <int kRows, typename Kind>
inline void gemv_rows(const ProductTile& tile) {
  // The next addition to a sum waits for the last: the narrower the weights, the more groups at once keep up with the
  // memory, as far as the registers go.
  constexpr int kColumnVectors = Kind::kElementBytes == 4 ? 1 : Kind::kElementBytes == 1 && kRows <= 2 ? 4 : 2;
  int64_t column = 0;
  for (; column + 8 * kColumnVectors <= tile.num_columns; column += 8 * kColumnVectors) {
    gemv_block<kRows, kColumnVectors, Kind>(tile, column, 8);
  }
  for (; column < tile.num_columns; column += 8) {
    const int64_t rest = tile.num_columns - column;
    gemv_block<kRows, 1, Kind>(tile, column, rest < 8 ? rest : 8);
  }
}

template <typename Kind>
inline void gemv(const ProductTile& tile) {
  switch (tile.num_rows) {
    case 1:
      return gemv_rows<1, Kind>(tile);
    case 2:
      return gemv_rows<2, Kind>(tile);
    case 3:
      return gemv_rows<3, Kind>(tile);
    default:
      return gemv_rows<4, Kind>(tile);
  }
}
inline void gemv_float32(const ProductTile& tile) { gemv<RowMajor<float>>(tile); }
inline void gemv_bfloat16(const ProductTile& tile) { gemv<RowMajor<uint16_t>>(tile); }
inline void gemv_int8(const ProductTile& tile) { gemv<Interleaved<false>>(tile); }
inline void gemv_int8_groups(const ProductTile& tile) { gemv<Interleaved<true>>(tile); }

// sums[c][v] += weights[c][at] * vector v of x, the vectors of one element
template <int kColumns, int kVectors>
inline void add_product(const float* x, const float* const (&weights)[kColumns], int64_t at,
                        Sums (&sums)[kColumns][kVectors]) {
  if constexpr (kVectors > kColumns) {
    Sums elements[kColumns];
    for (int c = 0; c < kColumns; ++c) elements[c] = broadcast_element(weights[c][at]);
    for (int v = 0; v < kVectors; ++v) {
      const Sums rows = load_elements(x + v * kSumLanes);
      for (int c = 0; c < kColumns; ++c) sums[c][v] = multiply_add(elements[c], rows, sums[c][v]);
    }
  } else {
    Sums rows[kVectors];
    for (int v = 0; v < kVectors; ++v) rows[v] = load_elements(x + v * kSumLanes);
    for (int c = 0; c < kColumns; ++c) {
      const Sums element = broadcast_element(weights[c][at]);
      for (int v = 0; v < kVectors; ++v) sums[c][v] = multiply_add(element, rows[v], sums[c][v]);
    }
  }
}

// The same for 16 elements.
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
    for (int v = 0; v < kVectors; ++v) sums[c][v] = broadcast_element(0.0f);
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
      if (adds) result = load_elements(place) + result;
      if (scale != nullptr) result = result * broadcast_element(scale[column + c]);
      if (bias != nullptr) result = result + broadcast_element(bias[column + c]);
      store_elements(place, result);
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
    for (; i + kSumLanes <= tile.size; i += kSumLanes) store_elements(row + i, load_elements(narrow + i));
    for (; i < tile.size; ++i) row[i] = widen(narrow[i]);
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
    const int64_t column = tile.first_lane + c, lane = column % kInterleavedRows;
    const auto* narrow = static_cast<const int8_t*>(tile.weight) + (column - lane) * tile.weight_stride + lane;
    // Eight columns, or one where they are not all there or of two groups.
    const int64_t width = lane % 8 == 0 && c + 8 <= tile.num_columns ? 8 : 1;
    float* rows = wide + c * wide_stride;
    int64_t i = 0;
    for (; width == 8 && i + 8 <= tile.size; i += 8)
      transpose_8(narrow + i * kInterleavedRows, kInterleavedRows, rows + i, wide_stride);
    for (; i < tile.size; ++i) {
      for (int64_t k = 0; k < width; ++k) rows[k * wide_stride + i] = widen(narrow[i * kInterleavedRows + k]);
    }
    c += width;
  }
}
inline void widen_int8_groups(const ProductTile& tile, float* wide, int64_t wide_stride) {
  widen_int8(tile, wide, wide_stride);
  for (int64_t c = 0; c < tile.num_columns; ++c) {
    float* row = wide + c * wide_stride;
    for (int64_t first = 0; first < tile.size; first += kGroupSize) {
      const float scale = tile.group_scales[first / kGroupSize * tile.group_scale_stride + c];
      for (int64_t i = first; i < first + kGroupSize; ++i) row[i] *= scale;
    }
  }
}

}  // namespace vllm::cpu::VLLM_VARIANT
