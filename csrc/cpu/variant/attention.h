// One tile of keys met by the query rows of one unit of attention. Included once per instruction set, after stretch.h.
//
// Every row's arithmetic is its own and in one fixed order: a dot product runs over d = 0, 1, ...; a sum of values runs
// over keys in rising order; a hidden key adds an exact zero. So a row's result does not depend on the rows beside it.
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

// scores[row][key] = queries[row] . keys[key]
template <int kCount>
inline void score_block(const AttentionTile& tile, int64_t first_row, int64_t num_vectors) {
  const float* queries = tile.queries + first_row * tile.head_dim;
  for (int64_t v = 0; v < num_vectors; ++v) {
    Floats sums[kCount];
    for (int r = 0; r < kCount; ++r) sums[r] = broadcast(0.0f);
    const float* keys = tile.packed_keys + v * kLanes;
    for (int64_t d = 0; d < tile.head_dim; ++d) {
      const Floats key = load(keys + d * kKeyTile);
      for (int r = 0; r < kCount; ++r) {
        sums[r] = multiply_add(broadcast(queries[r * tile.head_dim + d]), key, sums[r]);
      }
    }
    for (int r = 0; r < kCount; ++r) store(tile.scores + (first_row + r) * kKeyTile + v * kLanes, sums[r]);
  }
}

// output[row] = output[row] * decay[row] + sum over keys of weights[row][key] * values[key]
template <int kCount>
inline void add_values_block(const AttentionTile& tile, int64_t first_row) {
  const int64_t stride = tile.padded_dim;
  float* outputs = tile.state.output + first_row * stride;
  const float* weights = tile.scores + first_row * kKeyTile;
  for (int64_t offset = 0; offset < stride; offset += kLanes) {
    Floats sums[kCount];
    for (int r = 0; r < kCount; ++r) {
      sums[r] = load(outputs + r * stride + offset) * broadcast(tile.decay[first_row + r]);
    }
    for (int64_t key = tile.first_key; key < tile.end_key; ++key) {
      const Floats value = load(tile.values[key] + offset);
      for (int r = 0; r < kCount; ++r) {
        sums[r] = multiply_add(broadcast(weights[r * kKeyTile + key]), value, sums[r]);
      }
    }
    for (int r = 0; r < kCount; ++r) store(outputs + r * stride + offset, sums[r]);
  }
}

inline float find_max(const float* scores, int64_t num_vectors) {
  Floats largest = load(scores);
  for (int64_t v = 1; v < num_vectors; ++v) largest = larger(load(scores + v * kLanes), largest);
  float lanes[kLanes];
  store(lanes, largest);
  float max = lanes[0];
  for (int64_t i = 1; i < kLanes; ++i) max = lanes[i] > max ? lanes[i] : max;
  return max;
}

// Turns one row's scores into weights below the row's running maximum.
inline void weigh_row(const AttentionTile& tile, int64_t row, int64_t num_vectors) {
  float* scores = tile.scores + row * kKeyTile;
  for (int64_t key = 0; key < tile.visible[row].first; ++key) scores[key] = -kInfinity;
  for (int64_t key = tile.visible[row].end; key < num_vectors * kLanes; ++key) scores[key] = -kInfinity;
  const float before = tile.state.max[row];
  const float seen = find_max(scores, num_vectors);
  const float max = seen > before ? seen : before;
  const float shift = max > -kInfinity ? max : 0.0f;  // nothing visible yet: weights and decay become 0
  Floats total = broadcast(0.0f);
  for (int64_t v = 0; v < num_vectors; ++v) {
    const Floats weight = compute_exp(load(scores + v * kLanes) - broadcast(shift));
    store(scores + v * kLanes, weight);
    total = total + weight;
  }
  float lanes[kLanes];
  store(lanes, total);
  float sum = 0;
  for (float lane : lanes) sum += lane;
  float decay = 1.0f;
  if (before != max) {
    store(lanes, compute_exp(broadcast(before - shift)));
    decay = lanes[0];
  }
  tile.state.max[row] = max;
  tile.state.sum[row] = tile.state.sum[row] * decay + sum;
  tile.decay[row] = decay;
}

inline void attend_tile(const AttentionTile& tile) {
  const int64_t num_vectors = (tile.end_key + kLanes - 1) / kLanes;
  transpose(tile.keys, num_vectors * kLanes, tile.head_dim, kKeyTile, tile.packed_keys);
  for_each_block(tile.num_rows,
                 [&](auto rows, int64_t first) { score_block<decltype(rows)::value>(tile, first, num_vectors); });
  for (int64_t row = 0; row < tile.num_rows; ++row) weigh_row(tile, row, num_vectors);
  for_each_block(tile.num_rows,
                 [&](auto rows, int64_t first) { add_values_block<decltype(rows)::value>(tile, first); });
}

}  // namespace vllm::cpu::VLLM_VARIANT
