// Eight rows of weights transposed into vectors of eight columns, in registers; for the instruction sets that have
// AVX2. Included inside their namespaces' files.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "transpose8.h"

namespace vllm::cpu::VLLM_VARIANT {

// One element of each of 8 columns.
using Columns = __m256;

inline Columns load_columns(const float* p) { return _mm256_loadu_ps(p); }
inline Columns load_columns(const int8_t* p) { return load_8(p); }
inline void store_columns(float* p, Columns a) { _mm256_storeu_ps(p, a); }
inline Columns broadcast_column(float x) { return _mm256_set1_ps(x); }
inline Columns multiply_add_columns(Columns a, Columns b, Columns c) { return _mm256_fmadd_ps(a, b, c); }

inline __m256 join_halves(const void* low, const void* high) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(static_cast<const float*>(low))),
                              _mm_loadu_ps(static_cast<const float*>(high)), 1);
}

// 16 bytes of each of 8 rows as vectors of columns.
template <typename Weight>
struct Transposed {
  static constexpr int kCount = 16 / static_cast<int>(sizeof(Weight));
  __m256 words[4];  // a 32-bit word of each row: rows 0 to 3 in the low half, 4 to 7 in the high one

  void transpose(const Weight* const rows[8], int64_t at) {
    const __m256 a = join_halves(rows[0] + at, rows[4] + at), b = join_halves(rows[1] + at, rows[5] + at);
    const __m256 c = join_halves(rows[2] + at, rows[6] + at), d = join_halves(rows[3] + at, rows[7] + at);
    const __m256d ab_low = _mm256_castps_pd(_mm256_unpacklo_ps(a, b));
    const __m256d cd_low = _mm256_castps_pd(_mm256_unpacklo_ps(c, d));
    const __m256d ab_high = _mm256_castps_pd(_mm256_unpackhi_ps(a, b));
    const __m256d cd_high = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
    words[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab_low, cd_low));
    words[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab_low, cd_low));
    words[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab_high, cd_high));
    words[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab_high, cd_high));
  }

  // The i-th element of each row.
  Columns operator[](int i) const {
    if constexpr (sizeof(Weight) == 4) {
      return words[i];
    } else {  // bfloat16
      const __m256i word = _mm256_castps_si256(words[i / 2]);
      const __m256i high_half = _mm256_set1_epi32(static_cast<int>(0xFFFF0000));
      return _mm256_castsi256_ps(i % 2 == 0 ? _mm256_slli_epi32(word, 16) : _mm256_and_si256(word, high_half));
    }
  }
};

}  // namespace vllm::cpu::VLLM_VARIANT
