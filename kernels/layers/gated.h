// silu(gate) * up: each element depends on its two inputs alone. silu is rounded to the type of the inputs before the
// product, as two operations would round it.
#pragma once
#include "machine/simd.h"

namespace gated {

using namespace simd;

// T: the type of the inputs; gate and up hold values of that type, in fp32 lanes.
template <typename T>
static inline Floats product(Floats gate, Floats up) {
  Floats small = exp_nonpositive(gate < splat(0.0f) ? gate : -gate);  // exp(-|gate|): never overflows
  Floats silu = gate * (gate < splat(0.0f) ? small : splat(1.0f)) / (splat(1.0f) + small);
  return rounded(silu, T()) * up;
}

template <typename T>
void multiply(const T* gate, const T* up, T* y, int64_t count, int threads) {
  const int64_t whole = count / W * W, rest = count - whole;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < whole; i += W) store(y + i, product<T>(load(gate + i), load(up + i)));
  if (rest) {
    T g[W] = {}, u[W] = {}, out[W];
    memcpy(g, gate + whole, rest * sizeof(T));
    memcpy(u, up + whole, rest * sizeof(T));
    store(out, product<T>(load(g), load(u)));
    memcpy(y + whole, out, rest * sizeof(T));
  }
}

}  // namespace gated
