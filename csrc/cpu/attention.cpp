// Paged attention: which rows attend to which keys, and in what order partial results are joined.
//
// A work item is the rows of some consecutive tokens of one request, for one KV head (all query heads that share it)
// or, where they are few, for all of them. Its keys are taken in tiles of kKeyTile positions, tiles are gathered into
// spans of kSpan positions, and spans are joined in rising order. Tiles and spans start at multiples of their size in
// absolute positions, and a span's partial result is computed alone whether threads share it or not: so a row's result
// is the same to the bit for any chunking of the prompt, any batch, any block size and any number of threads.
//
// Where rows are few, memory bounds the speed: a thread computes neighbouring items one after the other, block after
// block with all KV heads that lie in it, and each tile's kernel prefetches the next tile's keys.
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
constexpr int64_t kMaxItemRows = 96;     // their queries, scores and outputs stay in the second-level cache
constexpr int64_t kMergedHeadRows = 12;  // of a KV head: fewer are computed with the other KV heads
constexpr int64_t kSharesPerThread = 8;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
size_t to_size(int64_t n) { return static_cast<size_t>(n); }

struct Arguments {
  const float* query;
  int64_t token_stride, num_heads;
  const char* kv_cache;
  int64_t element_size;  // bytes of an element of the cache: 4 of float32, 2 of bfloat16
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
  int64_t state_size() const { return padded_dim() + 2; }  // of a row
  int64_t max_item_tokens() const { return std::max(kMaxItemRows / group(), int64_t{1}); }
  int64_t max_item_rows() const { return std::max(max_item_tokens() * group(), kMergedHeadRows * num_kv_heads); }
  int64_t first_visible(int64_t position) const {
    return sliding_window > 0 ? std::max<int64_t>(position - sliding_window + 1, 0) : 0;
  }
  const char* keys(int64_t kv_head) const { return kv_cache + kv_head * head_dim * element_size; }
  const char* values(int64_t kv_head) const {
    return keys(kv_head) + num_blocks * block_size * num_kv_heads * head_dim * element_size;
  }
};

struct WorkItem {
  int64_t request, first_head, num_heads;  // KV heads
  int64_t first_token, num_tokens;         // in the batch
  int64_t first_position;                  // of the first token
  int64_t first_key, end_key;              // positions that some row sees
  int64_t head_rows;                       // rows of one KV head

  int64_t num_rows() const { return num_heads * head_rows; }
  int64_t first_span() const { return first_key / kSpan; }
  int64_t end_span() const { return divide_up(end_key, kSpan); }
  int64_t first_tile(int64_t span) const { return std::max(span * kSpan, first_key) / kKeyTile * kKeyTile; }
  // 1 is one key for one row; reading a key costs as much as some rows.
  int64_t cost() const { return (end_key - first_key) * num_heads * (head_rows + 4); }
};

// A tile's place, and where its keys and values lie.
struct TilePlace {
  const WorkItem* item;
  int64_t start;               // position of the tile's first key
  int64_t first_key, end_key;  // in the tile: what some row sees
  int64_t slots[kKeyTile];     // in elements from the start of the keys or values of a KV head
};

// One thread's scratch; kept between calls, since every layer of a step uses the same sizes.
struct Scratch {
  std::vector<float> queries, packed_keys, packed_values, scores, decay, states;
  std::vector<KeyRange> visible;
  TilePlace places[2];

  void reserve(const Arguments& p) {
    const size_t rows = to_size(p.max_item_rows());
    queries.resize(rows * to_size(p.head_dim));
    packed_keys.resize(to_size(p.head_dim * kKeyTile));
    packed_values.resize(to_size(p.padded_dim() * kKeyTile));
    scores.resize(rows * to_size(kKeyTile));
    decay.resize(rows);
    visible.resize(rows);
    states.resize(2 * rows * to_size(p.state_size()));
  }
};

Scratch& get_scratch(const Arguments& arguments) {
  thread_local Scratch scratch;
  scratch.reserve(arguments);
  return scratch;
}

// Lays a state for `rows` rows over memory of rows * state_size floats.
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

// With `merges_heads`, a few rows are computed for all KV heads at once.
std::vector<WorkItem> list_items(const Arguments& p, bool merges_heads) {
  std::vector<WorkItem> items;
  items.reserve(to_size(p.num_requests * (merges_heads ? 1 : p.num_kv_heads)));
  for (int64_t request = 0; request < p.num_requests; ++request) {
    const int64_t first = p.query_starts[request], end = p.query_starts[request + 1];
    const int64_t offset = p.seq_lens[request] - end;  // position = offset + token
    for (int64_t token = first; token < end; token += p.max_item_tokens()) {
      const int64_t num_tokens = std::min(p.max_item_tokens(), end - token);
      const int64_t position = offset + token, rows = num_tokens * p.group();
      const int64_t num_heads = merges_heads && rows <= kMergedHeadRows ? p.num_kv_heads : 1;
      for (int64_t kv_head = 0; kv_head < p.num_kv_heads; kv_head += num_heads) {
        items.push_back({request, kv_head, num_heads, token, num_tokens, position, p.first_visible(position),
                         position + num_tokens, rows});
      }
    }
  }
  return items;
}

bool has_bad_block(const Arguments& p) {
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

// queries[head of the item][token][head of the group]
void load_queries(const Arguments& p, const WorkItem& item, float* queries) {
  const int64_t size = p.group() * p.head_dim;
  for (int64_t kv_head = item.first_head; kv_head < item.first_head + item.num_heads; ++kv_head) {
    for (int64_t token = item.first_token; token < item.first_token + item.num_tokens; ++token) {
      const float* heads = p.query + token * p.token_stride + kv_head * size;
      for (int64_t i = 0; i < size; ++i) *queries++ = heads[i] * p.scale;
    }
  }
}

// Finds the keys of the tile that starts at `start`. Places that no row sees repeat a key that some row does.
void find_keys(const Arguments& p, const WorkItem& item, int64_t start, TilePlace* place) {
  place->item = &item;
  place->start = start;
  place->first_key = std::max<int64_t>(item.first_key - start, 0);
  place->end_key = std::min(item.end_key - start, kKeyTile);
  const int32_t* table = p.block_tables + item.request * p.table_stride;
  const int64_t slot_size = p.num_kv_heads * p.head_dim;
  for (int64_t key = place->first_key; key < place->end_key;) {
    const int64_t position = start + key;
    const int64_t block = position / p.block_size, offset = position - block * p.block_size;
    const int64_t end = std::min(place->end_key, key + p.block_size - offset);
    int64_t slot = (table[block] * p.block_size + offset) * slot_size;
    for (; key < end; ++key, slot += slot_size) place->slots[key] = slot;
  }
  std::fill(place->slots, place->slots + place->first_key, place->slots[place->first_key]);
  std::fill(place->slots + place->end_key, place->slots + kKeyTile, place->slots[place->first_key]);
}

// What each row of one KV head sees of the tile.
void find_visible(const Arguments& p, const WorkItem& item, const TilePlace& place, KeyRange* visible) {
  for (int64_t token = 0; token < item.num_tokens; ++token) {
    const int64_t position = item.first_position + token;
    const int64_t end = std::clamp<int64_t>(position + 1 - place.start, 0, place.end_key);
    const int64_t first = std::clamp<int64_t>(p.first_visible(position) - place.start, 0, end);
    std::fill_n(visible + token * p.group(), p.group(),
                KeyRange{static_cast<int32_t>(first), static_cast<int32_t>(end)});
  }
}

// Computes items one after the other on one thread, and prefetches what comes next.
class Worker {
 public:
  Worker(const Kernels& kernels, const Arguments& arguments, const WorkItem* end)
      : attend_(arguments.element_size == 4 ? kernels.attend_float32 : kernels.attend_bfloat16),
        p_(arguments),
        end_(end),
        scratch_(get_scratch(arguments)) {
    scratch_.places[0].item = scratch_.places[1].item = nullptr;
  }

  // Computes the item's rows and writes their output.
  void attend_item(const WorkItem& item) {
    const int64_t rows = item.num_rows();
    const AttentionState total = place_state(scratch_.states.data(), rows);
    const AttentionState part = place_state(total.max + rows * p_.state_size(), rows);
    load_queries(p_, item, scratch_.queries.data());
    attend_span(item, item.first_span(), total);
    for (int64_t span = item.first_span() + 1; span < item.end_span(); ++span) {
      attend_span(item, span, part);
      join_state(total, part, rows, p_.padded_dim());
    }
    write_output(item, total);
  }

  // Computes the partial result of one span.
  void attend_part(const WorkItem& item, int64_t span, const AttentionState& state) {
    load_queries(p_, item, scratch_.queries.data());
    attend_span(item, span, state);
  }

  void write_output(const WorkItem& item, const AttentionState& state) const {
    const float* sums = state.output;
    const float* total = state.sum;
    for (int64_t kv_head = item.first_head; kv_head < item.first_head + item.num_heads; ++kv_head) {
      for (int64_t token = item.first_token; token < item.first_token + item.num_tokens; ++token) {
        float* output = p_.output + (token * p_.num_heads + kv_head * p_.group()) * p_.head_dim;
        for (int64_t head = 0; head < p_.group(); ++head, ++total, sums += p_.padded_dim(), output += p_.head_dim) {
          for (int64_t d = 0; d < p_.head_dim; ++d) output[d] = sums[d] / *total;
        }
      }
    }
  }

 private:
  const TilePlace& find_place(const WorkItem& item, int64_t start) {
    for (const TilePlace& place : scratch_.places) {
      if (place.item == &item && place.start == start) return place;
    }
    find_keys(p_, item, start, &scratch_.places[0]);
    fetch_keys(scratch_.places[0]);
    return scratch_.places[0];
  }

  // Prefetches all keys of the first tile: nothing before it did.
  void fetch_keys(const TilePlace& place) const {
    const char* keys = p_.keys(place.item->first_head);
    const int64_t row_bytes = place.item->num_heads * p_.head_dim * p_.element_size;
    for (int64_t key = place.first_key; key < place.end_key; ++key) {
      const char* row = keys + place.slots[key] * p_.element_size;
      for (int64_t at = 0; at < row_bytes; at += kLineBytes) __builtin_prefetch(row + at);
    }
  }

  // The tile that is computed after `place`; itself if there is none.
  const TilePlace& find_next_place(const TilePlace& place) {
    const WorkItem* item = place.item;
    int64_t start = place.start + kKeyTile;
    if (start >= item->end_key) {
      if (++item == end_) return place;
      start = item->first_key / kKeyTile * kKeyTile;
    }
    TilePlace* other = &scratch_.places[&place == &scratch_.places[0] ? 1 : 0];
    find_keys(p_, *item, start, other);
    return *other;
  }

  void attend_span(const WorkItem& item, int64_t span, const AttentionState& state) {
    clear_state(state, item.num_rows(), p_.padded_dim());
    AttentionTile tile = {};
    tile.num_heads = item.num_heads;
    tile.num_rows = item.head_rows;
    tile.head_dim = p_.head_dim;
    tile.padded_dim = p_.padded_dim();
    tile.queries = scratch_.queries.data();
    tile.keys = p_.keys(item.first_head);
    tile.values = p_.values(item.first_head);
    tile.visible = scratch_.visible.data();
    tile.packed_keys = scratch_.packed_keys.data();
    tile.packed_values = scratch_.packed_values.data();
    tile.scores = scratch_.scores.data();
    tile.decay = scratch_.decay.data();
    tile.state = state;
    const int64_t end = std::min((span + 1) * kSpan, item.end_key);
    for (int64_t start = item.first_tile(span); start < end; start += kKeyTile) {
      const TilePlace& place = find_place(item, start);
      const TilePlace& next_place = find_next_place(place);
      find_visible(p_, item, place, scratch_.visible.data());
      tile.slots = place.slots;
      tile.first_key = place.first_key;
      tile.end_key = place.end_key;
      tile.next_keys = p_.keys(next_place.item->first_head);
      tile.next_slots = next_place.slots;
      tile.next_first_key = next_place.first_key;
      tile.next_end_key = next_place.end_key;
      attend_(tile);
    }
  }

  void (*attend_)(const AttentionTile&);
  const Arguments& p_;
  const WorkItem* end_;
  Scratch& scratch_;
};

// For few items: the spans are shared out one by one, so that all threads share one long context.
void attend_split(const Kernels& kernels, const Arguments& p, const std::vector<WorkItem>& items, int num_threads) {
  struct Part {
    const WorkItem* item;
    int64_t span, state_offset;
  };
  std::vector<Part> parts;
  int64_t num_floats = 0;
  for (const WorkItem& item : items) {
    for (int64_t span = item.first_span(); span < item.end_span(); ++span) {
      parts.push_back({&item, span, num_floats});
      num_floats += item.num_rows() * p.state_size();
    }
  }
  std::vector<float> states(to_size(num_floats));
  const auto place = [&](const Part& part) {
    return place_state(&states[to_size(part.state_offset)], part.item->num_rows());
  };
  const auto count = static_cast<int64_t>(parts.size());
  const int64_t num_shares = std::min(count, num_threads * kSharesPerThread);
  parallel_for(num_shares, num_threads, [&](int64_t share) {
    for (int64_t i = count * share / num_shares; i < count * (share + 1) / num_shares; ++i) {
      const Part& part = parts[to_size(i)];
      Worker(kernels, p, part.item + 1).attend_part(*part.item, part.span, place(part));
    }
  });
  for (size_t i = 0; i < parts.size();) {
    const WorkItem& item = *parts[i].item;
    const AttentionState total = place(parts[i]);
    for (++i; i < parts.size() && parts[i].item == &item; ++i) {
      join_state(total, place(parts[i]), item.num_rows(), p.padded_dim());
    }
    Worker(kernels, p, &item + 1).write_output(item, total);
  }
}

// For many items: shares of neighbouring ones, of about equal cost; the last, which are often the longest, come first.
void attend_shares(const Kernels& kernels, const Arguments& p, const std::vector<WorkItem>& items, int num_threads) {
  std::vector<int64_t> costs_before(items.size() + 1, 0);
  for (size_t i = 0; i < items.size(); ++i) costs_before[i + 1] = costs_before[i] + items[i].cost();
  const int64_t num_shares = num_threads == 1 ? 1 : num_threads * kSharesPerThread;
  const auto find_border = [&](int64_t share) {  // the first item that starts at or after the share's part of the cost
    const auto at =
        std::lower_bound(costs_before.begin(), costs_before.end() - 1, costs_before.back() * share / num_shares);
    return items.data() + (at - costs_before.begin());
  };
  parallel_for(num_shares, num_threads, [&](int64_t i) {
    const int64_t share = num_shares - 1 - i;
    const WorkItem* end = share + 1 == num_shares ? items.data() + items.size() : find_border(share + 1);
    Worker worker(kernels, p, end);
    for (const WorkItem* item = find_border(share); item < end; ++item) worker.attend_item(*item);
  });
}

void attend(const Arguments& p, int32_t max_threads) {
  const Kernels& kernels = get_kernels();
  std::vector<WorkItem> items = list_items(p, true);
  int64_t num_elements = 0, num_spans = 0;
  for (const WorkItem& item : items) {
    num_elements += (item.end_key - item.first_key) * p.head_dim * (2 * item.num_heads + item.num_rows());
    num_spans += item.end_span() - item.first_span();
  }
  const int num_threads = choose_threads(num_elements, max_threads);
  if (num_threads > 1 && static_cast<int64_t>(items.size()) < 4 * num_threads) {
    if (num_spans < 4 * num_threads) items = list_items(p, false);
    attend_split(kernels, p, items, num_threads);
  } else {
    attend_shares(kernels, p, items, num_threads);
  }
}

}  // namespace
}  // namespace vllm::cpu

int32_t vllm_paged_attention(const float* query, int64_t token_stride, int64_t num_heads, const void* kv_cache,
                             int32_t kv_kind, int64_t num_blocks, int64_t block_size, int64_t num_kv_heads,
                             int64_t head_dim, const int32_t* block_tables, int64_t table_stride,
                             const int32_t* query_starts, const int32_t* seq_lens, int64_t num_requests, float scale,
                             int64_t sliding_window, int32_t num_threads, float* output) {
  using namespace vllm::cpu;
  const Arguments arguments = {query,
                               token_stride,
                               num_heads,
                               static_cast<const char*>(kv_cache),
                               kv_kind == kBfloat16 ? 2 : 4,
                               num_blocks,
                               block_size,
                               num_kv_heads,
                               head_dim,
                               block_tables,
                               table_stride,
                               query_starts,
                               seq_lens,
                               num_requests,
                               scale,
                               sliding_window,
                               output};
  if (has_bad_block(arguments)) return kIdOutOfRange;
  return run_guarded([&] { attend(arguments, num_threads); });
}
