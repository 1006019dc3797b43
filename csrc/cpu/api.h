// The C interface of the CPU library: raw pointers and sizes, nothing that belongs to torch.
//
// Every function that computes returns a Status; on anything but kOk the output arrays hold no meaning. Strides count
// elements. `num_threads` is an upper bound: small work runs on fewer, and no result depends on it.
#pragma once

#include <cstdint>

#define VLLM_API extern "C" __attribute__((visibility("default")))

namespace vllm::cpu {

enum Status : int32_t {
  kOk = 0,
  kOutOfMemory = 1,
  kIdOutOfRange = 2,     // a token id, a row number, a block or a slot lies outside its table
  kCountOutOfRange = 3,  // num_top[row] is negative or larger than max_top
  kUnknownVariant = 4,   // not compiled in, or not run by this CPU
  kUnknownOp = 5,        // a kind that is not in OpKind
};

// Of int8 rows kInterleavedRows are interleaved: an element of each, then the next one of each; a last set that is not
// full takes the memory of a full one. kInt8Groups: each kGroupSize elements of a row have a scale of their own.
enum WeightKind : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt8Groups = 3 };
inline constexpr int64_t kGroupSize = 32;
inline constexpr int64_t kInterleavedRows = 32;

// A matrix of weights, and what its product is multiplied by and added to; see vllm_linear.
struct Matrix {
  const void* weight;  // [num_columns, size] of `kind`; int8: [num_columns / kInterleavedRows, size, kInterleavedRows]
  int64_t stride, num_columns, size;  // stride: from row to row; int8: size
  const float* scale;                 // [num_columns] or null; kInt8Groups: [size / kGroupSize, num_columns]
  const float* bias;                  // [num_columns] or null
  int64_t kind;
};

enum Activation : int64_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3 };
inline constexpr int64_t kNumActivations = 4;

// What an op of a program does; which fields of ProgramOp it reads is said with each.
enum OpKind : int64_t {
  kEmbed = 0,        // output = rows of `matrix` that the tokens' ids name
  kLinear = 1,       // output = input . matrix
  kGatedLinear = 2,  // output = activation(gates) * the columns after them, of the product that `second` has room for
  kGateAndMultiply = 3,  // the same of an input that holds gates and the columns after them
  kRmsNorm = 4,          // output = norm of input or, with `second`, of second += input; `weight`, `eps`
  kAdd = 5,              // output = input + second
  kScale = 6,            // output = input * factor
  kRotateAndWrite = 7,   // output = rotated query; `table`, `cache`, the sizes of heads; norms `weight`, `other_weight`
  kAttend = 8,           // output = attention of input over `cache`; `factor`: of scores, `sliding_window`
  kActivate = 9,         // output = activation of input
};

// Where the rows of a buffer lie: in a part of the scratch that has room for all of a step's rows, for those that pass
// a group of ops together, or for fewer than many; or in the caller's output.
enum BufferPlace : int64_t { kAllRows = 0, kPartRows = 1, kFewerRows = 2, kOutput = 3 };

struct ProgramBuffer {
  int64_t place, offset, width;  // offset: from the place's start, times its number of rows
};

struct ProgramOp {
  int64_t kind;
  int64_t input, second, output;  // numbers of buffers; -1: none
  int64_t num_grouped;            // this op and those after it that take some rows at a time, together; 1: all rows
  Matrix matrix;
  const float* weight;
  const float* other_weight;
  int64_t activation;
  int64_t num_heads, num_kv_heads, head_dim;
  int64_t table, cache;    // numbers of a rotation table and of a cache
  int64_t sliding_window;  // 0: none
  float eps, factor;
};

// A list of ops over buffers: what a model does with a step.
struct Program {
  const ProgramOp* ops;
  int64_t num_ops;
  const ProgramBuffer* buffers;
  int64_t all_width, part_width, fewer_width;  // floats a row that the places of buffers take
};

// Of each position its cosines, then its sines: [num_positions, 2 * dim].
struct RotationTable {
  const float* rows;
  int64_t num_positions, dim;
};

struct PagedCache {
  void* elements;
  int64_t kind;  // kFloat32 or kBfloat16
  int64_t num_blocks, block_size;
};

// What a step brings; see vllm_rotate_and_write_kv and vllm_paged_attention.
struct ProgramStep {
  const int64_t* token_ids;  // [num_tokens]
  const int64_t* positions;  // [num_tokens]
  int64_t num_tokens;
  const RotationTable* tables;
  int64_t num_tables;
  const PagedCache* caches;
  const int64_t* slot_mapping;  // [num_tokens]
  const int32_t* block_tables;  // [num_requests, table_stride]
  int64_t table_stride;
  const int32_t* query_starts;  // [num_requests + 1]
  const int32_t* seq_lens;      // [num_requests]
  int64_t num_requests;
};

}  // namespace vllm::cpu

// Raised whenever a signature below changes; Python refuses a library of another version.
inline constexpr int32_t kVllmAbiVersion = 10;

VLLM_API int32_t vllm_abi_version();

// The instruction set in use: "avx512", "avx2" or "portable". Setting "auto" takes the best that this CPU runs.
VLLM_API const char* vllm_get_variant();
VLLM_API int32_t vllm_set_variant(const char* name);

// Chosen token first, then the num_top[row] largest logits in falling order (ties: lowest id first), the chosen one
// left out. Outputs are [num_rows, 1 + max_top]; entries past num_entries[row] are (-1, -inf, 0).
VLLM_API int32_t vllm_score_rows(const float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                                 const int64_t* chosen,   // [num_rows]
                                 const int32_t* num_top,  // [num_rows]; vocab_size or more means all
                                 int32_t max_top, int32_t as_logits, int32_t num_threads, int32_t* token_ids,
                                 float* values, int32_t* ranks,
                                 int32_t* num_entries,  // [num_rows]
                                 uint8_t* is_finite);   // [num_rows]

// Chosen token first, then the given ids in their order with their true ranks; ids that repeat are left out.
VLLM_API int32_t vllm_score_given_ids(const float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                                      const int64_t* chosen,  // [num_rows]
                                      const int32_t* given,   // [num_rows, max_given], padded with -1
                                      int32_t max_given, int32_t as_logits, int32_t num_threads, int32_t* token_ids,
                                      float* values, int32_t* ranks, int32_t* num_entries, uint8_t* is_finite);

// Every token's value and rank, in id order. Outputs are [num_rows, vocab_size].
VLLM_API int32_t vllm_score_full_rows(const float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                                      int32_t as_logits, int32_t num_threads, float* values, int32_t* ranks,
                                      uint8_t* is_finite);

// The id of the largest logit, lowest id on ties.
VLLM_API int32_t vllm_argmax_rows(const float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                                  int32_t num_threads, int32_t* token_ids, uint8_t* is_finite);

// Gumbel-max: argmax of logit + noise(seed, position, token id), lowest id on ties, 0 when no token is left.
VLLM_API int32_t vllm_draw_rows(const float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                                const int32_t* row_of_draw,  // [num_draws]
                                const int64_t* seeds,        // [num_draws] bit pattern of a uint64
                                const int64_t* positions,    // [num_draws]
                                int64_t num_draws, int32_t num_threads, int32_t* token_ids);

// Top-k, top-p and min-p, in place: what is removed becomes -inf. What stays is a prefix of the row's falling order
// (ties: lowest id first): the tokens whose probability is min_p times the largest one's or more; of these the top_k
// first; of these the fewest that reach the share top_p of their probability. Never less than one token; a row that
// is not finite stays as it is.
VLLM_API int32_t vllm_filter_rows(float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                                  const int64_t* rows,       // [num_filtered], each once
                                  const float* temperature,  // [num_filtered] logits are before it
                                  const int64_t* top_k,      // [num_filtered], vocab_size or more: off
                                  const float* top_p,        // [num_filtered], 1: off
                                  const float* min_p,        // [num_filtered], 0: off
                                  int64_t num_filtered, int32_t num_threads);

// The 32 random bits of each token, [num_draws, vocab_size]: what draw_rows draws from, for tests.
VLLM_API int32_t vllm_philox_bits(const int64_t* seeds, const int64_t* positions, int64_t num_draws, int64_t vocab_size,
                                  int64_t* bits);

// Attention over the paged cache [2, num_blocks, block_size, num_kv_heads, head_dim] (keys, then values), of kv_kind
// kFloat32 or kBfloat16, which already holds this step's keys and values. A request's rows are its last positions;
// position i sees positions j <= i, with a sliding window (0: none) those with j > i - sliding_window. Nothing else in
// the cache is read.
VLLM_API int32_t vllm_paged_attention(const float* query,  // [num_tokens, num_heads, head_dim]
                                      int64_t token_stride, int64_t num_heads, const void* kv_cache, int32_t kv_kind,
                                      int64_t num_blocks, int64_t block_size, int64_t num_kv_heads, int64_t head_dim,
                                      const int32_t* block_tables,  // [num_requests, table_stride]
                                      int64_t table_stride,
                                      const int32_t* query_starts,  // [num_requests + 1]
                                      const int32_t* seq_lens,      // [num_requests], this step's tokens included
                                      int64_t num_requests, float scale, int64_t sliding_window, int32_t num_threads,
                                      float* output);  // [num_tokens, num_heads, head_dim]

// Copies keys and values [num_tokens, row_size] (row_size = num_kv_heads * head_dim) to their slots of the cache; where
// it is bfloat16, rounded to the nearest, to even on ties.
VLLM_API int32_t vllm_write_kv(const float* key, int64_t key_stride, const float* value, int64_t value_stride,
                               int64_t num_tokens, int64_t row_size, const int64_t* slot_mapping, void* kv_cache,
                               int32_t kv_kind, int64_t num_slots, int32_t num_threads);

// One pass from the product of a layer's qkv weights to attention: norms of q's and k's heads where weights are given
// (else null), rotation, query out, keys and values into the cache.
VLLM_API int32_t vllm_rotate_and_write_kv(const float* qkv,  // [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
                                          int64_t token_stride, int64_t num_tokens, int64_t num_heads,
                                          int64_t num_kv_heads, int64_t head_dim,
                                          const float* cos,  // [num_tokens, rotary_dim]
                                          const float* sin,  // [num_tokens, rotary_dim], first half negated
                                          int64_t rotary_dim, const float* query_norm, const float* key_norm, float eps,
                                          const int64_t* slot_mapping, void* kv_cache, int32_t kv_kind,
                                          int64_t num_slots, int32_t num_threads,
                                          float* query);  // [num_tokens, num_heads, head_dim]

// Rotates the first rotary_dim elements of every head: output = x * cos + swapped halves of x * sin.
VLLM_API int32_t vllm_rotate(const float* heads, int64_t token_stride, int64_t num_tokens, int64_t num_heads,
                             int64_t head_dim, const float* cos, const float* sin, int64_t rotary_dim,
                             int32_t num_threads, float* output);

// x / sqrt(mean(x^2) + eps) * weight by rows. With a residual (else null): residual += x first, in place, and the norm
// is the residual's.
VLLM_API int32_t vllm_rms_norm(const float* x, int64_t x_stride, float* residual, int64_t residual_stride,
                               int64_t num_rows, int64_t size, const float* weight, float eps, int32_t num_threads,
                               float* output);

// activation(x) or, where it is gated, activation(x) * the `size` columns after it, of rows of 2 * size.
VLLM_API int32_t vllm_activate(const float* x, int64_t row_stride, int64_t num_rows, int64_t size, int32_t activation,
                               int32_t is_gated, int32_t num_threads, float* output);

// output = x . weight^T * scale + bias; a row of weights an output column, with a scale of its own where `scale` is not
// null. kInt8Groups: weights are multiplied by their group's scale first, so the bits are those of the products as
// float32 weights; size is a multiple of kGroupSize. Each output's bits depend on its own row of x and row of weights
// alone.
VLLM_API int32_t vllm_linear(const float* x,  // [num_rows, size]
                             int64_t x_stride, int64_t num_rows, int64_t size,
                             const void* weight,  // as in Matrix
                             int64_t weight_stride, int64_t num_columns, int32_t weight_kind,
                             const float* scale,  // [num_columns] or null; kInt8Groups: as in Matrix
                             const float* bias,   // [num_columns] or null
                             int32_t num_threads,
                             float* output,  // [num_rows, num_columns]
                             int64_t output_stride);

// Runs a program on a step, with the functions above and so to the bits of its ops called one by one. `scratch` holds
// vllm_count_program_scratch(program, step->num_tokens) floats.
VLLM_API int32_t vllm_run_program(const vllm::cpu::Program* program, const vllm::cpu::ProgramStep* step, float* scratch,
                                  int32_t num_threads,
                                  float* output);  // [num_tokens, width of the buffers that are the output]
VLLM_API int64_t vllm_count_program_scratch(const vllm::cpu::Program* program, int64_t num_tokens);
