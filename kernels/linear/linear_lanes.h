// The product by vector instructions. One element of y is one chain: the lanes of a register are partial sums
// along K, each fused left to right, then the lanes are added in a fixed tree, then the bias. The chain does not
// depend on the rows and columns that share registers, nor on the division of columns among threads.
#pragma once
#include <omp.h>

#include <vector>

#include "linear/linear_call.h"

namespace lanes {

using namespace simd;

constexpr int64_t X_BYTES = 1 << 19;  // bytes of x that stay in the L2 cache while all weights are read

// Products of fp32 values; weights in bf16 are widened as they are loaded.
template <typename T>
struct Widened {
  using X = float;
  using Weight = T;
  static constexpr int STEP = W;
  static Floats multiply(const float* x, const Weight* weight, Floats sum) {
    return fused(load(x), load(weight), sum);
  }
};

#if defined(__AVX512BF16__)
// Products of pairs of bf16 values, added to fp32 sums: lane i takes x[2i] * w[2i] and x[2i + 1] * w[2i + 1].
struct Pairs {
  using X = bf16;
  using Weight = bf16;
  static constexpr int STEP = 2 * W;
  static Floats multiply(const bf16* x, const bf16* weight, Floats sum) {
    __m512bh a, b;
    memcpy(&a, x, sizeof a);
    memcpy(&b, weight, sizeof b);
    return (Floats)_mm512_dpbf16_ps((__m512)sum, a, b);
  }
};
#endif

// Computes a block of R x C elements, R * C == W, so that one tree adds all their lanes. Rows and columns beyond the
// matrix are repeats of real ones and are not written.
template <typename Dot, int R, int C>
Floats block(const typename Dot::X* const* x, const typename Dot::Weight* const* weight, int64_t K) {
  static_assert(R * C == W, "one vector of results");
  Floats acc[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) acc[i] = splat(0.0f);
  int64_t k = 0;
  for (; k + Dot::STEP <= K; k += Dot::STEP) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int c = 0; c < C; c++) acc[r * C + c] = Dot::multiply(x[r] + k, weight[c] + k, acc[r * C + c]);
  }
  if (k < K) {  // the last lanes hold zeros: one more step of the same chain
    typename Dot::X last_x[R][Dot::STEP] = {};
    typename Dot::Weight last_weight[C][Dot::STEP] = {};
    for (int r = 0; r < R; r++) std::copy(x[r] + k, x[r] + K, last_x[r]);
    for (int c = 0; c < C; c++) std::copy(weight[c] + k, weight[c] + K, last_weight[c]);
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) acc[r * C + c] = Dot::multiply(last_x[r], last_weight[c], acc[r * C + c]);
  }
  return sums(acc);
}

// Computes a block of y: rows [row, last_row), at most R of them, and `count` <= C columns whose weights start at
// `weight`.
template <typename Dot, typename T, int R, int C>
void multiply_block(const typename Dot::X* x, int64_t x_stride, const typename Dot::Weight* weight, int64_t stride,
                    int64_t K, int64_t rows, int64_t count, const T* bias, T* y, int64_t y_stride) {
  const typename Dot::X* x_rows[R];
  const typename Dot::Weight* w[C];
  for (int64_t r = 0; r < R; r++) x_rows[r] = x + std::min(r, rows - 1) * x_stride;
  for (int64_t c = 0; c < C; c++) w[c] = weight + std::min(c, count - 1) * stride;
  Floats sum = block<Dot, R, C>(x_rows, w, K);
  if (bias)
    for (int64_t i = 0; i < W; i++) sum[i] += scalar(bias[std::min(i % C, count - 1)]);
  T found[W];
  store(found, sum);
  for (int64_t r = 0; r < std::min<int64_t>(R, rows); r++)
    for (int64_t c = 0; c < std::min<int64_t>(C, count); c++) y[r * y_stride + c] = found[r * C + c];
}

// Computes rows [0, rows) of x by `count` columns. Columns are the outer loop, so that their few weights stay in the L1
// cache while all rows are read.
template <typename Dot, typename T>
void multiply_columns(const typename Dot::X* x, int64_t x_stride, int64_t rows, const typename Dot::Weight* weight,
                      int64_t stride, int64_t K, int64_t count, const T* bias, T* y, int64_t y_stride) {
  constexpr int SQUARE = W == 16 ? 4 : 2;  // rows of the squarest block
  constexpr int COLUMNS = W / SQUARE;
  const int64_t step = rows > 1 ? COLUMNS : W;
  for (int64_t c = 0; c < count; c += step) {
    const T* its_bias = bias ? bias + c : nullptr;
    if (rows == 1)
      multiply_block<Dot, T, 1, W>(x, x_stride, weight + c * stride, stride, K, 1, count - c, its_bias, y + c,
                                   y_stride);
    else
      for (int64_t r = 0; r < rows; r += SQUARE)
        multiply_block<Dot, T, SQUARE, COLUMNS>(x + r * x_stride, x_stride, weight + c * stride, stride, K, rows - r,
                                                count - c, its_bias, y + r * y_stride + c, y_stride);
  }
}

template <typename T>
void widen(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store(to + i, load(from + i));
  for (; i < count; i++) to[i] = scalar(from[i]);
}

// Computes the columns [first, last) of a part, block by block of rows.
template <typename Dot, typename T>
void multiply_part(const Call& call, const Part& part, const typename Dot::X* x, int64_t x_stride, int64_t first,
                   int64_t last) {
  const int64_t row_bytes = call.K * sizeof(typename Dot::X);
  const int64_t block_rows = std::max<int64_t>(X_BYTES / std::max<int64_t>(row_bytes, 1) / 4 * 4, 16);
  constexpr bool is_narrow = std::is_same_v<Dot, Widened<bf16>>;
  static thread_local std::vector<float> widened;
  if (is_narrow && (int64_t)widened.size() < TILE * call.K) widened.resize(TILE * call.K);
  float* wide = widened.data();
  for (int64_t row = 0; row < call.M; row += block_rows) {
    const int64_t rows = std::min(block_rows, call.M - row);
    for (int64_t n = first; n < last; n += TILE) {
      const int64_t count = std::min(TILE, last - n), stride = part.weight_stride;
      const auto* weight = (const typename Dot::Weight*)part.weight + n * stride;
      const T* bias = part.bias ? (const T*)part.bias + n : nullptr;
      T* y = (T*)part.y + row * part.N + n;
      if (is_narrow && rows > 4) {  // many rows read these weights: widen them once
        for (int64_t c = 0; c < count; c++) widen(weight + c * stride, call.K, wide + c * call.K);
        multiply_columns<Widened<float>, T>((const float*)x + row * x_stride, x_stride, rows, wide, call.K, call.K,
                                            count, bias, y, part.N);
      } else {
        multiply_columns<Dot, T>(x + row * x_stride, x_stride, rows, weight, stride, call.K, count, bias, y, part.N);
      }
    }
  }
}

// T: the type of x, weight, bias and y. Dot: the way to add their products.
template <typename Dot, typename T>
void multiply(const Call& call, int threads) {
  using X = typename Dot::X;
  static thread_local std::vector<X> converted;
  const bool converts = !std::is_same_v<X, T>;
  if (converts && (int64_t)converted.size() < call.M * call.K) converted.resize(call.M * call.K);
  X* x = converts ? converted.data() : (X*)call.x;
  const int64_t x_stride = converts ? call.K : call.x_stride;
#pragma omp parallel num_threads(threads) if (threads > 1 && is_worth_threads(call))
  {
    if constexpr (!std::is_same_v<X, T>) {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < call.M; row++)
        widen((const T*)call.x + row * call.x_stride, call.K, x + row * call.K);
    }
    visit_columns(call, omp_get_thread_num(), omp_get_num_threads(),
                  [&](const Part& part, int64_t first, int64_t last) {
                    multiply_part<Dot, T>(call, part, x, x_stride, first, last);
                  });
  }
}

}  // namespace lanes
