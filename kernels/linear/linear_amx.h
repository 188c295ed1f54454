// The bf16 product by AMX tiles. One element of y is one chain: the tile unit adds 32 products along K at a time
// to an fp32 sum, left to right, then the bias is added. Each element of a tile has its own chain, so its bits do not
// depend on other elements of the tile. Subnormal sums are flushed to zero, as the instruction does.
//
// y^T = weight x^T: a tile of weights is read from memory in place (16 rows, 32 values each), only x is
// rearranged, once a call, and the tile of results [16 columns, 16 rows] is transposed when it is stored.
#pragma once
#include "machine/amx.h"
#if defined(LOCKSTEP_AMX)
#include <omp.h>

#include <vector>

#include "linear/linear_amx_many.h"
#include "linear/linear_amx_sums.h"
#include "linear/linear_call.h"
#include "linear/linear_prefetch.h"
#include "linear/linear_shares.h"

namespace amx {

constexpr int64_t X_BYTES = 1 << 20;   // bytes of rearranged x that stay in the L2 cache while all weights are read
constexpr int64_t SERIAL_TILES = 64;   // up to this many tiles of x are rearranged by one thread

// Weights of columns that are computed together: twice up to 16 columns, of one part or of a gate and its `up`.
struct Columns {
  Half halves[2];
  const Tile* tail;  // [2] the last K % 32 values of each, zeros beyond

  static Half half(const Part& part, int64_t n, int64_t last) {
    return {(const bf16*)part.weight + n * part.weight_stride, part.bias ? (const bf16*)part.bias + n : nullptr,
            part.weight_stride, std::clamp<int64_t>(last - n, 0, TILE)};
  }
  Columns(const Part& part, const Part* up, int64_t n, int64_t last, const Tile* tail)
      : halves{half(part, n, last), up ? half(*up, n, last) : half(part, n + TILE, last)}, tail(tail) {}

  int num() const { return halves[1].count ? 2 : 1; }
  Ahead rows(int64_t K) const {
    const auto its = [K](const Half& half) { return MemoryRows{half.weight, K * 2, half.stride * 2, half.count}; };
    return {its(halves[0]), its(halves[1])};
  }
  void copy_tail(int64_t K, Tile* to) const {
    const int64_t k = K / STEP * STEP;
    for (const Half& half : halves)
      for (int64_t c = 0; c < half.count; c++)
        _mm512_store_si512(to[&half - halves].values + c * STEP,
                           _mm512_maskz_loadu_epi16(first_lanes(K - k), half.weight + c * half.stride + k));
  }
};

// Computes sums of NT tiles of columns by MT tiles of rows, and stores them at before.next(); meanwhile some of the sums
// `before` these are written to y.
template <int NT, int MT>
void multiply_tiles(const Columns& columns, const Tile* x, int64_t x_tiles, int64_t K, Prefetch& next,
                    Unwritten& before) {
  const int64_t full_steps = K / STEP, first_stride = columns.halves[0].stride, second_stride = columns.halves[1].stride;
  const bf16 *first = columns.halves[0].weight, *second = columns.halves[1].weight;
  const int lines = next.share(NT * (int)TILE, NT + MT + NT * MT);
  _tile_zero(0);
  if (NT == 2) _tile_zero(1);
  if (MT == 2) _tile_zero(2);
  if (NT == 2 && MT == 2) _tile_zero(3);
  const auto fetch = [&] { next.lines(lines); };
  auto add = [&](const bf16* w0, int64_t w0_stride, const bf16* w1, int64_t w1_stride, int64_t s) {
    _tile_loadd(6, x[s].values, 64);
    fetch();
    _tile_loadd(4, w0, w0_stride * 2);
    fetch();
    _tile_dpbf16ps(0, 4, 6);
    fetch();
    if (NT == 2) {
      _tile_loadd(5, w1, w1_stride * 2);
      fetch();
      _tile_dpbf16ps(1, 5, 6);
      fetch();
    }
    if (MT == 2) {
      _tile_loadd(7, x[x_tiles + s].values, 64);
      fetch();
      _tile_dpbf16ps(2, 4, 7);
      fetch();
      if (NT == 2) {
        _tile_dpbf16ps(3, 5, 7);
        fetch();
      }
    }
  };
  for (int64_t s = 0; s < full_steps; s++) {
    add(first + s * STEP, first_stride, second + s * STEP, second_stride, s);
    before.some();
  }
  if (K % STEP) add(columns.tail[0].values, STEP, columns.tail[1].values, STEP, full_steps);
  float* sums = before.next();
  _tile_stored(0, sums, 64);
  if (NT == 2) _tile_stored(1, sums + 256, 64);
  if (MT == 2) _tile_stored(2, sums + NT * 256, 64);
  if (NT == 2 && MT == 2) _tile_stored(3, sums + 768, 64);
  asm volatile("" ::: "memory");
}

// Computes rows [row, row + rows) of y, whose x is given as tiles, for the columns of a part from column n on. The last
// sums are left in `unwritten`.
inline void multiply_columns(const Part& part, const Columns& columns, bool is_gated, int64_t n, const Tile* x,
                             int64_t row, int64_t rows, int64_t K, Prefetch next, Unwritten& unwritten) {
  const int64_t x_tiles = (K + STEP - 1) / STEP;
  const int num_n = columns.num();
  for (int64_t m = 0; m < rows; m += PAIR, x += 2 * x_tiles) {
    const int64_t count = std::min(rows - m, PAIR);
    if (num_n == 2)
      (count > TILE ? multiply_tiles<2, 2> : multiply_tiles<2, 1>)(columns, x, x_tiles, K, next, unwritten);
    else
      (count > TILE ? multiply_tiles<1, 2> : multiply_tiles<1, 1>)(columns, x, x_tiles, K, next, unwritten);
    unwritten.begin(part, columns.halves, is_gated, n, row + m, count);
  }
}

// One thread's work on a call: tiles of columns that are next to each other, once or twice TILE of them.
class Worker {
 public:
  Worker(const Call& call, const ColumnTiles& tiles) : call_(call), tiles_(tiles), width_(width(call)) {}

  // The most tiles of columns that are multiplied together: with its `up`, a gate's tile makes a pair.
  static int64_t width(const Call& call) { return call.up ? 1 : PAIR / TILE; }

  // Returns the number of tiles from `tile` on that are multiplied together.
  int64_t num_together(int64_t tile) const {
    const ColumnTiles::Place place = tiles_[tile];
    return std::min(width_ - place.n / TILE % width_, tiles_of(place.part->N - place.n));
  }
  // Computes rows [row, row + rows) of `num` tiles, at most num_together(tile), of which the last are written by the next
  // call or by finish(). x: these rows, arranged. next: the tile that probably follows, or -1.
  void multiply(int64_t tile, int64_t num, int64_t next, const Tile* x, int64_t row, int64_t rows) {
    const Columns columns = columns_of(tile, num);
    const int64_t K = call_.K, counts[2] = {columns.halves[0].count, std::max<int64_t>(columns.halves[1].count, 1)};
    if (memcmp(counts, configured_, sizeof counts)) {
      memcpy(configured_, counts, sizeof counts);
      configure(counts[0], counts[1]);
    }
    if (K % STEP) columns.copy_tail(K, tail_);
    asm volatile("" ::"r"(tail_) : "memory");  // the compiler does not know that tile instructions read it
    Prefetch ahead;
    if (next >= 0) {
      ahead = Prefetch(columns_of(next, num_together(next)).rows(K), (rows - 1) / PAIR + 1);
    }
    const ColumnTiles::Place place = tiles_[tile];
    multiply_columns(*place.part, columns, call_.up != nullptr, place.n, x, row, rows, K, ahead,
                     unwritten_);
  }
  void finish() { unwritten_.finish(); }

 private:
  Columns columns_of(int64_t tile, int64_t num) const {
    const ColumnTiles::Place place = tiles_[tile];
    return {*place.part, call_.up, place.n, std::min(place.n + num * TILE, place.part->N), tail_};
  }

  const Call& call_;
  const ColumnTiles& tiles_;
  const int64_t width_;
  int64_t configured_[2] = {};  // columns of the two tiles of weights
  Tile tail_[2];
  Unwritten unwritten_;
};

inline void multiply(const Call& call, int threads) {
  if (call.M >= MANY_ROWS) return multiply_many(call, threads);
  static thread_local std::vector<Tile> arranged;
  const int64_t x_tiles = (call.K + STEP - 1) / STEP;
  const int64_t row_bytes = std::max<int64_t>(x_tiles, 1) * STEP * 2;
  const int64_t block_rows = std::min(std::max(X_BYTES / row_bytes / PAIR * PAIR, PAIR), tiles_of(call.M) * TILE);
  if ((int64_t)arranged.size() < block_rows / TILE * x_tiles) arranged.resize(block_rows / TILE * x_tiles);
  Tile* x = arranged.data();
  const auto arrange_rows = [&](int64_t row, int64_t tile) {
    row += tile * TILE;
    arrange((const bf16*)call.x + row * call.x_stride, call.x_stride, call.M - row, call.K, x + tile * x_tiles);
  };
  // For a few rows, arranging them takes less time than a barrier of the threads.
  const bool is_small = block_rows >= call.M && tiles_of(call.M) * x_tiles <= SERIAL_TILES;
  for (int64_t tile = 0; is_small && tile < tiles_of(call.M); tile++) arrange_rows(0, tile);
  threads = is_worth_threads(call) ? threads : 1;
  const ColumnTiles tiles(call);
  Shares shares(tiles.count(), threads, Worker::width(call), 0);  // a slow core's last tiles take long
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Worker worker(call, tiles);
    for (int64_t row = 0; row < call.M; row += block_rows) {
      const int64_t rows = std::min(block_rows, call.M - row);
      if (!is_small) {
#pragma omp barrier
#pragma omp master
        shares.deal();
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < tiles_of(rows); tile++) arrange_rows(row, tile);
      }
      int64_t tile, num;
      const auto together = [&](int64_t front) { return worker.num_together(front); };
      for (int share = omp_get_thread_num(); share < threads; share += omp_get_num_threads())  // fewer may have started
        while ((num = shares.take(share, together, &tile)))
          worker.multiply(tile, num, shares.has_more(share) ? tile + num : -1, x, row, rows);
      while (shares.take_last(&tile)) worker.multiply(tile, 1, tile - 1, x, row, rows);
    }
    worker.finish();
    _tile_release();
  }
}

}  // namespace amx
#endif
