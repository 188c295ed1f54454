// y = x @ weight^T + bias, on the best path that this build and processor have: each element of y depends on its row of
// x and its row of weight alone. Paths differ in their bits; a process always uses the same one.
#include "linear/grouped.h"
#include "linear/linear_amx.h"
#include "linear/linear_call.h"
#include "linear/linear_panels.h"
#include "machine/memory.h"
#include "machine/packed.h"

static bool uses_tiles() {
#if defined(LOCKSTEP_AMX)
  return amx::is_permitted();
#else
  return false;
#endif
}

// Returns the ISA level that products use, by its name in native.py.
extern "C" const char* lockstep_linear_path(int64_t is_bf16) {
  if (is_bf16 && uses_tiles()) return "amx";
#if defined(__AVX512BF16__)
  if (is_bf16) return "avx512_bf16";
#endif
  return simd::W == 16 ? "avx512" : simd::W == 8 ? "avx2" : "plain";
}

static void multiply(const Call& call, bool is_bf16, int threads) {
  if (!is_bf16) return lanes::multiply<lanes::Widened<float>, float>(call, threads);
#if defined(LOCKSTEP_AMX)
  if (uses_tiles()) return amx::multiply(call, threads);
#endif
#if defined(__AVX512BF16__)
  lanes::multiply<lanes::Pairs, simd::bf16>(call, threads);
#else
  lanes::multiply<lanes::Widened<simd::bf16>, simd::bf16>(call, threads);
#endif
}

// is_gated: the two parts are a gate and its factor `up`; their product goes into the first one's y. Returns 0 or
// memory::NONE_LEFT.
extern "C" int64_t lockstep_linear(const void* x, int64_t M, int64_t K, int64_t x_stride, const Part* parts,
                                   int64_t num_parts, int64_t is_gated, int64_t is_bf16, int64_t threads) {
  const Call call{x, M, K, x_stride, parts, is_gated ? 1 : num_parts, is_gated ? parts + 1 : nullptr};
  return memory::at_edge([&] { multiply(call, is_bf16, (int)threads); });
}

// Returns 1 if an expert's number is out of range, memory::NONE_LEFT, or 0 after the product.
extern "C" int64_t lockstep_linear_grouped(const grouped::Grouped* call, int64_t is_bf16, int64_t threads) {
  for (int64_t r = 0; r < call->R; r++)
    if (call->experts[r] < 0 || call->experts[r] >= call->E) return 1;
  const auto one_thread = [&](const Call& part) { multiply(part, is_bf16, 1); };
  return memory::at_edge([&] {
    if (is_bf16)
      grouped::multiply_grouped<simd::bf16>(*call, (int)threads, one_thread);
    else
      grouped::multiply_grouped<float>(*call, (int)threads, one_thread);
  });
}

LOCKSTEP_PACKED(lockstep_linear)
LOCKSTEP_PACKED(lockstep_linear_grouped)
