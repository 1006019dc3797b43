// One 512-bit register of running sums, for products with weights.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace vllm::cpu::avx512 {

constexpr int64_t kSumLanes = 16;
// Rows of x that meet 4 rows of weights at once: 24 sums, 6 operands and a weight fill 31 of the 32 registers.
constexpr int kProductRows = 6;

struct Sums {
  __m512 all;
};

inline Sums load_numbers(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Sums load_numbers(const uint16_t* p) {  // bfloat16
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline Sums load_numbers(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline void store_numbers(float* p, Sums a) { _mm512_storeu_ps(p, a.all); }
inline Sums zero_sums() { return {_mm512_setzero_ps()}; }
inline Sums multiply_add(Sums a, Sums b, Sums c) { return {_mm512_fmadd_ps(a.all, b.all, c.all)}; }

inline __m256 fold(Sums a) { return _mm256_add_ps(_mm512_castps512_ps256(a.all), _mm512_extractf32x8_ps(a.all, 1)); }
// The sum of the lanes of each of the four, in one fixed order.
inline __m128 add_lanes(const Sums sums[4]) {
  const __m256 pairs =
      _mm256_hadd_ps(_mm256_hadd_ps(fold(sums[0]), fold(sums[1])), _mm256_hadd_ps(fold(sums[2]), fold(sums[3])));
  return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

}  // namespace vllm::cpu::avx512
