// 16 lanes as two 256-bit registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "transpose8.h"

namespace vllm::cpu::avx2 {

// Rows of a register block: 6 x 2 accumulators, two operands and a broadcast fill the 16 registers.
constexpr int kBlockRows = 6;

struct Floats {
  __m256 low, high;
};
struct Words {
  __m256i low, high;
};
struct Doubles {
  __m256d quarter[4];
};

inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}
inline Floats broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
// a * b + c, rounded once here and in the other vector sets, twice in the portable one.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats larger(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
// value where x >= bound, else +0
inline Floats keep_at_least(Floats value, Floats x, Floats bound) {
  return {_mm256_and_ps(value.low, _mm256_cmp_ps(x.low, bound.low, _CMP_GE_OQ)),
          _mm256_and_ps(value.high, _mm256_cmp_ps(x.high, bound.high, _CMP_GE_OQ))};
}

template <int kPredicate>
inline uint32_t compare(Floats a, Floats b) {
  const auto low = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, kPredicate)));
  const auto high = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, kPredicate)));
  return low | high << 8;
}
// Bit i of the result is for lane i; a NaN compares false.
inline uint32_t greater(Floats a, Floats b) { return compare<_CMP_GT_OQ>(a, b); }
inline uint32_t at_least(Floats a, Floats b) { return compare<_CMP_GE_OQ>(a, b); }
inline uint32_t equal(Floats a, Floats b) { return compare<_CMP_EQ_OQ>(a, b); }
inline uint32_t is_nan(Floats a) { return compare<_CMP_UNORD_Q>(a, a); }

inline Words broadcast_word(uint32_t x) {
  const __m256i all = _mm256_set1_epi32(static_cast<int>(x));
  return {all, all};
}
inline Words count_up() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
inline Words load_words(const uint32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline void store_words(uint32_t* p, Words a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.high);
}
inline Words operator+(Words a, Words b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline Words operator^(Words a, Words b) { return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)}; }
template <int kBits>
inline Words shift_left(Words a) {
  return {_mm256_slli_epi32(a.low, kBits), _mm256_slli_epi32(a.high, kBits)};
}
template <int kBits>
inline Words shift_right(Words a) {
  return {_mm256_srli_epi32(a.low, kBits), _mm256_srli_epi32(a.high, kBits)};
}
inline Words as_words(Floats a) { return {_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)}; }
inline Floats as_floats(Words a) { return {_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)}; }
inline Floats convert_signed(Words a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
inline Words convert_rounded(Floats a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }

inline void multiply_wide(__m256i a, __m256i factor, __m256i* high, __m256i* low) {
  const __m256i even = _mm256_mul_epu32(a, factor);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), factor);
  *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}
// The high and low halves of each lane's 64-bit product.
inline void multiply_wide(Words a, uint32_t factor, Words* high, Words* low) {
  const __m256i all = _mm256_set1_epi32(static_cast<int>(factor));
  multiply_wide(a.low, all, &high->low, &low->low);
  multiply_wide(a.high, all, &high->high, &low->high);
}

inline void store_interleaved(uint32_t* p, __m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i ab_low = _mm256_unpacklo_epi32(a, b), ab_high = _mm256_unpackhi_epi32(a, b);
  const __m256i cd_low = _mm256_unpacklo_epi32(c, d), cd_high = _mm256_unpackhi_epi32(c, d);
  const __m256i lanes[4] = {_mm256_unpacklo_epi64(ab_low, cd_low), _mm256_unpackhi_epi64(ab_low, cd_low),
                            _mm256_unpacklo_epi64(ab_high, cd_high), _mm256_unpackhi_epi64(ab_high, cd_high)};
  for (int i = 0; i < 4; ++i) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 4 * i), _mm256_castsi256_si128(lanes[i]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16 + 4 * i), _mm256_extracti128_si256(lanes[i], 1));
  }
}
// p[4 * lane + word] = words[word][lane]
inline void store_interleaved(uint32_t* p, const Words words[4]) {
  store_interleaved(p, words[0].low, words[1].low, words[2].low, words[3].low);
  store_interleaved(p + 32, words[0].high, words[1].high, words[2].high, words[3].high);
}

inline Doubles zero_doubles() {
  const __m256d zero = _mm256_setzero_pd();
  return {{zero, zero, zero, zero}};
}
inline void accumulate(Doubles* sum, Floats a) {
  sum->quarter[0] = _mm256_add_pd(sum->quarter[0], _mm256_cvtps_pd(_mm256_castps256_ps128(a.low)));
  sum->quarter[1] = _mm256_add_pd(sum->quarter[1], _mm256_cvtps_pd(_mm256_extractf128_ps(a.low, 1)));
  sum->quarter[2] = _mm256_add_pd(sum->quarter[2], _mm256_cvtps_pd(_mm256_castps256_ps128(a.high)));
  sum->quarter[3] = _mm256_add_pd(sum->quarter[3], _mm256_cvtps_pd(_mm256_extractf128_ps(a.high, 1)));
}
inline void store(double* p, const Doubles& a) {
  for (int i = 0; i < 4; ++i) _mm256_storeu_pd(p + 4 * i, a.quarter[i]);
}
inline __m128 subtract_rounded(__m128 a, __m256d offset) {
  return _mm256_cvtpd_ps(_mm256_sub_pd(_mm256_cvtps_pd(a), offset));
}
// float(double(a) - offset)
inline Floats subtract_double(Floats a, double offset) {
  const __m256d all = _mm256_set1_pd(offset);
  return {_mm256_set_m128(subtract_rounded(_mm256_extractf128_ps(a.low, 1), all),
                          subtract_rounded(_mm256_castps256_ps128(a.low), all)),
          _mm256_set_m128(subtract_rounded(_mm256_extractf128_ps(a.high, 1), all),
                          subtract_rounded(_mm256_castps256_ps128(a.high), all))};
}

}  // namespace vllm::cpu::avx2
