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

// 1 / (1 + exp(-x)), through exp(-|x|), which cannot overflow.
inline Floats compute_sigmoid(Floats x) {
  const Floats zero = broadcast(0.0f), one = broadcast(1.0f);
  const Floats magnitude = larger(x, zero - x);
  const Floats power = compute_exp(zero - magnitude);
  // 1 for x >= 0, else exp(x)
  const Floats numerator = keep_at_least(one, x, zero) + (power - keep_at_least(power, x, zero));
  return numerator / (one + power);
}

struct Silu {
  Floats operator()(Floats x) const { return x * compute_sigmoid(x); }
};

// x times the normal distribution's share below x: 1 - q or, below 0, q = erfc(|x| / sqrt 2) / 2. That is exp(-x^2 / 2)
// times a polynomial in t = 1 / (1 + 0.4 |x| / sqrt 2), a least-squares fit by relative error, to 1.3e-6.
struct Gelu {
  Floats operator()(Floats x) const {
    const Floats zero = broadcast(0.0f), one = broadcast(1.0f);
    const Floats z = larger(x, zero - x) * broadcast(0.707106781f);
    const Floats t = one / (one + broadcast(0.4f) * z);
    constexpr float kCoefficients[] = {0.0251713014f, -0.0916225789f, 0.0848443119f, -0.00308384922f, 0.0708632741f,
                                       0.0842271288f, 0.103928214f,   0.112834319f,  0.112837941f};
    Floats sum = broadcast(kCoefficients[0]);
    for (int i = 1; i < 9; ++i) sum = sum * t + broadcast(kCoefficients[i]);
    const Floats q = sum * t * compute_exp(zero - z * z);
    return x * (keep_at_least(one - q, x, zero) + (q - keep_at_least(q, x, zero)));
  }
};

// x * (1 + tanh(u)) / 2 = x * sigmoid(2 u) with u = sqrt(2 / pi) * (x + 0.044715 x^3).
struct GeluTanh {
  Floats operator()(Floats x) const {
    const Floats cubic = broadcast(0.044715f) * x * x * x;
    return x * compute_sigmoid(broadcast(1.59576912f) * (x + cubic));
  }
};

struct Relu {
  Floats operator()(Floats x) const { return larger(broadcast(0.0f), x); }  // in this order NaN stays NaN
};

// output = activation(x) or, where `up` is not null, activation(x) * up.
template <typename Activation>
inline void activate(const float* x, const float* up, int64_t size, float* output) {
  const Activation compute;
  if (up == nullptr) {
    for_each_lane_group(size, [&](auto read, auto write) { write(output, compute(read(x))); });
  } else {
    for_each_lane_group(size, [&](auto read, auto write) { write(output, compute(read(x)) * read(up)); });
  }
}

}  // namespace vllm::cpu::VLLM_VARIANT
