// y = x @ weight^T + bias, every output element a function of its row of x and its row of weight alone.
//
// One element is one chain: W partial sums along K, each fused left to right, then the lanes added in a fixed
// tree, then the bias. How many rows and columns share registers, and how many threads share the columns, is
// outside that chain. Dimension letters: M rows of x, N rows of weight (columns of y), K summed over.
#include <algorithm>
#include <vector>

#include "simd.h"

using namespace simd;

namespace {

constexpr int64_t COLUMN_BLOCK = 16;      // columns of y that a thread takes at a time
constexpr int64_t SERIAL_WORK = 1 << 17;  // multiply-adds below which waking threads costs more than it gives

// A block of R x C elements, R * C == W, so that one tree adds all their lanes. Rows and columns beyond the
// matrix are given as repeats of real ones and not written.
template <int R, int C, typename Weight>
Floats block(const float* const* x, const Weight* const* weight, int64_t K) {
  static_assert(R * C == W, "one vector of results");
  Floats acc[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) acc[i] = splat(0.0f);
  int64_t k = 0;
  for (; k + W <= K; k += W) {
    Floats w[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) w[c] = load(weight[c] + k);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      Floats v = load(x[r] + k);
#pragma GCC unroll 16
      for (int c = 0; c < C; c++) acc[r * C + c] = fused(v, w[c], acc[r * C + c]);
    }
  }
  if (k < K) {  // the last lanes hold zeros: one more step of the same chain
    Floats w[C];
    for (int c = 0; c < C; c++) {
      w[c] = splat(0.0f);
      for (int64_t i = k; i < K; i++) w[c][i - k] = scalar(weight[c][i]);
    }
    for (int r = 0; r < R; r++) {
      Floats v = splat(0.0f);
      for (int64_t i = k; i < K; i++) v[i - k] = x[r][i];
      for (int c = 0; c < C; c++) acc[r * C + c] = fused(v, w[c], acc[r * C + c]);
    }
  }
  return sums(acc);
}

struct Product {
  const float* x;  // [M, K], rows x_stride apart
  const void *weight, *bias;
  void* y;  // [M, N] contiguous
  int64_t M, N, K, x_stride, weight_stride;
};

// Rows [first, first + R) and `count` <= C columns from `column`, whose weights start at `weight`, `stride`
// apart.
template <int R, int C, typename T, typename Weight>
void multiply_block(const Product& p, const Weight* weight, int64_t stride, int64_t first, int64_t column,
                    int64_t count) {
  const float* x[R];
  const Weight* w[C];
  for (int r = 0; r < R; r++) x[r] = p.x + std::min(first + r, p.M - 1) * p.x_stride;
  for (int c = 0; c < C; c++) w[c] = weight + std::min<int64_t>(c, count - 1) * stride;
  Floats sum = block<R, C>(x, w, p.K);
  if (p.bias)
    for (int64_t i = 0; i < W; i++)
      sum[i] += scalar(((const T*)p.bias)[column + std::min<int64_t>(i % C, count - 1)]);
  T found[W];
  store(found, sum);
  for (int64_t r = 0; r < std::min<int64_t>(R, p.M - first); r++)
    for (int64_t c = 0; c < count; c++) ((T*)p.y)[(first + r) * p.N + column + c] = found[r * C + c];
}

template <typename T, typename Weight>
void multiply_columns(const Product& p, const Weight* weight, int64_t stride, int64_t column, int64_t count) {
  constexpr int SQUARE = W == 16 ? 4 : 2;  // rows of the squarest block
  constexpr int COLUMNS = W / SQUARE;
  // Columns outside, so that their few weights stay in the nearest cache while all rows go by.
  if (p.M > 1)
    for (int64_t c = 0; c < count; c += COLUMNS)
      for (int64_t row = 0; row < p.M; row += SQUARE)
        multiply_block<SQUARE, COLUMNS, T>(p, weight + c * stride, stride, row, column + c,
                                           std::min<int64_t>(COLUMNS, count - c));
  else
    for (int64_t c = 0; c < count; c += W)
      multiply_block<1, W, T>(p, weight + c * stride, stride, 0, column + c, std::min<int64_t>(W, count - c));
}

template <typename T>
void widen(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store(to + i, load(from + i));
  for (; i < count; i++) to[i] = scalar(from[i]);
}

template <typename T>
void multiply(const Product& p, int threads) {
  const int64_t num_blocks = (p.N + COLUMN_BLOCK - 1) / COLUMN_BLOCK;
#pragma omp parallel for schedule(static) \
    num_threads(threads) if (threads > 1 && p.M * p.N * p.K > SERIAL_WORK)
  for (int64_t b = 0; b < num_blocks; b++) {
    const int64_t column = b * COLUMN_BLOCK, count = std::min(COLUMN_BLOCK, p.N - column);
    const T* weight = (const T*)p.weight + column * p.weight_stride;
    if (sizeof(T) == sizeof(float) || p.M <= 4) {
      multiply_columns<T>(p, weight, p.weight_stride, column, count);
      continue;
    }
    static thread_local std::vector<float> widened;  // many rows will read these weights: widen them once
    if ((int64_t)widened.size() < COLUMN_BLOCK * p.K) widened.resize(COLUMN_BLOCK * p.K);
    float* to = widened.data();
    for (int64_t c = 0; c < count; c++) widen(weight + c * p.weight_stride, p.K, to + c * p.K);
    multiply_columns<T, float>(p, to, p.K, column, count);
  }
}

}  // namespace

extern "C" void lockstep_linear(const float* x, const void* weight, const void* bias, void* y, int64_t M,
                                int64_t N, int64_t K, int64_t x_stride, int64_t weight_stride,
                                int64_t is_bf16, int64_t threads) {
  Product p{x, weight, bias, y, M, N, K, x_stride, weight_stride};
  if (is_bf16)
    multiply<bf16>(p, (int)threads);
  else
    multiply<float>(p, (int)threads);
}
