// The arguments of a product, and the division of its columns among threads. Dimension letters: M rows of x,
// N rows of a weight (columns of y), K summed over.
#pragma once
#include <algorithm>
#include <cstdint>

#include "machine/simd.h"

struct Part {  // one weight and its results
  const void* weight;  // [N, K], rows weight_stride elements apart
  const void* bias;    // [N] or null
  void* y;             // [M, N] contiguous
  int64_t N, weight_stride;
};

struct Call {  // y = x @ weight^T + bias for every part
  const void* x;  // [M, K], rows x_stride elements apart
  int64_t M, K, x_stride;
  const Part* parts;
  int64_t num_parts;
  const Part* up = nullptr;  // if set: the one part is the gate, and its y is silu(gate) * up, each rounded before
};

constexpr int64_t TILE = 16;  // columns that are never divided among threads
constexpr int64_t SERIAL_WEIGHTS = 1 << 15, SERIAL_WORK = 1 << 19;  // below, one thread

static inline int64_t tiles_of(int64_t count) { return (count + TILE - 1) / TILE; }

static inline bool is_worth_threads(const Call& call) {
  int64_t columns = 0;
  for (int64_t i = 0; i < call.num_parts; i++) columns += call.parts[i].N;
  if (call.up) columns *= 2;
  return columns * call.K > SERIAL_WEIGHTS && columns * call.K * call.M > SERIAL_WORK;
}

// Calls visit(part, first, last) for the columns [first, last) of each part that thread `index` of `count` computes.
// A thread's columns are contiguous, so that it reads one range of memory from its start to its end.
template <typename Visit>
static inline void visit_columns(const Call& call, int64_t index, int64_t count, Visit visit) {
  int64_t total = 0, seen = 0;
  for (int64_t i = 0; i < call.num_parts; i++) total += tiles_of(call.parts[i].N);
  const int64_t begin = total * index / count, end = total * (index + 1) / count;
  for (int64_t i = 0; i < call.num_parts; i++) {
    const Part& part = call.parts[i];
    const int64_t tiles = tiles_of(part.N);
    const int64_t first = std::max<int64_t>(begin - seen, 0), last = std::min(end - seen, tiles);
    if (first < last) visit(part, first * TILE, std::min(last * TILE, part.N));
    seen += tiles;
  }
}
