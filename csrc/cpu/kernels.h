// What each instruction-set variant offers: small loops over one stretch of one row, chosen at run time as a table.
//
// The same source (variant/*.h over simd/*.h) makes every table with the same order of operations on 16 lanes and no
// fused multiply-add in scoring and drawing, so the variants give the same bits.
#pragma once

#include <cstdint>

namespace vllm::cpu {

struct StretchScan {
  float max;  // of the numbers in the stretch; -inf when there is none
  bool has_nan;
};

struct DrawState {
  float best;  // the largest noisy logit so far; starts at -inf
  int32_t token_id;
};

struct PhiloxKey {
  uint32_t seed_low, seed_high, position_low, position_high;
};

struct Kernels {
  const char* name;
  StretchScan (*scan)(const float* logits, int64_t count);
  // Sum of exp(logit - max); max is the stretch's own and finite.
  double (*sum_exp)(const float* logits, int64_t count, float max);
  int64_t (*count_greater)(const float* logits, int64_t count, float bound);
  int64_t (*count_at_least)(const float* logits, int64_t count, float bound);
  int64_t (*find_equal)(const float* logits, int64_t count, float value);  // count when absent
  // Writes the offsets of logits > bound in rising order; `offsets` has room for `count`.
  int64_t (*select_greater)(const float* logits, int64_t count, float bound, int32_t* offsets);
  void (*subtract)(const float* logits, int64_t count, double offset, float* values);
  // Draws among tokens [first, end); `first` is a multiple of 64.
  void (*draw)(const float* logits, int64_t first, int64_t end, const PhiloxKey& key, DrawState* state);
  void (*philox)(int64_t first, const PhiloxKey& key, uint32_t* bits);  // the 64 words from token `first` on
};

// The table in use.
const Kernels& get_kernels();

}  // namespace vllm::cpu
