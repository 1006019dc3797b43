// Products with weights: which part of the work is done when, and by which thread. The arithmetic is
// variant/linear.h's.
#include <algorithm>
#include <cstring>
#include <new>

#include "api.h"
#include "kernels.h"
#include "threads.h"

namespace vllm::cpu {
namespace {

// Up to here a dot product a weight row is faster, from there on panels are, which cost a transposition.
constexpr int64_t kFewRows = 48;
constexpr int64_t kDotColumns = 8;
// Numbers that one sum of a dot product runs over before its lanes are added.
constexpr int64_t kDotBlock = 1024;
// Bytes that weights are fetched ahead at least.
constexpr int64_t kMinAhead = 4096;
// Numbers of a panel's columns: 20 KiB of a first-level cache of 32.
constexpr int64_t kPanelBlock = 320;
// Numbers of x that stay in a second-level cache of 512 KiB.
constexpr int64_t kCachedNumbers = 65536;
// The first-level caches of Zen can't read the same bank of two lines at once, so rows that are read side by side are
// set off against each other. Dots: x by half a line against the weights. Panels: the rows of x by 8 bytes each.
constexpr int64_t kLineNumbers = 16, kHalfLine = 8, kBankNumbers = 2;

struct Product {
  const float* x;
  int64_t x_stride, num_rows, size;
  const char* weight;
  int64_t weight_stride, weight_bytes;  // of one number
  const float* scale;
  const float* bias;
  float* output;
  int64_t output_stride;
  void (*dot)(const ProductTile&);
  void (*multiply_panel)(const ProductTile&);
  void (*pack)(const ProductTile&, float*, float*);
};

int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// Blocks of one size but the last, a function of the length alone: sums are the same for any number of rows.
int64_t choose_block(int64_t size, int64_t max_block) {
  const int64_t num_blocks = std::max<int64_t>(1, (size + max_block - 1) / max_block);
  return std::max(kLineNumbers, round_up((size + num_blocks - 1) / num_blocks, kLineNumbers));
}

const float* offset(const float* p, int64_t count) { return p == nullptr ? nullptr : p + count; }

// Uninitialised floats from a cache line's start.
class AlignedFloats {
 public:
  explicit AlignedFloats(int64_t count)
      : data_(static_cast<float*>(::operator new(static_cast<size_t>(count) * sizeof(float), kLine))) {}
  ~AlignedFloats() { ::operator delete(data_, kLine); }
  AlignedFloats(const AlignedFloats&) = delete;
  AlignedFloats& operator=(const AlignedFloats&) = delete;
  float* data() { return data_; }

 private:
  static constexpr std::align_val_t kLine{64};
  float* data_;
};

void copy_rows(const float* x, int64_t x_stride, int64_t num_rows, int64_t size, float* copy, int64_t stride) {
  for (int64_t r = 0; r < num_rows; ++r) {
    std::memcpy(copy + r * stride, x + r * x_stride, static_cast<size_t>(size) * sizeof(float));
  }
}

// Columns [first, end) for few rows: the weights go from memory into registers, once.
void multiply_few_rows(const Product& p, int64_t first, int64_t end) {
  const int64_t stride = round_up(p.size, kLineNumbers);
  AlignedFloats copy(p.num_rows * stride + kHalfLine);
  copy_rows(p.x, p.x_stride, p.num_rows, p.size, copy.data() + kHalfLine, stride);
  ProductTile tile{};
  tile.x = copy.data() + kHalfLine;
  tile.x_stride = stride;
  tile.num_rows = p.num_rows;
  tile.weight_stride = p.weight_stride;
  tile.size = p.size;
  tile.block_size = choose_block(p.size, kDotBlock);
  tile.output_stride = p.output_stride;
  const int64_t row_bytes = p.weight_stride * p.weight_bytes;
  for (int64_t column = first; column < end; column += kDotColumns) {
    const char* weight = p.weight + column * row_bytes;
    tile.weight = weight;
    tile.fetched = weight + std::max(kDotColumns * row_bytes, kMinAhead);
    tile.num_columns = std::min(kDotColumns, end - column);
    tile.scale = offset(p.scale, column);
    tile.bias = offset(p.bias, column);
    tile.output = p.output + column;
    p.dot(tile);
  }
}

// Columns [first, end) for many rows: a block of numbers of x stays in the cache while all weights pass it, a panel at
// a time.
void multiply_many_rows(const Product& p, int64_t first, int64_t end) {
  const int64_t block = choose_block(p.size, kPanelBlock), stride = block + kBankNumbers;
  const int64_t max_rows = std::min(p.num_rows, kCachedNumbers / stride);
  AlignedFloats x(max_rows * stride), scratch(kPanelColumns * block), panel(kPanelColumns * block);
  for (int64_t row = 0; row < p.num_rows; row += max_rows) {
    ProductTile tile{};
    tile.num_rows = std::min(max_rows, p.num_rows - row);
    tile.x = x.data();
    tile.x_stride = stride;
    tile.output_stride = p.output_stride;
    for (int64_t at = 0; at < p.size; at += block) {
      const bool is_last = at + block >= p.size;
      tile.size = std::min(block, p.size - at);
      tile.adds = at > 0;
      copy_rows(p.x + row * p.x_stride + at, p.x_stride, tile.num_rows, tile.size, x.data(), stride);
      for (int64_t column = first; column < end; column += kPanelColumns) {
        tile.num_columns = std::min(kPanelColumns, end - column);
        tile.weight = p.weight + (column * p.weight_stride + at) * p.weight_bytes;
        tile.weight_stride = p.weight_stride;
        p.pack(tile, scratch.data(), panel.data());
        tile.weight = panel.data();
        tile.scale = is_last ? offset(p.scale, column) : nullptr;
        tile.bias = is_last ? offset(p.bias, column) : nullptr;
        tile.output = p.output + row * p.output_stride + column;
        p.multiply_panel(tile);
      }
    }
  }
}

}  // namespace
}  // namespace vllm::cpu

int32_t vllm_linear(const float* x, int64_t x_stride, int64_t num_rows, int64_t size, const void* weight,
                    int64_t weight_stride, int64_t num_columns, int32_t weight_kind, const float* scale,
                    const float* bias, int32_t num_threads, float* output, int64_t output_stride) {
  using namespace vllm::cpu;
  if (num_rows == 0 || num_columns == 0) return kOk;
  const Kernels& kernels = get_kernels();
  Product p{};
  p.x = x;
  p.x_stride = x_stride;
  p.num_rows = num_rows;
  p.size = size;
  p.weight = static_cast<const char*>(weight);
  p.weight_stride = weight_stride;
  p.scale = scale;
  p.bias = bias;
  p.output = output;
  p.output_stride = output_stride;
  p.multiply_panel = kernels.multiply_panel;
  switch (weight_kind) {
    case kFloat32:
      p.weight_bytes = 4;
      p.dot = kernels.dot_float32;
      p.pack = kernels.pack_float32;
      break;
    case kBfloat16:
      p.weight_bytes = 2;
      p.dot = kernels.dot_bfloat16;
      p.pack = kernels.pack_bfloat16;
      break;
    default:
      p.weight_bytes = 1;
      p.dot = kernels.dot_int8;
      p.pack = kernels.pack_int8;
  }
  const int64_t num_panels = (num_columns + kPanelColumns - 1) / kPanelColumns;
  const int64_t work = num_columns * size * std::max<int64_t>(1, num_rows / 8);
  const int threads = static_cast<int>(std::min<int64_t>(num_panels, choose_threads(work, num_threads)));
  return run_guarded([&] {
    parallel_shares(num_panels, threads, [&](int64_t first_panel, int64_t end_panel) {
      const int64_t first = first_panel * kPanelColumns, end = std::min(end_panel * kPanelColumns, num_columns);
      if (num_rows <= kFewRows) {
        multiply_few_rows(p, first, end);
      } else {
        multiply_many_rows(p, first, end);
      }
    });
  });
}
