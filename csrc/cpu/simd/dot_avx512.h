// One 512-bit register of sums, for products with weights.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "avx512.h"
#include "columns8.h"

namespace vllm::cpu::avx512 {

constexpr int64_t kSumLanes = 16;
// Vectors of rows in a panel, at most.
constexpr int kPanelVectors = 2;
// Rows of weights in a register block: 12 or 24 of the 32 registers hold sums.
constexpr int count_block_columns(int) { return 12; }

using Sums = __m512;

inline Sums load_elements(const float* p) { return _mm512_loadu_ps(p); }
inline Sums load_elements(const uint16_t* p) { return load_16(p); }  // bfloat16
inline void store_elements(float* p, Sums a) { _mm512_storeu_ps(p, a); }
inline Sums broadcast_element(float x) { return _mm512_set1_ps(x); }
inline Sums multiply_add(Sums a, Sums b, Sums c) { return _mm512_fmadd_ps(a, b, c); }

}  // namespace vllm::cpu::avx512
