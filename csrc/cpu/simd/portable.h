// 16 lanes as four 128-bit vectors of the compiler's own kind: SSE2, NEON or plain code, as the machine has it.
#pragma once

#include <cstdint>
#include <cstring>

namespace vllm::cpu::portable {

using Float4 = float __attribute__((vector_size(16)));
using Word4 = uint32_t __attribute__((vector_size(16)));
using Int4 = int32_t __attribute__((vector_size(16)));

// Rows of a register block.
constexpr int kBlockRows = 2;

struct Floats {
  Float4 part[4];
};
struct Words {
  Word4 part[4];
};
struct Doubles {
  double lane[16];
};

#define VLLM_EACH_PART(result, expression)                   \
  do {                                                       \
    for (int i = 0; i < 4; ++i) result.part[i] = expression; \
  } while (false)

inline Floats load(const float* p) {
  Floats r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
inline void store(float* p, Floats a) { std::memcpy(p, &a, sizeof a); }
inline Floats broadcast(float x) {
  Floats r;
  VLLM_EACH_PART(r, (Float4{x, x, x, x}));
  return r;
}
inline Floats operator+(Floats a, Floats b) {
  VLLM_EACH_PART(a, a.part[i] + b.part[i]);
  return a;
}
inline Floats operator-(Floats a, Floats b) {
  VLLM_EACH_PART(a, a.part[i] - b.part[i]);
  return a;
}
inline Floats operator*(Floats a, Floats b) {
  VLLM_EACH_PART(a, a.part[i] * b.part[i]);
  return a;
}
inline Floats operator/(Floats a, Floats b) {
  VLLM_EACH_PART(a, a.part[i] / b.part[i]);
  return a;
}
inline Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
inline Floats larger(Floats a, Floats b) {
  VLLM_EACH_PART(a, a.part[i] > b.part[i] ? a.part[i] : b.part[i]);
  return a;
}
inline Words as_words(Floats a) {
  Words r;
  std::memcpy(&r, &a, sizeof r);
  return r;
}
inline Floats as_floats(Words a) {
  Floats r;
  std::memcpy(&r, &a, sizeof r);
  return r;
}
inline Floats convert_signed(Words a) {
  Floats r;
  VLLM_EACH_PART(r, __builtin_convertvector(reinterpret_cast<Int4&>(a.part[i]), Float4));
  return r;
}
// Adding and taking away 1.5 * 2^23 rounds to even, for |a| < 2^22.
inline Floats round_to_even(Floats a) {
  const Floats shifter = broadcast(12582912.0f);
  return (a + shifter) - shifter;
}
inline Words convert_rounded(Floats a) {
  Words r;
  const Floats whole = round_to_even(a);
  for (int i = 0; i < 4; ++i) {
    const Int4 part = __builtin_convertvector(whole.part[i], Int4);
    std::memcpy(&r.part[i], &part, sizeof part);
  }
  return r;
}

inline uint32_t collect(const Int4 masks[4]) {
  uint32_t bits = 0;
  for (int i = 0; i < 16; ++i) bits |= static_cast<uint32_t>(masks[i / 4][i % 4] & 1) << i;
  return bits;
}
#define VLLM_COMPARE(a, b, op) \
  const Int4 masks[4] = {a.part[0] op b.part[0], a.part[1] op b.part[1], a.part[2] op b.part[2], a.part[3] op b.part[3]}
// Bit i of the result is for lane i; a NaN compares false.
inline uint32_t greater(Floats a, Floats b) {
  VLLM_COMPARE(a, b, >);
  return collect(masks);
}
inline uint32_t at_least(Floats a, Floats b) {
  VLLM_COMPARE(a, b, >=);
  return collect(masks);
}
inline uint32_t equal(Floats a, Floats b) {
  VLLM_COMPARE(a, b, ==);
  return collect(masks);
}
inline uint32_t is_nan(Floats a) { return equal(a, a) ^ 0xFFFFu; }
// value where x >= bound, else +0
inline Floats keep_at_least(Floats value, Floats x, Floats bound) {
  VLLM_EACH_PART(value, x.part[i] >= bound.part[i] ? value.part[i] : Float4{});
  return value;
}

inline Words broadcast_word(uint32_t x) {
  Words r;
  VLLM_EACH_PART(r, (Word4{x, x, x, x}));
  return r;
}
inline Words load_words(const uint32_t* p) {
  Words r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
inline Words count_up() {
  const uint32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_words(lanes);
}
inline void store_words(uint32_t* p, Words a) { std::memcpy(p, &a, sizeof a); }
inline Words operator+(Words a, Words b) {
  VLLM_EACH_PART(a, a.part[i] + b.part[i]);
  return a;
}
inline Words operator^(Words a, Words b) {
  VLLM_EACH_PART(a, a.part[i] ^ b.part[i]);
  return a;
}
template <int kBits>
inline Words shift_left(Words a) {
  VLLM_EACH_PART(a, a.part[i] << kBits);
  return a;
}
template <int kBits>
inline Words shift_right(Words a) {
  VLLM_EACH_PART(a, a.part[i] >> kBits);
  return a;
}
#undef VLLM_EACH_PART
#undef VLLM_COMPARE

// The high and low halves of each lane's 64-bit product.
inline void multiply_wide(Words a, uint32_t factor, Words* high, Words* low) {
  uint32_t lanes[16], highs[16], lows[16];
  std::memcpy(lanes, &a, sizeof a);
  for (int i = 0; i < 16; ++i) {
    const uint64_t product = static_cast<uint64_t>(lanes[i]) * factor;
    highs[i] = static_cast<uint32_t>(product >> 32);
    lows[i] = static_cast<uint32_t>(product);
  }
  *high = load_words(highs);
  *low = load_words(lows);
}
// p[4 * lane + word] = words[word][lane]
inline void store_interleaved(uint32_t* p, const Words words[4]) {
  for (int lane = 0; lane < 16; ++lane) {
    for (int word = 0; word < 4; ++word) p[4 * lane + word] = words[word].part[lane / 4][lane % 4];
  }
}

// packed[d * stride + key] = keys[key][d], for a whole number of 16 keys.
inline void transpose(const float* const* keys, int64_t num_keys, int64_t dim, int64_t stride, float* packed) {
  for (int64_t key = 0; key < num_keys; ++key) {
    for (int64_t d = 0; d < dim; ++d) packed[d * stride + key] = keys[key][d];
  }
}

inline Doubles zero_doubles() { return {}; }
inline void accumulate(Doubles* sum, Floats a) {
  for (int i = 0; i < 16; ++i) sum->lane[i] += static_cast<double>(a.part[i / 4][i % 4]);
}
inline void store(double* p, const Doubles& a) { std::memcpy(p, a.lane, sizeof a.lane); }
// float(double(a) - offset)
inline Floats subtract_double(Floats a, double offset) {
  for (int i = 0; i < 16; ++i) {
    a.part[i / 4][i % 4] = static_cast<float>(static_cast<double>(a.part[i / 4][i % 4]) - offset);
  }
  return a;
}

}  // namespace vllm::cpu::portable
