// Rotary position embedding of queries and keys in one call: x * cos + rotate_half(x) * sin, both products and the sum
// rounded to the type of x, as three operations would round them. Letters: B batch, T tokens, H heads of the queries
// and the keys together, D head size.
#include "machine/packed.h"
#include "machine/simd.h"

using namespace simd;

namespace {

struct Rows {
  const void* from;  // [B, T, heads, D]
  void* to;          // [B, T, heads, D] contiguous
  int64_t batch_stride, token_stride, head_stride, heads;
};

using simd::rounded;
static inline float rounded(float x, float) { return x; }
static inline float rounded(float x, bf16) {
  bf16 y;
  store_scalar(&y, x);
  return scalar(y);
}

// Rotates one head of one token. For the first half, `other` is the negative of the second; for the second, the first.
template <typename T>
void rotate(const T* x, const T* cos, const T* sin, int64_t half, T* y) {
  for (int side = 0; side < 2; side++) {
    const T *own = x + side * half, *other = x + (1 - side) * half, *c = cos + side * half, *s = sin + side * half;
    T* out = y + side * half;
    const float sign = side ? 1.0f : -1.0f;
    int64_t d = 0;
    for (; d + W <= half; d += W)
      store(out + d, rounded(load(own + d) * load(c + d), T()) +
                         rounded(splat(sign) * load(other + d) * load(s + d), T()));
    for (; d < half; d++)
      store_scalar(out + d, rounded(scalar(own[d]) * scalar(c[d]), T()) +
                                rounded(sign * scalar(other[d]) * scalar(s[d]), T()));
  }
}

template <typename T>
void rotate_all(const Rows* parts, const T* cos, const T* sin, int64_t batch, int64_t tokens, int64_t table_batch,
                int64_t table_token, int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < batch * tokens; row++) {
    const int64_t b = row / tokens, t = row % tokens, table = b * table_batch + t * table_token;
    for (int part = 0; part < 2; part++) {
      const Rows& p = parts[part];
      for (int64_t h = 0; h < p.heads; h++)
        rotate((const T*)p.from + b * p.batch_stride + t * p.token_stride + h * p.head_stride, cos + table, sin + table,
               width / 2, (T*)p.to + (row * p.heads + h) * width);
    }
  }
}

}  // namespace

extern "C" void lockstep_rotary(const void* query, void* query_out, int64_t query_batch, int64_t query_token,
                                int64_t query_head, int64_t query_heads, const void* key, void* key_out,
                                int64_t key_batch, int64_t key_token, int64_t key_head, int64_t key_heads,
                                const void* cos, const void* sin, int64_t table_batch, int64_t table_token,
                                int64_t batch, int64_t tokens, int64_t width, int64_t is_bf16, int64_t threads) {
  const Rows parts[] = {{query, query_out, query_batch, query_token, query_head, query_heads},
                        {key, key_out, key_batch, key_token, key_head, key_heads}};
  if (is_bf16)
    rotate_all(parts, (const bf16*)cos, (const bf16*)sin, batch, tokens, table_batch, table_token, width, (int)threads);
  else
    rotate_all(parts, (const float*)cos, (const float*)sin, batch, tokens, table_batch, table_token, width,
               (int)threads);
}

LOCKSTEP_PACKED(lockstep_rotary)
