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

#include "layers/gated.h"
#include "linear/linear_call.h"
#include "linear/linear_prefetch.h"
#include "linear/linear_shares.h"

namespace amx {

constexpr int64_t X_BYTES = 1 << 20;   // bytes of rearranged x that stay in the L2 cache while all weights are read
constexpr int64_t SERIAL_TILES = 64;   // up to this many tiles of x are rearranged by one thread
constexpr int64_t PAIR = 2 * TILE;     // the most rows or columns computed together: 2 x 2 tiles of sums

// Tile registers: 0..3 sums (weights 0 and 1 by x 0, then by x 1), 4 and 5 weights, 6 and 7 x.
inline void configure(int64_t first_rows, int64_t second_rows) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  } config;
  for (int tile : {0, 2, 4}) config.rows[tile] = (uint8_t)first_rows;
  for (int tile : {1, 3, 5}) config.rows[tile] = (uint8_t)second_rows;
  for (int tile : {6, 7}) config.rows[tile] = TILE;
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// Weights of columns that are computed together: twice up to 16 columns, of one part or of a gate and its `up`.
struct Columns {
  struct Half {
    const bf16 *weight, *bias;
    int64_t stride, count;

    MemoryRows rows(int64_t K) const { return {weight, K * 2, stride * 2, count}; }
  } halves[2];
  const Tile* tail;  // [2] the last K % 32 values of each, zeros beyond

  static Half half(const Part& part, int64_t n, int64_t last) {
    return {(const bf16*)part.weight + n * part.weight_stride, part.bias ? (const bf16*)part.bias + n : nullptr,
            part.weight_stride, std::clamp<int64_t>(last - n, 0, TILE)};
  }
  Columns(const Part& part, const Part* up, int64_t n, int64_t last, const Tile* tail)
      : halves{half(part, n, last), up ? half(*up, n, last) : half(part, n + TILE, last)}, tail(tail) {}

  int num() const { return halves[1].count ? 2 : 1; }
  void copy_tail(int64_t K, Tile* to) const {
    const int64_t k = K / STEP * STEP;
    for (const Half& half : halves)
      for (int64_t c = 0; c < half.count; c++)
        _mm512_store_si512(to[&half - halves].values + c * STEP,
                           _mm512_maskz_loadu_epi16(first_lanes(K - k), half.weight + c * half.stride + k));
  }
};

// Computes sums of NT tiles of columns by MT tiles of rows, [MT * NT][16 columns][16 rows].
template <int NT, int MT>
void multiply_tiles(const Columns& columns, const Tile* x, int64_t x_tiles, int64_t K, Prefetch& next,
                    float* sums) {
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
  for (int64_t s = 0; s < full_steps; s++)
    add(first + s * STEP, first_stride, second + s * STEP, second_stride, s);
  if (K % STEP) add(columns.tail[0].values, STEP, columns.tail[1].values, STEP, full_steps);
  _tile_stored(0, sums, 64);
  if (NT == 2) _tile_stored(1, sums + 256, 64);
  if (MT == 2) _tile_stored(2, sums + NT * 256, 64);
  if (NT == 2 && MT == 2) _tile_stored(3, sums + 768, 64);
  asm volatile("" ::: "memory");
}

inline simd::Floats widened(__m256i row) { return (simd::Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(row), 16); }

// Stores a tile of sums as rows of up to 16 columns, with the bias, in bfloat16.
inline void round_rows(const float* sums, const Columns::Half& half, __m256i rows[16]) {
  const __mmask16 mask = (__mmask16)first_lanes(half.count);
  __m512 bias = _mm512_setzero_ps();
  if (half.bias) bias = (__m512)widened(_mm256_maskz_loadu_epi16(mask, half.bias));
  __m512i v[16];
  for (int i = 0; i < 16; i++) v[i] = _mm512_load_si512(sums + i * 16);
  transpose(v);
#pragma GCC unroll 16
  for (int r = 0; r < 16; r++) rows[r] = (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps((__m512)v[r], bias));
}

// Computes rows [row, row + rows) of y, whose x is given as tiles, for the columns of a part from column n on.
inline void multiply_columns(const Part& part, const Columns& columns, bool is_gated, int64_t n, const Tile* x,
                             int64_t row, int64_t rows, int64_t K, Prefetch next) {
  alignas(64) static thread_local float sums[4 * 256];
  const int64_t x_tiles = (K + STEP - 1) / STEP;
  const int num_n = columns.num();
  for (int64_t m = 0; m < rows; m += PAIR, x += 2 * x_tiles) {
    const int64_t num_m = tiles_of(std::min(rows - m, PAIR));
    if (num_n == 2)
      (num_m == 2 ? multiply_tiles<2, 2> : multiply_tiles<2, 1>)(columns, x, x_tiles, K, next, sums);
    else
      (num_m == 2 ? multiply_tiles<1, 2> : multiply_tiles<1, 1>)(columns, x, x_tiles, K, next, sums);
    for (int64_t j = 0; j < num_m; j++) {
      const float* tile = sums + j * num_n * 256;
      bf16* y = (bf16*)part.y + (row + m + j * TILE) * part.N + n;
      const int64_t count = std::min(rows - m - j * TILE, TILE);
      __m256i values[2][16];
      for (int i = 0; i < num_n; i++) round_rows(tile + i * 256, columns.halves[i], values[i]);
      for (int i = 0; i < (is_gated ? 1 : num_n); i++) {
        const __mmask16 mask = (__mmask16)first_lanes(columns.halves[i].count);
        for (int64_t r = 0; r < count; r++) {
          __m256i out = values[i][r];
          if (is_gated) out = (__m256i)simd::halves(gated::product<bf16>(widened(out), widened(values[1][r])));
          _mm256_mask_storeu_epi16(y + r * part.N + i * TILE, mask, out);
        }
      }
    }
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
  // Computes rows [row, row + rows) of `num` tiles, at most num_together(tile). x: these rows, arranged. next: the tile
  // that probably follows, or -1.
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
      const Columns after = columns_of(next, num_together(next));
      ahead = Prefetch({after.halves[0].rows(K), after.halves[1].rows(K)}, (rows - 1) / PAIR + 1);
    }
    const ColumnTiles::Place place = tiles_[tile];
    multiply_columns(*place.part, columns, call_.up != nullptr, place.n, x, row, rows, K, ahead);
  }

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
};

inline void multiply(const Call& call, int threads) {
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
  Shares shares(tiles.count(), threads, Worker::width(call));
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
    _tile_release();
  }
}

}  // namespace amx
#endif
