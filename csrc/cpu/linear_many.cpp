// Products of many rows of x with weights. A chunk of the weights is transposed once for all rows of x, which are read
// as they are stored and whose outputs are written in their order: no row of x is transposed.
//
// What a thread works on stays in its second-level cache: a chunk's transposed weights, a block of rows of x, their
// sums. A gated product's chunk holds columns of gates and the columns that they gate, so that only the result of both
// is written.
#include <algorithm>

#include "kernels.h"
#include "product.h"
#include "threads.h"

namespace vllm::cpu {
namespace {

// Bytes of a chunk's transposed weights, its columns, and the rows of x that are multiplied with it together, at most.
constexpr int64_t kTransposedBytes = 320 << 10, kTransposedColumns = 48, kBlockRows = 64;
// The next chunk's weights are fetched during the last so many rows: earlier, they would be evicted again.
constexpr int64_t kFetchingRows = 256;

// Some columns of a chunk, interleaved in vectors; columns that are not there repeat the last one.
struct TransposedPanel {
  int64_t column, num_columns, width;
  float* weights;  // [size, width]
  float* sums;     // [kBlockRows, width]
};

class TransposedChunk {
 public:
  static int64_t count_wide(const Product& p) {
    return p.weight_bytes == 4 ? 0 : round_up(p.kernels->panel_rows * (p.block_size + kPadding), kPage);
  }
  static int64_t count_floats(const Product& p, int64_t num_columns) {
    return round_up(num_columns * (p.size + kBlockRows), kPage) + count_wide(p);
  }

  // Columns [first, end), with the columns that they are gates of where the product has gates.
  TransposedChunk(const Product& product, int64_t first, int64_t end, float* memory)
      : p_(product),
        panels_(end - first, *product.kernels),
        first_(first),
        wide_(memory),
        weights_(memory + count_wide(product)) {}

  void transpose() const {
    for (int64_t i = 0; i < count(); ++i) {
      p_.for_each_block([&](int64_t at, int64_t size) { transpose_block(get_panel(i), at, size); });
    }
  }

  // Computes outputs of rows [first_row, first_row + num_rows) of x; those from `next_row` on come next.
  void multiply(int64_t first_row, int64_t num_rows, int64_t next_row, Fetching* fetching) const {
    p_.for_each_block([&](int64_t at, int64_t block_size) {
      for (int64_t i = 0; i < count(); ++i) {
        const TransposedPanel panel = get_panel(i);
        ProductTile tile{};
        tile.x = panel.weights + at * panel.width;
        tile.num_rows = panel.width;
        tile.weight = p_.x + first_row * p_.x_stride + at;
        tile.weight_stride = p_.x_stride;
        tile.num_columns = num_rows;
        tile.size = block_size;
        tile.adds = at > 0;
        tile.output = panel.sums;
        tile.fetching = fetching;
        // The first panel fetches for all: the same rows' next block, or the next rows.
        if (i == 0) tile.ahead = p_.is_last_block(at) ? (next_row - first_row) * p_.x_stride - at : p_.block_size;
        p_.kernels->multiply_panel(tile);
      }
    });
    for (int64_t i = 0; i < count(); ++i) scale(get_panel(i), num_rows);
    for (int64_t i = 0; i < panels_.count(); ++i) {
      const TransposedPanel panel = get_panel(i);
      if (p_.num_gates > 0) {
        const TransposedPanel gated = get_panel(i + panels_.count());
        p_.kernels->activate[p_.activation](panel.sums, gated.sums, num_rows * panel.width, panel.sums);
      }
      write(panel, num_rows, p_.output + first_row * p_.output_stride);
    }
  }

 private:
  int64_t count() const { return panels_.count() * (p_.num_gates > 0 ? 2 : 1); }

  TransposedPanel get_panel(int64_t i) const {
    const int64_t half = i / panels_.count();
    const Panel panel = panels_[i - half * panels_.count()];
    const int64_t place = panel.row + half * panels_.num_padded_rows();
    float* sums = weights_ + count() / panels_.count() * panels_.num_padded_rows() * p_.size;
    return {first_ + panel.row + half * p_.num_gates, panel.num_rows, panel.width, weights_ + place * p_.size,
            sums + place * kBlockRows};
  }

  void transpose_block(const TransposedPanel& panel, int64_t at, int64_t size) const {
    const int64_t wide_stride = p_.block_size + kPadding;
    ProductTile tile{};
    p_.point_at_weights(panel.column, at, &tile);
    tile.num_columns = panel.num_columns;
    tile.size = size;
    const bool is_float = p_.weight_bytes == 4;
    if (!is_float) p_.widen(tile, wide_, wide_stride);
    const float* columns[kPanelRows];
    for (int64_t c = 0; c < panel.width; ++c) {
      const int64_t there = std::min(c, panel.num_columns - 1);
      columns[c] =
          is_float ? static_cast<const float*>(tile.weight) + there * p_.weight_stride : wide_ + there * wide_stride;
    }
    p_.kernels->transpose(columns, panel.width, tile.size, panel.width, panel.weights + at * panel.width);
  }

  // sums[row][column] = sums[row][column] * scale[column] + bias[column]
  void scale(const TransposedPanel& panel, int64_t num_rows) const {
    const float *scale = offset(p_.scale, panel.column), *bias = offset(p_.bias, panel.column);
    if (scale == nullptr && bias == nullptr) return;
    for (int64_t r = 0; r < num_rows; ++r) {
      float* sums = panel.sums + r * panel.width;
      for (int64_t c = 0; c < panel.num_columns; ++c) {
        if (scale != nullptr) sums[c] *= scale[c];
        if (bias != nullptr) sums[c] += bias[c];
      }
    }
  }

  void write(const TransposedPanel& panel, int64_t num_rows, float* output) const {
    for (int64_t r = 0; r < num_rows; ++r) {
      std::copy_n(panel.sums + r * panel.width, panel.num_columns, output + r * p_.output_stride + panel.column);
    }
  }

  const Product& p_;
  const Panels panels_;  // of columns [first, end)
  const int64_t first_;
  float* wide_;     // [width, block_size], kPadding apart: narrow weights of a panel as float32
  float* weights_;  // of all panels, then their sums
};

}  // namespace

void multiply_many_rows(const Product& p, int num_threads) {
  static thread_local Workspace workspace;
  const int64_t unit = p.kernels->panel_rows, num_halves = p.num_gates > 0 ? 2 : 1;
  const int64_t fitting = kTransposedBytes / (4 * std::max<int64_t>(1, p.size)) / unit;
  const int64_t num_units = std::clamp<int64_t>(fitting, 1, kTransposedColumns / unit) / num_halves;
  const int64_t num_columns = unit * std::max<int64_t>(1, num_units);
  const int64_t num_floats = TransposedChunk::count_floats(p, num_columns * num_halves);
  float* memory = workspace.reserve(num_threads * num_floats);
  Chunks chunks(p, num_columns, p.num_gates > 0 ? p.num_gates : p.num_columns);
  chunks.run(num_threads, 0, [&](int64_t thread, int64_t chunk, int64_t following) {
    const TransposedChunk work(p, chunks.first(chunk), chunks.end(chunk), memory + thread * num_floats);
    work.transpose();
    Fetching none{}, fetching[2] = {chunks.fetch(following, 1), chunks.fetch(following, 1, p.num_gates)};
    for (int64_t row = 0; row < p.num_rows; row += kBlockRows) {
      const int64_t end = std::min(row + kBlockRows, p.num_rows), next = end < p.num_rows ? end : 0;
      const bool is_late = row + kFetchingRows >= p.num_rows, is_last = row + kFetchingRows / 2 >= p.num_rows;
      work.multiply(row, end - row, next, is_late ? &fetching[is_last] : &none);
    }
  });
}

}  // namespace vllm::cpu
