// Multiplies a tile of keys and values by AMX with all query rows that share a KV head, 16 of them at a time.
//
// scores^T = keys query^T, keys in place in the cache; out = probs values, values interleaved by pairs of positions.
// Each element has its own chain: 32 products along the head, or along the positions, are added to an fp32 sum at a
// time, so its bits do not depend on the rows and columns beside it. Probabilities are rounded to bfloat16. The sums
// of TILE positions start from zero and are then added to the fp32 output: the tile unit flushes subnormal numbers, so
// 32 positions that a row does not see would otherwise change the earlier sum.
#pragma once
#include "machine/amx.h"
#include "attention/attention_tiles.h"
#if defined(LOCKSTEP_AMX)
#define ATTENTION_HAS_AMX 1

namespace attention {

// [4][16] words -> [16][4].
inline void transpose_4_rows(__m512i v[4]) {
  const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpacklo_epi32(v[2], v[3]);
  const __m512i c = _mm512_unpackhi_epi32(v[0], v[1]), d = _mm512_unpackhi_epi32(v[2], v[3]);
  const __m512i w0 = _mm512_unpacklo_epi64(a, b), w1 = _mm512_unpackhi_epi64(a, b);  // lane l of wi: word 4 l + i
  const __m512i w2 = _mm512_unpacklo_epi64(c, d), w3 = _mm512_unpackhi_epi64(c, d);
  const __m512i e = _mm512_shuffle_i32x4(w0, w1, 0x44), f = _mm512_shuffle_i32x4(w0, w1, 0xee);
  const __m512i g = _mm512_shuffle_i32x4(w2, w3, 0x44), h = _mm512_shuffle_i32x4(w2, w3, 0xee);
  v[0] = _mm512_shuffle_i32x4(e, g, 0x88), v[1] = _mm512_shuffle_i32x4(e, g, 0xdd);
  v[2] = _mm512_shuffle_i32x4(f, h, 0x88), v[3] = _mm512_shuffle_i32x4(f, h, 0xdd);
}

// [16][4] words -> [4][16].
inline void transpose_4_columns(__m512i v[4]) {
  const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(2));
  const __m512i a = _mm512_permutex2var_epi32(v[0], first, v[1]), b = _mm512_permutex2var_epi32(v[2], first, v[3]);
  const __m512i c = _mm512_permutex2var_epi32(v[0], second, v[1]), d = _mm512_permutex2var_epi32(v[2], second, v[3]);
  v[0] = _mm512_shuffle_i32x4(a, b, 0x44), v[1] = _mm512_shuffle_i32x4(a, b, 0xee);
  v[2] = _mm512_shuffle_i32x4(c, d, 0x44), v[3] = _mm512_shuffle_i32x4(c, d, 0xee);
}

class ByMatrix : public Paired {
 public:
  static constexpr bool MULTIPLIES_ALL_ROWS = true;
  static constexpr int64_t ROWS_AT_ONCE = 128;  // several heads: each waits for its tiles while others go on
  static constexpr int64_t BLOCK = 16;  // keys in a tile register, and query rows at a time

  // Prepares for items of `rows` query rows for each of `heads` KV heads, until close().
  void open(const Problem& p, int64_t rows, int64_t heads) {
    rows_ = rows;
    columns_ = rows <= 4 ? 4 : BLOCK;  // decoding, a few rows share a KV head: narrow tiles of scores are cheaper
    groups_ = (rows + BLOCK - 1) / BLOCK;
    key_steps_ = padded(p.key_width) / amx::STEP, value_tiles_ = padded(p.value_width) / BLOCK;
    reserve(queries_, heads * groups_ * key_steps_);
    reserve(raw_, heads * groups_ * (TILE / BLOCK));
    reserve(scores_, groups_ * (TILE / BLOCK));
    reserve(probs_, heads * groups_ * (TILE / amx::STEP));
    reserve(keys_, TILE / BLOCK * key_steps_);
    reserve(values_, 2 * TILE / amx::STEP * value_tiles_);
    reserve(sums_, heads * groups_ * value_tiles_);
    configure();
  }
  void close() { _tile_release(); }

  void put_queries(const bf16* query, int64_t head) {
    const int64_t width = key_steps_ * amx::STEP;
    for (int64_t g = 0; g < groups_; g++) {
      amx::Tile* to = queries_of(head, g);
      if (columns_ == BLOCK) {
        amx::arrange(query + g * BLOCK * width, width, rows_ - g * BLOCK, width, to);
        continue;
      }
      for (int64_t s = 0; s < key_steps_; s++) {
        __m512i v[4];
        for (int r = 0; r < 4; r++)
          v[r] = r < rows_ ? _mm512_loadu_si512(query + r * width + s * amx::STEP) : _mm512_setzero_si512();
        transpose_4_rows(v);
        for (int i = 0; i < 4; i++) _mm512_store_si512(to[s].values + i * amx::STEP, v[i]);
      }
    }
  }

  // The calls of `ahead`, which prefetches the next tile, for one head of a whole tile.
  int64_t calls_ahead() const {
    return TILE / BLOCK / 2 * key_steps_ * 4 * groups_ + TILE / 2 * ((value_tiles_ + 1) / 2);
  }

  // Computes scores of all rows with positions [begin, at.count), in the layout of the tile unit; spread() makes rows.
  template <typename Ahead>
  void multiply_queries(const Problem& p, const Positions& at, int64_t head, int64_t begin, const Ahead& ahead) {
    first_ = begin / BLOCK, last_ = (at.count + BLOCK - 1) / BLOCK;
    const bf16* keys[TILE / BLOCK];
    int64_t stride[TILE / BLOCK];
    for (int64_t b = first_; b < last_; b++) {
      if (!(p.key_width % amx::STEP) && is_spaced(at.key + b * BLOCK, p.key_token)) {
        keys[b] = row_[b * BLOCK], stride[b] = p.key_token * sizeof(bf16);
      } else {
        keys[b] = copy_keys(b), stride[b] = key_steps_ * 64;
      }
    }
    amx::fence();
    const int64_t column_bytes = columns_ * sizeof(float);
    for (int64_t g = 0; g < groups_; g++) {
      const amx::Tile* queries = queries_of(head, g);
      for (int64_t b = first_; b < last_; b += 2) {
        const bool is_pair = b + 1 < last_;
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t s = 0; s < key_steps_; s++) {
          _tile_loadd(2, queries[s].values, column_bytes);
          ahead();
          _tile_loadd(3, keys[b] + s * amx::STEP, stride[b]);
          ahead();
          _tile_dpbf16ps(0, 3, 2);
          if (!is_pair) continue;
          ahead();
          _tile_loadd(4, keys[b + 1] + s * amx::STEP, stride[b + 1]);
          ahead();
          _tile_dpbf16ps(1, 4, 2);
        }
        amx::Tile* raw = raw_of(head, g) + b;
        _tile_stored(0, raw[0].values, column_bytes);
        if (is_pair) _tile_stored(1, raw[1].values, column_bytes);
      }
    }
    amx::fence();
  }

  void spread(int64_t head) {
    for (int64_t g = 0; g < groups_; g++)
      for (int64_t b = first_; b < last_; b++) {
        const bf16* from = raw_of(head, g)[b].values;
        float* to = (float*)scores_.data() + g * BLOCK * TILE + b * BLOCK;
        __m512i v[BLOCK];
        for (int i = 0; i < columns_; i++) v[i] = _mm512_load_si512(from + i * amx::STEP);
        columns_ == 4 ? transpose_4_columns(v) : amx::transpose(v);
        for (int i = 0; i < columns_; i++) _mm512_store_si512(to + i * TILE, v[i]);
      }
  }

  template <int R>
  void scores(const bf16*, int64_t, int64_t row, int64_t j, Fetch&, Floats* found) const {
    for (int r = 0; r < R; r++) found[r] = load((const float*)scores_.data() + (row + r) * TILE + j);
  }

  // Interleaves the values of a head, in the order of `head`, at positions [begin, at.count); before and after them others
  // are repeated. They stay until the head after the next: a tile load of what was stored just before would wait for it.
  template <typename Ahead>
  void open_values(const Problem& p, const Positions& at, int64_t kv_head, int64_t head, int64_t begin,
                   const Ahead& ahead) {
    Paired::open_values(p, at, kv_head);
    for (int64_t j = 0; j < begin; j++) row_[j] = row_[begin];
    first_step_ = begin / amx::STEP, last_step_ = (at.count + amx::STEP - 1) / amx::STEP;
    for (int64_t s = first_step_; s < last_step_; s++) {
      const bf16* const* rows = row_ + s * amx::STEP;
      for (int64_t c = 0; c < value_tiles_; c += 2) {
        const bool is_part = c * BLOCK + amx::STEP > width_;
        bf16* to = values_of(head)[s * value_tiles_ + c].values;
        for (int64_t i = 0; i < BLOCK; i++, to += amx::STEP) {
          const bf16 *even = rows[2 * i] + c * BLOCK, *odd = rows[2 * i + 1] + c * BLOCK;
          const __m512i a = is_part ? _mm512_maskz_loadu_epi16(Paired::last_, even) : _mm512_loadu_si512(even);
          const __m512i b = is_part ? _mm512_maskz_loadu_epi16(Paired::last_, odd) : _mm512_loadu_si512(odd);
          _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
          _mm512_store_si512(to + BLOCK * amx::STEP, _mm512_unpackhi_epi16(a, b));
          ahead();
        }
      }
    }
  }

  // Rounds the probabilities of all rows.
  void put_probs(const float* probs, int64_t head) {
    for (int64_t row = 0; row < rows_; row++)
      for (int64_t s = 0; s < TILE / amx::STEP; s++) {
        const float* from = probs + row * TILE + s * amx::STEP;
        _mm512_store_si512(probs_of(head, row / BLOCK)[s].values + row % BLOCK * amx::STEP,
                           (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from)));
      }
  }

  // Computes sums of probs[r, j] * values[j] for all rows.
  void multiply_values(int64_t head) {
    const int64_t out_bytes = value_tiles_ * BLOCK * sizeof(float);
    amx::fence();
    for (int64_t g = 0; g < groups_; g++) {
      const amx::Tile* probs = probs_of(head, g);
      float* sums = sums_of(head, g);
      for (int64_t c = 0; c < value_tiles_; c += 2) {
        _tile_zero(6);
        _tile_zero(7);
        for (int64_t s = first_step_; s < last_step_; s++) {
          const amx::Tile* values = values_of(head) + s * value_tiles_ + c;
          _tile_loadd(5, probs[s].values, 64);
          _tile_loadd(3, values[0].values, 64);
          _tile_dpbf16ps(6, 5, 3);
          _tile_loadd(4, values[1].values, 64);
          _tile_dpbf16ps(7, 5, 4);
        }
        _tile_stored(6, sums + c * BLOCK, out_bytes);
        _tile_stored(7, sums + (c + 1) * BLOCK, out_bytes);
      }
    }
    amx::fence();
  }

  void add_sums(int64_t head, float* out) const {
    for (int64_t g = 0; g < groups_; g++) {
      const int64_t width = value_tiles_ * BLOCK, count = std::min(rows_ - g * BLOCK, BLOCK) * width;
      const float* sums = sums_of(head, g);
      float* to = out + g * BLOCK * width;
      for (int64_t d = 0; d < count; d += W) store(to + d, load(to + d) + load(sums + d));
    }
  }

 private:
  template <typename T>
  static void reserve(std::vector<T>& memory, int64_t count) {
    if ((int64_t)memory.size() < count) memory.resize(count);
  }

  // Tile registers: 0 and 1 sums of scores, 2 queries, 3 and 4 keys or values, 5 probabilities, 6 and 7 sums of values.
  void configure() const {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    for (int tile : {0, 1, 2}) config.row_bytes[tile] = (uint16_t)(columns_ * 4);
    for (int tile : {5, 6, 7}) config.rows[tile] = (uint8_t)columns_;
    asm volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
  }

  amx::Tile* queries_of(int64_t head, int64_t group) {
    return queries_.data() + (head * groups_ + group) * key_steps_;
  }

  amx::Tile* values_of(int64_t head) { return values_.data() + head % 2 * (TILE / amx::STEP * value_tiles_); }
  amx::Tile* raw_of(int64_t head, int64_t group) { return raw_.data() + (head * groups_ + group) * (TILE / BLOCK); }
  amx::Tile* probs_of(int64_t head, int64_t group) {
    return probs_.data() + (head * groups_ + group) * (TILE / amx::STEP);
  }
  float* sums_of(int64_t head, int64_t group) const {
    return (float*)(sums_.data() + (head * groups_ + group) * value_tiles_);
  }

  static bool is_spaced(const int64_t* offsets, int64_t spacing) {  // of 16 offsets
    const __m512i first = _mm512_set1_epi64(offsets[0]);
    const __m512i low = _mm512_mullox_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), _mm512_set1_epi64(spacing));
    const __m512i a = _mm512_add_epi64(first, low), b = _mm512_add_epi64(a, _mm512_set1_epi64(8 * spacing));
    return !(_mm512_cmpneq_epi64_mask(a, _mm512_loadu_si512(offsets)) |
             _mm512_cmpneq_epi64_mask(b, _mm512_loadu_si512(offsets + 8)));
  }

  const bf16* copy_keys(int64_t block) {  // as 16 rows padded with zeros
    const int64_t width = key_steps_ * amx::STEP;
    bf16* to = keys_[block * key_steps_].values;
    for (int64_t i = 0; i < BLOCK; i++)
      for (int64_t d = 0; d < width; d += amx::STEP)
        _mm512_store_si512(to + i * width + d,
                           _mm512_maskz_loadu_epi16(amx::first_lanes(width_ - d), row_[block * BLOCK + i] + d));
    return to;
  }

  std::vector<amx::Tile> queries_;  // [heads, groups of 16 rows, steps along the head]
  std::vector<amx::Tile> raw_;      // [heads, groups, blocks of 16 keys]: [16 keys, columns_ rows] fp32
  std::vector<amx::Tile> scores_;   // [rows, TILE] fp32
  std::vector<amx::Tile> keys_, values_;
  std::vector<amx::Tile> probs_;    // [heads, groups, steps along the positions]: [16 rows, 32 positions]
  std::vector<amx::Tile> sums_;     // [heads, groups, 16 rows, value_tiles_ * 16] fp32
  int64_t rows_ = 0, columns_ = 0, groups_ = 0, key_steps_ = 0, value_tiles_ = 0;
  int64_t first_ = 0, last_ = 0, first_step_ = 0, last_step_ = 0;
};

}  // namespace attention
#endif
