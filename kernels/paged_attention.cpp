// Causal attention over a paged (or packed) KV cache, every output row a function of that row's query and its
// keys alone.
//
// The keys of a sequence are walked in tiles of TILE positions aligned at position 0, with an online softmax
// in fp32 (Milakov & Gimelshein 2018; tiled as in FlashAttention, Dao et al. 2022). What surrounds a row
// cannot reach its bits:
//   - a dot product adds its products in lanes of W along the head dimension and then the lanes in a fixed
//     tree;
//   - a tile in which a row sees nothing multiplies its state by exp(0) = 1 and adds exact zeros, so whether
//     it is visited (a longer neighbour in the same query tile needs it) or skipped is the same;
//   - values are added one position after the other. Dimension letters: S sequences, H query heads, Hk KV
//     heads, G = H / Hk, D key width, Dv value width.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "simd.h"

using namespace simd;

namespace {

constexpr int TILE = 64;        // positions per online-softmax step
constexpr int QUERY_ROWS = 32;  // rows (positions x heads of one group) that share a staged tile, about
constexpr int64_t SERIAL_WORK = 1 << 17;  // multiply-adds below which waking threads costs more than it gives

struct Problem {
  const void *query, *key, *value;
  void* out;
  const float* sinks;           // [H] or null
  const int32_t* block_tables;  // [S, table_stride] or null: keys are packed like the queries
  const int32_t* query_start;   // [S + 1]
  const int32_t* context_lens;  // [S] or null: as many keys as rows
  int64_t num_sequences, table_width, table_stride, num_blocks, block_size;
  int64_t num_heads, num_kv_heads, key_width, value_width;
  int64_t query_row, query_head, key_block, key_token, key_head;  // strides, in elements
  int64_t value_block, value_token, value_head, out_row, out_head;
  float scale, softcap;  // softcap 0: none
  int64_t window;        // 0: none

  int64_t rows(int64_t s) const { return query_start[s + 1] - query_start[s]; }
  int64_t context(int64_t s) const { return context_lens ? context_lens[s] : rows(s); }
};

int64_t round_up(int64_t n) { return (n + W - 1) / W * W; }

// One thread's workspace, in floats.
struct Scratch {
  float *tile, *query, *out, *probs, *total, *top;
  std::vector<float> memory;
  void reserve(int64_t rows, int64_t key_width, int64_t value_width) {
    int64_t sizes[] = {TILE * std::max(key_width, value_width),
                       rows * key_width,
                       rows * value_width,
                       rows * TILE,
                       rows * W,
                       round_up(rows)};
    int64_t needed = 2 * W;
    for (int64_t n : sizes) needed += n;
    if ((int64_t)memory.size() < needed) memory.resize(needed);
    uintptr_t start = ((uintptr_t)memory.data() + 63) / 64 * 64;
    float** parts[] = {&tile, &query, &out, &probs, &total, &top};
    for (int i = 0; i < 6; i++) *parts[i] = (float*)start, start += 4 * sizes[i];
  }
};

template <typename T>
void copy_row(const T* from, int64_t width, int64_t padded, float* to) {
  int64_t d = 0;
  for (; d + W <= width; d += W) store(to + d, load(from + d));
  for (; d < width; d++) to[d] = scalar(from[d]);
  for (; d < padded; d++) to[d] = 0.0f;
}

// Brings positions [first, first + count) into `tile` as fp32 rows, with rows of zeros up to a multiple of W.
template <typename T>
void stage(const Problem& p, const T* base, int64_t s, int64_t first, int64_t count, int64_t block_stride,
           int64_t token_stride, int64_t width, float* tile) {
  int64_t padded = round_up(width), j = 0;
  if (!p.block_tables) {
    const T* from = base + (p.query_start[s] + first) * token_stride;
    for (; j < count; j++) copy_row(from + j * token_stride, width, padded, tile + j * padded);
  } else {
    const int32_t* table = p.block_tables + s * p.table_stride;
    int64_t block = first / p.block_size, offset = first % p.block_size;
    while (j < count) {
      const T* from = base + table[block++] * block_stride + offset * token_stride;
      for (int64_t end = std::min(count, j + p.block_size - offset); j < end; j++, from += token_stride)
        copy_row(from, width, padded, tile + j * padded);
      offset = 0;
    }
  }
  if (j < round_up(count)) memset(tile + j * padded, 0, (round_up(count) - j) * padded * sizeof(float));
}

Floats dots(const float* query, const float* keys, int64_t width) {  // of one query with W neighbouring keys
  Floats acc[W];
#pragma GCC unroll 16
  for (int j = 0; j < W; j++) acc[j] = splat(0.0f);
  for (int64_t d = 0; d < width; d += W) {
    Floats q = load(query + d);
#pragma GCC unroll 16
    for (int j = 0; j < W; j++) acc[j] = fused(q, load(keys + j * width + d), acc[j]);
  }
  return sums(acc);
}

// out[r, c] += probs[r, j] * values[j, c] for j in [begin, end), R rows by C vectors held in registers.
template <int R, int C>
void add_values(const float* probs, const float* values, float* out, int64_t width, int64_t begin,
                int64_t end) {
  Floats acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = load(out + r * width + c * W);
  for (int64_t j = begin; j < end; j++) {
    Floats v[C];
    for (int c = 0; c < C; c++) v[c] = load(values + j * width + c * W);
    for (int r = 0; r < R; r++) {
      Floats p = splat(probs[r * TILE + j]);
      for (int c = 0; c < C; c++) acc[r][c] = fused(p, v[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(out + r * width + c * W, acc[r][c]);
}

template <int R>
void add_values_to_rows(const float* probs, const float* values, float* out, int64_t width, int64_t begin,
                        int64_t end) {
  int64_t c = 0;
  for (; c + 4 * W <= width; c += 4 * W) add_values<R, 4>(probs, values + c, out + c, width, begin, end);
  for (; c + 2 * W <= width; c += 2 * W) add_values<R, 2>(probs, values + c, out + c, width, begin, end);
  for (; c < width; c += W) add_values<R, 1>(probs, values + c, out + c, width, begin, end);
}

Ints lane_numbers() {
  Ints v;
  for (int i = 0; i < W; i++) v[i] = i;
  return v;
}

// Which positions [begin, end) of the tile at `first` a row at `position` sees; empty when begin >= end.
struct Seen {
  int64_t begin, end;
  Seen(const Problem& p, int64_t position, int64_t first) {
    begin = p.window ? std::max<int64_t>(0, position - p.window + 1 - first) : 0;
    end = std::min<int64_t>(TILE, position + 1 - first);
  }
  bool any() const { return begin < end; }
};

// Scores of one row in the tile, then its softmax state (top, total, out) and probs[TILE] brought up to date.
void update_row(const Problem& p, const Seen& seen, const float* query, const float* keys, int64_t key_width,
                int64_t value_width, float* probs, float* out, float* total, float* top) {
  if (!seen.any()) {
    memset(probs, 0, TILE * sizeof(float));
    return;
  }
  const Floats minus_infinity = splat(-INFINITY);
  Floats peak = minus_infinity;
  for (int64_t j = 0; j < TILE; j += W) {
    Floats score = minus_infinity;
    if (j < seen.end && j + W > seen.begin) {
      score = dots(query, keys + j * key_width, key_width) * splat(p.scale);
      if (p.softcap != 0.0f) score = simd::tanh(score / splat(p.softcap)) * splat(p.softcap);
      Ints lane = lane_numbers() + (int32_t)j;
      if (j < seen.begin || j + W > seen.end)
        score = select((lane >= (int32_t)seen.begin) & (lane < (int32_t)seen.end), score, minus_infinity);
      peak = larger(score, peak);
    }
    store(probs + j, score);
  }
  float before = *top, now = std::max(before, largest(peak));
  *top = now;
  if (now == -INFINITY)
    now = 0.0f;  // every score overflowed downwards; exp(-inf - 0) is 0, exp(-inf + inf) is NaN
  Floats sum_of_lanes = load(total);
  if (before != now) {
    Floats shrink = exp_nonpositive(splat(before - now));
    sum_of_lanes = sum_of_lanes * shrink;
    for (int64_t d = 0; d < value_width; d += W) store(out + d, load(out + d) * shrink);
  }
  for (int64_t j = 0; j < TILE; j += W) {
    Floats prob = splat(0.0f);
    if (j < seen.end) {
      prob = exp_nonpositive(load(probs + j) - splat(now));
      sum_of_lanes = sum_of_lanes + prob;
    }
    store(probs + j, prob);
  }
  store(total, sum_of_lanes);
}

template <typename T>
void write_row(const float* row, float total, int64_t width, T* to) {
  const Floats divisor = splat(total), zero = splat(0.0f);
  int64_t d = 0;
  // Adding zero turns -0 into +0: the sign of a zero is the one thing an exact-zero addend could have
  // changed.
  for (; d + W <= width; d += W) store(to + d, load(row + d) / divisor + zero);
  for (; d < width; d++) store_scalar(to + d, row[d] / total + 0.0f);
}

// Rows [first, first + count) of sequence s, for the G query heads that read KV head `kv_head`.
template <typename T>
void attend(const Problem& p, int64_t s, int64_t kv_head, int64_t first, int64_t count, Scratch& scratch) {
  const int64_t group = p.num_heads / p.num_kv_heads, num_rows = count * group;
  const int64_t key_width = round_up(p.key_width), value_width = round_up(p.value_width);
  scratch.reserve(num_rows, key_width, value_width);
  const int64_t row0 = p.query_start[s] + first, position0 = p.context(s) - p.rows(s) + first;
  for (int64_t r = 0; r < num_rows; r++) {
    int64_t head = kv_head * group + r % group;
    copy_row((const T*)p.query + (row0 + r / group) * p.query_row + head * p.query_head, p.key_width,
             key_width, scratch.query + r * key_width);
    scratch.top[r] = p.sinks ? p.sinks[head] : -INFINITY;
    store(scratch.total + r * W, splat(0.0f));
    if (p.sinks) scratch.total[r * W] = 1.0f;
  }
  memset(scratch.out, 0, num_rows * value_width * sizeof(float));

  const int64_t end = position0 + count;
  const int64_t begin = p.window ? std::max<int64_t>(0, position0 - p.window + 1) / TILE * TILE : 0;
  for (int64_t t = begin; t < end; t += TILE) {
    const int64_t staged = std::min<int64_t>(TILE, end - t);
    stage(p, (const T*)p.key + kv_head * p.key_head, s, t, staged, p.key_block, p.key_token, p.key_width,
          scratch.tile);
    for (int64_t r = 0; r < num_rows; r++)
      update_row(p, Seen(p, position0 + r / group, t), scratch.query + r * key_width, scratch.tile, key_width,
                 value_width, scratch.probs + r * TILE, scratch.out + r * value_width, scratch.total + r * W,
                 scratch.top + r);
    stage(p, (const T*)p.value + kv_head * p.value_head, s, t, staged, p.value_block, p.value_token,
          p.value_width, scratch.tile);
    for (int64_t r = 0, step; r < num_rows; r += step) {
      step = std::min<int64_t>(4, num_rows - r);
      auto add = step == 4   ? add_values_to_rows<4>
                 : step == 3 ? add_values_to_rows<3>
                 : step == 2 ? add_values_to_rows<2>
                             : add_values_to_rows<1>;
      Seen earliest(p, position0 + r / group, t), latest(p, position0 + (r + step - 1) / group, t);
      if (earliest.begin < latest.end)
        add(scratch.probs + r * TILE, scratch.tile, scratch.out + r * value_width, value_width,
            earliest.begin, latest.end);
    }
  }
  for (int64_t r = 0; r < num_rows; r++)
    write_row(scratch.out + r * value_width, sum(load(scratch.total + r * W)), p.value_width,
              (T*)p.out + (row0 + r / group) * p.out_row + (kv_head * group + r % group) * p.out_head);
}

// 0, or 1 + the first sequence whose rows, context or block ids do not fit the tensors.
int64_t first_bad_sequence(const Problem& p, int64_t num_rows) {
  for (int64_t s = 0; s < p.num_sequences; s++) {
    int64_t rows = p.rows(s), context = p.context(s);
    bool fits = p.query_start[s] >= 0 && rows >= 0 && p.query_start[s + 1] <= num_rows && context >= rows;
    if (fits && p.block_tables) {
      int64_t used = (context + p.block_size - 1) / p.block_size;
      fits = used <= p.table_width;
      for (int64_t b = 0; fits && b < used; b++) {
        int32_t block = p.block_tables[s * p.table_stride + b];
        fits = block >= 0 && block < p.num_blocks;
      }
    }
    if (!fits) return 1 + s;
  }
  return 0;
}

struct Item {
  int64_t sequence, first, count;
};

template <typename T>
void attend_all(const Problem& p, int threads) {
  const int64_t group = p.num_heads / p.num_kv_heads, positions = std::max<int64_t>(1, QUERY_ROWS / group);
  std::vector<Item> items;
  int64_t work = 0;
  for (int64_t s = 0; s < p.num_sequences; s++) {
    work += p.rows(s) * p.context(s);
    for (int64_t i = 0; i < p.rows(s); i += positions)
      items.push_back({s, i, std::min(positions, p.rows(s) - i)});
  }
  const int64_t num_items = (int64_t)items.size() * p.num_kv_heads;
  work *= p.num_heads * (p.key_width + p.value_width);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && work > SERIAL_WORK)
  for (int64_t i = 0; i < num_items; i++) {
    static thread_local Scratch scratch;
    const Item& item = items[i / p.num_kv_heads];
    attend<T>(p, item.sequence, i % p.num_kv_heads, item.first, item.count, scratch);
  }
}

}  // namespace

extern "C" int64_t lockstep_attention(const Problem* problem, int64_t num_rows, int64_t is_bf16,
                                      int64_t threads) {
  if (problem->query_start[0] != 0 || problem->query_start[problem->num_sequences] != num_rows) return -1;
  int64_t bad = first_bad_sequence(*problem, num_rows);
  if (bad) return bad;
  if (is_bf16)
    attend_all<bf16>(*problem, (int)threads);
  else
    attend_all<float>(*problem, (int)threads);
  return 0;
}
