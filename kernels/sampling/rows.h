// Rows of logits and their log-probabilities. The results of a row depend on that row and its settings alone: all
// processors add in sixteen lanes and blocks of BLOCK tokens, in one order, and a row is never divided among threads.
//
// Of a row with logits x and temperature t: z = (x - largest x) * (1 / t), e = exp(z), and the log-probability is
// z - log(sum of e). Letters: V vocabulary.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "machine/simd.h"

namespace sampling {

using namespace simd;

constexpr int LANES = 16, PARTS = LANES / W;
constexpr int64_t BLOCK = 256;  // tokens whose e are added in fp32; sums of blocks are added in double
constexpr int64_t SPAN = 1024;  // tokens of LANES groups; the largest logit of each group is kept

struct Lanes {
  Floats part[PARTS];
};

template <typename Function>
inline Lanes lanes(Function function) {
  Lanes r;
#pragma GCC unroll 4
  for (int u = 0; u < PARTS; u++) r.part[u] = function(u);
  return r;
}

template <typename T>
inline Lanes read(const T* x, int64_t start, int64_t end) {  // -inf after the end
  if (start + LANES <= end) return lanes([&](int u) { return load(x + start + u * W); });
  float padded[LANES];
  for (int i = 0; i < LANES; i++) padded[i] = start + i < end ? scalar(x[start + i]) : -INFINITY;
  return lanes([&](int u) { return load(padded + u * W); });
}

template <typename T>
inline void write(T* to, int64_t start, int64_t end, const Lanes& v) {
  T padded[LANES];
  bool fits = start + LANES <= end;
  T* out = fits ? to + start : padded;
  for (int u = 0; u < PARTS; u++) store(out + u * W, v.part[u]);
  if (!fits) std::copy(padded, padded + (end - start), to + start);
}

inline float fold(const Lanes& v) {  // the lanes' sum, by halves
  float a[LANES];
  for (int u = 0; u < PARTS; u++) store(a + u * W, v.part[u]);
  for (int n = LANES / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) a[i] += a[i + n];
  return a[0];
}

inline Lanes zeros() {
  return lanes([](int) { return splat(0.0f); });
}

inline Ints positions() {  // 0, 1, 2, ... in the lanes of one part
  Ints r;
  for (int i = 0; i < W; i++) r[i] = i;
  return r;
}

// A row of logits, without the tokens that a mask (a bit each, lowest first) leaves out.
template <typename T>
struct Row {
  const T* x;
  int64_t V;
  float temperature, inverse;  // 1 / temperature
  const uint16_t* allowed;
  float largest = 0, log_sum = 0;

  Row(const void* logits, int64_t V, float temperature, const uint16_t* allowed = nullptr)
      : x(static_cast<const T*>(logits)), V(V), temperature(temperature), inverse(1.0f / temperature),
        allowed(allowed) {}

  Lanes logits(int64_t i) const {
    Lanes v = read(x, i, V);
    if (!allowed) return v;
    int32_t bits = allowed[i / LANES];
    return lanes([&](int u) {
      Ints left = ((Ints{} + (bits >> (u * W))) >> positions()) & 1;
      return select(left != 0, v.part[u], splat(-INFINITY));
    });
  }
  float logit_at(int64_t i) const {
    return allowed && !(allowed[i / LANES] >> (i % LANES) & 1) ? -INFINITY : scalar(x[i]);
  }
  Lanes scaled(const Lanes& logits) const {
    return lanes([&](int u) { return (logits.part[u] - splat(largest)) * splat(inverse); });
  }
  float scaled_at(int64_t i) const { return (scalar(x[i]) - largest) * inverse; }
  float logprob(int64_t i) const { return scaled_at(i) - log_sum; }

  void find_largest(std::vector<float>* groups) {  // groups: gets the largest logit of each, if wanted
    float found = -INFINITY;
    for (int64_t start = 0; start < V; start += SPAN) {
      Lanes top = lanes([](int) { return splat(-INFINITY); });
      for (int64_t i = start, end = std::min(start + SPAN, V); i < end; i += LANES) {
        Lanes v = logits(i);
        top = lanes([&](int u) { return larger(v.part[u], top.part[u]); });
      }
      float tops[LANES];
      for (int u = 0; u < PARTS; u++) store(tops + u * W, top.part[u]);
      for (float one : tops) found = one > found ? one : found;
      if (groups) groups->insert(groups->end(), tops, tops + LANES);
    }
    largest = found;
  }

  // Adds e in blocks; calls visit(i, e) for each LANES tokens, and block(sum) for each block.
  template <typename Visit, typename Block>
  void add(Visit visit, Block block) const {
    for (int64_t start = 0; start < V; start += BLOCK) {
      Lanes added = zeros();
      for (int64_t i = start, end = std::min(start + BLOCK, V); i < end; i += LANES) {
        Lanes z = scaled(logits(i));
        Lanes e = lanes([&](int u) { return exp_nonpositive(z.part[u]); });
        visit(i, e);
        added = lanes([&](int u) { return added.part[u] + e.part[u]; });
      }
      block(fold(added));
    }
  }

  // Sums e and computes `log_sum`; NaN where a logit is NaN or +inf, or all are -inf.
  template <typename Visit>
  double sum(Visit visit) {
    double total = 0;
    add(visit, [&](float block) { total += block; });
    log_sum = (float)std::log(total);
    return total;
  }
  void normalise() {
    find_largest(nullptr);
    sum([](int64_t, const Lanes&) {});
  }
};

}  // namespace sampling
