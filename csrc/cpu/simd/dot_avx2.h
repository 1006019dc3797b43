// One 256-bit register of running sums, for products with weights.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace vllm::cpu::avx2 {

constexpr int64_t kSumLanes = 8;
// Rows of x that meet 4 rows of weights at once: 12 sums, 3 operands and a weight fill the 16 registers.
constexpr int kProductRows = 3;

struct Sums {
  __m256 all;
};

inline Sums load_numbers(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Sums load_numbers(const uint16_t* p) {  // bfloat16
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
inline Sums load_numbers(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline void store_numbers(float* p, Sums a) { _mm256_storeu_ps(p, a.all); }
inline Sums zero_sums() { return {_mm256_setzero_ps()}; }
inline Sums multiply_add(Sums a, Sums b, Sums c) { return {_mm256_fmadd_ps(a.all, b.all, c.all)}; }

// The sum of the lanes of each of the four, in one fixed order.
inline __m128 add_lanes(const Sums sums[4]) {
  const __m256 pairs =
      _mm256_hadd_ps(_mm256_hadd_ps(sums[0].all, sums[1].all), _mm256_hadd_ps(sums[2].all, sums[3].all));
  return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

}  // namespace vllm::cpu::avx2
