// How a call spreads over threads.
#pragma once

#include <algorithm>
#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

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

}  // namespace vllm::cpu
