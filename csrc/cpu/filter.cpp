// Top-k, top-p and min-p without a sort: which tokens stay is a prefix of the row's falling order (ties: lowest id
// first), so each filter is a search for the last token that stays.
//
// That token is found by buckets: one pass adds up what falls into each of a thousand, laid evenly over the distance to
// the largest logit; only the bucket that holds the end of the prefix is searched again, in finer buckets, until few
// tokens are left to sort. Sums are double and one thread's, so that nothing depends on the batch or on the threads.
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

constexpr int64_t kTile = 1024;
constexpr int64_t kSumsABucket = 4;  // neighbours of one bucket need not wait for each other
constexpr size_t kFewTokens = 32;    // sorted without further ado
constexpr int32_t kFineBuckets = 256;
constexpr float kLargestFloat = std::numeric_limits<float>::max();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The last token that stays.
struct Cut {
  float logit;
  int64_t token_id;
};

struct Settings {
  float temperature;
  int64_t top_k;
  float top_p, min_p;
};

// Adds up weights until a goal is reached.
struct Progress {
  double sum, goal;

  // Takes weights in falling order and returns which one reaches the goal, or else the last one above 0.
  template <typename GetWeight>
  int64_t find(int64_t count, GetWeight get_weight) {
    int64_t found = -1;
    double before_found = sum;
    for (int64_t i = 0; i < count; ++i) {
      const double weight = get_weight(i);
      if (weight <= 0) continue;
      found = i;
      before_found = sum;
      sum += weight;
      if (sum >= goal) break;
    }
    sum = before_found;  // what lies inside of the one found is searched again
    return found;
  }
};

// Tokens of one bucket, in rising order of id.
struct Group {
  std::vector<float> logits, weights;
  std::vector<int32_t> ids;

  void resize(size_t count) {
    logits.resize(count);
    weights.resize(count);
    ids.resize(count);
  }
  size_t size() const { return ids.size(); }
  void move(size_t from, size_t to) {
    logits[to] = logits[from];
    weights[to] = weights[from];
    ids[to] = ids[from];
  }
};

class RowFilter {
 public:
  // Sets to -inf what does not stay; leaves a row alone that is not finite.
  void filter(const Kernels& kernels, float* row, int64_t vocab_size, const Settings& settings) {
    const StretchScan seen = kernels.scan(row, vocab_size);
    if (seen.has_nan || !std::isfinite(seen.max)) return;
    kernels_ = &kernels;
    row_ = row;
    vocab_size_ = vocab_size;
    max_ = seen.max;
    temperature_ = settings.temperature;
    if (settings.min_p > 0) {
      kernels.remove_below(row, vocab_size, find_lowest(seen.max, settings.temperature, settings.min_p));
    }
    const int64_t k = std::max<int64_t>(settings.top_k, 1);
    const auto share = static_cast<double>(settings.top_p);
    if (k <= kMaxSelected && k < vocab_size) {
      keep(select_cut(k, share));
      return;
    }
    if (k < vocab_size) keep(find_cut(true, static_cast<double>(k)));
    if (share < 1) keep(find_cut(false, share));
  }

 private:
  // The smallest logit whose probability is min_p times the largest one's or more.
  static float find_lowest(float max, float temperature, float min_p) {
    const double gap = static_cast<double>(temperature) * std::log(static_cast<double>(min_p));
    const auto stays = [&](float logit) { return static_cast<double>(logit) - static_cast<double>(max) >= gap; };
    auto bound = static_cast<float>(std::max(static_cast<double>(max) + gap, -static_cast<double>(kLargestFloat)));
    while (!stays(bound) && bound < max) bound = std::nextafter(bound, kInfinity);
    while (bound > -kLargestFloat && stays(std::nextafter(bound, -kInfinity)))
      bound = std::nextafter(bound, -kInfinity);
    return bound;
  }

  void keep(const Cut& cut) {
    kernels_->remove_below(row_, cut.token_id + 1, cut.logit);
    kernels_->remove_below(row_ + cut.token_id + 1, vocab_size_ - cut.token_id - 1,
                           std::nextafter(cut.logit, kInfinity));
  }

  // Finds the end of the k first, or of those of them that reach a share below 1 of their probability.
  Cut select_cut(int64_t k, double share) {
    top_.reset(k);
    offsets_.resize(static_cast<size_t>(kTile));
    for (int64_t first = 0; first < vocab_size_; first += kTile) {
      select_top(*kernels_, row_ + first, first, std::min(kTile, vocab_size_ - first), offsets_.data(), &top_);
    }
    const std::vector<uint64_t>& order = top_.sort();
    group_.resize(order.size());
    for (size_t i = 0; i < order.size(); ++i) {
      group_.ids[i] = get_token_id(order[i]);
      group_.logits[i] = row_[group_.ids[i]];
    }
    if (share >= 1) return {group_.logits.back(), group_.ids.back()};
    weigh_group(false);
    Progress progress = {0, 0};
    for (const float weight : group_.weights) progress.goal += static_cast<double>(weight);
    progress.goal *= share;
    return walk(&progress);
  }

  // Finds the end of the smallest prefix of `goal` tokens, or of that share of the probability.
  Cut find_cut(bool counts, double goal) {
    sums_.assign(static_cast<size_t>(kSumsABucket * kNumBuckets), 0);
    float weights[kTile];
    uint32_t buckets[kTile];
    for (int64_t first = 0; first < vocab_size_; first += kTile) {
      const int64_t count = std::min(kTile, vocab_size_ - first);
      weigh(row_ + first, count, counts, weights, buckets);
      for (int64_t i = 0; i < count; ++i) {
        sums_[kSumsABucket * buckets[i] + i % kSumsABucket] += static_cast<double>(weights[i]);
      }
    }
    const auto get_sum = [&](int64_t bucket) {
      const double* sums = &sums_[static_cast<size_t>(kSumsABucket * bucket)];
      return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    };
    double total = 0;
    for (int64_t bucket = 0; bucket < kNumBuckets; ++bucket) total += get_sum(bucket);
    Progress progress = {0, counts ? std::min(goal, total) : goal * total};
    const int64_t bucket = progress.find(kNumBuckets, get_sum);
    collect(bucket);
    weigh_group(counts);
    return look_closer(&progress);
  }

  // Weights of logits, 0 for those removed, and their buckets.
  void weigh(const float* logits, int64_t count, bool counts, float* weights, uint32_t* buckets) const {
    kernels_->weigh(logits, count, max_, temperature_, weights, buckets);
    if (!counts) return;
    for (int64_t i = 0; i < count; ++i) weights[i] = logits[i] > -kInfinity ? 1.0f : 0.0f;
  }

  uint32_t find_bucket(float logit) const {
    float weight;
    uint32_t bucket;
    kernels_->weigh(&logit, 1, max_, temperature_, &weight, &bucket);
    return bucket;
  }

  // The smallest finite logit that falls into `bucket` or one of larger logits: buckets are stretches of the order.
  float find_bucket_start(int64_t bucket) const {
    uint32_t below = make_ordered(-kLargestFloat) - 1, inside = make_ordered(max_);
    while (inside - below > 1) {
      const uint32_t middle = below + (inside - below) / 2;
      (find_bucket(undo_ordered(middle)) <= bucket ? inside : below) = middle;
    }
    return undo_ordered(inside);
  }

  void collect(int64_t bucket) {
    const float low = find_bucket_start(bucket);
    const float high = bucket == 0 ? max_ : std::nextafter(find_bucket_start(bucket - 1), -kInfinity);
    offsets_.resize(static_cast<size_t>(vocab_size_));
    const int64_t found = kernels_->select_between(row_, vocab_size_, low, high, offsets_.data());
    group_.resize(static_cast<size_t>(found));
    for (size_t i = 0; i < group_.size(); ++i) {
      group_.ids[i] = offsets_[i];
      group_.logits[i] = row_[offsets_[i]];
    }
  }

  void weigh_group(bool counts) {
    buckets_.resize(group_.size());
    weigh(group_.logits.data(), static_cast<int64_t>(group_.size()), counts, group_.weights.data(), buckets_.data());
  }

  Cut look_closer(Progress* progress) {
    while (group_.size() > kFewTokens) {
      const auto [low, high] = std::minmax_element(group_.logits.begin(), group_.logits.end());
      if (*low == *high) return walk(progress);
      split(static_cast<double>(*low), static_cast<double>(*high), progress);
    }
    sort_group();
    return walk(progress);
  }

  // Keeps of the group only the finer bucket in which the goal is reached.
  void split(double low, double high, Progress* progress) {
    const double scale = (kFineBuckets - 1) / (high - low);
    double sums[kFineBuckets] = {};
    buckets_.resize(group_.size());
    for (size_t i = 0; i < group_.size(); ++i) {
      buckets_[i] = static_cast<uint32_t>((high - static_cast<double>(group_.logits[i])) * scale);
      sums[buckets_[i]] += static_cast<double>(group_.weights[i]);
    }
    const auto bucket = static_cast<uint32_t>(progress->find(kFineBuckets, [&](int64_t b) { return sums[b]; }));
    size_t count = 0;
    for (size_t i = 0; i < group_.size(); ++i) {
      if (buckets_[i] == bucket) group_.move(i, count++);
    }
    group_.resize(count);
  }

  void sort_group() {
    keys_.resize(group_.size());
    for (size_t i = 0; i < group_.size(); ++i) {
      keys_[i] = static_cast<uint64_t>(~make_ordered(group_.logits[i])) << 32 | i;  // by id among equals, as i is
    }
    std::sort(keys_.begin(), keys_.end());
    const Group before = group_;
    for (size_t i = 0; i < keys_.size(); ++i) {
      const auto from = static_cast<size_t>(keys_[i] & 0xFFFFFFFFu);
      group_.logits[i] = before.logits[from];
      group_.weights[i] = before.weights[from];
      group_.ids[i] = before.ids[from];
    }
  }

  Cut walk(Progress* progress) {
    const int64_t last = progress->find(static_cast<int64_t>(group_.size()), [&](int64_t i) {
      return static_cast<double>(group_.weights[static_cast<size_t>(i)]);
    });
    const auto place = static_cast<size_t>(last);
    return {group_.logits[place], group_.ids[place]};
  }

  const Kernels* kernels_ = nullptr;
  float* row_ = nullptr;
  int64_t vocab_size_ = 0;
  float max_ = 0, temperature_ = 1;
  TopSelector top_;
  Group group_;
  std::vector<int32_t> offsets_;
  std::vector<uint32_t> buckets_;
  std::vector<uint64_t> keys_;
  std::vector<double> sums_;
};

}  // namespace
}  // namespace vllm::cpu

int32_t vllm_filter_rows(float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size, const int64_t* rows,
                         const float* temperature, const int64_t* top_k, const float* top_p, const float* min_p,
                         int64_t num_filtered, int32_t num_threads) {
  using namespace vllm::cpu;
  for (int64_t i = 0; i < num_filtered; ++i) {
    if (rows[i] < 0 || rows[i] >= num_rows) return kIdOutOfRange;
  }
  return run_guarded([&] {
    const Kernels& kernels = get_kernels();
    const int threads = choose_threads(num_filtered * vocab_size, num_threads);
    std::vector<RowFilter> filters(static_cast<size_t>(threads));
    parallel_for(num_filtered, threads, [&](int64_t i) {
      filters[static_cast<size_t>(get_thread_index())].filter(kernels, logits + rows[i] * row_stride, vocab_size,
                                                              {temperature[i], top_k[i], top_p[i], min_p[i]});
    });
  });
}
