// Stored elements as float32, without rounding. `static`: each object file keeps its own copy, since those of the
// instruction-set variants may not be shared (variant/table.cpp).
#pragma once

#include <cstdint>

namespace vllm::cpu {

static inline float widen(float x) { return x; }
static inline float widen(int8_t x) { return static_cast<float>(x); }
static inline float widen(uint16_t x) {  // bfloat16
  const uint32_t word = static_cast<uint32_t>(x) << 16;
  float wide;
  __builtin_memcpy(&wide, &word, sizeof wide);
  return wide;
}

}  // namespace vllm::cpu
