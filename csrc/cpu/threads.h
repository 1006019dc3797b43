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
#include "team.h"

namespace vllm::cpu {

inline int get_thread_index() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// Elements that one thread reads in about the time that another one's start costs: some 5 us for a region's, 0.5 us in
// a team.
inline constexpr int64_t kElementsPerThread = 16384;
inline constexpr int64_t kElementsPerTeamThread = 2048;

inline int choose_threads(int64_t num_elements, int32_t num_threads) {
  const int64_t share = Team::current() == nullptr ? kElementsPerThread : kElementsPerTeamThread;
  return static_cast<int>(std::clamp<int64_t>(num_elements / share, 1, std::max(num_threads, 1)));
}

// Runs work() once on each of `num_threads` threads: the team's, where the caller leads one, else a region's.
template <typename Work>
void run_on_threads(int num_threads, Work work) {
  if (Team* team = Team::current()) {
    return team->run(
        std::min(num_threads, team->size()), [](void* context) { (*static_cast<Work*>(context))(); }, &work);
  }
#pragma omp parallel num_threads(num_threads)
  work();
}

// Runs body(thread) on each of `num_threads` threads; of a team these are threads 0 … num_threads − 1, outside of one
// there may be fewer. body must not throw.
template <typename Body>
void run_on_each_thread(int num_threads, Body body) {
  if (num_threads <= 1) return body(int64_t{0});
  run_on_threads(num_threads, [&] { body(int64_t{get_thread_index()}); });
}

// Runs body(item) for each item, whichever thread is free taking the next. Throws std::bad_alloc if a body did: an
// exception may not leave a parallel loop by itself.
template <typename Body>
void parallel_for(int64_t count, int num_threads, Body body) {
  if (num_threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::atomic<int64_t> next{0};
  std::atomic<bool> out_of_memory{false};
  run_on_threads(num_threads, [&] {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      try {
        body(i);
      } catch (const std::bad_alloc&) {
        out_of_memory = true;
      }
    }
  });
  if (out_of_memory) throw std::bad_alloc();
}

// Runs body() with a team of threads at hand, which all calls inside share. body must not throw.
template <typename Body>
void run_as_team(int num_threads, Body body) {
#ifdef _OPENMP
  if (num_threads > 1) {
    Team team;
#pragma omp parallel num_threads(num_threads)
    {
      if (omp_get_thread_num() == 0) {
        team.lead(omp_get_num_threads(), body);
      } else {
        team.serve(omp_get_thread_num());
      }
    }
    return;
  }
#endif
  body();
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
