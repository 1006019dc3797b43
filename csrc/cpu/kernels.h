// What each instruction-set variant offers: small loops over one stretch of one row, chosen at run time as a table.
//
// The same source (variant/*.h over simd/*.h) makes every table with the same order of operations on 16 lanes and no
// fused multiply-add in scoring and drawing, so the variants give the same bits there; attention's products use it.
#pragma once

#include <cstdint>

#include "api.h"

namespace vllm::cpu {

struct StretchScan {
  float max;  // of the elements in the stretch; -inf when there is none
  bool has_nan;
};

struct DrawState {
  float best;  // the largest noisy logit so far; starts at -inf
  int32_t token_id;
};

struct PhiloxKey {
  uint32_t seed_low, seed_high, position_low, position_high;
};

// Keys of one tile of attention. Tiles start at multiples of it, whatever the block size.
inline constexpr int64_t kKeyTile = 64;

// Running softmax of some rows: sum and output are relative to exp(max).
struct AttentionState {
  float* max;     // [num_rows]
  float* sum;     // [num_rows]
  float* output;  // [num_rows, padded_dim]
};

struct KeyRange {
  int32_t first, end;  // keys of the tile, from 0
};

// The keys and values are float32 or bfloat16, as the kernel's name says. Where a tile is computed for
// several KV heads, what belongs to each stands one after the other: num_rows queries, scores, ... and head_dim
// elements of a key.
struct AttentionTile {
  int64_t num_heads, num_rows;  // KV heads; rows of each
  int64_t head_dim;
  int64_t padded_dim;    // head_dim rounded up to 16
  const float* queries;  // [num_heads, num_rows, head_dim], scaled
  const void* keys;      // key k starts slots[k] elements after it
  const void* values;    // the same for values
  const int64_t* slots;  // [kKeyTile]; those outside [first_key, end_key) repeat others
  int64_t first_key, end_key;
  // What is read into the cache meanwhile: the keys of the next tile.
  const void* next_keys;
  const int64_t* next_slots;  // [kKeyTile]
  int64_t next_first_key, next_end_key;
  const KeyRange* visible;  // [num_rows], rising; first == end where a row sees nothing
  float* packed_keys;       // scratch [head_dim, kKeyTile]
  float* packed_values;     // scratch [kKeyTile, padded_dim]
  float* scores;            // scratch [num_heads, num_rows, kKeyTile]
  float* decay;             // scratch [num_heads, num_rows]
  AttentionState state;     // of num_heads * num_rows rows
};

// Bytes that are read into the cache while something else is computed, some lines with every step of it.
struct Fetching {
  const char* next;
  const char* end;
  int lines_a_step;
};

// Some rows of x times some rows of weights, each of `size` elements that start at the pointers.
struct ProductTile {
  const float* x;  // gemv: [num_rows, size]; panels: [size, num_rows]
  int64_t x_stride, num_rows;
  const void* weight;  // gemv: float, bfloat16 or int8 as the kernel's name says; panels: float
  int64_t
      first_lane;  // int8: the first column's place among the interleaved rows, whose start `weight` points at; gemv: 0
  int64_t weight_stride, num_columns;
  int64_t ahead;              // panels: elements from a weight to the one to fetch meanwhile, of a later call; 0: none
  int64_t size, block_size;   // gemv: sums run over a block, then over blocks; panels: over all
  bool adds;                  // panels: to what the output holds
  const float* scale;         // [num_columns]; null: 1
  const float* group_scales;  // groups of int8: [size / kGroupSize, num_columns], rows group_scale_stride apart
  int64_t group_scale_stride;
  const float* bias;      // [num_columns]; null: 0
  float* output;          // gemv: [num_rows, num_columns]; panels: [num_columns, num_rows]
  int64_t output_stride;  // gemv
  Fetching* fetching;
};

// Rows of x of a gemv call, at most.
inline constexpr int64_t kGemvRows = 4;
// Rows of x in a panel are so many at most, in any variant.
inline constexpr int64_t kPanelRows = 32;

// Buckets of filtering, laid evenly over (max - logit) / temperature from 0 to 32; the last one holds the rest too.
inline constexpr int64_t kNumBuckets = 1024;

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
  // The same with low <= logit <= high.
  int64_t (*select_between)(const float* logits, int64_t count, float low, float high, int32_t* offsets);
  // exp((logit - max) / temperature), and which of kNumBuckets it falls into: 0 holds the largest.
  void (*weigh)(const float* logits, int64_t count, float max, float temperature, float* weights, uint32_t* buckets);
  void (*remove_below)(float* logits, int64_t count, float bound);  // sets them to -inf
  void (*subtract)(const float* logits, int64_t count, double offset, float* values);
  // Draws among tokens [first, end); `first` is a multiple of 64.
  void (*draw)(const float* logits, int64_t first, int64_t end, const PhiloxKey& key, DrawState* state);
  void (*philox)(int64_t first, const PhiloxKey& key, uint32_t* bits);  // the 64 words from token `first` on
  void (*attend_float32)(const AttentionTile& tile);
  void (*attend_bfloat16)(const AttentionTile& tile);
  // With a residual: residual += x first, and the norm is the residual's. output may be x.
  void (*rms_norm)(const float* x, float* residual, const float* weight, int64_t size, float eps, float* output);
  void (*rotate)(const float* x, const float* cos, const float* sin, int64_t dim, float* output);  // not in place
  // By Activation; where `up` is not null, times it.
  void (*activate[kNumActivations])(const float* x, const float* up, int64_t size, float* output);
  // Products of few rows of x with weights as they are stored.
  void (*gemv_float32)(const ProductTile& tile);
  void (*gemv_bfloat16)(const ProductTile& tile);
  void (*gemv_int8)(const ProductTile& tile);
  void (*gemv_int8_groups)(const ProductTile& tile);
  // Products of a panel of x with weights as float32.
  int64_t product_lanes;
  int64_t panel_rows;  // at most; a whole number of product_lanes, at most kPanelRows
  void (*multiply_panel)(const ProductTile& tile);
  // wide[column][i] = weight[column][i]
  void (*widen_float32)(const ProductTile& tile, float* wide, int64_t wide_stride);
  void (*widen_bfloat16)(const ProductTile& tile, float* wide, int64_t wide_stride);
  void (*widen_int8)(const ProductTile& tile, float* wide, int64_t wide_stride);
  void (*widen_int8_groups)(const ProductTile& tile, float* wide, int64_t wide_stride);
  // transposed[i][row] = rows[row][i] for a whole number of 8 rows
  void (*transpose)(const float* const* rows, int64_t num_rows, int64_t size, int64_t transposed_stride,
                    float* transposed);
};

// The table in use.
const Kernels& get_kernels();

}  // namespace vllm::cpu
