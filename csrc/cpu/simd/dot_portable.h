// Two 128-bit vectors of sums, for products with weights.
#pragma once

#include <cstdint>
#include <cstring>

#include "../widen.h"
#include "portable.h"

namespace vllm::cpu::portable {

constexpr int64_t kSumLanes = 8;
// Vectors of rows in a panel, at most.
constexpr int kPanelVectors = 4;
// Rows of weights in a register block: 12 of the 128-bit registers hold sums.
constexpr int count_block_columns(int num_vectors) { return 6 / num_vectors; }

struct Sums {
  Float4 half[2];
};

template <typename Weight>
inline Sums load_elements(const Weight* p) {
  Sums r;
  for (int i = 0; i < 4; ++i) r.half[0][i] = widen(p[i]);
  for (int i = 0; i < 4; ++i) r.half[1][i] = widen(p[4 + i]);
  return r;
}
inline Sums load_elements(const float* p) {
  Sums r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
inline void store_elements(float* p, Sums a) { std::memcpy(p, &a, sizeof a); }
inline Sums broadcast_element(float x) {
  const Float4 all = {x, x, x, x};
  return {{all, all}};
}
inline Sums multiply_add(Sums a, Sums b, Sums c) {
  return {{a.half[0] * b.half[0] + c.half[0], a.half[1] * b.half[1] + c.half[1]}};
}
inline Sums operator*(Sums a, Sums b) { return {{a.half[0] * b.half[0], a.half[1] * b.half[1]}}; }
inline Sums operator+(Sums a, Sums b) { return {{a.half[0] + b.half[0], a.half[1] + b.half[1]}}; }

// One element of each of 8 columns.
using Columns = Sums;

template <typename Weight>
inline Columns load_columns(const Weight* p) {
  return load_elements(p);
}
inline void store_columns(float* p, Columns a) { store_elements(p, a); }
inline Columns broadcast_column(float x) { return broadcast_element(x); }
inline Columns multiply_add_columns(Columns a, Columns b, Columns c) { return multiply_add(a, b, c); }

// transposed[column * transposed_stride + i] = elements[i * stride + column], eight of each
inline void transpose_8(const int8_t* elements, int64_t stride, float* transposed, int64_t transposed_stride) {
  for (int64_t column = 0; column < 8; ++column) {
    for (int64_t i = 0; i < 8; ++i) transposed[column * transposed_stride + i] = widen(elements[i * stride + column]);
  }
}

// 16 bytes of each of 8 rows as vectors of columns.
template <typename Weight>
struct Transposed {
  static constexpr int kCount = 16 / static_cast<int>(sizeof(Weight));
  const Weight* const* rows;
  int64_t at;

  void transpose(const Weight* const all_rows[8], int64_t first) {
    rows = all_rows;
    at = first;
  }

  // The i-th element of each row.
  Columns operator[](int i) const {
    Columns columns;
    for (int c = 0; c < 4; ++c) columns.half[0][c] = widen(rows[c][at + i]);
    for (int c = 0; c < 4; ++c) columns.half[1][c] = widen(rows[4 + c][at + i]);
    return columns;
  }
};

}  // namespace vllm::cpu::portable
