// The keys that each row's indexer selects (DeepSeek Sparse Attention): those with the highest scores
//     sum over h of weight[h] * max(0, scale * query[h] . key)
// among the positions up to the row's own, the earlier one where two scores are equal. A score is of its row and its key
// alone: a dot product is one chain of sums from the first width to the last, and heads are added from the first to the
// last. So is the selection, whatever rows and threads are beside it.
// Letters: N rows of a step, S sequences, H heads of the indexer, D their width, K keys that a row may select.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "machine/packed.h"
#include "machine/simd.h"

using namespace simd;

namespace {

constexpr int KEYS = 8;  // that are multiplied with one load of the queries

struct Problem {
  const float* query;           // [N, H, D]
  const float* weight;          // [N, H]
  void* cache;                  // [slots, D]
  const void* fresh;            // [N, D] or null: keys of the rows, to be written first
  const int64_t* slots;         // [N], their places
  const int32_t* block_tables;  // [S, blocks], or null: the sequences' rows are their keys
  const int32_t *starts, *contexts;  // [S + 1], [S]
  int32_t *places, *counts;     // results [N, K], [N]
  int64_t num_sequences, num_slots, table_width, table_stride, block_size, heads, width, most;
  float scale;

  int64_t rows(int64_t s) const { return starts[s + 1] - starts[s]; }
  int64_t context(int64_t s) const { return block_tables ? contexts[s] : rows(s); }
  int64_t slot(int64_t s, int64_t position) const {
    if (!block_tables) return starts[s] + position;
    return (int64_t)block_tables[s * table_stride + position / block_size] * block_size + position % block_size;
  }
};

struct Scratch {
  std::vector<float> query, keys, scores;  // [D, padded heads], [D, KEYS], [context]
  std::vector<int32_t> order;
  std::vector<uint8_t> is_selected;
};

template <typename T>
void score_keys(const Problem& p, int64_t row, int64_t s, int64_t num_keys, Scratch& m) {
  const int64_t D = p.width, H = p.heads, padded = (H + W - 1) / W * W;
  const float* query = p.query + row * H * D;
  m.query.assign(D * padded, 0.0f);
  for (int64_t h = 0; h < H; h++)
    for (int64_t d = 0; d < D; d++) m.query[d * padded + h] = query[h * D + d];
  m.keys.resize(D * KEYS);
  m.scores.resize(num_keys + KEYS);
  const float* weight = p.weight + row * H;
  for (int64_t first = 0; first < num_keys; first += KEYS) {
    for (int64_t j = 0; j < KEYS; j++) {
      const T* key = (const T*)p.cache + p.slot(s, std::min(first + j, num_keys - 1)) * D;
      for (int64_t d = 0; d < D; d++) m.keys[d * KEYS + j] = scalar(key[d]);
    }
    float total[KEYS] = {};
    for (int64_t h = 0; h < padded; h += W) {
      Floats dot[KEYS];
      for (int j = 0; j < KEYS; j++) dot[j] = splat(0.0f);
      for (int64_t d = 0; d < D; d++) {
        const Floats q = load(m.query.data() + d * padded + h);
        for (int j = 0; j < KEYS; j++) dot[j] = fused(splat(m.keys[d * KEYS + j]), q, dot[j]);
      }
      const int64_t count = std::min<int64_t>(W, H - h);
      for (int j = 0; j < KEYS; j++)
        for (int64_t i = 0; i < count; i++) {
          const float scaled = dot[j][i] * p.scale;
          total[j] += weight[h + i] * (scaled > 0.0f || std::isnan(scaled) ? scaled : 0.0f);
        }
    }
    // As torch.topk, a NaN is above all numbers.
    for (int j = 0; j < KEYS; j++)
      m.scores[first + j] = std::isnan(total[j]) ? std::numeric_limits<float>::infinity() : total[j];
  }
}

template <typename T>
void select_for_row(const Problem& p, int64_t s, int64_t row, Scratch& m) {
  const int64_t num_keys = p.context(s) - p.starts[s + 1] + row + 1;
  int32_t* places = p.places + row * p.most;
  p.counts[row] = (int32_t)std::min(num_keys, p.most);
  if (num_keys <= p.most) {
    for (int64_t i = 0; i < num_keys; i++) places[i] = (int32_t)p.slot(s, i);
    return;
  }
  score_keys<T>(p, row, s, num_keys, m);
  m.order.resize(num_keys);
  for (int64_t i = 0; i < num_keys; i++) m.order[i] = (int32_t)i;
  const float* scores = m.scores.data();
  std::nth_element(m.order.begin(), m.order.begin() + p.most, m.order.end(), [scores](int32_t a, int32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  });
  m.is_selected.assign(num_keys, 0);
  for (int64_t i = 0; i < p.most; i++) m.is_selected[m.order[i]] = 1;
  for (int64_t i = 0; i < num_keys; i++)
    if (m.is_selected[i]) *places++ = (int32_t)p.slot(s, i);
}

template <typename T>
void select_all(const Problem& p, int64_t num_rows, int threads) {
  if (p.fresh)
    for (int64_t i = 0; i < num_rows; i++)
      memcpy((T*)p.cache + p.slots[i] * p.width, (const T*)p.fresh + i * p.width, p.width * sizeof(T));
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < num_rows; row++) {
    static thread_local Scratch memory;
    const int64_t s = std::upper_bound(p.starts, p.starts + p.num_sequences + 1, (int32_t)row) - p.starts - 1;
    select_for_row<T>(p, s, row, memory);
  }
}

// Returns 0, or 1 + the first sequence whose rows, context or block ids do not fit; -1 for row offsets, -2 - i for the
// slot of row i.
int64_t first_bad(const Problem& p, int64_t num_rows) {
  if (p.starts[0] != 0 || p.starts[p.num_sequences] != num_rows) return -1;
  for (int64_t s = 0; s < p.num_sequences; s++) {
    bool fits = p.rows(s) >= 0 && p.context(s) >= p.rows(s);
    if (fits && p.block_tables) {
      const int64_t used = (p.context(s) + p.block_size - 1) / p.block_size;
      fits = used <= p.table_width;
      for (int64_t b = 0; fits && b < used; b++) {
        const int64_t block = p.block_tables[s * p.table_stride + b];
        fits = block >= 0 && (block + 1) * p.block_size <= p.num_slots;
      }
    }
    if (!fits) return 1 + s;
  }
  for (int64_t i = 0; p.fresh && i < num_rows; i++)
    if (p.slots[i] < 0 || p.slots[i] >= p.num_slots) return -2 - i;
  return 0;
}

}  // namespace

extern "C" int64_t lockstep_select_keys(const void* query, const void* weight, void* cache, const void* fresh,
                                        const void* slots, const void* block_tables, const void* starts,
                                        const void* contexts, void* places, void* counts, int64_t num_rows,
                                        int64_t num_sequences, int64_t num_slots, int64_t table_width,
                                        int64_t table_stride, int64_t block_size, int64_t heads, int64_t width,
                                        int64_t most, float scale, int64_t is_bf16, int64_t threads) {
  const Problem p{(const float*)query, (const float*)weight, cache, fresh, (const int64_t*)slots, (const int32_t*)block_tables,
                  (const int32_t*)starts, (const int32_t*)contexts, (int32_t*)places, (int32_t*)counts, num_sequences,
                  num_slots, table_width, table_stride, block_size, heads, width, most, scale};
  if (const int64_t bad = first_bad(p, num_rows)) return bad;
  is_bf16 ? select_all<bf16>(p, num_rows, (int)threads) : select_all<float>(p, num_rows, (int)threads);
  return 0;
}

LOCKSTEP_PACKED(lockstep_select_keys)
