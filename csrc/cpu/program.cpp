// Runs a program, a list of ops over buffers, in one call: the same functions in the same order as one call an op, so
// to the same bits.
#include <algorithm>

#include "api.h"
#include "layers.h"
#include "linear.h"
#include "threads.h"
#include "widen.h"

namespace vllm::cpu {
namespace {

// Rows that pass a group of ops together: what they are widened to is bounded, and stays in a large cache.
constexpr int64_t kMaxGroupRows = 1024;

// A row of a matrix of weights as float32: its elements lie `step` apart.
template <typename Element>
void widen_row(const void* first_element, int64_t size, int64_t step, float* output) {
  const auto* elements = static_cast<const Element*>(first_element);
  for (int64_t i = 0; i < size; ++i) output[i] = widen(elements[i * step]);
}

void read_row(const Matrix& m, int64_t row, float* output) {
  if (m.kind == kFloat32)
    return widen_row<float>(static_cast<const float*>(m.weight) + row * m.stride, m.size, 1, output);
  if (m.kind == kBfloat16) {
    return widen_row<uint16_t>(static_cast<const uint16_t*>(m.weight) + row * m.stride, m.size, 1, output);
  }
  const int64_t lane = row % kInterleavedRows;
  const auto* first = static_cast<const int8_t*>(m.weight) + (row - lane) * m.size + lane;
  widen_row<int8_t>(first, m.size, kInterleavedRows, output);
  const int64_t group_size = m.kind == kInt8Groups ? kGroupSize : std::max<int64_t>(m.size, 1);
  for (int64_t i = 0; i < m.size; ++i) output[i] *= m.scale[i / group_size * m.num_columns + row];
}

bool are_within(const int64_t* ids, int64_t num_ids, int64_t count) {
  return std::all_of(ids, ids + num_ids, [=](int64_t id) { return id >= 0 && id < count; });
}

class ProgramRun {
 public:
  ProgramRun(const Program& program, const ProgramStep& step, float* scratch, int32_t num_threads, float* output)
      : p_(program), step_(step), num_threads_(num_threads), scratch_(scratch), output_(output) {
    rows_[kAllRows] = step.num_tokens;
    rows_[kPartRows] = std::min(step.num_tokens, kMaxGroupRows);
    rows_[kFewerRows] = std::min(step.num_tokens, kManyRows);
    starts_[kAllRows] = 0;
    starts_[kPartRows] = rows_[kAllRows] * program.all_width;
    starts_[kFewerRows] = starts_[kPartRows] + rows_[kPartRows] * program.part_width;
  }

  int64_t count_scratch() const { return starts_[kFewerRows] + rows_[kFewerRows] * p_.fewer_width; }

  int32_t run() const {
    for (int64_t i = 0; i < step_.num_tables; ++i) {
      if (!are_within(step_.positions, step_.num_tokens, step_.tables[i].num_positions)) return kIdOutOfRange;
    }
    int32_t status = kOk;
    for (int64_t i = 0; i < p_.num_ops && status == kOk; i += p_.ops[i].num_grouped) {
      status = p_.ops[i].num_grouped == 1 ? run_op(i, 0, step_.num_tokens) : run_in_parts(i);
    }
    return status;
  }

 private:
  // Parts of equal size: a small last one would be slow.
  int32_t run_in_parts(int64_t first_op) const {
    const int64_t num_tokens = step_.num_tokens, num_parts = (num_tokens + kMaxGroupRows - 1) / kMaxGroupRows;
    const int64_t end_op = first_op + p_.ops[first_op].num_grouped;
    int32_t status = kOk;
    for (int64_t part = 0; part < num_parts && status == kOk; ++part) {
      const int64_t row = num_tokens * part / num_parts, end = num_tokens * (part + 1) / num_parts;
      for (int64_t i = first_op; i < end_op && status == kOk; ++i) status = run_op(i, row, end - row);
    }
    return status;
  }

  // The rows of a buffer from `row` on; of a place that has room for some only, those that are there now.
  float* find(int64_t buffer, int64_t row) const {
    if (buffer < 0) return nullptr;
    const ProgramBuffer& b = p_.buffers[buffer];
    if (b.place == kOutput) return output_ + row * b.width;
    float* start = scratch_ + starts_[b.place] + b.offset * rows_[b.place];
    return b.place == kAllRows ? start + row * b.width : start;
  }

  int32_t run_op(int64_t index, int64_t row, int64_t num_rows) const {
    const ProgramOp& op = p_.ops[index];
    float *input = find(op.input, row), *second = find(op.second, row), *output = find(op.output, row);
    const int64_t width = p_.buffers[op.output].width;
    const auto activation = static_cast<int32_t>(op.activation);
    switch (op.kind) {
      case kEmbed:
        return embed(op, row, num_rows, output);
      case kLinear:
        announce_next_product(index, num_rows);
        return multiply(input, op.matrix.size, num_rows, op.matrix, num_threads_, output, op.matrix.num_columns);
      case kGatedLinear:
        announce_next_product(index, num_rows);
        return multiply_and_gate(input, num_rows, op.matrix, activation, num_threads_, second, output);
      case kGateAndMultiply:
        return vllm_activate(input, 2 * width, num_rows, width, activation, true, num_threads_, output);
      case kActivate:
        return vllm_activate(input, width, num_rows, width, activation, false, num_threads_, output);
      case kRmsNorm:
        return vllm_rms_norm(input, width, second, width, num_rows, width, op.weight, op.eps, num_threads_, output);
      case kAdd:
        for_each_share(num_rows * width, [=](int64_t i) { output[i] = input[i] + second[i]; });
        return kOk;
      case kScale:
        for_each_share(num_rows * width, [=, factor = op.factor](int64_t i) { output[i] = input[i] * factor; });
        return kOk;
      case kRotateAndWrite:
        return rotate(op, input, row, num_rows, output);
      case kAttend:
        return attend(op, input, output);
      default:
        return kUnknownOp;
    }
  }

  template <typename Compute>
  void for_each_share(int64_t count, Compute compute) const {
    parallel_shares(count, choose_threads(count, num_threads_), [=](int64_t first, int64_t end) {
      for (int64_t i = first; i < end; ++i) compute(i);
    });
  }

  // Threads that wait during this product, or until the next one begins, fetch what that begins with.
  void announce_next_product(int64_t index, int64_t num_rows) const {
    for (int64_t i = index + 1; i < p_.num_ops; ++i) {
      const ProgramOp& op = p_.ops[i];
      if (op.kind == kLinear || op.kind == kGatedLinear) return announce_product(op.matrix, num_rows, num_threads_);
    }
  }

  int32_t embed(const ProgramOp& op, int64_t row, int64_t num_rows, float* output) const {
    const Matrix& m = op.matrix;
    const int64_t* ids = step_.token_ids + row;
    if (!are_within(ids, num_rows, m.num_columns)) return kIdOutOfRange;
    parallel_shares(num_rows, choose_threads(num_rows * m.size, num_threads_), [=](int64_t first, int64_t end) {
      for (int64_t i = first; i < end; ++i) read_row(m, ids[i], output + i * m.size);
    });
    return kOk;
  }

  int32_t rotate(const ProgramOp& op, const float* qkv, int64_t row, int64_t num_rows, float* query) const {
    const RotationTable& table = step_.tables[op.table];
    const PagedCache& cache = step_.caches[op.cache];
    const int64_t stride = (op.num_heads + 2 * op.num_kv_heads) * op.head_dim;
    return rotate_and_write({qkv, stride, num_rows, op.num_heads, op.num_kv_heads, op.head_dim},
                            {table.rows, table.rows + table.dim, 2 * table.dim, table.dim, step_.positions + row},
                            {op.weight, op.other_weight, op.eps},
                            {cache.elements, static_cast<int32_t>(cache.kind), cache.num_blocks * cache.block_size,
                             step_.slot_mapping + row},
                            num_threads_, query);
  }

  int32_t attend(const ProgramOp& op, const float* query, float* output) const {
    const PagedCache& cache = step_.caches[op.cache];
    return vllm_paged_attention(query, op.num_heads * op.head_dim, op.num_heads, cache.elements,
                                static_cast<int32_t>(cache.kind), cache.num_blocks, cache.block_size, op.num_kv_heads,
                                op.head_dim, step_.block_tables, step_.table_stride, step_.query_starts, step_.seq_lens,
                                step_.num_requests, op.factor, op.sliding_window, num_threads_, output);
  }

  const Program& p_;
  const ProgramStep& step_;
  const int32_t num_threads_;
  float *scratch_, *output_;
  int64_t rows_[kOutput], starts_[kOutput];  // of each place in the scratch
};

}  // namespace
}  // namespace vllm::cpu

int64_t vllm_count_program_scratch(const vllm::cpu::Program* program, int64_t num_tokens) {
  vllm::cpu::ProgramStep step{};
  step.num_tokens = num_tokens;
  return vllm::cpu::ProgramRun(*program, step, nullptr, 1, nullptr).count_scratch();
}

int32_t vllm_run_program(const vllm::cpu::Program* program, const vllm::cpu::ProgramStep* step, float* scratch,
                         int32_t num_threads, float* output) {
  using namespace vllm::cpu;
  int32_t status = kOk;
  run_as_team(num_threads, [&] { status = ProgramRun(*program, *step, scratch, num_threads, output).run(); });
  return status;
}
