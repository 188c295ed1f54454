// Helpers that our AMX kernels share: bf16 products by tiles of 16 rows of 64 bytes.
#pragma once
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && \
    defined(__AVX512VL__) && defined(__linux__)
#define LOCKSTEP_AMX 1
#include <sys/syscall.h>
#include <unistd.h>

#include "machine/simd.h"

namespace amx {

using simd::bf16;

constexpr int64_t STEP = 32;  // bf16 values in a row of a tile

struct alignas(64) Tile {
  bf16 values[16 * STEP];
};

// Asks Linux for the use of tiles: a process may use them only after that.
inline bool is_permitted() {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  static const bool answer = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
  return answer;
}

// Compiler barrier: tile instructions read and write memory that the compiler does not know of.
inline void fence() { asm volatile("" ::: "memory"); }

// Transposes in place: word j of vector i becomes word i of vector j.
inline void transpose(__m512i v[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    v[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    v[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

inline __mmask32 first_lanes(int64_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }

// Writes up to 16 rows of x as tiles: row p of tile s has values 32 s + 2 p and the next of each row; zeros at the end.
inline void arrange(const bf16* x, int64_t stride, int64_t rows, int64_t K, Tile* to) {
  for (int64_t k = 0; k < K; k += STEP, to++) {
    const __mmask32 mask = first_lanes(K - k);
    __m512i v[16];
    for (int64_t r = 0; r < 16; r++)
      v[r] = r < rows ? _mm512_maskz_loadu_epi16(mask, x + r * stride + k) : _mm512_setzero_si512();
    transpose(v);
    for (int64_t r = 0; r < 16; r++) _mm512_store_si512(to->values + r * STEP, v[r]);
  }
}

}  // namespace amx
#endif
