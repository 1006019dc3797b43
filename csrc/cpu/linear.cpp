// Products with weights: which part of the work is done when, and by which thread. The arithmetic is
// variant/linear.h's.
#include "linear.h"

#include <algorithm>

#include "api.h"
#include "kernels.h"
#include "product.h"
#include "threads.h"

namespace vllm::cpu {
namespace {

// Elements of a block, a whole number of any kind's cache lines: a block of a panel is 24 KiB of a first-level
// cache's 32.
constexpr int64_t kMaxBlock = 192;
constexpr int64_t kBlockUnit = 64;
// From so many panels on the rows of weights are copied together: at their stride they may evict each other, and the
// copy costs an eighth of a vector's work.
constexpr int64_t kManyPanels = 4;
// Columns of a chunk: for many panels, so that reading a panel is a small part of using it; for fewer, so that two
// chunks of weights (used and fetched) and the panels share a second-level cache of 512 KiB.
constexpr int64_t kManyColumns = 96, kColumnUnit = 24, kMaxUnits = 2;
constexpr int64_t kChunkBytes = 128 << 10;
// Bytes of a thread's first chunk that are fetched before anything else is done.
constexpr int64_t kFirstBytes = 32 << 10, kFirstGemvBytes = 8 << 10;
// Gemv: runs of a thread, as long as there are vectors of columns for them, and vectors of a run.
constexpr int64_t kRunsPerThread = 16, kMaxRun = 8;
// Gemv: a share of the columns, and bytes at most, that are divided up in advance among a team's threads.
constexpr int64_t kOwnShare = 4, kOwnBytes = 96 << 10;
// Gemv: what a step of the kernel uses up, 16 bytes of 8 rows of weights.
constexpr int kGemvLinesAStep = 2;

// Blocks of one size but the last, a function of the length alone: sums are the same for any number of rows.
int64_t choose_block(int64_t size) {
  const int64_t num_blocks = std::max<int64_t>(1, divide_up(size, kMaxBlock));
  return std::max(kBlockUnit, round_up(divide_up(size, num_blocks), kBlockUnit));
}

int64_t count_weight_bytes(int64_t kind) { return kind == kFloat32 ? 4 : kind == kBfloat16 ? 2 : 1; }
int64_t count_most_gemv_rows(int64_t weight_bytes) { return weight_bytes == 4 ? kGemvRows : 2 * kGemvRows; }
int choose_product_threads(int64_t num_rows, int64_t num_columns, int64_t size, int32_t num_threads) {
  return choose_threads(num_columns * size * std::max<int64_t>(1, num_rows / 8), num_threads);
}

// The columns that the kernel computes at once: of int8, those that are interleaved.
int64_t count_group_columns(int64_t weight_bytes) { return 32 / weight_bytes; }
static_assert(kInterleavedRows == 32);

// The columns that each thread of a team begins with.
int64_t count_own_columns(int64_t num_columns, int64_t row_bytes, int64_t weight_bytes, int num_threads) {
  const int64_t group = count_group_columns(weight_bytes);
  const int64_t most = std::min(kOwnBytes / std::max<int64_t>(1, row_bytes), num_columns / (kOwnShare * num_threads));
  return most / group * group;
}

// The weights go from memory into registers, once.
void multiply_by_gemv(const Product& p, int num_threads) {
  // A thread takes a run of columns, and meanwhile fetches the next one: memory is faster in its order, and a
  // call ends sooner with more runs.
  const int64_t num_columns = count_group_columns(p.weight_bytes);
  const int64_t run = std::clamp<int64_t>(p.num_columns / (num_columns * num_threads * kRunsPerThread), 1, kMaxRun);
  const Team* team = Team::current();  // which may have fewer threads than were asked for
  const int num_own = team == nullptr ? 0 : std::min(num_threads, team->size());
  const int64_t own = count_own_columns(p.num_columns, p.weight_stride * p.weight_bytes, p.weight_bytes, num_threads);
  Chunks chunks(p, num_columns * run, p.num_columns, num_own, own);
  chunks.run(num_threads, kFirstGemvBytes, [&](int64_t, int64_t chunk, int64_t following) {
    const int64_t end = chunks.end(chunk);
    for (int64_t column = chunks.first(chunk); column < end; column += num_columns) {
      const int64_t next = column + num_columns < end ? column + num_columns : chunks.first(following);
      Fetching fetching{p.find_column(next), p.find_column(std::min(next + num_columns, p.num_columns)),
                        kGemvLinesAStep};
      ProductTile tile{};
      tile.x_stride = p.x_stride;
      p.point_at_weights(column, 0, &tile);
      tile.num_columns = std::min(num_columns, end - column);
      tile.size = p.size;
      tile.block_size = p.block_size;
      tile.scale = offset(p.scale, column);
      tile.bias = offset(p.bias, column);
      tile.output_stride = p.output_stride;
      tile.fetching = &fetching;
      for (int64_t row = 0; row < p.num_rows; row += kGemvRows) {
        tile.x = p.x + row * p.x_stride;
        tile.num_rows = std::min(kGemvRows, p.num_rows - row);
        tile.output = p.output + row * p.output_stride + column;
        p.gemv(tile);
      }
    }
  });
}

// [size, width] from `width` rows; those that are not there repeat the last one.
void pack_panel(const Product& p, const Panel& panel, float* packed) {
  const float* rows[kPanelRows];
  for (int64_t r = 0; r < panel.width; ++r) {
    rows[r] = p.x + (panel.row + std::min(r, panel.num_rows - 1)) * p.x_stride;
  }
  p.kernels->transpose(rows, panel.width, p.size, panel.width, packed);
}

// output[row][column] = sums[column][row]
void write_outputs(const Product& p, const float* sums, int64_t width, int64_t num_rows, int64_t num_columns,
                   float* output) {
  int64_t column = 0;
  for (; column + 16 <= num_columns; column += 16) {
    const float* columns[16];
    for (int64_t c = 0; c < 16; ++c) columns[c] = sums + (column + c) * width;
    p.kernels->transpose(columns, 16, num_rows, p.output_stride, output + column);
  }
  for (; column < num_columns; ++column) {
    for (int64_t r = 0; r < num_rows; ++r) output[r * p.output_stride + column] = sums[column * width + r];
  }
}

// Columns [first, end) for all panels: a block of elements of a panel stays in the first-level cache while it is
// multiplied with the weights of these columns, which stay in the second-level one for all panels.
struct PanelWork {
  const Product& p;
  const Panels& panels;
  const float* x;
  float* wide;  // [num_columns, block_size]; null: weights are read as they are stored
  float* sums;

  void multiply(int64_t first, int64_t end, Fetching* fetching) const {
    const int64_t num_columns = end - first;
    p.for_each_block([&](int64_t at, int64_t block_size) {
      const bool is_last = p.is_last_block(at);
      ProductTile tile{};
      tile.num_columns = num_columns;
      tile.size = block_size;
      tile.adds = at > 0;
      tile.scale = is_last ? offset(p.scale, first) : nullptr;
      tile.bias = is_last ? offset(p.bias, first) : nullptr;
      tile.fetching = fetching;
      p.point_at_weights(first, at, &tile);
      if (wide != nullptr) {
        const int64_t stride = p.block_size + kPadding;
        p.widen(tile, wide, stride);
        tile.weight = wide;
        tile.weight_stride = stride;
      }
      for (int64_t i = 0; i < panels.count(); ++i) {
        const Panel panel = panels[i];
        tile.x = x + panel.row * p.size + at * panel.width;
        tile.num_rows = panel.width;
        tile.output = sums + panel.row * num_columns;
        p.kernels->multiply_panel(tile);
      }
    });
    for (int64_t i = 0; i < panels.count(); ++i) {
      const Panel panel = panels[i];
      write_outputs(p, sums + panel.row * num_columns, panel.width, panel.num_rows, num_columns,
                    p.output + panel.row * p.output_stride + first);
    }
  }
};

void multiply_panels(const Product& p, int num_threads) {
  static thread_local Workspace workspace;
  const Panels panels(p.num_rows, *p.kernels);
  const bool has_many = panels.count() >= kManyPanels, is_direct = p.weight_bytes == 4 && !has_many;
  const int64_t row_bytes = std::max<int64_t>(1, p.weight_stride * p.weight_bytes);
  const int64_t unit = std::max(kColumnUnit, count_interleaved(p.weight_bytes));
  const int64_t num_units = std::clamp<int64_t>(kChunkBytes / row_bytes / unit, 1, kMaxUnits);
  const int64_t num_columns = has_many ? kManyColumns : num_units * unit;
  const int64_t num_x = round_up(panels.num_padded_rows() * p.size, kPage);
  const int64_t num_wide = is_direct ? 0 : round_up(num_columns * (p.block_size + kPadding), kPage);
  const int64_t num_sums = round_up(num_columns * panels.num_padded_rows(), kPage);
  float* x = workspace.reserve(num_x + num_threads * (num_wide + num_sums));
  Chunks chunks(p, num_columns, p.num_columns);
  // A step of the kernel is 16 elements of 12 rows of weights and one vector, or fewer rows and more vectors.
  const int64_t columns_a_step = std::max<int64_t>(1, 12 * p.kernels->product_lanes / panels[0].width);
  const int lines_a_step = static_cast<int>(divide_up(columns_a_step * p.weight_bytes, 4 * panels.count()));
  const auto pack = [&](int64_t i) { pack_panel(p, panels[i], x + panels[i].row * p.size); };
  parallel_for(panels.count(), panels.count() > 1 ? num_threads : 1, pack);
  chunks.run(num_threads, kFirstBytes, [&](int64_t thread, int64_t chunk, int64_t following) {
    float* wide = x + num_x + thread * (num_wide + num_sums);
    const PanelWork work{p, panels, x, is_direct ? nullptr : wide, wide + num_wide};
    Fetching fetching = chunks.fetch(following, lines_a_step);
    work.multiply(chunks.first(chunk), chunks.end(chunk), &fetching);
  });
}

Product describe_product(const float* x, int64_t x_stride, int64_t num_rows, const Matrix& m, float* output,
                         int64_t output_stride) {
  const Kernels& kernels = get_kernels();
  Product p{};
  p.x = x;
  p.x_stride = x_stride;
  p.num_rows = num_rows;
  p.size = m.size;
  p.weight = static_cast<const char*>(m.weight);
  p.weight_stride = m.stride;
  (m.kind == kInt8Groups ? p.group_scales : p.scale) = m.scale;
  p.bias = m.bias;
  p.output = output;
  p.output_stride = output_stride;
  p.num_columns = m.num_columns;
  p.block_size = choose_block(m.size);
  p.kernels = &kernels;
  p.weight_bytes = count_weight_bytes(m.kind);
  switch (m.kind) {
    case kFloat32:
      p.gemv = kernels.gemv_float32;
      p.widen = kernels.widen_float32;
      break;
    case kBfloat16:
      p.gemv = kernels.gemv_bfloat16;
      p.widen = kernels.widen_bfloat16;
      break;
    case kInt8Groups:
      p.gemv = kernels.gemv_int8_groups;
      p.widen = kernels.widen_int8_groups;
      break;
    default:
      p.gemv = kernels.gemv_int8;
      p.widen = kernels.widen_int8;
  }
  return p;
}

}  // namespace

int32_t multiply(const float* x, int64_t x_stride, int64_t num_rows, const Matrix& m, int32_t num_threads,
                 float* output, int64_t output_stride) {
  if (num_rows == 0 || m.num_columns == 0) return kOk;
  const Product p = describe_product(x, x_stride, num_rows, m, output, output_stride);
  const int threads = choose_product_threads(num_rows, m.num_columns, m.size, num_threads);
  return run_guarded([&] {
    if (num_rows >= kManyRows) return multiply_many_rows(p, threads);
    if (num_rows <= count_most_gemv_rows(p.weight_bytes)) return multiply_by_gemv(p, threads);
    multiply_panels(p, threads);
  });
}

int32_t multiply_and_gate(const float* x, int64_t num_rows, const Matrix& m, int32_t activation, int32_t num_threads,
                          float* gate_up, float* output) {
  const int64_t num_gates = m.num_columns / 2;
  if (num_rows < kManyRows) {
    const int32_t status = multiply(x, m.size, num_rows, m, num_threads, gate_up, m.num_columns);
    if (status != kOk) return status;
    return vllm_activate(gate_up, m.num_columns, num_rows, num_gates, activation, true, num_threads, output);
  }
  Product p = describe_product(x, m.size, num_rows, m, output, num_gates);
  p.num_gates = num_gates;
  p.activation = activation;
  const int threads = choose_product_threads(num_rows, m.num_columns, m.size, num_threads);
  return run_guarded([&] { multiply_many_rows(p, threads); });
}

void announce_product(const Matrix& m, int64_t num_rows, int32_t max_threads) {
  Team* team = Team::current();
  const int64_t weight_bytes = count_weight_bytes(m.kind);
  if (team == nullptr || num_rows > count_most_gemv_rows(weight_bytes)) return;
  const int num_threads = choose_product_threads(num_rows, m.num_columns, m.size, max_threads);
  if (num_threads == 1) return;
  const int64_t row_bytes = m.stride * weight_bytes;
  team->ahead().announce(m.weight, count_own_columns(m.num_columns, row_bytes, weight_bytes, num_threads) * row_bytes);
}

}  // namespace vllm::cpu

int32_t vllm_linear(const float* x, int64_t x_stride, int64_t num_rows, int64_t size, const void* weight,
                    int64_t weight_stride, int64_t num_columns, int32_t weight_kind, const float* scale,
                    const float* bias, int32_t num_threads, float* output, int64_t output_stride) {
  using namespace vllm::cpu;
  const Matrix matrix{weight, weight_stride, num_columns, size, scale, bias, weight_kind};
  return multiply(x, x_stride, num_rows, matrix, num_threads, output, output_stride);
}
