// Turns keys into columns, 8 by 8; for the instruction sets that have AVX2. Included inside their namespaces' files.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace vllm::cpu::VLLM_VARIANT {

inline void transpose_8x8(const float* const* keys, int64_t d, int64_t stride, float* packed) {
  __m256 rows[8], pairs[8], quads[8];
  for (int i = 0; i < 8; ++i) rows[i] = _mm256_loadu_ps(keys[i] + d);
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
    _mm256_storeu_ps(packed + (d + i) * stride, _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20));
    _mm256_storeu_ps(packed + (d + 4 + i) * stride, _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31));
  }
}

// packed[d * stride + key] = keys[key][d], for a whole number of 16 keys.
inline void transpose(const float* const* keys, int64_t num_keys, int64_t dim, int64_t stride, float* packed) {
  for (int64_t key = 0; key < num_keys; key += 8) {
    int64_t d = 0;
    for (; d + 8 <= dim; d += 8) transpose_8x8(keys + key, d, stride, packed + key);
    for (; d < dim; ++d) {
      for (int64_t i = 0; i < 8; ++i) packed[d * stride + key + i] = keys[key + i][d];
    }
  }
}

}  // namespace vllm::cpu::VLLM_VARIANT
