// The small operations between matrix products. Included once per instruction set, after stretch.h.
#include <cmath>
#include <cstdint>

namespace vllm::cpu::VLLM_VARIANT {

// Calls compute(offset, load-like function, store-like function) per vector; the last one is partial and padded with 0.
template <typename Compute>
inline void for_each_lane_group(int64_t count, Compute compute) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    compute([i](const float* p) { return load(p + i); }, [i](float* p, Floats a) { store(p + i, a); });
  }
  if (i < count) {
    const int64_t rest = count - i;
    compute([=](const float* p) { return load_tail(p + i, rest, 0.0f); },
            [=](float* p, Floats a) { store_head(p + i, rest, a); });
  }
}

inline double sum_lanes(const Doubles& sums) {
  double lanes[kLanes];
  store(lanes, sums);
  double total = 0;
  for (double lane : lanes) total += lane;
  return total;
}

inline void rms_norm(const float* x, float* residual, const float* weight, int64_t size, float eps, float* output) {
  Doubles squares = zero_doubles();
  for_each_lane_group(size, [&](auto read, auto write) {
    Floats sum = read(x);
    if (residual != nullptr) {
      sum = sum + read(residual);
      write(residual, sum);
    }
    accumulate(&squares, sum * sum);
  });
  const float* normalised = residual != nullptr ? residual : x;
  const double mean = sum_lanes(squares) / static_cast<double>(size);
  const Floats inverse = broadcast(static_cast<float>(1.0 / std::sqrt(mean + static_cast<double>(eps))));
  for_each_lane_group(size, [&](auto read, auto write) { write(output, read(normalised) * inverse * read(weight)); });
}

// Pairs (i, i + dim / 2) are rotated together; the first half of `sin` is negated.
inline void rotate(const float* x, const float* cos, const float* sin, int64_t dim, float* output) {
  const int64_t half = dim / 2;
  for_each_lane_group(half, [&](auto read, auto write) {
    const Floats first = read(x), second = read(x + half);
    write(output, first * read(cos) + second * read(sin));
    write(output + half, second * read(cos + half) + first * read(sin + half));
  });
}

// gate / (1 + exp(-gate)) * up, through exp(-|gate|), which cannot overflow.
inline void silu_and_multiply(const float* gate, const float* up, int64_t size, float* output) {
  const Floats zero = broadcast(0.0f), one = broadcast(1.0f);
  for_each_lane_group(size, [&](auto read, auto write) {
    const Floats g = read(gate);
    const Floats magnitude = larger(g, zero - g);
    const Floats power = compute_exp(zero - magnitude);
    // 1 for g >= 0, else exp(g)
    const Floats numerator = keep_at_least(one, g, zero) + (power - keep_at_least(power, g, zero));
    write(output, g * (numerator / (one + power)) * read(up));
  });
}

}  // namespace vllm::cpu::VLLM_VARIANT
