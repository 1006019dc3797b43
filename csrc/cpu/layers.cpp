// The operations between matrix products: norms, rotation, activation, and writing the cache.
#include "layers.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "api.h"
#include "kernels.h"
#include "threads.h"

namespace vllm::cpu {
namespace {

bool are_slots(const int64_t* slots, int64_t count, int64_t num_slots) {
  return std::all_of(slots, slots + count, [=](int64_t slot) { return slot >= 0 && slot < num_slots; });
}

// Rotates `count` heads of one token, normalised first where the model has a norm (else null).
void rotate_heads(const Kernels& kernels, const float* heads, int64_t count, int64_t head_dim, const float* norm,
                  float eps, const Rotations& rotations, int64_t token, float* normalised, float* output) {
  const int64_t row = rotations.find(token);
  for (int64_t head = 0; head < count; ++head) {
    const float* x = heads + head * head_dim;
    float* head_output = output + head * head_dim;
    if (norm != nullptr) {
      kernels.rms_norm(x, nullptr, norm, head_dim, eps, normalised);
      x = normalised;
    }
    kernels.rotate(x, rotations.cos + row, rotations.sin + row, rotations.dim, head_output);
    std::copy(x + rotations.dim, x + head_dim, head_output + rotations.dim);
  }
}

// Bfloat16 numbers nearest to x, to even on ties; NaN stays NaN.
void round_to_bfloat16(const float* x, int64_t count, uint16_t* rounded) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    const uint32_t nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    rounded[i] = static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : nearest);
  }
}

// The paged cache as rows of keys, then as many rows of values.
struct CacheRows {
  void* numbers;
  int32_t kind;
  int64_t num_slots, row_size;

  float* key(int64_t slot) const { return static_cast<float*>(numbers) + slot * row_size; }  // of a float32 cache
  void write_key(int64_t slot, const float* row) const { write(slot * row_size, row); }
  void write_value(int64_t slot, const float* row) const { write((num_slots + slot) * row_size, row); }

 private:
  void write(int64_t offset, const float* row) const {
    if (kind == kBfloat16) {
      round_to_bfloat16(row, row_size, static_cast<uint16_t*>(numbers) + offset);
    } else {
      std::copy_n(row, row_size, static_cast<float*>(numbers) + offset);
    }
  }
};

}  // namespace

int32_t rotate_and_write(const HeadRows& heads, const Rotations& rotations, const HeadNorms& norms,
                         const CacheSlots& slots, int32_t num_threads, float* query) {
  if (!are_slots(slots.slot_mapping, heads.num_tokens, slots.num_slots)) return kIdOutOfRange;
  const Kernels& kernels = get_kernels();
  const int64_t dim = heads.head_dim, query_size = heads.num_heads * dim, kv_size = heads.num_kv_heads * dim;
  const CacheRows cache = {slots.cache, slots.kind, slots.num_slots, kv_size};
  const int threads = choose_threads(heads.num_tokens * (query_size + 2 * kv_size), num_threads);
  return run_guarded([&] {
    parallel_shares(heads.num_tokens, threads, [&](int64_t first, int64_t end) {
      std::vector<float> normalised(static_cast<size_t>(dim)), rotated(static_cast<size_t>(kv_size));
      for (int64_t token = first; token < end; ++token) {
        const float* row = heads.rows + token * heads.stride;
        const int64_t slot = slots.slot_mapping[token];
        float* key = slots.kind == kBfloat16 ? rotated.data() : cache.key(slot);
        rotate_heads(kernels, row, heads.num_heads, dim, norms.query, norms.eps, rotations, token, normalised.data(),
                     query + token * query_size);
        rotate_heads(kernels, row + query_size, heads.num_kv_heads, dim, norms.key, norms.eps, rotations, token,
                     normalised.data(), key);
        if (key == rotated.data()) cache.write_key(slot, key);
        cache.write_value(slot, row + query_size + kv_size);
      }
    });
  });
}

}  // namespace vllm::cpu

int32_t vllm_write_kv(const float* key, int64_t key_stride, const float* value, int64_t value_stride,
                      int64_t num_tokens, int64_t row_size, const int64_t* slot_mapping, void* kv_cache,
                      int32_t kv_kind, int64_t num_slots, int32_t num_threads) {
  using namespace vllm::cpu;
  if (!are_slots(slot_mapping, num_tokens, num_slots)) return kIdOutOfRange;
  const CacheRows cache = {kv_cache, kv_kind, num_slots, row_size};
  parallel_shares(num_tokens, choose_threads(2 * num_tokens * row_size, num_threads), [&](int64_t first, int64_t end) {
    for (int64_t token = first; token < end; ++token) {
      cache.write_key(slot_mapping[token], key + token * key_stride);
      cache.write_value(slot_mapping[token], value + token * value_stride);
    }
  });
  return kOk;
}

int32_t vllm_rotate_and_write_kv(const float* qkv, int64_t token_stride, int64_t num_tokens, int64_t num_heads,
                                 int64_t num_kv_heads, int64_t head_dim, const float* cos, const float* sin,
                                 int64_t rotary_dim, const float* query_norm, const float* key_norm, float eps,
                                 const int64_t* slot_mapping, void* kv_cache, int32_t kv_kind, int64_t num_slots,
                                 int32_t num_threads, float* query) {
  return vllm::cpu::rotate_and_write({qkv, token_stride, num_tokens, num_heads, num_kv_heads, head_dim},
                                     {cos, sin, rotary_dim, rotary_dim, nullptr}, {query_norm, key_norm, eps},
                                     {kv_cache, kv_kind, num_slots, slot_mapping}, num_threads, query);
}

int32_t vllm_rotate(const float* heads, int64_t token_stride, int64_t num_tokens, int64_t num_heads, int64_t head_dim,
                    const float* cos, const float* sin, int64_t rotary_dim, int32_t num_threads, float* output) {
  using namespace vllm::cpu;
  const Kernels& kernels = get_kernels();
  const int64_t size = num_heads * head_dim;
  const Rotations rotations = {cos, sin, rotary_dim, rotary_dim, nullptr};
  parallel_shares(num_tokens, choose_threads(num_tokens * size, num_threads), [&](int64_t first, int64_t end) {
    for (int64_t token = first; token < end; ++token) {
      rotate_heads(kernels, heads + token * token_stride, num_heads, head_dim, nullptr, 0, rotations, token, nullptr,
                   output + token * size);
    }
  });
  return kOk;
}

int32_t vllm_rms_norm(const float* x, int64_t x_stride, float* residual, int64_t residual_stride, int64_t num_rows,
                      int64_t size, const float* weight, float eps, int32_t num_threads, float* output) {
  using namespace vllm::cpu;
  const Kernels& kernels = get_kernels();
  parallel_shares(num_rows, choose_threads(num_rows * size, num_threads), [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      float* row_residual = residual == nullptr ? nullptr : residual + row * residual_stride;
      kernels.rms_norm(x + row * x_stride, row_residual, weight, size, eps, output + row * size);
    }
  });
  return kOk;
}

int32_t vllm_activate(const float* x, int64_t row_stride, int64_t num_rows, int64_t size, int32_t activation,
                      int32_t is_gated, int32_t num_threads, float* output) {
  using namespace vllm::cpu;
  const auto activate = get_kernels().activate[activation];
  parallel_shares(num_rows, choose_threads(4 * num_rows * size, num_threads), [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      const float* input = x + row * row_stride;
      activate(input, is_gated ? input + size : nullptr, size, output + row * size);
    }
  });
  return kOk;
}
