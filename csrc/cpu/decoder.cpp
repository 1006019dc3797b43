// A step through all layers of a decoder in one call: the same functions in the same order as a model's modules would
// call them one by one, so to the same bits.
#include <algorithm>
#include <cstring>

#include "api.h"
#include "linear.h"
#include "threads.h"

namespace vllm::cpu {
namespace {

// Rows that pass the feed-forward part together: what it widens them to is bounded, and stays in a large cache.
constexpr int64_t kMaxMlpRows = 1024;
constexpr int64_t kLineFloats = 16;

int64_t count_mlp_parts(int64_t num_tokens) { return (num_tokens + kMaxMlpRows - 1) / kMaxMlpRows; }

// Hands out pieces of the scratch, each from a cache line's start; with no memory it only counts.
class Arena {
 public:
  explicit Arena(float* memory) : memory_(memory) {}

  float* take(int64_t rows, int64_t width) {
    float* piece = memory_ == nullptr ? nullptr : memory_ + num_taken_;
    num_taken_ += (rows * width + kLineFloats - 1) / kLineFloats * kLineFloats;
    return piece;
  }
  int64_t num_taken() const { return num_taken_; }

 private:
  float* memory_;
  int64_t num_taken_ = 0;
};

struct Buffers {
  float* residual;   // [num_tokens, hidden_size]
  float* added;      // [num_tokens, hidden_size], what the residual still lacks
  float* rows;       // [num_tokens, hidden_size or all query heads], what a product reads
  float* qkv;        // [num_tokens, all heads]
  float* query;      // [num_tokens, all query heads]
  float* cos;        // [num_tokens, head_dim]
  float* sin;        // [num_tokens, head_dim]
  float* gate_up;    // [rows of a part if they are few, 2 * intermediate_size]
  float* activated;  // [rows of a part, intermediate_size]
};

Buffers take_buffers(const Decoder& d, int64_t num_tokens, Arena* arena) {
  const int64_t hidden = d.embedding.size, query = d.num_heads * d.head_dim;
  int64_t gate_up = 0, activated = 0, qkv = 0;
  for (int64_t i = 0; i < d.num_layers; ++i) {
    qkv = std::max(qkv, d.layers[i].qkv.num_columns);
    gate_up = std::max(gate_up, d.layers[i].gate_up.num_columns);
    activated = std::max(activated, d.layers[i].down.size);
  }
  const int64_t part = std::min(num_tokens, kMaxMlpRows);
  Buffers b{};
  b.residual = arena->take(num_tokens, hidden);
  b.added = arena->take(num_tokens, hidden);
  b.rows = arena->take(num_tokens, std::max(hidden, query));
  b.qkv = arena->take(num_tokens, qkv);
  b.query = arena->take(num_tokens, query);
  b.cos = arena->take(num_tokens, d.head_dim);
  b.sin = arena->take(num_tokens, d.head_dim);
  b.gate_up = arena->take(std::min(part, kManyRows), gate_up);
  b.activated = arena->take(part, activated);
  return b;
}

void widen_row(const Matrix& m, int64_t row, float* output) {
  const int64_t first = row * m.stride;
  switch (m.kind) {
    case kFloat32:
      std::copy_n(static_cast<const float*>(m.weight) + first, m.size, output);
      break;
    case kBfloat16: {
      const auto* narrow = static_cast<const uint16_t*>(m.weight) + first;
      for (int64_t i = 0; i < m.size; ++i) {
        const uint32_t bits = static_cast<uint32_t>(narrow[i]) << 16;
        std::memcpy(output + i, &bits, sizeof(bits));
      }
      break;
    }
    default: {
      const int64_t lane = row % kInterleavedRows;
      const auto* narrow = static_cast<const int8_t*>(m.weight) + (row - lane) * m.size + lane;
      const bool has_blocks = m.kind == kInt8Groups;
      for (int64_t i = 0; i < m.size; ++i) {
        const int64_t factor = has_blocks ? i / kGroupSize * m.num_columns + row : row;
        output[i] = static_cast<float>(narrow[i * kInterleavedRows]) * m.scale[factor];
      }
    }
  }
}

class DecoderRun {
 public:
  DecoderRun(const Decoder& decoder, const DecoderStep& step, float* scratch, int32_t num_threads)
      : d_(decoder), step_(step), num_threads_(num_threads) {
    Arena arena(scratch);
    b_ = take_buffers(decoder, step.num_tokens, &arena);
  }

  int32_t run(float* output) {
    if (!are_within(step_.token_ids, d_.embedding.num_columns)) return kIdOutOfRange;
    if (!are_within(step_.positions, step_.num_positions)) return kIdOutOfRange;
    load_tokens();
    int32_t status = kOk;
    for (int64_t i = 0; i < d_.num_layers && status == kOk; ++i) {
      const DecoderLayer& layer = d_.layers[i];
      const float* added = i == 0 ? b_.residual : b_.added;
      status = normalise(added, i == 0 ? nullptr : b_.residual, step_.num_tokens, layer.attention_norm, b_.rows);
      if (status == kOk) status = run_attention(layer, step_.kv_caches[i]);
      if (status == kOk) status = run_mlp(layer, i + 1 < d_.num_layers ? &d_.layers[i + 1] : nullptr);
    }
    if (status != kOk) return status;
    if (d_.num_layers == 0) return normalise(b_.residual, nullptr, step_.num_tokens, d_.final_norm, output);
    return normalise(b_.added, b_.residual, step_.num_tokens, d_.final_norm, output);
  }

 private:
  bool are_within(const int64_t* ids, int64_t count) const {
    return std::all_of(ids, ids + step_.num_tokens, [=](int64_t id) { return id >= 0 && id < count; });
  }

  // The embeddings of the tokens, and the rotations of their positions.
  void load_tokens() {
    const int64_t hidden = d_.embedding.size, dim = d_.head_dim;
    const int threads = choose_threads(step_.num_tokens * hidden, num_threads_);
    parallel_shares(step_.num_tokens, threads, [&](int64_t first, int64_t end) {
      for (int64_t token = first; token < end; ++token) {
        widen_row(d_.embedding, step_.token_ids[token], b_.residual + token * hidden);
        const float* rotation = step_.rotations + step_.positions[token] * 2 * dim;
        std::copy_n(rotation, dim, b_.cos + token * dim);
        std::copy_n(rotation + dim, dim, b_.sin + token * dim);
      }
    });
  }

  int32_t normalise(const float* x, float* residual, int64_t num_rows, const float* weight, float* output) const {
    const int64_t hidden = d_.embedding.size;
    return vllm_rms_norm(x, hidden, residual, hidden, num_rows, hidden, weight, d_.eps, num_threads_, output);
  }

  // x times m; `next` is the product after it.
  int32_t multiply(const float* x, int64_t num_rows, const Matrix& m, const Matrix* next, float* output) const {
    if (next != nullptr) announce_product(*next, num_rows, num_threads_);
    return cpu::multiply(x, m.size, num_rows, m, num_threads_, output, m.num_columns);
  }

  int32_t run_attention(const DecoderLayer& layer, void* kv_cache) const {
    const int64_t query_size = d_.num_heads * d_.head_dim;
    const auto kv_kind = static_cast<int32_t>(step_.kv_kind);
    int32_t status = multiply(b_.rows, step_.num_tokens, layer.qkv, &layer.attention_out, b_.qkv);
    if (status != kOk) return status;
    status = vllm_rotate_and_write_kv(b_.qkv, layer.qkv.num_columns, step_.num_tokens, d_.num_heads, d_.num_kv_heads,
                                      d_.head_dim, b_.cos, b_.sin, layer.query_norm, layer.key_norm, d_.eps,
                                      step_.slot_mapping, kv_cache, kv_kind, step_.num_blocks * step_.block_size,
                                      num_threads_, b_.query);
    if (status != kOk) return status;
    status = vllm_paged_attention(b_.query, query_size, d_.num_heads, kv_cache, kv_kind, step_.num_blocks,
                                  step_.block_size, d_.num_kv_heads, d_.head_dim, step_.block_tables,
                                  step_.table_stride, step_.query_starts, step_.seq_lens, step_.num_requests,
                                  d_.attention_scale, layer.sliding_window, num_threads_, b_.rows);
    return status == kOk ? multiply(b_.rows, step_.num_tokens, layer.attention_out, &layer.gate_up, b_.added) : status;
  }

  // Parts of equal size: a small last one would be slow.
  int32_t run_mlp(const DecoderLayer& layer, const DecoderLayer* next_layer) const {
    const int64_t hidden = d_.embedding.size, num_tokens = step_.num_tokens;
    const int64_t num_parts = count_mlp_parts(num_tokens);
    int32_t status = kOk;
    for (int64_t part = 0; part < num_parts && status == kOk; ++part) {
      const int64_t first = num_tokens * part / num_parts, end = num_tokens * (part + 1) / num_parts;
      float* added = b_.added + first * hidden;
      status = normalise(added, b_.residual + first * hidden, end - first, layer.mlp_norm, b_.rows);
      announce_product(layer.down, end - first, num_threads_);
      if (status == kOk) {
        status = multiply_and_gate(b_.rows, end - first, layer.gate_up, num_threads_, b_.gate_up, b_.activated);
      }
      const Matrix* next = next_layer == nullptr ? nullptr : &next_layer->qkv;
      if (status == kOk) status = multiply(b_.activated, end - first, layer.down, next, added);
    }
    return status;
  }

  const Decoder& d_;
  const DecoderStep& step_;
  const int32_t num_threads_;
  Buffers b_;
};

}  // namespace
}  // namespace vllm::cpu

int64_t vllm_count_decoder_scratch(const vllm::cpu::Decoder* decoder, int64_t num_tokens) {
  vllm::cpu::Arena arena(nullptr);
  vllm::cpu::take_buffers(*decoder, num_tokens, &arena);
  return arena.num_taken();
}

int32_t vllm_run_decoder(const vllm::cpu::Decoder* decoder, const vllm::cpu::DecoderStep* step, float* scratch,
                         int32_t num_threads, float* output) {
  using namespace vllm::cpu;
  int32_t status = kOk;
  run_as_team(num_threads, [&] { status = DecoderRun(*decoder, *step, scratch, num_threads).run(output); });
  return status;
}
