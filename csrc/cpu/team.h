// A team: the threads of one parallel region, which wait for work while the first of them makes a chain of calls.
//
// Opening a region costs microseconds, a decode step has some 150 of them, and a step of a small model with narrow
// weights takes ten milliseconds: so the whole chain runs inside one region. Whoever waits polls for some microseconds
// and then sleeps: when another process wants the cores, a thread that spins keeps the one that it waits for from
// running.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace vllm::cpu {

inline constexpr int64_t kLineBytes = 64;  // of a cache

inline void pause_thread() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps while `word` holds `value` (and may wake up for nothing).
inline void sleep_while_equal(std::atomic<uint32_t>* word, uint32_t value) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  if (word->load() == value) std::this_thread::yield();
#endif
}

inline void wake_sleepers(std::atomic<uint32_t>* word) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

// A number that one thread changes and others wait for.
class Signal {
 public:
  uint32_t read() const { return value_.load(std::memory_order_acquire); }

  uint32_t add(uint32_t amount) {
    const uint32_t value = value_.fetch_add(amount) + amount;
    wake_if_needed();
    return value;
  }

  void set(uint32_t value) {
    value_.store(value);
    wake_if_needed();
  }

  // Returns the first value found that is not `old`; between two polls, pass() does something short.
  template <typename Pass>
  uint32_t wait_for_change(uint32_t old, Pass& pass) {
    for (int poll = 0; poll < kPolls; ++poll) {
      const uint32_t value = read();
      if (value != old) return value;
      pass();
      pause_thread();
    }
    num_sleepers_.fetch_add(1);  // before the value is read again: whoever changes it does so before reading this
    uint32_t value;
    while ((value = value_.load()) == old) sleep_while_equal(&value_, old);
    num_sleepers_.fetch_sub(1);
    return value;
  }

 private:
  // Together about as long as falling asleep and waking take.
  static constexpr int kPolls = 1000;

  void wake_if_needed() {
    if (num_sleepers_.load() > 0) wake_sleepers(&value_);
  }

  alignas(64) std::atomic<uint32_t> value_{0};
  alignas(64) std::atomic<uint32_t> num_sleepers_{0};
};

// The bytes that a team's next product begins with: `size` of each thread's own, one thread's after the other's.
class Ahead {
 public:
  void announce(const void* start, int64_t size) {
    size_.store(size, std::memory_order_relaxed);
    start_.store(static_cast<const char*>(start), std::memory_order_relaxed);
  }

  // One thread's progress through its own. A start and a size of two different announcements only waste prefetches.
  class Reader {
   public:
    Reader(const Ahead& ahead, int thread) : ahead_(ahead), thread_(thread) {}

    void operator()() {
      const char* start = ahead_.start_.load(std::memory_order_relaxed);
      if (start != start_) {
        const int64_t size = ahead_.size_.load(std::memory_order_relaxed);
        start_ = start;
        next_ = start + thread_ * size;
        end_ = next_ + size;
      }
      for (int line = 0; line < kLinesAPoll && next_ < end_; ++line, next_ += kLineBytes) __builtin_prefetch(next_);
    }

   private:
    static constexpr int kLinesAPoll = 2;

    const Ahead& ahead_;
    int thread_;
    const char *start_ = nullptr, *next_ = nullptr, *end_ = nullptr;
  };

 private:
  std::atomic<const char*> start_{nullptr};
  std::atomic<int64_t> size_{0};
};

class Team {
 public:
  using Work = void (*)(void* context);

  // The team that the calling thread leads; null outside of any, and within a team's work.
  static Team*& current() {
    static thread_local Team* team = nullptr;
    return team;
  }

  int size() const { return size_; }

  // What threads fetch while they wait: memory sets the pace of few rows, and would idle meanwhile.
  Ahead& ahead() { return ahead_; }

  // Makes the calling thread the leader of `size` threads for as long as body() takes. body must not throw.
  template <typename Body>
  void lead(int size, Body& body) {
    size_ = size;
    current() = this;
    body();
    current() = nullptr;
    orders_.set((order_ & ~kThreadsMask) + kThreadsMask + 1);
  }

  // Runs work(context) on `num_threads` threads, the caller's among them, and returns when all are done.
  void run(int num_threads, Work work, void* context) {
    work_ = work;
    context_ = context;
    num_busy_.set(static_cast<uint32_t>(num_threads - 1));
    order_ = (order_ & ~kThreadsMask) + kThreadsMask + 1 + static_cast<uint32_t>(num_threads);
    orders_.set(order_);
    current() = nullptr;
    work(context);
    current() = this;
    for (uint32_t busy = num_busy_.read(); busy != 0;) busy = num_busy_.wait_for_change(busy, leaders_);
  }

  // What the other threads do until the leader has ended the team.
  void serve(int thread) {
    Ahead::Reader reader(ahead_, thread);
    for (uint32_t order = 0;;) {
      order = orders_.wait_for_change(order, reader);
      const uint32_t num_threads = order & kThreadsMask;
      if (num_threads == 0) return;
      // An order that has room for this thread can't be replaced before it is done, so what it says is whole.
      if (static_cast<uint32_t>(thread) >= num_threads) continue;
      work_(context_);
      num_busy_.add(~uint32_t{0});
    }
  }

 private:
  static constexpr uint32_t kThreadsMask = 0xffff;

  int size_ = 1;
  uint32_t order_ = 0;  // a running number, and how many threads are to work (0: the team ends)
  Work work_ = nullptr;
  void* context_ = nullptr;
  Ahead ahead_;
  Ahead::Reader leaders_{ahead_, 0};
  Signal orders_;
  Signal num_busy_;
};

}  // namespace vllm::cpu
