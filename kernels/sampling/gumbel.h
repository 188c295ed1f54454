// The noise of draws, as noise.py defines it, and the token with the largest score: logit / temperature + noise.
#pragma once
#include "sampling/rows.h"

namespace sampling {

// -- noise --------------------------------------------------------------------------------------------------------

inline uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

struct RowKey {
  uint32_t a, b, c, d;
  RowKey(int64_t seed, int64_t position) {
    constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15u;
    uint64_t first = mixed(mixed((uint64_t)seed + GAMMA) + ((uint64_t)position + 1) * GAMMA);
    uint64_t second = mixed(first + GAMMA);
    a = (uint32_t)first, b = (uint32_t)(first >> 32), c = (uint32_t)second, d = (uint32_t)(second >> 32);
  }
};

template <typename U>  // uint32_t, or a vector of them
inline U noise_word(U token_id, uint32_t a, uint32_t b) {
  U h = token_id + a;
  h = (h ^ (h >> 17)) * 0xED5AD4BBu;
  h = ((h ^ (h >> 11)) + b) * 0xAC4C1B51u;
  h = (h ^ (h >> 15)) * 0x31848BABu;
  return h ^ (h >> 14);
}

inline double natural_log(double x) {  // of a normal positive number: fdlibm's, as in musl's log.c
  uint64_t bits;
  memcpy(&bits, &x, 8);
  uint32_t high = (uint32_t)(bits >> 32) + (0x3FF00000 - 0x3FE6A09E);
  double exponent = (double)((int32_t)(high >> 20) - 0x3FF);
  high = (high & 0xFFFFF) + 0x3FE6A09E;
  bits = ((uint64_t)high << 32) | (uint32_t)bits;
  memcpy(&x, &bits, 8);
  double f = x - 1.0, half_square = 0.5 * f * f, s = f / (2.0 + f), z = s * s, w = z * z;
  double even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
  double odd = z * (6.666666666666735130e-01 +
                    w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  return s * (half_square + (odd + even)) + exponent * 1.90821492927058770002e-10 - half_square + f +
         exponent * 6.93147180369123816490e-01;
}

inline double gumbel_noise(const RowKey& key, uint32_t token_id) {
  uint64_t k = ((uint64_t)noise_word(token_id, key.a, key.b) << 20) | (noise_word(token_id, key.c, key.d) >> 12);
  return -natural_log(-natural_log(1.0 - ((double)k + 0.5) * 0x1p-52));
}

// -- scores -------------------------------------------------------------------------------------------------------

struct Score {  // the exact sum of two doubles, high the nearest double
  double high = -INFINITY, low = 0;
  Score() {}
  Score(double x, double y) {
    high = x + y;
    double back = high - x;
    low = (x - (high - back)) + (y - back);
  }
  bool operator>(const Score& other) const { return high > other.high || (high == other.high && low > other.low); }
};

// Finds the token with the largest score, the first of equal ones, among those it is shown.
//
// Only a token that may win gets a logarithm. Its noise g is at most -log(v), so it loses if v * exp(best - y) > e, where
// best is the largest score so far, and y the largest logit / temperature. The noise of that largest logit is above
// -3.7, which bounds the best score before any is known. The margin covers the errors of e in fp32.
template <typename T>
struct Contest {
  const Row<T>& row;
  RowKey key;
  int64_t first_id;  // token id of the row's first logit
  double largest;    // scaled logit
  int64_t token = 0;
  Score best;
  float bar = BAR * 0.0247f;

  static constexpr float BAR = 0x1p-24f / 1.0001f;  // the unit of v, as it is compared

  Contest(const Row<T>& row, const RowKey& key, int64_t first_id = 0)
      : row(row), key(key), first_id(first_id), largest((double)row.largest / (double)row.temperature) {}

  void show(int64_t i, const Lanes& e) {  // e: 0 for tokens that must not win
    for (int u = 0; u < PARTS; u++) {
      Words ids = (Words)(positions() + (int32_t)(first_id + i + u * W));
      Floats v = __builtin_convertvector((Ints)(noise_word(ids, key.a, key.b) >> 8), Floats);
      uint32_t able = bits(v * splat(bar) <= e.part[u]);
      for (; able; able &= able - 1) {
        int lane = __builtin_ctz(able);
        float chance = e.part[u][lane];
        if (chance > 0 && v[lane] * bar <= chance) enter(i + u * W + lane);  // the bar may have risen in this loop
      }
    }
  }

  void enter(int64_t i) {
    double y = (double)row.logit_at(i) / (double)row.temperature;
    double g = gumbel_noise(key, (uint32_t)(first_id + i));
    Score score(y, g);
    if (!(score > best)) return;
    best = score;
    token = i;
    bar = std::max(bar, BAR * (float)std::exp((y - largest) + g));
  }
};

}  // namespace sampling
