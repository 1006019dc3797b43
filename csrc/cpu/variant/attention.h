// The query rows of one work item of attention over one tile of keys. Included once per instruction set, after
// stretch.h.
//
// Every row's arithmetic is its own and in one fixed order: a dot product runs over d = 0, 1, ...; a sum of values runs
// over keys in rising order; a hidden key adds an exact zero or nothing. So a row's result does not depend on the rows
// beside it, nor on how the keys are read: a few rows read them as they are stored, many rows read a packed copy.
#include <cstdint>

namespace vllm::cpu::VLLM_VARIANT {

template <int kCount>
struct Rows {
  static constexpr int value = kCount;
};

// Calls body(Rows<n>, first row) over all rows, kBlockRows at a time and then the rest at once.
template <int kCount, typename Body>
inline void visit_rest(int64_t num_rows, int64_t first, Body body) {
  if (num_rows == kCount) {
    body(Rows<kCount>(), first);
  } else if constexpr (kCount > 1) {
    visit_rest<kCount - 1>(num_rows, first, body);
  }
}
template <typename Body>
inline void for_each_block(int64_t num_rows, Body body) {
  int64_t first = 0;
  for (; first + kBlockRows <= num_rows; first += kBlockRows) body(Rows<kBlockRows>(), first);
  visit_rest<kBlockRows>(num_rows - first, first, body);
}

// The keys that some of the rows see; rows stand in rising order of position.
inline KeyRange find_range(const AttentionTile& tile, int64_t first_row, int64_t num_rows) {
  return {tile.visible[first_row].first, tile.visible[first_row + num_rows - 1].end};
}

template <typename Element>
inline Floats load_column(const Element* keys, const int64_t* slots) {
  float lanes[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = widen(keys[slots[i]]);
  return load(lanes);
}

// What is read before and after is read twice, instead of kept in registers that sums need.
inline void keep_in_order() { asm volatile("" : : : "memory"); }

// Prefetches keys or values of all heads, line after line in the order of their places: that is faster than to prefetch
// what is needed next, head by head, and the hardware prefetcher helps. Always inline: GCC takes a call whose only
// effect is a prefetch for one without effect.
template <typename Element>
class Stream {
 public:
  static constexpr int64_t kLine = 64 / sizeof(Element);

  Stream(const AttentionTile& tile, const void* elements, const int64_t* slots, int64_t first_key, int64_t end_key)
      : elements_(static_cast<const Element*>(elements)),
        slot_(slots + first_key),
        end_(slots + end_key),
        row_size_(tile.num_heads * tile.head_dim) {}

  __attribute__((always_inline)) void fetch(int64_t num_lines) {
    for (int64_t i = 0; i < num_lines && slot_ != end_; ++i) {
      __builtin_prefetch(elements_ + *slot_ + offset_);
      offset_ += kLine;
      if (offset_ >= row_size_) {
        offset_ = 0;
        ++slot_;
      }
    }
  }

 private:
  const Element* elements_;
  const int64_t *slot_, *end_;
  int64_t row_size_, offset_ = 0;
};

// scores[row][key] = queries[row] . keys[key], with keys as they are stored; the stream advances by as much as is read.
template <int kCount, typename Element>
inline void score_unpacked(const AttentionTile& tile, Stream<Element>* stream) {
  const auto* keys = static_cast<const Element*>(tile.keys);
  const int64_t dim = tile.head_dim;
  for (int64_t key = tile.first_key / kLanes * kLanes; key < tile.end_key; key += kLanes) {
    const int64_t* slots = tile.slots + key;
    Floats sums[kCount];
    for (int r = 0; r < kCount; ++r) sums[r] = broadcast(0.0f);
    int64_t d = 0;
    for (; d + 8 <= dim; d += 8) {
      stream->fetch(8 * kLanes / Stream<Element>::kLine);
      add_products_8<kCount>(tile.queries + d, dim, keys + d, slots, sums);
    }
    for (; d < dim; ++d) {
      const Floats column = load_column(keys + d, slots);
      for (int r = 0; r < kCount; ++r) {
        sums[r] = multiply_add(broadcast(tile.queries[r * dim + d]), column, sums[r]);
      }
    }
    for (int r = 0; r < kCount; ++r) store(tile.scores + r * kKeyTile + key, sums[r]);
  }
}

template <typename Element>
inline void pack_keys(const AttentionTile& tile) {
  const auto* keys = static_cast<const Element*>(tile.keys);
  for (int64_t key = tile.first_key / kLanes * kLanes; key < tile.end_key; key += kLanes) {
    const int64_t* slots = tile.slots + key;
    float* packed = tile.packed_keys + key;
    int64_t d = 0;
    for (; d + 8 <= tile.head_dim; d += 8) pack_8(keys + d, slots, kKeyTile, packed + d * kKeyTile);
    for (; d < tile.head_dim; ++d) store(packed + d * kKeyTile, load_column(keys + d, slots));
  }
}

template <typename Element>
inline void pack_values(const AttentionTile& tile) {
  for (int64_t key = tile.first_key; key < tile.end_key; ++key) {
    const Element* value = static_cast<const Element*>(tile.values) + tile.slots[key];
    float* packed = tile.packed_values + key * tile.padded_dim;
    int64_t d = 0;
    for (; d + kLanes <= tile.head_dim; d += kLanes) store(packed + d, load_wide(value + d));
    for (; d < tile.padded_dim; ++d) packed[d] = d < tile.head_dim ? widen(value[d]) : 0.0f;
  }
}

// scores[row][key] = queries[row] . keys[key], for packed keys that some row of the block sees
template <int kCount>
inline void score_block(const AttentionTile& tile, int64_t first_row) {
  const float* queries = tile.queries + first_row * tile.head_dim;
  float* scores = tile.scores + first_row * kKeyTile;
  const KeyRange range = find_range(tile, first_row, kCount);
  for (int64_t key = range.first / kLanes * kLanes; key < range.end; key += kLanes) {
    Floats sums[kCount];
    for (int r = 0; r < kCount; ++r) sums[r] = broadcast(0.0f);
    const float* keys = tile.packed_keys + key;
    for (int64_t d = 0; d < tile.head_dim; ++d) {
      const Floats column = load(keys + d * kKeyTile);
      for (int r = 0; r < kCount; ++r) {
        sums[r] = multiply_add(broadcast(queries[r * tile.head_dim + d]), column, sums[r]);
      }
    }
    for (int r = 0; r < kCount; ++r) store(scores + r * kKeyTile + key, sums[r]);
  }
}

// Replaces one row's scores in `range` by weights below the row's running maximum; those it does not see become 0.
inline void weigh_row(const AttentionTile& tile, int64_t row, KeyRange range) {
  float* scores = tile.scores + row * kKeyTile;
  const int64_t start = range.first / kLanes * kLanes, end = (range.end + kLanes - 1) / kLanes * kLanes;
  for (int64_t key = start; key < tile.visible[row].first; ++key) scores[key] = -kInfinity;
  for (int64_t key = tile.visible[row].end; key < end; ++key) scores[key] = -kInfinity;
  const float before = tile.state.max[row];
  Floats largest = broadcast(before);
  for (int64_t key = start; key < end; key += kLanes) largest = larger(load(scores + key), largest);
  const float max = find_largest_lane(largest);
  const float shift = max > -kInfinity ? max : 0.0f;  // nothing visible yet: weights become 0
  Floats total = broadcast(0.0f);
  for (int64_t key = start; key < end; key += kLanes) {
    const Floats weight = compute_fused_exp(load(scores + key) - broadcast(shift));
    store(scores + key, weight);
    total = total + weight;
  }
  float decay = 1.0f;
  if (before != max) {
    float lanes[kLanes];
    store(lanes, compute_fused_exp(broadcast(before - shift)));
    decay = lanes[0];
  }
  tile.state.max[row] = max;
  tile.state.sum[row] = tile.state.sum[row] * decay + add_lanes(total);
  tile.decay[row] = decay;
}

// Where values are stored; the stream advances by as much as is read.
template <typename Element>
struct CachedValues {
  const AttentionTile& tile;
  Stream<Element>* stream;

  const Element* find(int64_t key) const { return static_cast<const Element*>(tile.values) + tile.slots[key]; }
  template <int kVectors>
  __attribute__((always_inline)) void fetch() const {
    constexpr int64_t kElements = kVectors * kLanes, kLine = Stream<Element>::kLine;
    stream->fetch((kElements + kLine - 1) / kLine);
  }
};
struct PackedValues {
  const AttentionTile& tile;

  const float* find(int64_t key) const { return tile.packed_values + key * tile.padded_dim; }
  template <int kVectors>
  void fetch() const {}
};

// output[row] = output[row] * decay[row] + sum over keys of weights[row][key] * values[key], for kWide vectors of
// output from `offset` on
template <int kCount, int kWide, typename Values>
inline void add_values_at(const AttentionTile& tile, int64_t first_row, KeyRange range, int64_t offset, Values values) {
  const int64_t stride = tile.padded_dim;
  float* outputs = tile.state.output + first_row * stride + offset;
  const float* weights = tile.scores + first_row * kKeyTile;
  Floats sums[kCount * kWide];
  for (int i = 0; i < kCount * kWide; ++i) {
    sums[i] = load(outputs + i / kWide * stride + i % kWide * kLanes) * broadcast(tile.decay[first_row + i / kWide]);
  }
  for (int64_t key = range.first; key < range.end; ++key) {
    const auto* value = values.find(key) + offset;
    values.template fetch<kWide>();
    for (int w = 0; w < kWide; ++w) {
      if (w > 0) keep_in_order();
      const Floats wide = load_wide(value + w * kLanes);
      for (int r = 0; r < kCount; ++r) {
        sums[r * kWide + w] = multiply_add(broadcast(weights[r * kKeyTile + key]), wide, sums[r * kWide + w]);
      }
    }
  }
  for (int i = 0; i < kCount * kWide; ++i) store(outputs + i / kWide * stride + i % kWide * kLanes, sums[i]);
}

template <int kCount, typename Values>
inline void add_values(const AttentionTile& tile, int64_t first_row, KeyRange range, Values values) {
  constexpr int kWide = 2 * kCount <= kBlockRows ? 2 : 1;  // few rows need both for enough independent sums
  int64_t offset = 0;
  for (; offset + kWide * kLanes <= tile.padded_dim; offset += kWide * kLanes) {
    add_values_at<kCount, kWide>(tile, first_row, range, offset, values);
  }
  if (offset < tile.padded_dim) add_values_at<kCount, 1>(tile, first_row, range, offset, values);
}

// The part of a tile that belongs to one of its heads.
template <typename Element>
inline AttentionTile get_head(const AttentionTile& tile, int64_t head) {
  AttentionTile part = tile;
  const int64_t first = head * tile.num_rows;
  part.num_heads = 1;
  part.queries += first * tile.head_dim;
  part.keys = static_cast<const Element*>(tile.keys) + head * tile.head_dim;
  part.values = static_cast<const Element*>(tile.values) + head * tile.head_dim;
  part.scores += first * kKeyTile;
  part.decay += first;
  part.state = {tile.state.max + first, tile.state.sum + first, tile.state.output + first * tile.padded_dim};
  return part;
}

template <int kCount, typename Element>
inline void attend_unpacked(const AttentionTile& tile) {
  const KeyRange range = find_range(tile, 0, kCount);
  Stream<Element> values_ahead(tile, tile.values, tile.slots, tile.first_key, tile.end_key);
  for (int64_t head = 0; head < tile.num_heads; ++head) {
    const AttentionTile part = get_head<Element>(tile, head);
    score_unpacked<kCount, Element>(part, &values_ahead);
    for (int r = 0; r < kCount; ++r) weigh_row(part, r, range);
  }
  Stream<Element> keys_ahead(tile, tile.next_keys, tile.next_slots, tile.next_first_key, tile.next_end_key);
  for (int64_t head = 0; head < tile.num_heads; ++head) {
    const AttentionTile part = get_head<Element>(tile, head);
    if (tile.head_dim == tile.padded_dim) {
      add_values<kCount>(part, 0, range, CachedValues<Element>{part, &keys_ahead});
    } else {
      pack_values<Element>(part);
      add_values<kCount>(part, 0, range, PackedValues{part});
    }
  }
}

template <typename Element>
inline void attend_packed(const AttentionTile& tile) {
  pack_keys<Element>(tile);
  pack_values<Element>(tile);
  for_each_block(tile.num_rows, [&](auto rows, int64_t first) {
    constexpr int kCount = decltype(rows)::value;
    const KeyRange range = find_range(tile, first, kCount);
    if (range.first >= range.end) return;
    score_block<kCount>(tile, first);
    for (int r = 0; r < kCount; ++r) weigh_row(tile, first + r, range);
  });
  for_each_block(tile.num_rows, [&](auto rows, int64_t first) {
    constexpr int kCount = decltype(rows)::value;
    const KeyRange range = find_range(tile, first, kCount);
    if (range.first < range.end) add_values<kCount>(tile, first, range, PackedValues{tile});
  });
}

template <typename Element>
inline void attend_tile(const AttentionTile& tile) {
  if (tile.num_rows <= kUnpackedRows) {
    visit_rest<kUnpackedRows>(tile.num_rows, 0,
                              [&](auto rows, int64_t) { attend_unpacked<decltype(rows)::value, Element>(tile); });
  } else {
    for (int64_t head = 0; head < tile.num_heads; ++head) attend_packed<Element>(get_head<Element>(tile, head));
  }
}

inline void attend_float32(const AttentionTile& tile) { attend_tile<float>(tile); }
inline void attend_bfloat16(const AttentionTile& tile) { attend_tile<uint16_t>(tile); }

}  // namespace vllm::cpu::VLLM_VARIANT
