// Eight rows transposed into columns in registers; for the instruction sets that have AVX2. Included inside their
// namespaces' files.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace vllm::cpu::VLLM_VARIANT {

inline __m256 load_8(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 load_8(const uint16_t* p) {  // bfloat16
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

inline __m256 load_8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// columns[i] = element i of each of the eight rows that start at find_row(0), ... find_row(7)
template <typename Find>
inline void load_columns_8(Find find_row, __m256 columns[8]) {
  __m256 rows[8], pairs[8], quads[8];
  for (int i = 0; i < 8; ++i) rows[i] = load_8(find_row(i));
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xEE);
    quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    columns[i] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
    columns[4 + i] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
  }
}

// transposed[column * transposed_stride + i] = elements[i * stride + column], eight of each
inline void transpose_8(const int8_t* elements, int64_t stride, float* transposed, int64_t transposed_stride) {
  __m256 columns[8];
  load_columns_8([&](int i) { return elements + i * stride; }, columns);
  for (int i = 0; i < 8; ++i) _mm256_storeu_ps(transposed + i * transposed_stride, columns[i]);
}

// packed[d * stride + row] = rows[row][d], for a whole number of 16 rows.
inline void transpose(const float* const* rows, int64_t num_rows, int64_t dim, int64_t stride, float* packed) {
  for (int64_t row = 0; row < num_rows; row += 8) {
    int64_t d = 0;
    for (; d + 8 <= dim; d += 8) {
      __m256 columns[8];
      load_columns_8([&](int i) { return rows[row + i] + d; }, columns);
      for (int i = 0; i < 8; ++i) _mm256_storeu_ps(packed + (d + i) * stride + row, columns[i]);
    }
    for (; d < dim; ++d) {
      for (int64_t i = 0; i < 8; ++i) packed[d * stride + row + i] = rows[row + i][d];
    }
  }
}

}  // namespace vllm::cpu::VLLM_VARIANT
