// The keys that each row's indexer selects (DeepSeek Sparse Attention): those with the highest scores
//     sum over h of weight[h] * max(0, scale * query[h] . key)
// among the positions up to the row's own, the earlier one where two scores are equal. A score is of its row and its key
// alone: a dot product is one chain of sums from the first width to the last, and heads are added from the first to the
// last. So is the selection, whatever rows and threads are beside it.
// Letters: N rows of a step, S sequences, H heads of the indexer, D their width, K keys that a row may select.
#include <algorithm>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "machine/memory.h"
#include "machine/packed.h"
#include "machine/simd.h"

using namespace simd;

namespace {

constexpr int ROWS = 8, HEADS = 8;  // rows of a sequence that share a tile of W keys, and heads that share its registers

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
  std::vector<float> keys, scores, sorted;  // [D, W], [ROWS, context in whole tiles], [context]
};

// Adds weight * max(0, scale * query . key) of `COUNT` heads to the totals of W keys, one head after the other.
template <int COUNT>
Floats add_heads(const Problem& p, const float* query, const float* weight, const float* keys, Floats total) {
  Floats dot[COUNT];
  for (int j = 0; j < COUNT; j++) dot[j] = splat(0.0f);
  for (int64_t d = 0; d < p.width; d++) {
    const Floats key = load(keys + d * W);
    for (int j = 0; j < COUNT; j++) dot[j] = fused(splat(query[j * p.width + d]), key, dot[j]);
  }
  for (int j = 0; j < COUNT; j++) {
    const Floats scaled = dot[j] * splat(p.scale);
    const Floats positive = scaled < splat(0.0f) ? splat(0.0f) : scaled;  // a NaN stays
    total = total + splat(weight[j]) * positive;
  }
  return total;
}

// Scores the keys of a sequence for `count` of its rows, the first of which sees `num_keys` of them, each next one more.
template <typename T>
void score_keys(const Problem& p, int64_t row, int64_t count, int64_t s, int64_t num_keys, Scratch& m) {
  const int64_t D = p.width, H = p.heads, last = num_keys + count - 1, stride = (last + W - 1) / W * W;
  m.keys.resize(D * W);
  m.scores.resize(count * stride);
  for (int64_t first = 0; first < last; first += W) {
    for (int64_t j = 0; j < W; j++) {
      const T* key = (const T*)p.cache + p.slot(s, std::min(first + j, last - 1)) * D;
      for (int64_t d = 0; d < D; d++) m.keys[d * W + j] = scalar(key[d]);
    }
    for (int64_t i = 0; i < count; i++) {
      if (first >= num_keys + i) continue;
      const float *query = p.query + (row + i) * H * D, *weight = p.weight + (row + i) * H;
      Floats total = splat(0.0f);
      int64_t h = 0;
      for (; h + HEADS <= H; h += HEADS) total = add_heads<HEADS>(p, query + h * D, weight + h, m.keys.data(), total);
      for (; h < H; h++) total = add_heads<1>(p, query + h * D, weight + h, m.keys.data(), total);
      // As torch.topk, a NaN is above all numbers.
      store(m.scores.data() + i * stride + first, total != total ? splat(std::numeric_limits<float>::infinity()) : total);
    }
  }
}

// Writes the places of the best of `num_keys` keys of a sequence, in the order of their positions.
void write_best(const Problem& p, int64_t s, int64_t num_keys, const float* scores, int32_t* places, Scratch& m) {
  m.sorted.assign(scores, scores + num_keys);
  const auto last = m.sorted.begin() + p.most - 1;
  std::nth_element(m.sorted.begin(), last, m.sorted.end(), std::greater<float>());
  const float lowest = *last;
  int64_t left = p.most - std::count_if(m.sorted.begin(), last, [lowest](float score) { return score > lowest; });
  for (int64_t i = 0; i < num_keys; i++)
    if (scores[i] > lowest || (scores[i] == lowest && left-- > 0)) *places++ = (int32_t)p.slot(s, i);
}

template <typename T>
void select_for_rows(const Problem& p, int64_t s, int64_t row, int64_t count, Scratch& m) {
  const int64_t seen = p.context(s) - p.starts[s + 1] + row + 1;  // by the first row
  const int64_t alike = std::clamp<int64_t>(p.most - seen + 1, 0, count);  // rows that see no more than they select
  for (int64_t i = 0; i < count; i++) p.counts[row + i] = (int32_t)std::min(seen + i, p.most);
  for (int64_t i = 0; i < alike; i++)
    for (int64_t key = 0; key < seen + i; key++) p.places[(row + i) * p.most + key] = (int32_t)p.slot(s, key);
  if (alike == count) return;
  score_keys<T>(p, row + alike, count - alike, s, seen + alike, m);
  const int64_t stride = (int64_t)m.scores.size() / (count - alike);
  for (int64_t i = alike; i < count; i++)
    write_best(p, s, seen + i, m.scores.data() + (i - alike) * stride, p.places + (row + i) * p.most, m);
}

template <typename T>
void select_all(const Problem& p, int64_t num_rows, int threads) {
  if (p.fresh)
    for (int64_t i = 0; i < num_rows; i++)
      memcpy((T*)p.cache + p.slots[i] * p.width, (const T*)p.fresh + i * p.width, p.width * sizeof(T));
  std::vector<std::pair<int64_t, int64_t>> runs;  // the sequence and the first row of each
  for (int64_t s = 0; s < p.num_sequences; s++)
    for (int64_t row = p.starts[s]; row < p.starts[s + 1]; row += ROWS) runs.push_back({s, row});
  memory::Shortage shortage;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (size_t i = 0; i < runs.size(); i++) {
    static thread_local Scratch scratch;
    const auto [s, row] = runs[i];
    try {
      select_for_rows<T>(p, s, row, std::min<int64_t>(ROWS, p.starts[s + 1] - row), scratch);
    } catch (const std::bad_alloc&) {
      shortage.note();
    }
  }
  shortage.raise();
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
  return memory::at_edge([&] {
    is_bf16 ? select_all<bf16>(p, num_rows, (int)threads) : select_all<float>(p, num_rows, (int)threads);
  });
}

LOCKSTEP_PACKED(lockstep_select_keys)
