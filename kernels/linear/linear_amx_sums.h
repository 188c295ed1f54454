// Sums of tiles on their way to rows of y: transposed, with the bias, rounded, for a gate with silu and its factor.
#pragma once
#include "machine/amx.h"
#if defined(LOCKSTEP_AMX)
#include <algorithm>

#include "layers/gated.h"
#include "linear/linear_call.h"

namespace amx {

constexpr int64_t PAIR = 2 * TILE;  // the most rows or columns computed together: 2 x 2 tiles of sums

struct Half {  // up to TILE columns of a weight
  const bf16 *weight, *bias;
  int64_t stride, count;
};

// Tile registers: 0 to 3 sums, of rows of tiles 4, 5, 4 and 5; 4 and 5 the rows of weights or of x, of which there may be
// fewer than 16; 6 and 7 the arranged ones.
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

inline simd::Floats widened(__m256i row) { return (simd::Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(row), 16); }

inline __m512 bias_of(const Half& half) {  // in fp32, zeros if there is none
  if (!half.bias || !half.count) return _mm512_setzero_ps();
  return (__m512)widened(_mm256_maskz_loadu_epi16((__mmask16)first_lanes(half.count), half.bias));
}

// Turns a tile of sums, [16 columns][16 rows], into rows of up to 16 columns, with the bias, in bfloat16.
inline void round_rows(const float* sums, const Half& half, __m256i rows[16]) {
  const __m512 bias = bias_of(half);
  __m512i v[16];
  for (int i = 0; i < 16; i++) v[i] = _mm512_load_si512(sums + i * 16);
  transpose(v);
#pragma GCC unroll 16
  for (int r = 0; r < 16; r++) rows[r] = (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps((__m512)v[r], bias));
}

// The sums of a block of up to 2 x 2 tiles, which are written to y piece by piece while the next block is multiplied: the
// processor's units for tiles and for vectors work at the same time, and no vector is loaded that a tile just stored.
class Unwritten {
 public:
  // Where the sums of the next block are stored, [tiles of rows * tiles of columns][16 columns][16 rows].
  float* next() { return sums_[1 - side_]; }

  // Takes over the block at next(): `rows` rows of y, from row `row` and column `n` of the part on.
  void begin(const Part& part, const Half halves[2], bool is_gated, int64_t n, int64_t row, int64_t rows) {
    finish();
    side_ = 1 - side_, is_gated_ = is_gated, num_n_ = halves[1].count ? 2 : 1;
    halves_[0] = halves[0], halves_[1] = halves[1];
    y_ = (bf16*)part.y + row * part.N + n, y_stride_ = part.N, rows_ = rows;
    pieces_of_tile_ = is_gated ? 2 + PRODUCTS : num_n_;
    piece_ = 0, pieces_ = (int)tiles_of(rows) * pieces_of_tile_;
  }
  void some() {
    if (piece_ < pieces_) write_piece();
  }
  void finish() {
    while (piece_ < pieces_) write_piece();
  }

 private:
  static constexpr int PRODUCTS = 8, PRODUCT_ROWS = TILE / PRODUCTS;  // pieces of a tile of gates times `up`

  // Not inlined: the compiler would move its vectors among the tile instructions as it likes.
  __attribute__((noinline)) void write_piece() {
    const int tile = piece_ / pieces_of_tile_, part = piece_ % pieces_of_tile_;
    piece_++;
    const int64_t count = std::min(rows_ - tile * TILE, TILE);
    bf16* y = y_ + tile * TILE * y_stride_;
    const float* sums = sums_[side_] + (tile * num_n_ + part) * 256;
    if (!is_gated_) {
      __m256i values[16];
      round_rows(sums, halves_[part], values);
      const __mmask16 mask = (__mmask16)first_lanes(halves_[part].count);
      for (int64_t r = 0; r < count; r++) _mm256_mask_storeu_epi16(y + r * y_stride_ + part * TILE, mask, values[r]);
    } else if (part < 2) {
      round_rows(sums, halves_[part], rounded_[part]);
    } else {
      const __mmask16 mask = (__mmask16)first_lanes(halves_[0].count);
      const int64_t first = (part - 2) * PRODUCT_ROWS, last = std::min<int64_t>(first + PRODUCT_ROWS, count);
      for (int64_t r = first; r < last; r++) {
        const simd::Floats out = gated::product<bf16>(widened(rounded_[0][r]), widened(rounded_[1][r]));
        _mm256_mask_storeu_epi16(y + r * y_stride_, mask, (__m256i)simd::halves(out));
      }
    }
  }

  alignas(64) float sums_[2][4 * 256];
  __m256i rounded_[2][16];  // rows of a gate and of its `up`
  Half halves_[2];
  bf16* y_;
  int64_t y_stride_, rows_;
  int side_ = 0, num_n_, pieces_of_tile_, piece_ = 0, pieces_ = 0;
  bool is_gated_;
};

}  // namespace amx
#endif
