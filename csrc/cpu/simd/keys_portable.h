// How attention reads keys and values, and what it sums over lanes.
#pragma once

#include "../widen.h"
#include "portable.h"

namespace vllm::cpu::portable {

// Rows of a tile, at most, that read keys as they are stored in the cache, without a packed copy.
constexpr int kUnpackedRows = 3;

inline Floats load_wide(const float* p) { return load(p); }
inline Floats load_wide(const uint16_t* p) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = widen(p[i]);
  return load(lanes);
}

// sums[r] += queries[r][i] * element i of each of 16 keys, for i = 0, 1, ... 7
template <int kCount, typename Element>
inline void add_products_8(const float* queries, int64_t stride, const Element* keys, const int64_t* slots,
                           Floats sums[kCount]) {
  for (int i = 0; i < 8; ++i) {
    float lanes[16];
    for (int lane = 0; lane < 16; ++lane) lanes[lane] = widen(keys[slots[lane] + i]);
    const Floats column = load(lanes);
    for (int r = 0; r < kCount; ++r) sums[r] = multiply_add(broadcast(queries[r * stride + i]), column, sums[r]);
  }
}

// packed[i * stride + key] = element i of each of 16 keys, for i below 8
template <typename Element>
inline void pack_8(const Element* keys, const int64_t* slots, int64_t stride, float* packed) {
  for (int key = 0; key < 16; ++key) {
    for (int i = 0; i < 8; ++i) packed[i * stride + key] = widen(keys[slots[key] + i]);
  }
}

inline float find_largest_lane(Floats a) {
  float largest = a.part[0][0];
  for (int i = 1; i < 16; ++i) largest = a.part[i / 4][i % 4] > largest ? a.part[i / 4][i % 4] : largest;
  return largest;
}
// Lane i is added to lane i + 8, then to i + 4, i + 2, i + 1.
inline float add_lanes(Floats a) {
  const Float4 four = (a.part[0] + a.part[2]) + (a.part[1] + a.part[3]);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

}  // namespace vllm::cpu::portable
