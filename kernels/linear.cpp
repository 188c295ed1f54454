// y = x @ weight^T + bias, every output element a function of its row of x and its row of weight alone, on the
// best path that this build and processor have. A path has bits of its own; a process keeps to one.
#include "linear_amx.h"
#include "linear_call.h"
#include "linear_lanes.h"

static bool uses_tiles() {
#if defined(LOCKSTEP_AMX)
  return amx::is_permitted();
#else
  return false;
#endif
}

// The ISA level that products use, a name that native.py knows.
extern "C" const char* lockstep_linear_path(int64_t is_bf16) {
  if (is_bf16 && uses_tiles()) return "amx";
#if defined(__AVX512BF16__)
  if (is_bf16) return "avx512_bf16";
#endif
  return simd::W == 16 ? "avx512" : simd::W == 8 ? "avx2" : "plain";
}

extern "C" void lockstep_linear(const void* x, int64_t M, int64_t K, int64_t x_stride, const Part* parts,
                                int64_t num_parts, int64_t is_bf16, int64_t threads) {
  const Call call{x, M, K, x_stride, parts, num_parts};
  if (!is_bf16) return lanes::multiply<lanes::Widened<float>, float>(call, (int)threads);
#if defined(LOCKSTEP_AMX)
  if (uses_tiles()) return amx::multiply(call, (int)threads);
#endif
#if defined(__AVX512BF16__)
  lanes::multiply<lanes::Pairs, simd::bf16>(call, (int)threads);
#else
  lanes::multiply<lanes::Widened<simd::bf16>, simd::bf16>(call, (int)threads);
#endif
}
