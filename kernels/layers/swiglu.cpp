// silu(gate) * up in one pass.
#include "layers/gated.h"

using simd::bf16;

extern "C" void lockstep_swiglu(const void* gate, const void* up, void* y, int64_t count, int64_t is_bf16,
                                int64_t threads) {
  if (is_bf16)
    gated::multiply((const bf16*)gate, (const bf16*)up, (bf16*)y, count, (int)threads);
  else
    gated::multiply((const float*)gate, (const float*)up, (float*)y, count, (int)threads);
}
