// What the ways to compute a product of rows of x with rows of weights share: its description, chunks of columns that
// threads take, panels, memory to work in.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

#include "api.h"
#include "kernels.h"
#include "linear.h"
#include "threads.h"

namespace vllm::cpu {

// Elements of a page: parts of the workspace start at one.
inline constexpr int64_t kPage = 1024;
// Elements after each row of copied weights, so that rows do not map to the same sets of the cache.
inline constexpr int64_t kPadding = 16;

// Rows of weights that are interleaved, element by element.
inline int64_t count_interleaved(int64_t weight_bytes) { return weight_bytes == 1 ? kInterleavedRows : 1; }

struct Product {
  const float* x;
  int64_t x_stride, num_rows, size, block_size;
  const char* weight;
  int64_t weight_stride, weight_bytes;  // of one element
  int64_t num_columns;
  int64_t num_gates;  // many rows: output = activation(the first num_gates columns) * the others; 0: all columns
  int64_t activation;
  const float* scale;
  const float* group_scales;  // [size / kGroupSize, num_columns] or null
  const float* bias;
  float* output;
  int64_t output_stride;
  void (*gemv)(const ProductTile&);
  void (*widen)(const ProductTile&, float*, int64_t);
  const Kernels* kernels;

  // Calls body(first element, size) for each block of a row; once where a row is empty.
  template <typename Body>
  void for_each_block(Body body) const {
    int64_t at = 0;
    do {
      body(at, std::min(block_size, size - at));
      at += block_size;
    } while (at < size);
  }
  bool is_last_block(int64_t at) const { return at + block_size >= size; }
  const char* find_column(int64_t column) const { return weight + column * weight_stride * weight_bytes; }
  // Points a tile at the weights of columns from `column` on, elements from `at` on, a block's start.
  void point_at_weights(int64_t column, int64_t at, ProductTile* tile) const {
    const int64_t group = count_interleaved(weight_bytes);
    tile->first_lane = column % group;
    tile->weight = find_column(column - tile->first_lane) + at * group * weight_bytes;
    tile->weight_stride = weight_stride;
    if (group_scales == nullptr) return;
    tile->group_scales = group_scales + at / kGroupSize * num_columns + column;
    tile->group_scale_stride = num_columns;
  }
};

inline int64_t divide_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit; }
inline int64_t round_up(int64_t count, int64_t unit) { return divide_up(count, unit) * unit; }
inline const float* offset(const float* p, int64_t count) { return p == nullptr ? nullptr : p + count; }

// Uninitialised floats from a cache line's start, kept from call to call.
class Workspace {
 public:
  Workspace() = default;
  ~Workspace() { release(); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  float* reserve(int64_t count) {
    if (count > count_) {
      release();
      data_ = static_cast<float*>(::operator new(static_cast<size_t>(count) * sizeof(float), kAlignment));
      count_ = count;
    }
    return data_;
  }

 private:
  static constexpr std::align_val_t kAlignment{4096};
  void release() {
    ::operator delete(data_, kAlignment);
    data_ = nullptr;
    count_ = 0;
  }
  float* data_ = nullptr;
  int64_t count_ = 0;
};

inline void fetch_now(Fetching fetching, int64_t max_bytes) {
  const char* end = std::min(fetching.end, fetching.next + max_bytes);
  for (const char* p = fetching.next; p < end; p += kLineBytes) __builtin_prefetch(p);
}

// Chunks of columns [0, end), which threads take one after the other; each thread knows its next one, and prefetches
// it. The first chunks may be the threads' own, of another size.
class Chunks {
 public:
  Chunks(const Product& product, int64_t num_columns, int64_t end, int64_t num_own = 0, int64_t own_columns = 0)
      : product_(product),
        num_columns_(num_columns),
        end_(end),
        num_own_(num_own),
        own_columns_(own_columns),
        next_(num_own) {}
  // Calls body(thread, chunk, the thread's next one) for each chunk, on `num_threads` threads; of a thread's first,
  // `first_bytes` are fetched before anything else. body must not throw.
  template <typename Body>
  void run(int num_threads, int64_t first_bytes, Body body) {
    run_on_each_thread(num_threads, [&](int64_t thread) {
      int64_t chunk = thread < num_own_ ? thread : take();
      fetch_now(fetch(chunk, 1), first_bytes);
      while (chunk < count()) {
        const int64_t following = take();
        body(thread, chunk, following);
        chunk = following;
      }
    });
  }
  int64_t first(int64_t chunk) const {
    const int64_t later = std::max<int64_t>(chunk - num_own_, 0);
    return std::min((chunk - later) * own_columns_ + later * num_columns_, end_);
  }
  int64_t end(int64_t chunk) const { return first(chunk + 1); }
  // A chunk's weights, or those that lie `columns_on` behind.
  Fetching fetch(int64_t chunk, int lines_a_step, int64_t columns_on = 0) const {
    return {product_.find_column(columns_on + first(chunk)), product_.find_column(columns_on + end(chunk)),
            lines_a_step};
  }

 private:
  int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }
  int64_t count() const { return num_own_ + divide_up(end_ - num_own_ * own_columns_, num_columns_); }

  const Product& product_;
  int64_t num_columns_, end_, num_own_, own_columns_;
  std::atomic<int64_t> next_;
};

struct Panel {
  int64_t row, num_rows, width;
};

// Panels as even as whole vectors allow.
class Panels {
 public:
  Panels(int64_t num_rows, const Kernels& kernels)
      : num_rows_(num_rows), lanes_(kernels.product_lanes), num_vectors_(divide_up(num_rows, lanes_)) {
    count_ = divide_up(num_vectors_, kernels.panel_rows / lanes_);
  }
  int64_t count() const { return count_; }
  int64_t num_padded_rows() const { return num_vectors_ * lanes_; }
  Panel operator[](int64_t i) const {
    const int64_t row = num_vectors_ * i / count_ * lanes_, end = num_vectors_ * (i + 1) / count_ * lanes_;
    return {row, std::min(end, num_rows_) - row, end - row};
  }

 private:
  int64_t num_rows_, lanes_, num_vectors_, count_;
};

// The product of at least kManyRows rows of x (linear_many.cpp).
void multiply_many_rows(const Product& product, int num_threads);

}  // namespace vllm::cpu
