// What a program may ask of the operations between products, beside what api.h has of them.
#pragma once

#include <cstdint>

namespace vllm::cpu {

// Cosines and sines of tokens: a token's are the row of its position or, where `positions` is null, its own row.
struct Rotations {
  const float *cos, *sin;  // rows of `dim`, `stride` apart; the first half of a row of sines is negated
  int64_t stride, dim;     // only the first `dim` elements of a head are rotated
  const int64_t* positions;

  int64_t find(int64_t token) const { return (positions == nullptr ? token : positions[token]) * stride; }
};

// The heads of a token in one row: query heads, then key heads, then as many value heads.
struct HeadRows {
  const float* rows;
  int64_t stride, num_tokens;
  int64_t num_heads, num_kv_heads, head_dim;
};

struct HeadNorms {
  const float *query, *key;  // [head_dim] or null
  float eps;
};

struct CacheSlots {
  void* cache;
  int32_t kind;
  int64_t num_slots;
  const int64_t* slot_mapping;  // [num_tokens]
};

// vllm_rotate_and_write_kv.
int32_t rotate_and_write(const HeadRows& heads, const Rotations& rotations, const HeadNorms& norms,
                         const CacheSlots& slots, int32_t num_threads, float* query);

}  // namespace vllm::cpu
