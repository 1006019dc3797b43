// The order of tokens in a row: larger logit first, lower id first among equals.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "kernels.h"

namespace vllm::cpu {

// Maps floats to integers of the same order; -0 and +0 are one number.
inline uint32_t make_ordered(float logit) {
  const float value = logit + 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits ^ ((bits & 0x80000000u) != 0 ? 0xFFFFFFFFu : 0x80000000u);
}
inline float undo_ordered(uint32_t ordered) {
  const uint32_t bits = ordered ^ ((ordered & 0x80000000u) != 0 ? 0x80000000u : 0xFFFFFFFFu);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// One token as one integer: the greater comes first.
inline uint64_t make_sort_key(float logit, int64_t token_id) {
  return static_cast<uint64_t>(make_ordered(logit)) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(token_id));
}
inline int32_t get_token_id(uint64_t sort_key) {
  return static_cast<int32_t>(0xFFFFFFFFu - static_cast<uint32_t>(sort_key));
}

// Keeps the `limit` first of the tokens pushed, in amortised constant time a token.
class TopSelector {
 public:
  void reset(int64_t limit) {
    limit_ = static_cast<size_t>(limit);
    keys_.clear();
    keys_.reserve(2 * limit_ + kSlack);
    bound_ = -std::numeric_limits<float>::infinity();
    is_bounded_ = limit == 0;
  }

  size_t limit() const { return limit_; }
  // While false every token must be pushed; once true only logits above bound() can still matter, provided that
  // tokens come in rising order of id.
  bool is_bounded() const { return is_bounded_; }
  float bound() const { return bound_; }

  void push(float logit, int64_t token_id) {
    keys_.push_back(make_sort_key(logit, token_id));
    if (keys_.size() == limit_ + (is_bounded_ ? limit_ + kSlack : 0)) shrink();
  }

  void merge(const TopSelector& other) {
    keys_.insert(keys_.end(), other.keys_.begin(), other.keys_.end());
    if (keys_.size() > limit_) shrink();
  }

  const std::vector<uint64_t>& sort() {
    if (keys_.size() > limit_) shrink();
    std::sort(keys_.begin(), keys_.end(), std::greater<>());
    return keys_;
  }

 private:
  static constexpr size_t kSlack = 32;

  void shrink() {
    const auto last = keys_.begin() + static_cast<std::ptrdiff_t>(limit_ - 1);
    std::nth_element(keys_.begin(), last, keys_.end(), std::greater<>());
    keys_.resize(limit_);
    bound_ = undo_ordered(static_cast<uint32_t>(keys_[limit_ - 1] >> 32));
    is_bounded_ = true;
  }

  size_t limit_ = 0;
  bool is_bounded_ = false;
  float bound_ = 0;
  std::vector<uint64_t> keys_;
};

inline constexpr int64_t kMaxSelected = 1024;  // above, sorting or bucketing the row beats selecting

// Pushes the tokens [first, first + count) of a row that may be among the first; `offsets` has room for `count`.
inline void select_top(const Kernels& kernels, const float* tile, int64_t first, int64_t count, int32_t* offsets,
                       TopSelector* top) {
  int64_t i = 0;
  for (; i < count && !top->is_bounded(); ++i) top->push(tile[i], first + i);
  // Short steps at first, while the bound still rises quickly.
  for (int64_t step = 256; i < count; i += step, step = count) {
    step = std::min(step, count - i);
    const int64_t found = kernels.select_greater(tile + i, step, top->bound(), offsets);
    for (int64_t j = 0; j < found; ++j) {
      const int64_t offset = i + offsets[j];
      if (tile[offset] > top->bound()) top->push(tile[offset], first + offset);
    }
  }
}

// Orders a whole row by radix: three stable passes over (inverted value, id) pairs.
class RowSorter {
 public:
  // The row's (inverted value, id) pairs, first to last; valid until the next call.
  const std::vector<uint64_t>& sort(const float* logits, int64_t vocab_size) {
    constexpr int kDigitBits = 11, kNumPasses = 3;
    constexpr uint32_t kDigits = 1u << kDigitBits;
    for (auto& pairs : pairs_) pairs.resize(static_cast<size_t>(vocab_size));
    std::vector<uint32_t> counts(kNumPasses * kDigits, 0);
    for (int64_t id = 0; id < vocab_size; ++id) {
      const uint32_t value = ~make_ordered(logits[id]);
      pairs_[0][static_cast<size_t>(id)] = static_cast<uint64_t>(value) << 32 | static_cast<uint32_t>(id);
      for (int pass = 0; pass < kNumPasses; ++pass) {
        ++counts[static_cast<size_t>(pass) * kDigits + (value >> (pass * kDigitBits) & (kDigits - 1))];
      }
    }
    for (int pass = 0; pass < kNumPasses; ++pass) {
      uint32_t* starts = &counts[static_cast<size_t>(pass) * kDigits];
      uint32_t total = 0;
      for (uint32_t digit = 0; digit < kDigits; ++digit) {
        const uint32_t count = starts[digit];
        starts[digit] = total;
        total += count;
      }
      const std::vector<uint64_t>& from = pairs_[pass % 2];
      std::vector<uint64_t>& to = pairs_[(pass + 1) % 2];
      for (const uint64_t pair : from) to[starts[pair >> (32 + pass * kDigitBits) & (kDigits - 1)]++] = pair;
    }
    return pairs_[kNumPasses % 2];
  }

 private:
  std::vector<uint64_t> pairs_[2];  // value in the high half, id in the low one
};

}  // namespace vllm::cpu
