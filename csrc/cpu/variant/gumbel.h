// Philox4x32-10 and the Gumbel-max draw. Included once per instruction set, after stretch.h.
#include <cmath>
#include <cstdint>

namespace vllm::cpu::VLLM_VARIANT {

constexpr int64_t kGroup = 64;  // tokens of one vector of counters

// Writes the random words of tokens [first, first + 64). Counter: (token / 4, position low, position high, 0); the word
// of a token is output[token % 4]. Constants: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
inline void philox(int64_t first, const PhiloxKey& key, uint32_t* bits) {
  Words x[4] = {count_up() + broadcast_word(static_cast<uint32_t>(first / 4)), broadcast_word(key.position_low),
                broadcast_word(key.position_high), broadcast_word(0)};
  uint32_t round_key[2] = {key.seed_low, key.seed_high};
  for (int round = 0; round < 10; ++round) {
    Words high[2], low[2];
    multiply_wide(x[0], 0xD2511F53u, &high[0], &low[0]);
    multiply_wide(x[2], 0xCD9E8D57u, &high[1], &low[1]);
    x[0] = high[1] ^ x[1] ^ broadcast_word(round_key[0]);
    x[1] = low[1];
    x[2] = high[0] ^ x[3] ^ broadcast_word(round_key[1]);
    x[3] = low[0];
    round_key[0] += 0x9E3779B9u;
    round_key[1] += 0xBB67AE85u;
  }
  store_interleaved(bits, x);
}

// -log(-log1p(-v)) with v = (bits + 0.5) * 2^-32 rounded to float32 and kept below 1; computed in double and rounded
// once, so that any libm worth its name, and torch, gives the same float.
inline float compute_gumbel(uint32_t bits) {
  constexpr float kBelowOne = 1.0f - 0x1p-24f;
  const float rounded = static_cast<float>((static_cast<double>(bits) + 0.5) * 0x1p-32);
  const double v = rounded < kBelowOne ? rounded : kBelowOne;
  return static_cast<float>(-std::log(-std::log1p(-v)));
}

// An upper bound of the noise that costs no logarithm: noise <= -log(v), and the bits of a float, read as an integer,
// are its log2 from below. 1e-3 covers the roundings; the bound is at most 0.07 too high for small v.
inline Floats bound_gumbel(Words bits) {
  constexpr float kLn2 = 0.69314718f;
  const Floats v = convert_signed(shift_right<1>(bits)) * broadcast(0x1p-31f);
  const Floats log2_from_below = convert_signed(as_words(v));
  return broadcast(127.0f * kLn2 + 1e-3f) - log2_from_below * broadcast(kLn2 * 0x1p-23f);
}

// No group that fails this holds a winner, so its random words need not be made: most groups of a filtered row.
inline bool may_win(const float* logits, float best) {
  constexpr float kMostNoise = 22.875f;  // that of bits 0 is 22.873857
  const Floats most = broadcast(kMostNoise), bests = broadcast(best);
  uint32_t hits = 0;
  for (int64_t i = 0; i < kGroup; i += kLanes) hits |= greater(load(logits + i) + most, bests);
  return hits != 0;
}

// The noise is computed only where it could win: about log(vocabulary) times a row instead of once a token.
inline void draw_group(const float* logits, int64_t first, const uint32_t* bits, DrawState* state) {
  for (int64_t i = 0; i < kGroup; i += kLanes) {
    const Floats reach = load(logits + i) + bound_gumbel(load_words(bits + i));
    for (uint32_t hits = greater(reach, broadcast(state->best)); hits != 0; hits &= hits - 1) {
      const int64_t lane = i + __builtin_ctz(hits);
      const float noisy = logits[lane] + compute_gumbel(bits[lane]);
      if (noisy > state->best) *state = {noisy, static_cast<int32_t>(first + lane)};
    }
  }
}

inline void draw(const float* logits, int64_t first, int64_t end, const PhiloxKey& key, DrawState* state) {
  uint32_t bits[kGroup];
  for (; first + kGroup <= end; first += kGroup) {
    if (!may_win(logits + first, state->best)) continue;
    philox(first, key, bits);
    draw_group(logits + first, first, bits, state);
  }
  if (first < end) {
    float padded[kGroup];
    for (int64_t i = 0; i < kGroup; ++i) padded[i] = first + i < end ? logits[first + i] : -kInfinity;
    philox(first, key, bits);
    draw_group(padded, first, bits, state);
  }
}

}  // namespace vllm::cpu::VLLM_VARIANT
