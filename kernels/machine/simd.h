// Vectors of our CPU kernels: one register of W floats, and only operations that compute all lanes in the same way.
// Build with -ffp-contract=off: a product and a sum are fused only where `fused` is called, so a value's bits never
// depend on the copy of an inlined loop that the compiler chose for it.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace simd {

// Fetches the line at an address into the second-level cache. The empty assembly keeps GCC from taking a function that
// only prefetches for one without effects, whose calls it drops.
static inline void prefetch(const void* p) {
  __builtin_prefetch(p, 0, 2);
  asm volatile("");
}

// Of two vectors, the even and the odd floats of each four lanes, and the even and the odd groups of four lanes: shuffles
// that stay inside 128 bits, or move 128 bits, are the cheap ones. Of one vector, each lane's partner 1, 2, 4 or 8 away.
#if defined(__AVX512F__)
constexpr int W = 16;
#define SIMD_EVEN 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30
#define SIMD_ODD 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31
#define SIMD_EVEN_FOURS 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define SIMD_ODD_FOURS 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
#define SIMD_AWAY_1 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14
#define SIMD_AWAY_2 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13
#define SIMD_AWAY_4 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11
#define SIMD_AWAY_8 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7
#define SIMD_REVERSED 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int W = 8;
#define SIMD_EVEN 0, 2, 8, 10, 4, 6, 12, 14
#define SIMD_ODD 1, 3, 9, 11, 5, 7, 13, 15
#define SIMD_EVEN_FOURS 0, 1, 2, 3, 8, 9, 10, 11
#define SIMD_ODD_FOURS 4, 5, 6, 7, 12, 13, 14, 15
#define SIMD_AWAY_1 1, 0, 3, 2, 5, 4, 7, 6
#define SIMD_AWAY_2 2, 3, 0, 1, 6, 7, 4, 5
#define SIMD_AWAY_4 4, 5, 6, 7, 0, 1, 2, 3
#define SIMD_REVERSED 7, 6, 5, 4, 3, 2, 1, 0
#else
constexpr int W = 4;
#define SIMD_EVEN 0, 2, 4, 6
#define SIMD_ODD 1, 3, 5, 7
#define SIMD_AWAY_1 1, 0, 3, 2
#define SIMD_AWAY_2 2, 3, 0, 1
#define SIMD_REVERSED 3, 2, 1, 0
#endif

typedef float Floats __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Words __attribute__((vector_size(4 * W)));
typedef uint16_t Halves __attribute__((vector_size(2 * W)));
typedef uint16_t bf16;

static inline Floats splat(float x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_set1_ps(x);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Floats)_mm256_set1_ps(x);
#else
  return Floats{x, x, x, x};
#endif
}

static inline Floats fused(Floats a, Floats b, Floats c) {  // a * b + c
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
  Floats r;
  for (int i = 0; i < W; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#else
  return a * b + c;  // two roundings, everywhere
#endif
}

// Fetches the line at an address into the second-level cache, after `value` was computed and before it is used: compilers
// would gather such instructions from a whole loop at one place, where they wait for each other.
static inline void prefetch_after(Floats& value, const void* p) {
#if defined(__AVX512F__)
  asm volatile("prefetcht1 (%1)" : "+v"(value) : "r"(p));
#elif defined(__AVX2__) && defined(__FMA__)
  asm volatile("prefetcht1 (%1)" : "+x"(value) : "r"(p));
#else
  __builtin_prefetch(p, 0, 2);
#endif
}

static inline Floats load(const float* p) {
  Floats v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline Floats load(const bf16* p) {
  Halves h;
  memcpy(&h, p, sizeof h);
  return (Floats)(__builtin_convertvector(h, Words) << 16);
}
static inline float scalar(float x) { return x; }
static inline float scalar(bf16 x) {
  uint32_t u = (uint32_t)x << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

static inline Halves halves_by_bits(Floats v) {  // to nearest, ties to even; any NaN becomes the quiet one, as in PyTorch
  Words u = (Words)v;
  Words rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  Ints is_nan = v != v;
  rounded = (rounded & ~(Words)is_nan) | ((Words)is_nan & 0x7fc0);
  return __builtin_convertvector(rounded, Halves);
}
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
#define SIMD_ROUNDS_BF16
#endif
static inline Halves halves(Floats v) {
#if defined(SIMD_ROUNDS_BF16)
  constexpr int QUIET_NAN = 1, SUBNORMAL = 32, SIGNALLING_NAN = 128;  // which the instruction treats otherwise
  if (__builtin_expect(!_mm512_fpclass_ps_mask((__m512)v, QUIET_NAN | SUBNORMAL | SIGNALLING_NAN), 1))
    return (Halves)(__m256i)_mm512_cvtneps_pbh((__m512)v);
#endif
  return halves_by_bits(v);
}
static inline void store(float* p, Floats v) { memcpy(p, &v, sizeof v); }
static inline void store(bf16* p, Floats v) {
  Halves h = halves(v);
  memcpy(p, &h, sizeof h);
}
static inline Floats to_bf16(Floats v) {  // the value that `store` would write, still in fp32 lanes
#if defined(SIMD_ROUNDS_BF16)
  return (Floats)(__builtin_convertvector(halves(v), Words) << 16);
#else
  Words u = (Words)v;
  Words rounded = (u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u;
  Ints is_nan = v != v;
  return (Floats)((rounded & ~(Words)is_nan) | ((Words)is_nan & 0x7fc00000u));
#endif
}
// Rounds to the type of the second argument; the result stays in fp32 lanes.
static inline Floats rounded(Floats v, float) { return v; }
static inline Floats rounded(Floats v, bf16) { return to_bf16(v); }
static inline void store_scalar(float* p, float x) { *p = x; }
static inline void store_scalar(bf16* p, float x) {
  bf16 lanes[W];
  store(lanes, splat(x));
  *p = lanes[0];
}

static inline Floats select(Ints mask, Floats yes, Floats no) { return mask ? yes : no; }
static inline uint32_t bits(Ints mask) {  // bit i: whether lane i is true
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX2__) && defined(__FMA__)
  return (uint32_t)_mm256_movemask_ps((__m256)mask);
#else
  uint32_t found = 0;
  for (int i = 0; i < W; i++) found |= (uint32_t)(mask[i] != 0) << i;
  return found;
#endif
}
static inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

#if defined(__clang__)
#define SIMD_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SIMD_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif

static inline Floats reversed(Floats v) { return SIMD_SHUFFLE(v, v, SIMD_REVERSED); }  // the last lane first

// Adds neighbouring lanes (levels 0 and 1), or neighbouring groups of four lanes, of two vectors.
template <int LEVEL>
static inline Floats add_neighbours(Floats a, Floats b) {
#if defined(SIMD_EVEN_FOURS)
  if constexpr (LEVEL > 1) return SIMD_SHUFFLE(a, b, SIMD_EVEN_FOURS) + SIMD_SHUFFLE(a, b, SIMD_ODD_FOURS);
#endif
  return SIMD_SHUFFLE(a, b, SIMD_EVEN) + SIMD_SHUFFLE(a, b, SIMD_ODD);
}

// Adds up the lanes of N vectors at once: lane j of sums<W> is the sum of vector j's lanes, neighbours first, then
// neighbouring pairs, and so on. N vectors with N < W are added up to one whose W / N lanes for each of them are left to
// add: several of these, in order, are the vectors of the levels from log2(N) on. Overwrites `v`.
template <int N, int LEVEL = 0>
static inline Floats sums(Floats* v) {
  if constexpr (N == 1) {
    return v[0];
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < N / 2; i++) v[i] = add_neighbours<LEVEL>(v[2 * i], v[2 * i + 1]);
    return sums<N / 2, LEVEL + 1>(v);
  }
}

// Adds the lanes of a vector: the lower half and the upper half, then the halves of that half, and so on.
static inline float sum(Floats v) {
#if defined(SIMD_AWAY_8)
  v = v + SIMD_SHUFFLE(v, v, SIMD_AWAY_8);
#endif
#if defined(SIMD_AWAY_4)
  v = v + SIMD_SHUFFLE(v, v, SIMD_AWAY_4);
#endif
  v = v + SIMD_SHUFFLE(v, v, SIMD_AWAY_2);
  v = v + SIMD_SHUFFLE(v, v, SIMD_AWAY_1);
  return v[0];
}
static inline float largest(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#endif
  float m = v[0];
  for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m;
  return m;
}

// exp(x) for x <= 0, within 2 ulp; exactly 1 at 0, exactly 0 below -87.3 and at -inf; NaN stays NaN.
// Range reduction and polynomial are those of Cephes expf (S. Moshier).
static inline Floats exp_nonpositive(Floats x) {
  const Floats lowest = splat(-87.3f),
               magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Ints underflow = x < lowest;
  Floats y = select(underflow, lowest, x);
  Floats t = fused(y, splat(1.44269504088896341f), magic);
  Floats n = t - magic;
  Floats r = fused(n, splat(-0.693359375f), y);
  r = fused(n, splat(2.12194440e-4f), r);
  Floats p = splat(1.9875691500e-4f);
  p = fused(p, r, splat(1.3981999507e-3f));
  p = fused(p, r, splat(8.3334519073e-3f));
  p = fused(p, r, splat(4.1665795894e-2f));
  p = fused(p, r, splat(1.6666665459e-1f));
  p = fused(p, r, splat(5.0000001201e-1f));
  p = fused(p, r * r, r) + splat(1.0f);
  Floats power = (Floats)((((Ints)t) << 23) + (127 << 23));
  return select(underflow, splat(0.0f), p * power);
}

static inline Floats tanh(Floats x) {
  Floats size = x < splat(0.0f) ? -x : x;
  Floats e = exp_nonpositive(splat(-2.0f) * size);
  Floats big = (splat(1.0f) - e) / (splat(1.0f) + e);
  big = x < splat(0.0f) ? -big : big;
  Floats x2 = x * x;  // near zero 1 - e loses digits: Taylor, x^9 and below
  Floats p = splat(62.0f / 2835);
  p = fused(p, x2, splat(-17.0f / 315));
  p = fused(p, x2, splat(2.0f / 15));
  p = fused(p, x2, splat(-1.0f / 3));
  return select(size < splat(0.25f), fused(p, x2 * x, x), big);
}

}  // namespace simd
