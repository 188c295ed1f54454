// Products of rows with a weight each, chosen among the weights of experts: a row's bits are those of a product with
// its weight alone. Dimension letters: R routes (rows of y), N columns of y, K summed over, E experts.
#pragma once
#include <omp.h>

#include <memory>
#include <vector>

#include "linear/linear_call.h"
#include "machine/memory.h"

namespace grouped {

struct Grouped {
  const void* x;           // route r reads row r / x_repeats: [R / x_repeats, K], rows x_stride elements apart
  const int64_t* experts;  // [R], each in [0, E)
  const void* weights;     // [E, N, K]; transposed: [E, K, N]. Of a gated product: [E, 2 N, K], gates before ups
  const void* biases;      // [E, N] or null; of a gated product [E, 2 N]
  void* y;                 // [R, N] contiguous
  int64_t R, x_repeats, x_stride, E, N, K;
  int64_t expert_stride, weight_stride;  // elements from one expert, and from one row of a weight, to the next
  int64_t is_gated, is_transposed;
};

constexpr int64_t TRANSPOSED = 64;  // columns whose transposed weights stay in the L2 cache
constexpr int64_t ROW_COST = 1, TILE_COST = 8;  // of a tile's product: per row of x, and for reading the weights

// The routes of each expert, in ascending order: order[first[e]] .. order[first[e + 1] - 1].
inline void sort_routes(const Grouped& call, std::vector<int64_t>& first, std::vector<int64_t>& order) {
  first.assign(call.E + 2, 0);
  order.resize(call.R);
  for (int64_t r = 0; r < call.R; r++) first[call.experts[r] + 2]++;
  for (int64_t e = 2; e < call.E + 2; e++) first[e] += first[e - 1];
  for (int64_t r = 0; r < call.R; r++) order[first[call.experts[r] + 1]++] = r;
}

template <typename T>
void transpose(const T* from, int64_t stride, int64_t K, int64_t columns, T* to) {
  for (int64_t k = 0; k < K; k += TILE)
    for (int64_t c = 0; c < columns; c++)
      for (int64_t i = k; i < std::min(k + TILE, K); i++) to[c * K + i] = from[i * stride + c];
}

// Computes the columns [first, last) of an expert's routes, whose x is contiguous, and stores them in the rows of y.
template <typename T, typename Multiply>
void multiply_expert(const Grouped& call, int64_t expert, const T* x, const int64_t* routes, int64_t rows,
                     int64_t first, int64_t last, Multiply multiply) {
  static thread_local std::vector<T> results, turned;
  const int64_t width = last - first;
  if ((int64_t)results.size() < rows * width) results.resize(rows * width);
  const T* weight = (const T*)call.weights + expert * call.expert_stride;
  int64_t stride = call.weight_stride;
  if (call.is_transposed) {
    if ((int64_t)turned.size() < width * call.K) turned.resize(width * call.K);
    transpose(weight + first, stride, call.K, width, turned.data());
    weight = turned.data(), stride = call.K;
  } else {
    weight += first * stride;
  }
  const T* bias = call.biases ? (const T*)call.biases + expert * call.N * (call.is_gated ? 2 : 1) + first : nullptr;
  const Part parts[] = {{weight, bias, results.data(), width, stride},
                        {weight + call.N * stride, bias ? bias + call.N : nullptr, results.data(), width, stride}};
  multiply(Call{x, rows, call.K, call.K, parts, 1, call.is_gated ? parts + 1 : nullptr});
  for (int64_t i = 0; i < rows; i++)
    memcpy((T*)call.y + routes[i] * call.N + first, results.data() + i * width, width * sizeof(T));
}

// Calls visit(expert, first, last) for the columns [first, last) of experts that thread `index` of `count` computes.
// The cost of its share is about that of each other's; a part of an expert is contiguous in memory.
template <typename Visit>
void visit_experts(const Grouped& call, const std::vector<int64_t>& first, int64_t index, int64_t count, Visit visit) {
  const int64_t tiles = tiles_of(call.N);
  const auto cost = [&](int64_t e) {  // of a tile of the expert
    const int64_t rows = first[e + 1] - first[e];
    return rows ? rows * ROW_COST + TILE_COST : 0;
  };
  int64_t total = 0, seen = 0;
  for (int64_t e = 0; e < call.E; e++) total += tiles * cost(e);
  const int64_t begin = total * index / count, end = total * (index + 1) / count;
  for (int64_t e = 0; e < call.E; e++) {
    const int64_t each = cost(e);
    if (!each) continue;
    const auto tile_at = [&](int64_t place) { return std::clamp<int64_t>((place - seen + each - 1) / each, 0, tiles); };
    const int64_t from = begin > seen ? tile_at(begin) : 0, to = end > seen ? tile_at(end) : 0;
    if (from < to) visit(e, from * TILE, std::min(to * TILE, call.N));
    seen += tiles * each;
  }
}

// multiply: computes a Call with one thread.
template <typename T, typename Multiply>
void multiply_grouped(const Grouped& call, int threads, Multiply multiply) {
  static thread_local std::vector<int64_t> first_routes, routes;
  static thread_local memory::Kept<T> kept;
  // The threads below have thread-locals of their own; they use these of the caller.
  std::vector<int64_t>&first = first_routes, &order = routes;
  sort_routes(call, first, order);
  std::unique_ptr<T[]> own;
  T* x = memory::take(call.R * call.K, kept, own);  // a copy of the rows, in the order of the experts
  const int64_t columns = call.N * (call.is_gated ? 2 : 1);
  const bool is_worth_threads =
      threads > 1 && columns * call.K > SERIAL_WEIGHTS && columns * call.K * call.R > SERIAL_WORK;
  memory::Shortage shortage;
#pragma omp parallel num_threads(threads) if (is_worth_threads)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < call.R; i++)
      memcpy(x + i * call.K, (const T*)call.x + order[i] / call.x_repeats * call.x_stride, call.K * sizeof(T));
    const auto visit = [&](int64_t expert, int64_t begin, int64_t end) {
      const int64_t width = call.is_transposed ? TRANSPOSED : end - begin;
      for (int64_t n = begin; n < end; n += width)
        multiply_expert<T>(call, expert, x + first[expert] * call.K, order.data() + first[expert],
                           first[expert + 1] - first[expert], n, std::min(n + width, end), multiply);
    };
    try {
      visit_experts(call, first, omp_get_thread_num(), omp_get_num_threads(), visit);
    } catch (const std::bad_alloc&) {
      shortage.note();
    }
  }
  shortage.raise();
}

}  // namespace grouped
