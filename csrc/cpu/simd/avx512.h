// 16 lanes as one 512-bit register. Needs AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "transpose8.h"

namespace vllm::cpu::avx512 {

// Rows of a register block: enough independent sums to hide a multiply-add's latency.
constexpr int kBlockRows = 12;

struct Floats {
  __m512 all;
};
struct Words {
  __m512i all;
};
struct Doubles {
  __m512d half[2];
};

inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a.all); }
inline __m512 load_16(const uint16_t* p) {  // bfloat16
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Floats broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.all, b.all)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.all, b.all)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.all, b.all)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.all, b.all)}; }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.all, b.all, c.all)}; }
inline Floats larger(Floats a, Floats b) { return {_mm512_max_ps(a.all, b.all)}; }
// value where x >= bound, else +0
inline Floats keep_at_least(Floats value, Floats x, Floats bound) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.all, bound.all, _CMP_GE_OQ), value.all)};
}

// Bit i of the result is for lane i; a NaN compares false.
inline uint32_t greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.all, b.all, _CMP_GT_OQ); }
inline uint32_t at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.all, b.all, _CMP_GE_OQ); }
inline uint32_t equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.all, b.all, _CMP_EQ_OQ); }
inline uint32_t is_nan(Floats a) { return _mm512_cmp_ps_mask(a.all, a.all, _CMP_UNORD_Q); }

inline Words broadcast_word(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
inline Words count_up() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
inline Words load_words(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_words(uint32_t* p, Words a) { _mm512_storeu_si512(p, a.all); }
inline Words operator+(Words a, Words b) { return {_mm512_add_epi32(a.all, b.all)}; }
inline Words operator^(Words a, Words b) { return {_mm512_xor_si512(a.all, b.all)}; }
template <int kBits>
inline Words shift_left(Words a) {
  return {_mm512_slli_epi32(a.all, kBits)};
}
template <int kBits>
inline Words shift_right(Words a) {
  return {_mm512_srli_epi32(a.all, kBits)};
}
inline Words as_words(Floats a) { return {_mm512_castps_si512(a.all)}; }
inline Floats as_floats(Words a) { return {_mm512_castsi512_ps(a.all)}; }
inline Floats convert_signed(Words a) { return {_mm512_cvtepi32_ps(a.all)}; }
inline Words convert_rounded(Floats a) { return {_mm512_cvtps_epi32(a.all)}; }

// The high and low halves of each lane's 64-bit product.
inline void multiply_wide(Words a, uint32_t factor, Words* high, Words* low) {
  constexpr __mmask16 kOdd = 0xAAAA;
  const __m512i all = _mm512_set1_epi32(static_cast<int>(factor));
  const __m512i even = _mm512_mul_epu32(a.all, all);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a.all, 32), all);
  low->all = _mm512_mask_blend_epi32(kOdd, even, _mm512_slli_epi64(odd, 32));
  high->all = _mm512_mask_blend_epi32(kOdd, _mm512_srli_epi64(even, 32), odd);
}

// p[4 * lane + word] = words[word][lane]
inline void store_interleaved(uint32_t* p, const Words words[4]) {
  const __m512i ab_low = _mm512_unpacklo_epi32(words[0].all, words[1].all);
  const __m512i ab_high = _mm512_unpackhi_epi32(words[0].all, words[1].all);
  const __m512i cd_low = _mm512_unpacklo_epi32(words[2].all, words[3].all);
  const __m512i cd_high = _mm512_unpackhi_epi32(words[2].all, words[3].all);
  const __m512i lanes[4] = {_mm512_unpacklo_epi64(ab_low, cd_low), _mm512_unpackhi_epi64(ab_low, cd_low),
                            _mm512_unpacklo_epi64(ab_high, cd_high), _mm512_unpackhi_epi64(ab_high, cd_high)};
  for (int i = 0; i < 4; ++i) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 4 * i), _mm512_extracti32x4_epi32(lanes[i], 0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16 + 4 * i), _mm512_extracti32x4_epi32(lanes[i], 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 32 + 4 * i), _mm512_extracti32x4_epi32(lanes[i], 2));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 48 + 4 * i), _mm512_extracti32x4_epi32(lanes[i], 3));
  }
}

inline Doubles zero_doubles() { return {{_mm512_setzero_pd(), _mm512_setzero_pd()}}; }
inline void accumulate(Doubles* sum, Floats a) {
  sum->half[0] = _mm512_add_pd(sum->half[0], _mm512_cvtps_pd(_mm512_castps512_ps256(a.all)));
  sum->half[1] = _mm512_add_pd(sum->half[1], _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.all, 1)));
}
inline void store(double* p, const Doubles& a) {
  _mm512_storeu_pd(p, a.half[0]);
  _mm512_storeu_pd(p + 8, a.half[1]);
}
// float(double(a) - offset)
inline Floats subtract_double(Floats a, double offset) {
  const __m512d all = _mm512_set1_pd(offset);
  const __m256 low = _mm512_cvtpd_ps(_mm512_sub_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(a.all)), all));
  const __m256 high = _mm512_cvtpd_ps(_mm512_sub_pd(_mm512_cvtps_pd(_mm512_extractf32x8_ps(a.all, 1)), all));
  return {_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1)};
}

}  // namespace vllm::cpu::avx512
