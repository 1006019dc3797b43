// Products with weights: which part of the work is done when, and by which thread. The arithmetic is
// variant/linear.h's.
#include <algorithm>
#include <cstring>
#include <vector>

#include "api.h"
#include "kernels.h"
#include "threads.h"

namespace vllm::cpu {
namespace {

// Numbers that one sum runs over before its lanes are added: 8 rows of weights and 3 of x stay in a 32 KiB cache.
constexpr int64_t kMaxBlock = 640;
constexpr int64_t kTileColumns = 8;
// Bytes that weights are fetched ahead at least.
constexpr int64_t kMinAhead = 4096;
// Rows of x that stay in the second-level cache (as one block of numbers), and how many numbers may.
constexpr int64_t kMaxRows = 144;
constexpr int64_t kCachedNumbers = 65536;

struct Product {
  const float* x;
  int64_t x_stride, num_rows, size;
  const char* weight;
  int64_t weight_stride, weight_bytes;  // of one number
  const float* scale;
  const float* bias;
  float* output;
  int64_t output_stride;
  int64_t block_size, num_blocks;
  void (*multiply)(const ProductTile&);
  void (*widen)(const void*, int64_t, float*);  // null for float32
  void (*multiply_wide)(const ProductTile&);
};

// Blocks of one size but the last, a function of the length alone: sums are the same for any number of rows.
int64_t choose_block(int64_t size) {
  const int64_t num_blocks = std::max<int64_t>(1, (size + kMaxBlock - 1) / kMaxBlock);
  return std::max<int64_t>(16, ((size + num_blocks - 1) / num_blocks + 15) / 16 * 16);
}

const float* offset(const float* p, int64_t count) { return p == nullptr ? nullptr : p + count; }

// The weights go straight from memory into registers.
void multiply_few_rows(const Product& p, int64_t first, int64_t end) {
  ProductTile tile{};
  tile.x = p.x;
  tile.x_stride = p.x_stride;
  tile.num_rows = p.num_rows;
  tile.weight_stride = p.weight_stride;
  tile.size = p.size;
  tile.block_size = p.block_size;
  tile.output_stride = p.output_stride;
  const int64_t row_bytes = p.weight_stride * p.weight_bytes;
  for (int64_t column = first; column < end; column += kTileColumns) {
    const char* weight = p.weight + column * row_bytes;
    tile.weight = weight;
    tile.fetched = weight + std::max(kTileColumns * row_bytes, kMinAhead);
    tile.num_columns = std::min(kTileColumns, end - column);
    tile.scale = offset(p.scale, column);
    tile.bias = offset(p.bias, column);
    tile.output = p.output + column;
    p.multiply(tile);
  }
}

// A share of the columns for many rows: rows of x lie block by block, the weights of a tile too if they were widened.
class ManyRows {
 public:
  ManyRows(const Product& product, int64_t first, int64_t end)
      : p_(product), first_(first), end_(end), max_rows_(std::min(p_.num_rows, kMaxRows)) {
    // Few enough rows: the rows of weights are read to their ends before the next ones.
    blocks_at_once_ = max_rows_ * p_.size <= kCachedNumbers ? p_.num_blocks : 1;
    x_.resize(static_cast<size_t>(blocks_at_once_ * max_rows_ * p_.block_size));
    if (p_.widen != nullptr) weight_.resize(static_cast<size_t>(blocks_at_once_ * kTileColumns * p_.block_size));
  }

  void multiply() {
    for (int64_t row = 0; row < p_.num_rows; row += max_rows_) {
      first_row_ = row;
      num_rows_ = std::min(max_rows_, p_.num_rows - row);
      for (int64_t block = 0; block < p_.num_blocks; block += blocks_at_once_) {
        first_block_ = block;
        end_block_ = std::min(block + blocks_at_once_, p_.num_blocks);
        pack_x();
        for (int64_t column = first_; column < end_; column += kTileColumns) multiply_tile(column);
      }
    }
  }

 private:
  int64_t get_size(int64_t block) const { return std::min(p_.block_size, p_.size - block * p_.block_size); }

  void pack_x() {
    float* packed = x_.data();
    for (int64_t block = first_block_; block < end_block_; ++block) {
      const auto num_bytes = static_cast<size_t>(get_size(block)) * sizeof(float);
      for (int64_t r = 0; r < num_rows_; ++r, packed += p_.block_size) {
        std::memcpy(packed, p_.x + (first_row_ + r) * p_.x_stride + block * p_.block_size, num_bytes);
      }
    }
  }

  void widen_tile(int64_t column, int64_t num_columns) {
    for (int64_t c = 0; c < num_columns; ++c) {
      for (int64_t block = first_block_; block < end_block_; ++block) {
        float* wide = weight_.data() + ((block - first_block_) * kTileColumns + c) * p_.block_size;
        p_.widen(get_weight(column + c, block), get_size(block), wide);
      }
    }
  }

  const char* get_weight(int64_t column, int64_t block) const {
    return p_.weight + (column * p_.weight_stride + block * p_.block_size) * p_.weight_bytes;
  }

  void multiply_tile(int64_t column) {
    ProductTile tile{};
    tile.num_rows = num_rows_;
    tile.num_columns = std::min(kTileColumns, end_ - column);
    tile.x_stride = p_.block_size;
    tile.weight_stride = p_.widen == nullptr ? p_.weight_stride : p_.block_size;
    tile.output = p_.output + first_row_ * p_.output_stride + column;
    tile.output_stride = p_.output_stride;
    if (p_.widen != nullptr) widen_tile(column, tile.num_columns);
    for (int64_t block = first_block_; block < end_block_; ++block) {
      const int64_t i = block - first_block_;
      const bool is_last = block + 1 == p_.num_blocks;
      tile.x = x_.data() + i * num_rows_ * p_.block_size;
      tile.size = tile.block_size = get_size(block);
      tile.adds = block > 0;
      tile.scale = is_last ? offset(p_.scale, column) : nullptr;
      tile.bias = is_last ? offset(p_.bias, column) : nullptr;
      if (p_.widen != nullptr) {
        tile.weight = weight_.data() + i * kTileColumns * p_.block_size;
      } else {
        tile.weight = get_weight(column, block);
        // The next tile, a part with each block.
        if (blocks_at_once_ == p_.num_blocks) {
          tile.fetched = get_weight(column + kTileColumns, 0) + kTileColumns * block * p_.block_size * p_.weight_bytes;
        }
      }
      p_.multiply_wide(tile);
    }
  }

  const Product& p_;
  const int64_t first_, end_, max_rows_;
  int64_t blocks_at_once_ = 1;
  int64_t first_row_ = 0, num_rows_ = 0, first_block_ = 0, end_block_ = 0;
  std::vector<float> x_;       // [blocks, rows, block_size]
  std::vector<float> weight_;  // [blocks, kTileColumns, block_size]
};

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
  p.block_size = choose_block(size);
  p.num_blocks = std::max<int64_t>(1, (size + p.block_size - 1) / p.block_size);
  p.multiply_wide = kernels.multiply_float32;
  switch (weight_kind) {
    case kFloat32:
      p.weight_bytes = 4;
      p.multiply = kernels.multiply_float32;
      break;
    case kBfloat16:
      p.weight_bytes = 2;
      p.multiply = kernels.multiply_bfloat16;
      p.widen = kernels.widen_bfloat16;
      break;
    default:
      p.weight_bytes = 1;
      p.multiply = kernels.multiply_int8;
      p.widen = kernels.widen_int8;
  }
  const int64_t num_tiles = (num_columns + kTileColumns - 1) / kTileColumns;
  const int threads = static_cast<int>(std::min<int64_t>(
      num_tiles, choose_threads(num_columns * size / 2 * std::max<int64_t>(1, num_rows / 8), num_threads)));
  return run_guarded([&] {
    parallel_shares(num_tiles, threads, [&](int64_t first_tile, int64_t end_tile) {
      const int64_t first = first_tile * kTileColumns, end = std::min(end_tile * kTileColumns, num_columns);
      if (num_rows <= 2 * kernels.product_rows) {
        multiply_few_rows(p, first, end);
      } else {
        ManyRows(p, first, end).multiply();
      }
    });
  });
}
