// silu(gate) * up in one pass, every element a function of its two inputs alone. silu is rounded to the inputs' type
// before the product, as two operations would round it.
#include "simd.h"

using namespace simd;

namespace {

static inline Floats rounded(Floats v, float) { return v; }
static inline Floats rounded(Floats v, bf16) { return to_bf16(v); }

template <typename T>
void gated(const T* gate, const T* up, T* y) {
  Floats g = load(gate);
  Floats small = exp_nonpositive(g < splat(0.0f) ? g : -g);  // exp(-|g|): never overflows
  Floats silu = g * (g < splat(0.0f) ? small : splat(1.0f)) / (splat(1.0f) + small);
  store(y, rounded(silu, T()) * load(up));
}

template <typename T>
void gated_all(const T* gate, const T* up, T* y, int64_t count, int threads) {
  const int64_t whole = count / W * W, rest = count - whole;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < whole; i += W) gated(gate + i, up + i, y + i);
  if (rest) {
    T g[W] = {}, u[W] = {}, out[W];
    memcpy(g, gate + whole, rest * sizeof(T));
    memcpy(u, up + whole, rest * sizeof(T));
    gated(g, u, out);
    memcpy(y + whole, out, rest * sizeof(T));
  }
}

}  // namespace

extern "C" void lockstep_swiglu(const void* gate, const void* up, void* y, int64_t count, int64_t is_bf16,
                                int64_t threads) {
  if (is_bf16)
    gated_all((const bf16*)gate, (const bf16*)up, (bf16*)y, count, (int)threads);
  else
    gated_all((const float*)gate, (const float*)up, (float*)y, count, (int)threads);
}
