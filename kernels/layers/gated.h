// silu(gate) * up: each element depends on its two inputs alone. silu is rounded to the type of the inputs before the
// product, as two operations would round it.
#pragma once
#include <omp.h>

#include <algorithm>

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

#if defined(__AVX512F__)
// silu of every bfloat16: of 16 bits, so a table has all its values, those that `product` computes.
class SiluTable {
 public:
  static const SiluTable& get() {
    static const SiluTable table;
    return table;
  }
  // Returns `product` of 16 gates and their `up`, both widened, in less than half its time while the values that occur
  // stay in the first cache: they do where many rows follow one another.
  Floats product(__m256i gate, Floats up) const {
    const __m512i found = _mm512_i32gather_epi32(_mm512_cvtepu16_epi32(gate), values_, 2);
    return (Floats)_mm512_slli_epi32(found, 16) * up;
  }

 private:
  SiluTable() {
    for (uint32_t first = 0; first < 1 << 16; first += W) {
      Words bits;
      for (int i = 0; i < W; i++) bits[i] = (first + i) << 16;
      store(values_ + first, gated::product<bf16>((Floats)bits, splat(1.0f)));
    }
  }
  bf16 values_[(1 << 16) + 1] = {};  // the last one is read with the one before, and not used
};
#endif

template <typename T>
inline void multiply_some(const T* gate, const T* up, T* y, int64_t count) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store(y + i, product<T>(load(gate + i), load(up + i)));
  if (i < count) {
    T g[W] = {}, u[W] = {}, out[W];
    memcpy(g, gate + i, (count - i) * sizeof(T));
    memcpy(u, up + i, (count - i) * sizeof(T));
    store(out, product<T>(load(g), load(u)));
    memcpy(y + i, out, (count - i) * sizeof(T));
  }
}

template <typename T>
void multiply(const T* gate, const T* up, T* y, int64_t count, int threads) {
  const int64_t steps = (count + W - 1) / W;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t index = omp_get_thread_num(), num = omp_get_num_threads();
    const int64_t from = steps * index / num * W, to = std::min(steps * (index + 1) / num * W, count);
    multiply_some(gate + from, up + from, y + from, to - from);
  }
}

// The gradients of silu(gate) * up, silu unrounded.
static inline void slopes(Floats gate, Floats up, Floats grad, Floats& grad_gate, Floats& grad_up) {
  Floats small = exp_nonpositive(gate < splat(0.0f) ? gate : -gate), whole = splat(1.0f) + small;
  Floats sigmoid = (gate < splat(0.0f) ? small : splat(1.0f)) / whole;
  Floats rest = (gate < splat(0.0f) ? splat(1.0f) : small) / whole;  // 1 - sigmoid, which would cancel
  grad_gate = grad * up * sigmoid * (splat(1.0f) + gate * rest);
  grad_up = grad * (gate * sigmoid);
}

template <typename T>
void differentiate(const T* gate, const T* up, const T* grad, T* grad_gate, T* grad_up, int64_t count, int threads) {
  const int64_t whole = count / W * W, rest = count - whole;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < whole; i += W) {
    Floats dg, du;
    slopes(load(gate + i), load(up + i), load(grad + i), dg, du);
    store(grad_gate + i, dg);
    store(grad_up + i, du);
  }
  if (rest) {
    T g[W] = {}, u[W] = {}, d[W] = {}, out[2][W];
    memcpy(g, gate + whole, rest * sizeof(T));
    memcpy(u, up + whole, rest * sizeof(T));
    memcpy(d, grad + whole, rest * sizeof(T));
    Floats dg, du;
    slopes(load(g), load(u), load(d), dg, du);
    store(out[0], dg);
    store(out[1], du);
    memcpy(grad_gate + whole, out[0], rest * sizeof(T));
    memcpy(grad_up + whole, out[1], rest * sizeof(T));
  }
}

}  // namespace gated
