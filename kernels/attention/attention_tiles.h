// The arguments of an attention call, and the products with a tile of its keys and values: either widened to fp32, for
// any type, or by the processor's own dot product of pairs of bfloat16, straight from the cache.
//
// Both read TILE positions from `open` on, and give a row the same bits for any set of other rows.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "machine/simd.h"

namespace attention {

using namespace simd;

constexpr int TILE = 64;  // positions per online-softmax step
constexpr int VALUES_A_FETCH = 8;  // positions whose values are added between two prefetches

struct Problem {
  const void *query, *key, *value;
  void* out;
  const float* sinks;           // [H], or [N, H] with sink_row H; or null
  const void *new_key, *new_value;  // rows to write at `slots` first, or null
  const int64_t* slots;             // [N]: block * block_size + offset
  const void* bias;  // [N, H, bias_reach], or [H, bias_reach] with bias_row 0, or null: added to the score of the key
                     // so many positions before the row's
  const int32_t* block_tables;  // [S, table_stride] or null: keys are packed like the queries
  const int32_t* query_start;   // [S + 1]
  const int32_t* context_lens;  // [S], or null: each sequence has as many keys as rows
  const int32_t* row_ends;      // [N], or null: the keys that each row sees, from its sequence's first on
  int64_t num_sequences, table_width, table_stride, num_blocks, block_size;
  int64_t num_heads, num_kv_heads, key_width, value_width;
  int64_t query_row, query_head, key_block, key_token, key_head;  // strides, in elements
  int64_t value_block, value_token, value_head, out_row, out_head;
  int64_t new_key_row, new_key_head, new_value_row, new_value_head;
  float scale, softcap;  // softcap 0: none
  int64_t window;        // 0: none
  int64_t sink_row, bias_row, bias_reach;

  int64_t rows(int64_t s) const { return query_start[s + 1] - query_start[s]; }
  int64_t context(int64_t s) const { return context_lens ? context_lens[s] : rows(s); }
  // Returns the end of the keys that the row at `position` sees.
  int64_t end_of(int64_t row, int64_t position) const { return row_ends ? row_ends[row] : position + 1; }
};

static inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Addresses of positions [first, first + count) of sequence s; after them the last one is repeated: finite, and masked.
struct Positions {
  int64_t key[TILE], value[TILE], count;  // offsets in elements, of head 0
  void open(const Problem& p, int64_t s, int64_t first, int64_t num) {
    count = num;
    int64_t j = 0;
    if (!p.block_tables) {
      const int64_t row = p.query_start[s] + first;
      for (; j < count; j++) key[j] = (row + j) * p.key_token, value[j] = (row + j) * p.value_token;
    } else {
      const int32_t* table = p.block_tables + s * p.table_stride;
      int64_t block = first / p.block_size, offset = first % p.block_size;
      while (j < count) {
        const int64_t id = table[block++];
        for (; j < count && offset < p.block_size; j++, offset++)
          key[j] = id * p.key_block + offset * p.key_token, value[j] = id * p.value_block + offset * p.value_token;
        offset = 0;
      }
    }
    for (; j < TILE; j++) key[j] = key[count - 1], value[j] = value[count - 1];
  }
};

// Prefetches the keys, or the values, of a tile that is read later, in the order of memory, a few lines at a time: all at
// once would fill the processor's queue of misses, and it would wait. The stride between positions of a head is one that
// the processor's own prefetcher does not follow.
class Fetch {
 public:
  // bytes: of all heads at a position. calls: how many calls of `some` there will be.
  void begin(const void* first, const int64_t* offsets, int64_t element_bytes, int64_t positions, int64_t bytes,
             int64_t calls) {
    first_ = (const char*)first, offsets_ = offsets, element_bytes_ = element_bytes, bytes_ = bytes;
    left_ = positions * ((bytes + 63) / 64), share_ = (left_ + calls - 1) / calls;
    if (left_) open();
  }
  // Prefetches its share of the lines; returns whether there were any.
  bool some() {
    const bool any = left_ > 0;
    for (int64_t count = share_; count > 0 && left_ > 0; count--) {
      simd::prefetch(at_);
      at_ += 64, left_--;
      if (at_ >= end_ && left_ > 0) offsets_++, open();
    }
    return any;
  }

 private:
  void open() { at_ = first_ + *offsets_ * element_bytes_, end_ = at_ + bytes_; }

  const char *first_ = nullptr, *at_ = nullptr, *end_ = nullptr;
  const int64_t* offsets_ = nullptr;
  int64_t element_bytes_ = 0, bytes_ = 0, left_ = 0, share_ = 0;
};

template <typename T>
static inline void copy_row(const T* from, int64_t width, int64_t padded, float* to) {
  int64_t d = 0;
  for (; d + W <= width; d += W) store(to + d, load(from + d));
  for (; d < width; d++) to[d] = scalar(from[d]);
  for (; d < padded; d++) to[d] = 0.0f;
}

// Reads a tile as fp32 rows. A dot product adds its products in lanes of W along the head, then the lanes in a fixed
// tree; values are added one position after the other.
template <typename T>
class Widened {
 public:
  static constexpr bool MULTIPLIES_ALL_ROWS = false;
  static constexpr int64_t ROWS_AT_ONCE = 32;  // about as many rows, of one KV head or several, are an item
  using Element = float;  // type of a query row in the workspace
  static int64_t padded(int64_t width) { return round_up(width, W); }

  static void put_query(const T* from, int64_t width, float* to) { copy_row(from, width, padded(width), to); }

  void open_keys(const Problem& p, const Positions& at, int64_t kv_head) {
    stage((const T*)p.key + kv_head * p.key_head, at.key, at.count, p.key_width);
  }
  void open_values(const Problem& p, const Positions& at, int64_t kv_head) {
    stage((const T*)p.value + kv_head * p.value_head, at.value, at.count, p.value_width);
  }

  // Scores of R rows, `stride` elements apart, with W neighbouring keys.
  template <int R>
  void scores(const float* query, int64_t stride, int64_t /*row*/, int64_t j, Fetch& next, Floats* found) const {
    next.some();
    for (int r = 0; r < R; r++) found[r] = scores_of(query + r * stride, j);
  }
  Floats scores_of(const float* query, int64_t j) const {
    const float* keys = tile_.data() + j * width_;
    Floats acc[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) acc[i] = splat(0.0f);
    for (int64_t d = 0; d < width_; d += W) {
      Floats q = load(query + d);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) acc[i] = fused(q, load(keys + i * width_ + d), acc[i]);
    }
    return sums<W>(acc);
  }

  // out[r] += probs[r, j] * values[j] for j in [begin, end), R rows.
  template <int R>
  void add(const float* probs, float* out, int64_t begin, int64_t end, Fetch& next) const {
    for (int64_t j = begin; j < end; j += VALUES_A_FETCH) next.some();
    int64_t c = 0;
    for (; c + 4 * W <= width_; c += 4 * W) add_columns<R, 4>(probs, out, c, begin, end);
    for (; c + 2 * W <= width_; c += 2 * W) add_columns<R, 2>(probs, out, c, begin, end);
    for (; c < width_; c += W) add_columns<R, 1>(probs, out, c, begin, end);
  }

  static Floats output(const float* out, int64_t d) { return load(out + d); }  // elements [d, d + W)

 private:
  void stage(const T* base, const int64_t* offsets, int64_t count, int64_t width) {
    width_ = padded(width);
    const int64_t rows = round_up(count, W);
    if ((int64_t)tile_.size() < TILE * width_) tile_.resize(TILE * width_);
    for (int64_t j = 0; j < count; j++) copy_row(base + offsets[j], width, width_, tile_.data() + j * width_);
    if (count < rows) memset(tile_.data() + count * width_, 0, (rows - count) * width_ * sizeof(float));
  }

  template <int R, int C>
  void add_columns(const float* probs, float* out, int64_t column, int64_t begin, int64_t end) const {
    Floats acc[R][C];
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) acc[r][c] = load(out + r * width_ + column + c * W);
    for (int64_t j = begin; j < end; j++) {
      Floats v[C];
      for (int c = 0; c < C; c++) v[c] = load(tile_.data() + j * width_ + column + c * W);
      for (int r = 0; r < R; r++) {
        Floats p = splat(probs[r * TILE + j]);
        for (int c = 0; c < C; c++) acc[r][c] = fused(p, v[c], acc[r][c]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) store(out + r * width_ + column + c * W, acc[r][c]);
  }

  std::vector<float> tile_;
  int64_t width_ = 0;
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define ATTENTION_HAS_PAIRS 1

// Reads a tile in place. A dot product adds pairs of products in 16 lanes along the head, 32 elements a step, then the
// lanes in a fixed tree; probabilities are rounded to bfloat16, as transformers' attention does, and values are added
// two positions at a time from an even one on.
class Paired {
 public:
  static constexpr bool MULTIPLIES_ALL_ROWS = false;
  static constexpr int64_t ROWS_AT_ONCE = 32;
  using Element = bf16;
  static int64_t padded(int64_t width) { return round_up(width, 32); }

  static void put_query(const bf16* from, int64_t width, bf16* to) {
    memcpy(to, from, width * sizeof(bf16));
    memset(to + width, 0, (padded(width) - width) * sizeof(bf16));
  }

  void open_keys(const Problem& p, const Positions& at, int64_t kv_head) {
    open((const bf16*)p.key + kv_head * p.key_head, at.key, p.key_width);
  }
  void open_values(const Problem& p, const Positions& at, int64_t kv_head) {
    open((const bf16*)p.value + kv_head * p.value_head, at.value, p.value_width);
  }

  // Scores of R rows, `stride` elements apart, with 16 neighbouring keys.
  template <int R>
  void scores(const bf16* query, int64_t stride, int64_t /*row*/, int64_t j, Fetch& next, Floats* found) const {
    next.some();
    if (width_ == 64) return scores_of<R, 2>(query, stride, j, found);
    if (width_ == 128) return scores_of<R, 4>(query, stride, j, found);
    return scores_of<R, 0>(query, stride, j, found);
  }

  template <int R>
  void add(const float* probs, float* out, int64_t begin, int64_t end, Fetch& next) const {
    begin = begin / 2 * 2;
    end = (end + 1) / 2 * 2;
    alignas(64) uint32_t pairs[R][TILE / 2];
    for (int r = 0; r < R; r++)
      for (int64_t j = begin / 32 * 32; j < end; j += 32)
        _mm512_store_si512(pairs[r] + j / 2, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(probs + r * TILE + j + 16),
                                                                          _mm512_loadu_ps(probs + r * TILE + j)));
    const int64_t stride = padded(width_);
    int64_t d = 0;
    for (; d + 64 <= width_; d += 64) add_columns<R, 2, false>(pairs, out, stride, d, begin, end, next);
    for (; d + 32 <= width_; d += 32) add_columns<R, 1, false>(pairs, out, stride, d, begin, end, next);
    if (d < width_) add_columns<R, 1, true>(pairs, out, stride, d, begin, end, next);
  }

  // Sums are in the order of the interleaved values: per 32 elements, the first halves of each 8, then the second
  // halves.
  static Floats output(const float* out, int64_t d) {
    const float* group = out + d / 32 * 32;
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i index = _mm512_add_epi32(first, _mm512_set1_epi32(d % 32 ? 8 : 0));
    return (Floats)_mm512_permutex2var_ps(_mm512_loadu_ps(group), index, _mm512_loadu_ps(group + 16));
  }

 protected:
  void open(const bf16* base, const int64_t* offsets, int64_t width) {
    width_ = width;
    last_ = width % 32 ? (1u << width % 32) - 1 : 0;
    for (int j = 0; j < TILE; j++) row_[j] = base + offsets[j];
  }

  const bf16* row_[TILE];
  int64_t width_ = 0;
  __mmask32 last_ = 0;

 private:
  // The same for keys of STEPS * 32 elements, of any number if STEPS is 0. Each key is loaded once for all rows, four
  // keys at a time: more sums, and addresses, than that leave the registers.
  template <int R, int STEPS>
  void scores_of(const bf16* query, int64_t stride, int64_t j, Floats* found) const {
    Floats fours[R][4];
#pragma GCC unroll 4
    for (int f = 0; f < 4; f++) {
      const bf16* const* keys = row_ + j + f * 4;
      __m512 acc[R][4];
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) acc[r][i] = _mm512_setzero_ps();
      if constexpr (STEPS > 0) {
#pragma GCC unroll 4
        for (int s = 0; s < STEPS; s++)
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) {
            const __m512bh key = (__m512bh)_mm512_loadu_si512(keys[i] + s * 32);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
              acc[r][i] = _mm512_dpbf16_ps(acc[r][i], (__m512bh)_mm512_loadu_si512(query + r * stride + s * 32), key);
          }
      } else {
        for (int64_t d = 0; d < width_; d += 32) {
          const __mmask32 lanes = d + 32 > width_ ? last_ : ~0u;
          for (int i = 0; i < 4; i++) {
            const __m512bh key = (__m512bh)_mm512_maskz_loadu_epi16(lanes, keys[i] + d);
            for (int r = 0; r < R; r++)
              acc[r][i] = _mm512_dpbf16_ps(acc[r][i], (__m512bh)_mm512_loadu_si512(query + r * stride + d), key);
          }
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) fours[r][f] = sums<4>((Floats*)acc[r]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) found[r] = sums<4, 2>(fours[r]);
  }

  template <int R, int C, bool IsPart>
  void add_columns(const uint32_t (*pairs)[TILE / 2], float* out, int64_t stride, int64_t column, int64_t begin,
                   int64_t end, Fetch& next) const {
    __m512 acc[R][2 * C];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < 2 * C; c++) acc[r][c] = _mm512_loadu_ps(out + r * stride + column + c * 16);
    for (int64_t j = begin; j < end; j += 2) {
      if (j % VALUES_A_FETCH == 0) next.some();
      __m512bh v[2 * C];
#pragma GCC unroll 2
      for (int c = 0; c < C; c++) {
        const bf16 *even = row_[j] + column + c * 32, *odd = row_[j + 1] + column + c * 32;
        const __m512i a = IsPart ? _mm512_maskz_loadu_epi16(last_, even) : _mm512_loadu_si512(even);
        const __m512i b = IsPart ? _mm512_maskz_loadu_epi16(last_, odd) : _mm512_loadu_si512(odd);
        v[2 * c] = (__m512bh)_mm512_unpacklo_epi16(a, b);
        v[2 * c + 1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const __m512bh p = (__m512bh)_mm512_set1_epi32((int)pairs[r][j / 2]);
#pragma GCC unroll 4
        for (int c = 0; c < 2 * C; c++) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], p, v[c]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < 2 * C; c++) _mm512_storeu_ps(out + r * stride + column + c * 16, acc[r][c]);
  }
};
#endif

}  // namespace attention
