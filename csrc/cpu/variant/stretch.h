// Loops over one stretch of logits: what scoring is made of. Included once per instruction set, after its simd header.
#include <cstdint>
#include <limits>

namespace vllm::cpu::VLLM_VARIANT {

constexpr int64_t kLanes = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Loads the last, partial vector of a stretch; the lanes past its end hold `fill`.
inline Floats load_tail(const float* logits, int64_t count, float fill) {
  float padded[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) padded[i] = i < count ? logits[i] : fill;
  return load(padded);
}

inline void store_head(float* p, int64_t count, Floats a) {
  float lanes[kLanes];
  store(lanes, a);
  for (int64_t i = 0; i < count; ++i) p[i] = lanes[i];
}

// Calls visit(vector, offset) along the stretch; the last vector is padded with `fill`.
template <typename Visit>
inline void for_each_vector(const float* logits, int64_t count, float fill, Visit visit) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) visit(load(logits + i), i);
  if (i < count) visit(load_tail(logits + i, count - i, fill), i);
}

inline StretchScan scan(const float* logits, int64_t count) {
  Floats largest = broadcast(-kInfinity);
  uint32_t nan_lanes = 0;
  for_each_vector(logits, count, -kInfinity, [&](Floats x, int64_t) {
    largest = larger(x, largest);  // a NaN on the left gives the right one
    nan_lanes |= is_nan(x);
  });
  float lanes[kLanes];
  store(lanes, largest);
  float max = lanes[0];
  for (int64_t i = 1; i < kLanes; ++i) max = lanes[i] > max ? lanes[i] : max;
  return {max, nan_lanes != 0};
}

// exp(x) for x <= 0, to 1.3 half-ulps; 0 below -87.33 (where the result would be denormal). What is added to a product
// is added by add(a, b, c) = a * b + c, which may round once or twice.
// x = n ln 2 + r with |r| <= ln 2 / 2; the polynomial is the Chebyshev fit of (exp(r) - 1 - r) / r^2.
template <typename Add>
__attribute__((always_inline)) inline Floats compute_exp_by(Floats x, Add add) {
  constexpr float kLog2e = 1.44269504f;
  constexpr float kLn2High = 0.693145751953125f;  // 15 bits: n * kLn2High is exact
  constexpr float kLn2Low = 1.428606765330187e-06f;
  const Floats shifter = broadcast(12582912.0f);  // 1.5 * 2^23: what is added to it is rounded to a whole number
  const Floats shifted = x * broadcast(kLog2e) + shifter;
  const Floats n = shifted - shifter;
  const Floats r = add(n, broadcast(-kLn2Low), add(n, broadcast(-kLn2High), x));
  Floats p = broadcast(1.3926184e-03f);
  p = add(p, r, broadcast(8.363179e-03f));
  p = add(p, r, broadcast(4.1666556e-02f));
  p = add(p, r, broadcast(1.6666576e-01f));
  p = add(p, r, broadcast(5.0e-01f));
  p = add(p * r, r, r + broadcast(1.0f));
  // n stands in the low bits of `shifted`; p is 1 or more where n is the lowest, so its exponent has room for n.
  const Floats scaled = as_floats(as_words(p) + shift_left<23>(as_words(shifted)));
  return keep_at_least(scaled, x, broadcast(-87.33f));
}

// In every instruction set to the same bits.
inline Floats compute_exp(Floats x) {
  return compute_exp_by(x, [](Floats a, Floats b, Floats c) { return a * b + c; });
}
// With the instruction set's own multiply-add.
inline Floats compute_fused_exp(Floats x) {
  return compute_exp_by(x, [](Floats a, Floats b, Floats c) { return multiply_add(a, b, c); });
}

// Four exponentials are added as float32 before they enter the double sum: their error stays below 2 half-ulps.
inline double sum_exp(const float* logits, int64_t count, float max) {
  const Floats shift = broadcast(max);
  Doubles sum = zero_doubles();
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    const Floats a = compute_exp(load(logits + i) - shift);
    const Floats b = compute_exp(load(logits + i + kLanes) - shift);
    const Floats c = compute_exp(load(logits + i + 2 * kLanes) - shift);
    const Floats d = compute_exp(load(logits + i + 3 * kLanes) - shift);
    accumulate(&sum, (a + b) + (c + d));
  }
  for_each_vector(logits + i, count - i, -kInfinity,
                  [&](Floats x, int64_t) { accumulate(&sum, compute_exp(x - shift)); });
  double lanes[kLanes];
  store(lanes, sum);
  double total = 0;
  for (double lane : lanes) total += lane;
  return total;
}

inline int64_t count_bits(uint32_t bits) { return __builtin_popcount(bits); }

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline int64_t count_greater(const float* logits, int64_t count, float bound) {
  const Floats bounds = broadcast(bound);
  int64_t total = 0;
  for_each_vector(logits, count, kNan, [&](Floats x, int64_t) { total += count_bits(greater(x, bounds)); });
  return total;
}

inline int64_t count_at_least(const float* logits, int64_t count, float bound) {
  const Floats bounds = broadcast(bound);
  int64_t total = 0;
  for_each_vector(logits, count, kNan, [&](Floats x, int64_t) { total += count_bits(at_least(x, bounds)); });
  return total;
}

inline int64_t find_equal(const float* logits, int64_t count, float value) {
  const Floats values = broadcast(value);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats x = i + kLanes <= count ? load(logits + i) : load_tail(logits + i, count - i, kNan);
    const uint32_t hits = equal(x, values);
    if (hits != 0) return i + __builtin_ctz(hits);
  }
  return count;
}

inline int64_t select_greater(const float* logits, int64_t count, float bound, int32_t* offsets) {
  const Floats bounds = broadcast(bound);
  int64_t found = 0;
  for_each_vector(logits, count, kNan, [&](Floats x, int64_t offset) {
    for (uint32_t hits = greater(x, bounds); hits != 0; hits &= hits - 1) {
      offsets[found++] = static_cast<int32_t>(offset) + __builtin_ctz(hits);
    }
  });
  return found;
}

inline int64_t select_between(const float* logits, int64_t count, float low, float high, int32_t* offsets) {
  const Floats lows = broadcast(low), highs = broadcast(high);
  int64_t found = 0;
  for_each_vector(logits, count, kNan, [&](Floats x, int64_t offset) {
    for (uint32_t hits = at_least(x, lows) & at_least(highs, x); hits != 0; hits &= hits - 1) {
      offsets[found++] = static_cast<int32_t>(offset) + __builtin_ctz(hits);
    }
  });
  return found;
}

inline void weigh(const float* logits, int64_t count, float max, float temperature, float* weights, uint32_t* buckets) {
  constexpr float kPerUnit = kNumBuckets / 32;
  const Floats shift = broadcast(max), divisor = broadcast(temperature);
  const Floats farthest = broadcast((1 - kNumBuckets) / kPerUnit), scale = broadcast(-kPerUnit);
  const auto compute = [&](Floats x, float* to_weights, uint32_t* to_buckets) {
    const Floats gap = (x - shift) / divisor;
    store(to_weights, compute_exp(gap));
    store_words(to_buckets, convert_rounded(larger(gap, farthest) * scale));
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) compute(load(logits + i), weights + i, buckets + i);
  if (i == count) return;
  float last_weights[kLanes];
  uint32_t last_buckets[kLanes];
  compute(load_tail(logits + i, count - i, max), last_weights, last_buckets);
  for (int64_t j = 0; i < count; ++i, ++j) {
    weights[i] = last_weights[j];
    buckets[i] = last_buckets[j];
  }
}

inline void remove_below(float* logits, int64_t count, float bound) {
  for (int64_t i = 0; i < count; ++i) logits[i] = logits[i] < bound ? -kInfinity : logits[i];
}

inline void subtract(const float* logits, int64_t count, double offset, float* values) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(values + i, subtract_double(load(logits + i), offset));
  for (; i < count; ++i) values[i] = static_cast<float>(static_cast<double>(logits[i]) - offset);
}

}  // namespace vllm::cpu::VLLM_VARIANT
