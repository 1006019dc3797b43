// How attention reads keys and values, and what it sums over lanes.
#pragma once

#include "avx512.h"
#include "transpose8.h"

namespace vllm::cpu::avx512 {

// Rows of a tile, at most, that read keys as they are stored in the cache, without a packed copy.
constexpr int kUnpackedRows = 12;

inline Floats load_wide(const float* p) { return load(p); }
inline Floats load_wide(const uint16_t* p) { return {load_16(p)}; }  // bfloat16

// sums[r] += queries[r][i] * element i of each of 16 keys, for i = 0, 1, ... 7
template <int kCount, typename Element>
inline void add_products_8(const float* queries, int64_t stride, const Element* keys, const int64_t* slots,
                           Floats sums[kCount]) {
  __m256 low[8], high[8];
  load_columns_8([&](int i) { return keys + slots[i]; }, low);
  load_columns_8([&](int i) { return keys + slots[8 + i]; }, high);
  for (int i = 0; i < 8; ++i) {
    const Floats column = {_mm512_insertf32x8(_mm512_castps256_ps512(low[i]), high[i], 1)};
    for (int r = 0; r < kCount; ++r) sums[r] = multiply_add(broadcast(queries[r * stride + i]), column, sums[r]);
  }
}

// packed[i * stride + key] = element i of each of 16 keys, for i below 8
template <typename Element>
inline void pack_8(const Element* keys, const int64_t* slots, int64_t stride, float* packed) {
  for (int64_t first = 0; first < 16; first += 8) {
    __m256 columns[8];
    load_columns_8([&](int i) { return keys + slots[first + i]; }, columns);
    for (int i = 0; i < 8; ++i) _mm256_storeu_ps(packed + i * stride + first, columns[i]);
  }
}

inline float find_largest_lane(Floats a) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a.all), _mm512_extractf32x8_ps(a.all, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
// Lane i is added to lane i + 8, then to i + 4, i + 2, i + 1.
inline float add_lanes(Floats a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.all), _mm512_extractf32x8_ps(a.all, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

}  // namespace vllm::cpu::avx512
