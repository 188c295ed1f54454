// Root-mean-square norm: each row of the result depends on its own row of x and the weight alone. The squares of a row
// are added in W lanes from left to right, then the lanes in a fixed tree.
#include <cmath>

#include "machine/packed.h"
#include "machine/simd.h"

using namespace simd;

namespace {

struct Norm {
  const void *left, *right;  // [rows, width]: x is their sum; or null
  void* x;                   // [rows, width]
  const void* weight;        // [width]
  void* y;                   // [rows, width]
  int64_t rows, width;
  float eps, weight_offset;
  int64_t round_first;
};

template <typename T>
Floats load_some(const T* p, int64_t count) {  // the first `count` < W lanes, zeros after them
  T lanes[W] = {};
  memcpy(lanes, p, count * sizeof(T));
  return load(lanes);
}

// In two operations: the sum is rounded before the norm reads it.
template <typename T>
void add(const T* left, const T* right, int64_t width, T* to) {
  int64_t d = 0;
  for (; d + W <= width; d += W) store(to + d, load(left + d) + load(right + d));
  if (d == width) return;
  T lanes[W];
  store(lanes, load_some(left + d, width - d) + load_some(right + d, width - d));
  memcpy(to + d, lanes, (width - d) * sizeof(T));
}

template <typename T>
void normalize(const Norm& p, int64_t row) {
  const int64_t start = row * p.width;
  if (p.left) add((const T*)p.left + start, (const T*)p.right + start, p.width, (T*)p.x + start);
  const T *x = (const T*)p.x + start, *weight = (const T*)p.weight;
  T* y = (T*)p.y + row * p.width;
  const int64_t whole = p.width / W * W, rest = p.width - whole;
  Floats squares = splat(0.0f);
  for (int64_t d = 0; d < whole; d += W) {
    Floats v = load(x + d);
    squares = fused(v, v, squares);
  }
  if (rest) {
    Floats v = load_some(x + whole, rest);
    squares = fused(v, v, squares);
  }
  const Floats scale = splat(1.0f / std::sqrt(sum(squares) / (float)p.width + p.eps)), offset = splat(p.weight_offset);
  auto scaled = [&](Floats v, Floats w) {
    v = v * scale;
    return (w + offset) * (p.round_first ? rounded(v, T()) : v);
  };
  for (int64_t d = 0; d < whole; d += W) store(y + d, scaled(load(x + d), load(weight + d)));
  if (rest) {
    T lanes[W];
    store(lanes, scaled(load_some(x + whole, rest), load_some(weight + whole, rest)));
    memcpy(y + whole, lanes, rest * sizeof(T));
  }
}

template <typename T>
void normalize_all(const Norm& p, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < p.rows; row++) normalize<T>(p, row);
}

}  // namespace

extern "C" void lockstep_add_rms_norm(const void* left, const void* right, void* x, const void* weight, void* y,
                                      int64_t rows, int64_t width, float eps, float weight_offset, int64_t round_first,
                                      int64_t is_bf16, int64_t threads) {
  Norm p{left, right, x, weight, y, rows, width, eps, weight_offset, round_first};
  if (is_bf16)
    normalize_all<bf16>(p, (int)threads);
  else
    normalize_all<float>(p, (int)threads);
}

extern "C" void lockstep_rms_norm(void* x, const void* weight, void* y, int64_t rows, int64_t width, float eps,
                                  float weight_offset, int64_t round_first, int64_t is_bf16, int64_t threads) {
  lockstep_add_rms_norm(nullptr, nullptr, x, weight, y, rows, width, eps, weight_offset, round_first, is_bf16, threads);
}

LOCKSTEP_PACKED(lockstep_rms_norm)
LOCKSTEP_PACKED(lockstep_add_rms_norm)
