// silu(gate) * up in one pass, and its gradients in one.
#include "layers/gated.h"
#include "machine/packed.h"

using simd::bf16;

extern "C" void lockstep_swiglu(const void* gate, const void* up, void* y, int64_t count, int64_t is_bf16,
                                int64_t threads) {
  if (is_bf16)
    gated::multiply((const bf16*)gate, (const bf16*)up, (bf16*)y, count, (int)threads);
  else
    gated::multiply((const float*)gate, (const float*)up, (float*)y, count, (int)threads);
}

extern "C" void lockstep_swiglu_slopes(const void* gate, const void* up, const void* grad, void* grad_gate,
                                       void* grad_up, int64_t count, int64_t is_bf16, int64_t threads) {
  if (is_bf16)
    gated::differentiate((const bf16*)gate, (const bf16*)up, (const bf16*)grad, (bf16*)grad_gate, (bf16*)grad_up,
                         count, (int)threads);
  else
    gated::differentiate((const float*)gate, (const float*)up, (const float*)grad, (float*)grad_gate,
                         (float*)grad_up, count, (int)threads);
}

LOCKSTEP_PACKED(lockstep_swiglu)
