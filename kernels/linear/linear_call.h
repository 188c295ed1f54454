// The arguments of a product. Dimension letters: M rows of x, N rows of a weight (columns of y), K summed over.
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

// The tiles of columns of a call, numbered in the order of its parts.
class ColumnTiles {
 public:
  struct Place {
    const Part* part;
    int64_t n;  // the tile's first column
  };
  explicit ColumnTiles(const Call& call) : parts_(call.parts) {
    for (int64_t i = 0; i < call.num_parts; i++) count_ += tiles_of(call.parts[i].N);
  }
  int64_t count() const { return count_; }
  Place operator[](int64_t tile) const {
    const Part* part = parts_;
    for (; tile >= tiles_of(part->N); part++) tile -= tiles_of(part->N);
    return {part, tile * TILE};
  }

 private:
  const Part* parts_;
  int64_t count_ = 0;
};

static inline bool is_worth_threads(const Call& call) {
  int64_t columns = 0;
  for (int64_t i = 0; i < call.num_parts; i++) columns += call.parts[i].N;
  if (call.up) columns *= 2;
  return columns * call.K > SERIAL_WEIGHTS && columns * call.K * call.M > SERIAL_WORK;
}
