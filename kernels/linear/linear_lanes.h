// The product by vector instructions. One element of y is one chain: the lanes of a register are partial sums
// along K, each fused left to right, then the lanes are added in a fixed tree, then the bias. The chain does not
// depend on the rows and columns that share registers, nor on the division of a product among threads.
#pragma once
#include "linear/linear_call.h"
#include "linear/linear_prefetch.h"

namespace lanes {

using namespace simd;

constexpr int ROWS = 6;                   // the most rows computed together
constexpr int COLUMNS = W == 16 ? 4 : 2;  // the columns computed together: their sums fill the registers
constexpr int LEVEL = COLUMNS / 2;        // log2(COLUMNS): sums of lanes that are added before they are stored
constexpr int STEPS = 4;                  // along K, between two that may branch
constexpr int64_t PANEL = 2 * TILE;       // columns that a few rows are multiplied by: a line of y in bf16

// Products of fp32 values; weights in bf16 are widened as they are loaded.
template <typename T>
struct Widened {
  using X = float;
  using Weight = T;
  using Values = Floats;
  static constexpr int STEP = W;
  template <typename From>
  static Values load(const From* p) {
    return simd::load(p);
  }
  static Floats multiply(Values x, Values weight, Floats sum) { return fused(x, weight, sum); }
};

#if defined(__AVX512BF16__)
// Products of pairs of bf16 values, added to fp32 sums: lane i takes x[2i] * w[2i] and x[2i + 1] * w[2i + 1].
struct Pairs {
  using X = bf16;
  using Weight = bf16;
  using Values = __m512i;
  static constexpr int STEP = 2 * W;
  static Values load(const bf16* p) { return _mm512_loadu_si512(p); }
  static Floats multiply(Values x, Values weight, Floats sum) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)weight);
  }
};
#endif

// Adds one step along K to the sums of R rows by C columns.
template <typename Dot, int R, int C>
inline void add_step(const typename Dot::X* x, int64_t x_stride, const typename Dot::Weight* weight, int64_t stride,
                     Floats* acc) {
  typename Dot::Values w[C];
#pragma GCC unroll 16
  for (int c = 0; c < C; c++) w[c] = Dot::load(weight + c * stride);
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    typename Dot::Values values = Dot::load(x + r * x_stride);
    asm("" : "+v"(values));  // loaded once: GCC would load it again for every column
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) acc[r * C + c] = Dot::multiply(values, w[c], acc[r * C + c]);
  }
}

// Computes the sums of R rows by C columns, a register of lanes each.
template <typename Dot, int R, int C, int LINES>
inline void add_products(const typename Dot::X* x, int64_t x_stride, const typename Dot::Weight* weight, int64_t stride,
                         int64_t K, Prefetch& next, Floats* acc) {
#pragma GCC unroll 32
  for (int i = 0; i < R * C; i++) acc[i] = splat(0.0f);
  int64_t k = 0;
  for (; k + STEPS * Dot::STEP <= K; k += STEPS * Dot::STEP) {
    const char* ahead = next.take(STEPS * LINES, weight);
#pragma GCC unroll 8
    for (int i = 0; i < STEPS; i++) {
      add_step<Dot, R, C>(x + k + i * Dot::STEP, x_stride, weight + k + i * Dot::STEP, stride, acc);
#pragma GCC unroll 8
      for (int line = 0; line < LINES; line++)
        prefetch_after(acc[line % (R * C)], ahead + (i * LINES + line) * 64);
    }
  }
  for (; k + Dot::STEP <= K; k += Dot::STEP) add_step<Dot, R, C>(x + k, x_stride, weight + k, stride, acc);
  if (k < K) {  // the last lanes hold zeros: one more step of the same chain
    typename Dot::X last_x[R * Dot::STEP] = {};
    typename Dot::Weight last_weight[C * Dot::STEP] = {};
    for (int r = 0; r < R; r++) std::copy(x + r * x_stride + k, x + r * x_stride + K, last_x + r * Dot::STEP);
    for (int c = 0; c < C; c++)
      std::copy(weight + c * stride + k, weight + c * stride + K, last_weight + c * Dot::STEP);
    add_step<Dot, R, C>(last_x, Dot::STEP, last_weight, Dot::STEP, acc);
  }
}

// Computes the sums of R rows by C columns, whose lanes are added up to LEVEL: parts[r * TILE / COLUMNS].
template <typename Dot, int R, int LINES>
void add_columns(const typename Dot::X* x, int64_t x_stride, const typename Dot::Weight* weight, int64_t stride,
                 int64_t K, Prefetch& next, Floats* parts) {
  Floats acc[R * COLUMNS];
  add_products<Dot, R, COLUMNS, LINES>(x, x_stride, weight, stride, K, next, acc);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) parts[r * TILE / COLUMNS] = sums<COLUMNS>(acc + r * COLUMNS);
}

// The same for `count` < COLUMNS columns, which are computed one by one; the others are zeros.
template <typename Dot, int R>
void add_last_columns(const typename Dot::X* x, int64_t x_stride, const typename Dot::Weight* weight, int64_t stride,
                      int64_t K, int64_t count, Prefetch& next, Floats* parts) {
  Floats acc[R * COLUMNS] = {}, column[R];
  for (int64_t c = 0; c < count; c++) {
    add_products<Dot, R, 1, 1>(x, x_stride, weight + c * stride, stride, K, next, column);
    for (int r = 0; r < R; r++) acc[r * COLUMNS + c] = column[r];
  }
  for (int r = 0; r < R; r++) parts[r * TILE / COLUMNS] = sums<COLUMNS>(acc + r * COLUMNS);
}

// Stores `count` columns of a row, whose lanes are added up to LEVEL, with the bias [TILE]. Overwrites `parts`.
template <typename T>
inline __attribute__((always_inline)) void store_row(Floats* parts, int64_t count, const float* bias, T* y) {
  T found[TILE];
  const bool is_whole = count == TILE;
#pragma GCC unroll 4
  for (int64_t c = 0; c < TILE; c += W)
    store(is_whole ? y + c : found + c, sums<W / COLUMNS, LEVEL>(parts + c / COLUMNS) + load(bias + c));
  if (!is_whole) memcpy(y, found, count * sizeof(T));
}

// Computes R rows of y by `count` <= TILE columns.
template <typename Dot, typename T, int R>
void multiply_rows(const typename Dot::X* x, int64_t x_stride, const typename Dot::Weight* weight, int64_t stride,
                   int64_t K, int64_t count, const float* bias, Prefetch& next, T* y, int64_t y_stride) {
  constexpr int C = COLUMNS;
  Floats parts[R * TILE / C];
  const int lines = next.share(std::max<int>(C * Dot::STEP * sizeof(T) / 64, 1), 1);
  const auto add = lines > 2 ? add_columns<Dot, R, 4> : lines > 1 ? add_columns<Dot, R, 2> : add_columns<Dot, R, 1>;
  int64_t c = 0;
  for (; c + C <= count; c += C) add(x, x_stride, weight + c * stride, stride, K, next, parts + c / C);
  if (c < count)
    add_last_columns<Dot, R>(x, x_stride, weight + c * stride, stride, K, count - c, next, parts + c / C), c += C;
  for (; c < TILE; c += C)  // of columns that are not there
    for (int r = 0; r < R; r++) parts[r * TILE / C + c / C] = splat(0.0f);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) store_row(parts + r * TILE / C, count, bias, y + r * y_stride);
}

// Computes rows of y, at most ROWS, by `count` <= TILE columns.
template <typename Dot, typename T, int R = ROWS, typename... Arguments>
void multiply_few_rows(int64_t rows, Arguments&&... arguments) {
  if (rows == R)
    multiply_rows<Dot, T, R>(arguments...);
  else if constexpr (R > 1)
    multiply_few_rows<Dot, T, R - 1>(rows, arguments...);
}

// Computes rows of y by `count` <= PANEL columns. Rows are the outer loop: a few rows of x stay in the L1 cache while
// the columns are read, from memory for the first of them, then from the L2 cache; and whole lines of y are written.
template <typename Dot, typename T>
void multiply_tile(const typename Dot::X* x, int64_t x_stride, int64_t rows, const typename Dot::Weight* weight,
                   int64_t stride, int64_t K, int64_t count, const float* bias, Prefetch& next, T* y,
                   int64_t y_stride) {
  const int64_t blocks = (rows + ROWS - 1) / ROWS;
  for (int64_t i = 0, row = 0, last; i < blocks; i++, row = last) {
    last = rows * (i + 1) / blocks;
    for (int64_t c = 0; c < count; c += TILE)
      multiply_few_rows<Dot, T>(last - row, x + row * x_stride, x_stride, weight + c * stride, stride, K,
                                std::min(TILE, count - c), bias + c, next, y + row * y_stride + c, y_stride);
  }
}

}  // namespace lanes
