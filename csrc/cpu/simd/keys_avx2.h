// How attention reads keys and values, and what it sums over lanes.
#pragma once

#include "avx2.h"
#include "transpose8.h"

namespace vllm::cpu::avx2 {

// Rows of a tile, at most, that read keys as they are stored in the cache, without a packed copy.
constexpr int kUnpackedRows = 6;

inline Floats load_wide(const float* p) { return load(p); }
inline Floats load_wide(const uint16_t* p) { return {load_8(p), load_8(p + 8)}; }

// sums[r] += queries[r][i] * element i of each of 16 keys, for i = 0, 1, ... 7
template <int kCount, typename Element>
inline void add_products_8(const float* queries, int64_t stride, const Element* keys, const int64_t* slots,
                           Floats sums[kCount]) {
  __m256 columns[8];
  load_columns_8([&](int i) { return keys + slots[i]; }, columns);
  for (int i = 0; i < 8; ++i) {
    for (int r = 0; r < kCount; ++r) {
      sums[r].low = _mm256_fmadd_ps(_mm256_set1_ps(queries[r * stride + i]), columns[i], sums[r].low);
    }
  }
  // Elements of the queries are read again: keeping all of them would spill the sums from the registers.
  asm volatile("" : : : "memory");
  load_columns_8([&](int i) { return keys + slots[8 + i]; }, columns);
  for (int i = 0; i < 8; ++i) {
    for (int r = 0; r < kCount; ++r) {
      sums[r].high = _mm256_fmadd_ps(_mm256_set1_ps(queries[r * stride + i]), columns[i], sums[r].high);
    }
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
  const __m256 eight = _mm256_max_ps(a.low, a.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
// Lane i is added to lane i + 8, then to i + 4, i + 2, i + 1.
inline float add_lanes(Floats a) {
  const __m256 eight = _mm256_add_ps(a.low, a.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

}  // namespace vllm::cpu::avx2
