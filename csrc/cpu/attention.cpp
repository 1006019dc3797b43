// Paged attention: which rows meet which keys, and in what order partial results are joined.
//
// A unit is one KV head of one request and the rows of some consecutive tokens (all query heads that share the KV
// head). Its keys are walked in tiles of kKeyTile positions, tiles are gathered into spans of kSpan positions, and
// spans are joined in rising order. Tiles and spans start at multiples of their size in absolute positions, and a
// span's partial result is computed alone whether threads share it or not: so a row's result is the same to the bit for
// any chunking of the prompt, any batch, any block size and any number of threads.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "api.h"
#include "kernels.h"
#include "threads.h"

namespace vllm::cpu {
namespace {

constexpr int64_t kSpan = 4 * kKeyTile;
constexpr int64_t kMaxUnitRows = 96;  // their queries, scores and outputs stay in the second-level cache
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
size_t to_size(int64_t n) { return static_cast<size_t>(n); }

struct Problem {
  const float* query;
  int64_t token_stride, num_heads;
  const float* kv_cache;
  int64_t num_blocks, block_size, num_kv_heads, head_dim;
  const int32_t* block_tables;
  int64_t table_stride;
  const int32_t* query_starts;
  const int32_t* seq_lens;
  int64_t num_requests;
  float scale;
  int64_t sliding_window;
  float* output;

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t padded_dim() const { return divide_up(head_dim, 16) * 16; }
  int64_t max_unit_rows() const { return std::max(kMaxUnitRows / group(), int64_t{1}) * group(); }
  int64_t first_visible(int64_t position) const {
    return sliding_window > 0 ? std::max<int64_t>(position - sliding_window + 1, 0) : 0;
  }
};

struct Unit {
  int64_t request, kv_head;
  int64_t first_token, num_tokens;  // in the batch
  int64_t first_position;           // of the first token
  int64_t first_key, end_key;       // positions that some row sees

  int64_t first_span() const { return first_key / kSpan; }
  int64_t end_span() const { return divide_up(end_key, kSpan); }
};

// One thread's scratch; kept between calls, since every layer of a step wants the same.
struct Scratch {
  std::vector<float> queries, packed_keys, scores, decay, padded_values, zeros, states;
  std::vector<const float*> keys, values;
  std::vector<KeyRange> visible;

  void reserve(const Problem& p) {
    const size_t rows = to_size(p.max_unit_rows());
    queries.resize(rows * to_size(p.head_dim));
    packed_keys.resize(to_size(p.head_dim * kKeyTile));
    scores.resize(rows * to_size(kKeyTile));
    decay.resize(rows);
    visible.resize(rows);
    keys.resize(to_size(kKeyTile));
    values.resize(to_size(kKeyTile));
    zeros.assign(to_size(p.padded_dim()), 0.0f);
    if (p.padded_dim() != p.head_dim) padded_values.assign(to_size(kKeyTile * p.padded_dim()), 0.0f);
    states.resize(2 * rows * to_size(p.padded_dim() + 2));
  }
};

Scratch& get_scratch(const Problem& problem) {
  thread_local Scratch scratch;
  scratch.reserve(problem);
  return scratch;
}

// Lays a state for `rows` rows over memory of rows * (padded_dim + 2) floats.
AttentionState place_state(float* memory, int64_t rows) { return {memory, memory + rows, memory + 2 * rows}; }

void clear_state(const AttentionState& state, int64_t rows, int64_t padded_dim) {
  std::fill_n(state.max, rows, -kInfinity);
  std::fill_n(state.sum, rows, 0.0f);
  std::fill_n(state.output, rows * padded_dim, 0.0f);
}

// Joins a later span into what the spans before it gave.
void join_state(const AttentionState& earlier, const AttentionState& later, int64_t rows, int64_t padded_dim) {
  for (int64_t r = 0; r < rows; ++r) {
    if (!(later.max[r] > -kInfinity)) continue;  // the row saw nothing there
    const float max = std::max(earlier.max[r], later.max[r]);
    const float keep = earlier.max[r] > -kInfinity ? std::exp(earlier.max[r] - max) : 0.0f;
    const float take = std::exp(later.max[r] - max);
    earlier.max[r] = max;
    earlier.sum[r] = earlier.sum[r] * keep + later.sum[r] * take;
    float* into = earlier.output + r * padded_dim;
    const float* from = later.output + r * padded_dim;
    for (int64_t d = 0; d < padded_dim; ++d) into[d] = into[d] * keep + from[d] * take;
  }
}

std::vector<Unit> plan_units(const Problem& p) {
  std::vector<Unit> units;
  const int64_t max_tokens = p.max_unit_rows() / p.group();
  for (int64_t request = 0; request < p.num_requests; ++request) {
    const int64_t first = p.query_starts[request], end = p.query_starts[request + 1];
    const int64_t offset = p.seq_lens[request] - end;  // position = offset + token
    for (int64_t token = first; token < end; token += max_tokens) {
      const int64_t num_tokens = std::min(max_tokens, end - token);
      const int64_t position = offset + token;
      for (int64_t kv_head = 0; kv_head < p.num_kv_heads; ++kv_head) {
        units.push_back(
            {request, kv_head, token, num_tokens, position, p.first_visible(position), position + num_tokens});
      }
    }
  }
  return units;
}

bool has_bad_block(const Problem& p) {
  for (int64_t request = 0; request < p.num_requests; ++request) {
    const int64_t num_tokens = p.query_starts[request + 1] - p.query_starts[request];
    const int64_t end = p.seq_lens[request];
    if (num_tokens < 0 || end < num_tokens || divide_up(end, p.block_size) > p.table_stride) return true;
    if (num_tokens == 0) continue;
    const int32_t* table = p.block_tables + request * p.table_stride;
    for (int64_t b = p.first_visible(end - num_tokens) / p.block_size; b * p.block_size < end; ++b) {
      if (table[b] < 0 || table[b] >= p.num_blocks) return true;
    }
  }
  return false;
}

void load_queries(const Problem& p, const Unit& unit, float* queries) {
  for (int64_t token = 0; token < unit.num_tokens; ++token) {
    const float* heads = p.query + (unit.first_token + token) * p.token_stride + unit.kv_head * p.group() * p.head_dim;
    for (int64_t i = 0; i < p.group() * p.head_dim; ++i) *queries++ = heads[i] * p.scale;
  }
}

// Points at the tile's keys and values in their blocks; whatever no row may see stays at the zeros.
void find_keys(const Problem& p, const Unit& unit, int64_t tile_start, const AttentionTile& tile, Scratch* scratch) {
  const int32_t* table = p.block_tables + unit.request * p.table_stride;
  const int64_t slot_size = p.num_kv_heads * p.head_dim;
  const float* values = p.kv_cache + p.num_blocks * p.block_size * slot_size;
  std::fill(scratch->keys.begin(), scratch->keys.end(), scratch->zeros.data());
  for (int64_t key = tile.first_key; key < tile.end_key; ++key) {
    const int64_t position = tile_start + key;
    const int64_t slot = table[position / p.block_size] * p.block_size + position % p.block_size;
    const int64_t offset = slot * slot_size + unit.kv_head * p.head_dim;
    scratch->keys[to_size(key)] = p.kv_cache + offset;
    scratch->values[to_size(key)] = values + offset;
    if (p.padded_dim() != p.head_dim) {  // a whole vector must not reach past the value
      float* padded = &scratch->padded_values[to_size(key * p.padded_dim())];
      std::copy_n(values + offset, p.head_dim, padded);
      scratch->values[to_size(key)] = padded;
    }
  }
}

// Computes the partial result of one span. scratch->queries holds the unit's queries.
void attend_span(const Kernels& kernels, const Problem& p, const Unit& unit, int64_t span, Scratch* scratch,
                 const AttentionState& state) {
  const int64_t rows = unit.num_tokens * p.group();
  clear_state(state, rows, p.padded_dim());
  AttentionTile tile = {};
  tile.num_rows = rows;
  tile.head_dim = p.head_dim;
  tile.padded_dim = p.padded_dim();
  tile.queries = scratch->queries.data();
  tile.keys = scratch->keys.data();
  tile.values = scratch->values.data();
  tile.visible = scratch->visible.data();
  tile.packed_keys = scratch->packed_keys.data();
  tile.scores = scratch->scores.data();
  tile.decay = scratch->decay.data();
  tile.state = state;
  const int64_t first_tile = std::max(span * kSpan, unit.first_key) / kKeyTile * kKeyTile;
  for (int64_t start = first_tile; start < std::min((span + 1) * kSpan, unit.end_key); start += kKeyTile) {
    tile.first_key = std::max<int64_t>(unit.first_key - start, 0);
    tile.end_key = std::min(unit.end_key - start, kKeyTile);
    find_keys(p, unit, start, tile, scratch);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = unit.first_position + row / p.group();
      const auto end = static_cast<int32_t>(std::clamp<int64_t>(position + 1 - start, 0, tile.end_key));
      const auto first = static_cast<int32_t>(std::clamp<int64_t>(p.first_visible(position) - start, 0, end));
      scratch->visible[to_size(row)] = {first, end};
    }
    kernels.attend_tile(tile);
  }
}

void write_output(const Problem& p, const Unit& unit, const AttentionState& state) {
  for (int64_t row = 0; row < unit.num_tokens * p.group(); ++row) {
    const int64_t token = unit.first_token + row / p.group();
    const int64_t head = unit.kv_head * p.group() + row % p.group();
    float* output = p.output + (token * p.num_heads + head) * p.head_dim;
    const float* sums = state.output + row * p.padded_dim();
    for (int64_t d = 0; d < p.head_dim; ++d) output[d] = sums[d] / state.sum[row];
  }
}

void attend_unit(const Kernels& kernels, const Problem& p, const Unit& unit) {
  Scratch& scratch = get_scratch(p);
  const int64_t rows = unit.num_tokens * p.group();
  const int64_t state_size = p.max_unit_rows() * (p.padded_dim() + 2);
  load_queries(p, unit, scratch.queries.data());
  const AttentionState total = place_state(scratch.states.data(), rows);
  const AttentionState part = place_state(scratch.states.data() + state_size, rows);
  attend_span(kernels, p, unit, unit.first_span(), &scratch, total);
  for (int64_t span = unit.first_span() + 1; span < unit.end_span(); ++span) {
    attend_span(kernels, p, unit, span, &scratch, part);
    join_state(total, part, rows, p.padded_dim());
  }
  write_output(p, unit, total);
}

// For few units: every span is an item of its own, so that all threads share one long context.
void attend_split(const Kernels& kernels, const Problem& p, const std::vector<Unit>& units, int num_threads) {
  struct Item {
    const Unit* unit;
    int64_t span, state_offset;
  };
  std::vector<Item> items;
  int64_t num_floats = 0;
  for (const Unit& unit : units) {
    for (int64_t span = unit.first_span(); span < unit.end_span(); ++span) {
      items.push_back({&unit, span, num_floats});
      num_floats += unit.num_tokens * p.group() * (p.padded_dim() + 2);
    }
  }
  std::vector<float> states(to_size(num_floats));
  const auto place = [&](const Item& item) {
    return place_state(&states[to_size(item.state_offset)], item.unit->num_tokens * p.group());
  };
  parallel_for(static_cast<int64_t>(items.size()), num_threads, [&](int64_t i) {
    const Item& item = items[to_size(i)];
    Scratch& scratch = get_scratch(p);
    load_queries(p, *item.unit, scratch.queries.data());
    attend_span(kernels, p, *item.unit, item.span, &scratch, place(item));
  });
  for (size_t i = 0; i < items.size();) {
    const Unit& unit = *items[i].unit;
    const AttentionState total = place(items[i]);
    for (++i; i < items.size() && items[i].unit == &unit; ++i) {
      join_state(total, place(items[i]), unit.num_tokens * p.group(), p.padded_dim());
    }
    write_output(p, unit, total);
  }
}

void attend(const Problem& p, int32_t max_threads) {
  const Kernels& kernels = get_kernels();
  const std::vector<Unit> units = plan_units(p);
  int64_t num_elements = 0, num_spans = 0;
  for (const Unit& unit : units) {
    num_elements += (unit.end_key - unit.first_key) * p.head_dim * (2 + unit.num_tokens * p.group());
    num_spans += unit.end_span() - unit.first_span();
  }
  const int num_threads = choose_threads(num_elements, max_threads);
  const auto num_units = static_cast<int64_t>(units.size());
  if (num_units < 4 * num_threads && num_spans > num_units && num_threads > 1) {
    attend_split(kernels, p, units, num_threads);
  } else {
    parallel_for(num_units, num_threads, [&](int64_t i) { attend_unit(kernels, p, units[to_size(i)]); });
  }
}

}  // namespace
}  // namespace vllm::cpu

int32_t vllm_paged_attention(const float* query, int64_t token_stride, int64_t num_heads, const float* kv_cache,
                             int64_t num_blocks, int64_t block_size, int64_t num_kv_heads, int64_t head_dim,
                             const int32_t* block_tables, int64_t table_stride, const int32_t* query_starts,
                             const int32_t* seq_lens, int64_t num_requests, float scale, int64_t sliding_window,
                             int32_t num_threads, float* output) {
  using namespace vllm::cpu;
  const Problem problem = {query,        token_stride, num_heads,      kv_cache,     num_blocks,   block_size,
                           num_kv_heads, head_dim,     block_tables,   table_stride, query_starts, seq_lens,
                           num_requests, scale,        sliding_window, output};
  if (has_bad_block(problem)) return kIdOutOfRange;
  return run_guarded([&] { attend(problem, num_threads); });
}
