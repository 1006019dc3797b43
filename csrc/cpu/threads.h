// How a call spreads over threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "api.h"

namespace vllm::cpu {

inline int get_thread_index() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// Waking a thread costs some 5 us, in which one thread reads about this many elements.
inline constexpr int64_t kElementsPerThread = 16384;

inline int choose_threads(int64_t num_elements, int32_t num_threads) {
  return static_cast<int>(std::clamp<int64_t>(num_elements / kElementsPerThread, 1, std::max(num_threads, 1)));
}

// Runs body(item) for each item, whichever thread is free taking the next. Throws std::bad_alloc if a body did: an
// exception may not leave a parallel loop by itself.
template <typename Body>
void parallel_for(int64_t count, int num_threads, Body body) {
  if (num_threads == 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::atomic<bool> out_of_memory{false};
#pragma omp parallel for num_threads(num_threads) schedule(dynamic)
  for (int64_t i = 0; i < count; ++i) {
    try {
      body(i);
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
    }
  }
  if (out_of_memory) throw std::bad_alloc();
}

// Runs body(first, end) on equal shares of [0, count), one a thread.
template <typename Body>
void parallel_shares(int64_t count, int num_threads, Body body) {
  parallel_for(num_threads, num_threads,
               [&](int64_t share) { body(count * share / num_threads, count * (share + 1) / num_threads); });
}

// Turns the one exception that kernels may throw into a Status.
template <typename Compute>
int32_t run_guarded(Compute compute) {
  try {
    compute();
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
  return kOk;
}

}  // namespace vllm::cpu
