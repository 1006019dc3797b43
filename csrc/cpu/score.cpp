// The scorer: log-sum-exp, top-k, the chosen token's value and true rank, in one pass over each row of logits.
//
// A row is cut into tiles that fit the first-level cache. Each tile gives its maximum and the sum of exponentials below
// it; these are joined in tile order, so that no result depends on the number of threads.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "api.h"
#include "kernels.h"
#include "ranking.h"
#include "threads.h"

namespace vllm::cpu {
namespace {

constexpr int64_t kTile = 4096;  // 16 KiB of logits
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Logits {
  const float* data;
  int64_t row_stride, num_rows, vocab_size;

  const float* row(int64_t r) const { return data + r * row_stride; }
  int64_t num_tiles() const { return (vocab_size + kTile - 1) / kTile; }
  int choose_threads(int32_t num_threads) const { return cpu::choose_threads(num_rows * vocab_size, num_threads); }
};

struct Entries {
  int32_t width;
  int32_t* token_ids;
  float* values;
  int32_t* ranks;
  int32_t* num_entries;
  uint8_t* is_finite;
};

// One thread's workspace: what it found in its slice of tiles of a row, and scratch that lasts for the whole call.
struct Findings {
  std::vector<int64_t> num_before;  // for each ranked id: tokens that come before it
  std::vector<float> maxima;        // one a tile
  std::vector<double> sums;         // one a tile: sum of exp(logit - the tile's maximum)
  bool has_nan;
  TopSelector top;

  std::vector<int32_t> offsets;  // of the selection
  std::vector<int32_t> ids;      // the row's tokens to rank
  RowSorter sorter;

  void reset(int64_t num_tiles, int64_t num_ids, int64_t num_selected) {
    num_before.assign(static_cast<size_t>(num_ids), 0);
    offsets.resize(static_cast<size_t>(kTile));
    maxima.assign(static_cast<size_t>(num_tiles), -kInfinity);
    sums.assign(static_cast<size_t>(num_tiles), 0);
    has_nan = false;
    top.reset(num_selected);
  }
};

struct RowTask {
  const float* row;
  int64_t vocab_size;
  const int32_t* ids;  // tokens to rank
  int64_t num_ids;
  bool needs_sum;
};

// Counts the tokens of a tile that come before `id`: larger logits, and equal ones of a lower id.
int64_t count_before(const Kernels& kernels, const float* tile, int64_t first, int64_t count, float logit, int64_t id) {
  const int64_t num_lower = std::clamp<int64_t>(id - first, 0, count);
  int64_t total = 0;
  if (num_lower > 0) total += kernels.count_at_least(tile, num_lower, logit);
  if (num_lower < count) total += kernels.count_greater(tile + num_lower, count - num_lower, logit);
  return total;
}

void scan_tiles(const Kernels& kernels, const RowTask& task, int64_t first_tile, int64_t end_tile, Findings* findings) {
  for (int64_t t = first_tile; t < end_tile; ++t) {
    const int64_t first = t * kTile;
    const int64_t count = std::min(kTile, task.vocab_size - first);
    const float* tile = task.row + first;
    const StretchScan seen = kernels.scan(tile, count);
    findings->has_nan |= seen.has_nan;
    findings->maxima[static_cast<size_t>(t)] = seen.max;
    if (task.needs_sum && std::isfinite(seen.max)) {
      findings->sums[static_cast<size_t>(t)] = kernels.sum_exp(tile, count, seen.max);
    }
    for (int64_t i = 0; i < task.num_ids; ++i) {
      const float logit = task.row[task.ids[i]];
      if (seen.max >= logit) {
        findings->num_before[static_cast<size_t>(i)] += count_before(kernels, tile, first, count, logit, task.ids[i]);
      }
    }
    if (findings->top.limit() > 0 && (!findings->top.is_bounded() || seen.max > findings->top.bound())) {
      select_top(kernels, tile, first, count, findings->offsets.data(), &findings->top);
    }
  }
}

// Scans a row into parts[0], by `num_slices` threads when there are fewer rows than threads.
void scan_row(const Kernels& kernels, const RowTask& task, int64_t num_tiles, int num_slices, int64_t num_selected,
              Findings* parts) {
  for (int s = 0; s < num_slices; ++s) parts[s].reset(num_tiles, task.num_ids, num_selected);
  if (num_slices == 1) {
    scan_tiles(kernels, task, 0, num_tiles, &parts[0]);
    return;
  }
  parallel_for(num_slices, num_slices, [&](int64_t slice) {
    scan_tiles(kernels, task, num_tiles * slice / num_slices, num_tiles * (slice + 1) / num_slices, &parts[slice]);
  });
  for (int s = 1; s < num_slices; ++s) {
    parts[0].has_nan |= parts[s].has_nan;
    for (size_t i = 0; i < parts[s].num_before.size(); ++i) parts[0].num_before[i] += parts[s].num_before[i];
    for (auto t = static_cast<size_t>(num_tiles * s / num_slices);
         t < static_cast<size_t>(num_tiles * (s + 1) / num_slices); ++t) {
      parts[0].maxima[t] = parts[s].maxima[t];
      parts[0].sums[t] = parts[s].sums[t];
    }
    if (num_selected > 0) parts[0].top.merge(parts[s].top);
  }
}

// The row's normaliser, and whether a distribution can be made of it.
struct Normaliser {
  bool is_finite;
  bool as_logits;
  double log_sum_exp;

  float apply(float logit) const {
    if (as_logits) return logit;
    return is_finite ? static_cast<float>(static_cast<double>(logit) - log_sum_exp) : kNan;
  }
};

Normaliser join_tiles(const Findings& findings, bool as_logits) {
  const float max = *std::max_element(findings.maxima.begin(), findings.maxima.end());
  Normaliser result = {!findings.has_nan && std::isfinite(max), as_logits, 0};
  if (!result.is_finite || as_logits) return result;
  double sum = 0;
  for (size_t t = 0; t < findings.maxima.size(); ++t) {
    if (findings.sums[t] > 0) {
      sum += findings.sums[t] * std::exp(static_cast<double>(findings.maxima[t]) - static_cast<double>(max));
    }
  }
  result.log_sum_exp = static_cast<double>(max) + std::log(sum);
  return result;
}

// Appends entries to one row of the output.
class RowWriter {
 public:
  RowWriter(const Entries& out, int64_t r) : out_(out), r_(r), start_(r * out.width) {}

  void append(int32_t token_id, float value, int64_t rank) {
    out_.token_ids[start_ + count_] = token_id;
    out_.values[start_ + count_] = value;
    out_.ranks[start_ + count_] = static_cast<int32_t>(rank);
    ++count_;
  }
  void finish(bool is_finite) {
    out_.num_entries[r_] = count_;
    out_.is_finite[r_] = is_finite ? 1 : 0;
    while (count_ < out_.width) append(-1, -kInfinity, 0);
  }

 private:
  const Entries& out_;
  int64_t r_, start_;
  int32_t count_ = 0;
};

// Runs score_row(row, num_slices, thread's own parts) over all rows: rows in parallel, or one after another in slices.
template <typename ScoreRow>
void for_each_row(const Logits& logits, int num_threads, ScoreRow score_row) {
  std::vector<Findings> parts(static_cast<size_t>(num_threads));
  const auto num_slices = static_cast<int>(std::min<int64_t>(num_threads, logits.num_tiles()));
  if (num_threads == 1 || (logits.num_rows < num_threads && num_slices > 1)) {
    for (int64_t r = 0; r < logits.num_rows; ++r) score_row(r, num_slices, parts.data());
    return;
  }
  parallel_for(logits.num_rows, num_threads, [&](int64_t r) { score_row(r, 1, parts.data() + get_thread_index()); });
}

void score_top(const Logits& logits, const int64_t* chosen, const int32_t* num_top, bool as_logits, int num_threads,
               const Entries& out) {
  const Kernels& kernels = get_kernels();
  for_each_row(logits, num_threads, [&](int64_t r, int num_slices, Findings* mine) {
    const int64_t k = std::min<int64_t>(num_top[r], logits.vocab_size);
    const bool sorts = k > kMaxSelected;
    const auto id = static_cast<int32_t>(chosen[r]);
    const RowTask task = {logits.row(r), logits.vocab_size, &id, 1, !as_logits};
    scan_row(kernels, task, logits.num_tiles(), num_slices, sorts ? 0 : k, mine);
    const Normaliser normaliser = join_tiles(mine[0], as_logits);
    RowWriter writer(out, r);
    writer.append(id, normaliser.apply(task.row[id]), mine[0].num_before[0] + 1);
    const auto append_rest = [&](const std::vector<uint64_t>& order, auto get_id) {
      for (int64_t i = 0; i < k; ++i) {
        const int32_t token_id = get_id(order[static_cast<size_t>(i)]);
        if (token_id != id) writer.append(token_id, normaliser.apply(task.row[token_id]), i + 1);
      }
    };
    if (sorts) {
      append_rest(mine[0].sorter.sort(task.row, logits.vocab_size),
                  [](uint64_t pair) { return static_cast<int32_t>(pair); });
    } else if (k > 0) {
      append_rest(mine[0].top.sort(), get_token_id);
    }
    writer.finish(normaliser.is_finite);
  });
}

void score_given(const Logits& logits, const int64_t* chosen, const int32_t* given, int32_t max_given, bool as_logits,
                 int num_threads, const Entries& out) {
  const Kernels& kernels = get_kernels();
  for_each_row(logits, num_threads, [&](int64_t r, int num_slices, Findings* mine) {
    std::vector<int32_t>& ids = mine[0].ids;
    ids.assign(1, static_cast<int32_t>(chosen[r]));
    for (int32_t i = 0; i < max_given; ++i) {
      const int32_t id = given[r * max_given + i];
      if (id >= 0 && std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
    }
    const RowTask task = {logits.row(r), logits.vocab_size, ids.data(), static_cast<int64_t>(ids.size()), !as_logits};
    scan_row(kernels, task, logits.num_tiles(), num_slices, 0, mine);
    const Normaliser normaliser = join_tiles(mine[0], as_logits);
    RowWriter writer(out, r);
    for (size_t i = 0; i < ids.size(); ++i) {
      writer.append(ids[i], normaliser.apply(task.row[ids[i]]), mine[0].num_before[i] + 1);
    }
    writer.finish(normaliser.is_finite);
  });
}

void score_full(const Logits& logits, bool as_logits, int num_threads, float* values, int32_t* ranks,
                uint8_t* is_finite) {
  const Kernels& kernels = get_kernels();
  for_each_row(logits, num_threads, [&](int64_t r, int num_slices, Findings* mine) {
    const RowTask task = {logits.row(r), logits.vocab_size, nullptr, 0, !as_logits};
    scan_row(kernels, task, logits.num_tiles(), num_slices, 0, mine);
    const Normaliser normaliser = join_tiles(mine[0], as_logits);
    is_finite[r] = normaliser.is_finite ? 1 : 0;
    float* row_values = values + r * logits.vocab_size;
    if (as_logits) {
      std::copy_n(task.row, logits.vocab_size, row_values);
    } else if (normaliser.is_finite) {
      kernels.subtract(task.row, logits.vocab_size, normaliser.log_sum_exp, row_values);
    } else {
      std::fill_n(row_values, logits.vocab_size, kNan);
    }
    int32_t rank = 0;
    for (const uint64_t pair : mine[0].sorter.sort(task.row, logits.vocab_size)) {
      ranks[r * logits.vocab_size + static_cast<uint32_t>(pair)] = ++rank;
    }
  });
}

void find_argmax(const Logits& logits, int num_threads, int32_t* token_ids, uint8_t* is_finite) {
  const Kernels& kernels = get_kernels();
  for_each_row(logits, num_threads, [&](int64_t r, int num_slices, Findings* mine) {
    const RowTask task = {logits.row(r), logits.vocab_size, nullptr, 0, false};
    scan_row(kernels, task, logits.num_tiles(), num_slices, 0, mine);
    const std::vector<float>& maxima = mine[0].maxima;
    const auto largest = std::max_element(maxima.begin(), maxima.end());
    const int64_t first = (largest - maxima.begin()) * kTile;
    const int64_t count = std::min(kTile, logits.vocab_size - first);
    const int64_t found = kernels.find_equal(task.row + first, count, *largest);
    token_ids[r] = static_cast<int32_t>(found < count ? first + found : 0);  // absent only in a row of NaN
    is_finite[r] = !mine[0].has_nan && std::isfinite(*largest) ? 1 : 0;
  });
}

bool are_in_vocabulary(const int64_t* ids, int64_t count, int64_t vocab_size) {
  return std::all_of(ids, ids + count, [=](int64_t id) { return id >= 0 && id < vocab_size; });
}

}  // namespace
}  // namespace vllm::cpu

int32_t vllm_score_rows(const float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                        const int64_t* chosen, const int32_t* num_top, int32_t max_top, int32_t as_logits,
                        int32_t num_threads, int32_t* token_ids, float* values, int32_t* ranks, int32_t* num_entries,
                        uint8_t* is_finite) {
  using namespace vllm::cpu;
  if (!are_in_vocabulary(chosen, num_rows, vocab_size)) return kIdOutOfRange;
  for (int64_t r = 0; r < num_rows; ++r) {
    if (num_top[r] < 0 || std::min<int64_t>(num_top[r], vocab_size) > max_top) return kCountOutOfRange;
  }
  const Logits table = {logits, row_stride, num_rows, vocab_size};
  return run_guarded([&] {
    score_top(table, chosen, num_top, as_logits != 0, table.choose_threads(num_threads),
              {max_top + 1, token_ids, values, ranks, num_entries, is_finite});
  });
}

int32_t vllm_score_given_ids(const float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                             const int64_t* chosen, const int32_t* given, int32_t max_given, int32_t as_logits,
                             int32_t num_threads, int32_t* token_ids, float* values, int32_t* ranks,
                             int32_t* num_entries, uint8_t* is_finite) {
  using namespace vllm::cpu;
  if (!are_in_vocabulary(chosen, num_rows, vocab_size)) return kIdOutOfRange;
  const auto is_known = [=](int32_t id) { return id >= -1 && id < vocab_size; };
  if (!std::all_of(given, given + num_rows * max_given, is_known)) return kIdOutOfRange;
  const Logits table = {logits, row_stride, num_rows, vocab_size};
  return run_guarded([&] {
    score_given(table, chosen, given, max_given, as_logits != 0, table.choose_threads(num_threads),
                {max_given + 1, token_ids, values, ranks, num_entries, is_finite});
  });
}

int32_t vllm_score_full_rows(const float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                             int32_t as_logits, int32_t num_threads, float* values, int32_t* ranks,
                             uint8_t* is_finite) {
  using namespace vllm::cpu;
  const Logits table = {logits, row_stride, num_rows, vocab_size};
  return run_guarded(
      [&] { score_full(table, as_logits != 0, table.choose_threads(num_threads), values, ranks, is_finite); });
}

int32_t vllm_argmax_rows(const float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                         int32_t num_threads, int32_t* token_ids, uint8_t* is_finite) {
  using namespace vllm::cpu;
  const Logits table = {logits, row_stride, num_rows, vocab_size};
  // A scan alone: a single row is done before another thread has woken up.
  const int threads = choose_threads(num_rows * vocab_size / 4, num_threads);
  return run_guarded([&] { find_argmax(table, threads, token_ids, is_finite); });
}
