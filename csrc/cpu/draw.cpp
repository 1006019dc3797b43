// Gumbel-max draws: several draws may share a row, so the row is read, never repeated.
#include <limits>
#include <vector>

#include "api.h"
#include "kernels.h"
#include "threads.h"

namespace vllm::cpu {
namespace {

constexpr int64_t kGroup = 64;

PhiloxKey make_key(int64_t seed, int64_t position) {
  const auto seed_bits = static_cast<uint64_t>(seed);
  const auto position_bits = static_cast<uint64_t>(position);
  return {static_cast<uint32_t>(seed_bits), static_cast<uint32_t>(seed_bits >> 32),
          static_cast<uint32_t>(position_bits), static_cast<uint32_t>(position_bits >> 32)};
}

struct DrawTask {
  const float* logits;
  int64_t row_stride, vocab_size;
  const int32_t* row_of_draw;
  const int64_t* seeds;
  const int64_t* positions;
};

// Draws among one of `num_slices` slices of the row; slices begin at multiples of the generator's group.
DrawState draw_slice(const Kernels& kernels, const DrawTask& task, int64_t draw, int64_t slice, int64_t num_slices) {
  const int64_t num_groups = (task.vocab_size + kGroup - 1) / kGroup;
  const int64_t first = num_groups * slice / num_slices * kGroup;
  const int64_t end = std::min(num_groups * (slice + 1) / num_slices * kGroup, task.vocab_size);
  DrawState state = {-std::numeric_limits<float>::infinity(), 0};
  kernels.draw(task.logits + task.row_of_draw[draw] * task.row_stride, first, end,
               make_key(task.seeds[draw], task.positions[draw]), &state);
  return state;
}

void draw_all(const DrawTask& task, int64_t num_draws, int num_threads, int32_t* token_ids) {
  const Kernels& kernels = get_kernels();
  const int64_t num_slices = num_draws >= num_threads ? 1 : (num_threads + num_draws - 1) / num_draws;
  std::vector<DrawState> states(static_cast<size_t>(num_draws * num_slices));
  parallel_for(num_draws * num_slices, num_threads, [&](int64_t item) {
    states[static_cast<size_t>(item)] = draw_slice(kernels, task, item / num_slices, item % num_slices, num_slices);
  });
  for (int64_t draw = 0; draw < num_draws; ++draw) {
    DrawState state = states[static_cast<size_t>(draw * num_slices)];
    for (int64_t slice = 1; slice < num_slices; ++slice) {
      const DrawState& other = states[static_cast<size_t>(draw * num_slices + slice)];
      if (other.best > state.best) state = other;
    }
    token_ids[draw] = state.token_id;
  }
}

}  // namespace
}  // namespace vllm::cpu

int32_t vllm_draw_rows(const float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                       const int32_t* row_of_draw, const int64_t* seeds, const int64_t* positions, int64_t num_draws,
                       int32_t num_threads, int32_t* token_ids) {
  for (int64_t draw = 0; draw < num_draws; ++draw) {
    if (row_of_draw[draw] < 0 || row_of_draw[draw] >= num_rows) return vllm::cpu::kIdOutOfRange;
  }
  if (num_draws == 0) return vllm::cpu::kOk;
  const vllm::cpu::DrawTask task = {logits, row_stride, vocab_size, row_of_draw, seeds, positions};
  const int threads = vllm::cpu::choose_threads(num_draws * vocab_size, num_threads);
  return vllm::cpu::run_guarded([&] { vllm::cpu::draw_all(task, num_draws, threads, token_ids); });
}

int32_t vllm_philox_bits(const int64_t* seeds, const int64_t* positions, int64_t num_draws, int64_t vocab_size,
                         int64_t* bits) {
  const vllm::cpu::Kernels& kernels = vllm::cpu::get_kernels();
  uint32_t group[vllm::cpu::kGroup];
  for (int64_t draw = 0; draw < num_draws; ++draw) {
    const vllm::cpu::PhiloxKey key = vllm::cpu::make_key(seeds[draw], positions[draw]);
    for (int64_t token = 0; token < vocab_size; ++token) {
      if (token % vllm::cpu::kGroup == 0) kernels.philox(token, key, group);
      bits[draw * vocab_size + token] = group[token % vllm::cpu::kGroup];
    }
  }
  return vllm::cpu::kOk;
}
