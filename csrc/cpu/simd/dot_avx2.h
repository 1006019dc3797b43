// One 256-bit register of sums, for products with weights.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "columns8.h"

namespace vllm::cpu::avx2 {

constexpr int64_t kSumLanes = 8;
// Vectors of rows in a panel, at most.
constexpr int kPanelVectors = 3;
// Rows of weights in a register block: of 16 registers 10 or 12 hold sums, and a block of 4 by 3 leaves none free.
constexpr int count_block_columns(int num_vectors) { return num_vectors == 1 ? 12 : num_vectors == 2 ? 5 : 4; }

using Sums = __m256;

inline Sums load_elements(const float* p) { return _mm256_loadu_ps(p); }
inline Sums load_elements(const uint16_t* p) { return load_8(p); }  // bfloat16
inline void store_elements(float* p, Sums a) { _mm256_storeu_ps(p, a); }
inline Sums broadcast_element(float x) { return _mm256_set1_ps(x); }
inline Sums multiply_add(Sums a, Sums b, Sums c) { return _mm256_fmadd_ps(a, b, c); }

}  // namespace vllm::cpu::avx2
