// Two 128-bit vectors of running sums, for products with weights.
#pragma once

#include <cstdint>
#include <cstring>

#include "portable.h"

namespace vllm::cpu::portable {

constexpr int64_t kSumLanes = 8;
// Rows of x that meet 4 rows of weights at once; 16 registers of 128 bits hold little more.
constexpr int kProductRows = 1;

struct Sums {
  Float4 half[2];
};

inline Sums load_numbers(const float* p) {
  Sums r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
inline Sums load_numbers(const uint16_t* p) {  // bfloat16
  uint32_t words[kSumLanes];
  for (int i = 0; i < kSumLanes; ++i) words[i] = static_cast<uint32_t>(p[i]) << 16;
  Sums r;
  std::memcpy(&r, words, sizeof r);
  return r;
}
inline Sums load_numbers(const int8_t* p) {
  float numbers[kSumLanes];
  for (int i = 0; i < kSumLanes; ++i) numbers[i] = static_cast<float>(p[i]);
  return load_numbers(numbers);
}
inline void store_numbers(float* p, Sums a) { std::memcpy(p, &a, sizeof a); }
inline Sums zero_sums() { return {}; }
inline Sums multiply_add(Sums a, Sums b, Sums c) {
  return {{a.half[0] * b.half[0] + c.half[0], a.half[1] * b.half[1] + c.half[1]}};
}

// The sum of the lanes of each of the four, in one fixed order.
inline Float4 add_lanes(const Sums sums[4]) {
  Float4 totals;
  for (int i = 0; i < 4; ++i) {
    const Float4 low = sums[i].half[0], high = sums[i].half[1];
    totals[i] = ((low[0] + low[1]) + (low[2] + low[3])) + ((high[0] + high[1]) + (high[2] + high[3]));
  }
  return totals;
}

}  // namespace vllm::cpu::portable
