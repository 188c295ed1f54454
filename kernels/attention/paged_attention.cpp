// Causal attention over a paged (or packed) KV cache: each output row depends on its query and the keys that it sees
// alone.
//
// The keys of a sequence are read in tiles of TILE positions aligned at position 0, with an online softmax
// in fp32 (Milakov & Gimelshein 2018; tiled as in FlashAttention, Dao et al. 2022). Other rows cannot change a row's
// bits:
//   - a dot product is one chain of sums for any set of rows that share the tile (attention_tiles.h);
//   - a tile in which a row sees nothing multiplies its state by exp(0) = 1 and adds exact zeros, so reading it
//     (a longer row of the same query tile needs it) and skipping it give the same bits;
//   - values are added in the order of their positions.
// Where decoding sequences begin with the same blocks, as samples of one prompt do, their rows read the tiles of these
// blocks together, and each row continues alone from its state: the same sums in the same order, the keys read once.
// Dimension letters: S sequences, H query heads, Hk KV heads, G = H / Hk, D key width, Dv value width.
#include "attention/attention_amx.h"
#include "attention/attention_tiles.h"

using namespace attention;

namespace {

constexpr int QUERY_ROWS = 32;  // about as many rows (positions x heads of one group) share a tile
constexpr int64_t SERIAL_WORK = 1 << 17;  // with fewer multiply-adds, starting threads costs more than it saves

// One thread's workspace.
template <typename Tile>
struct Scratch {
  typename Tile::Element* query;
  float *out, *probs, *total, *top;
  Tile tile;
  Positions at, next;  // this tile, and the one to prefetch meanwhile
  std::vector<char> memory;
  void reserve(int64_t rows, int64_t sharing, int64_t key_width, int64_t value_width) {
    const int64_t sizes[] = {rows * Tile::padded(key_width) * (int64_t)sizeof(*query),
                             rows * Tile::padded(value_width) * (int64_t)sizeof(float),
                             sharing * TILE * (int64_t)sizeof(float), rows * W * (int64_t)sizeof(float),
                             rows * (int64_t)sizeof(float)};
    int64_t needed = 64;
    for (int64_t n : sizes) needed += round_up(n, 64);
    if ((int64_t)memory.size() < needed) memory.resize(needed);
    char* start = (char*)(((uintptr_t)memory.data() + 63) / 64 * 64);
    char* parts[5];
    for (int i = 0; i < 5; i++) parts[i] = start, start += round_up(sizes[i], 64);
    query = (typename Tile::Element*)parts[0], out = (float*)parts[1], probs = (float*)parts[2];
    total = (float*)parts[3], top = (float*)parts[4];
  }
};

Ints lane_numbers() {
  Ints v;
  for (int i = 0; i < W; i++) v[i] = i;
  return v;
}

// The positions [begin, end) of the tile at `first` that a row at `position` sees; empty when begin >= end.
struct Seen {
  int64_t begin, end;
  Seen(const Problem& p, int64_t position, int64_t first) {
    begin = p.window ? std::max<int64_t>(0, position - p.window + 1 - first) : 0;
    end = std::min<int64_t>(TILE, position + 1 - first);
  }
  bool any() const { return begin < end; }
};

// Computes scores of one row in the tile, then updates its softmax state (top, total, out) and probs[TILE].
template <typename Tile>
void update_row(const Problem& p, const Tile& tile, const Seen& seen, const typename Tile::Element* query, int64_t row,
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
      score = tile.scores(query, row, j) * splat(p.scale);
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
    now = 0.0f;  // every score is -inf; exp(-inf - 0) is 0, exp(-inf + inf) is NaN
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

template <typename Tile, typename T>
void write_row(const float* row, float total, int64_t width, T* to) {
  const Floats divisor = splat(total), zero = splat(0.0f);
  int64_t d = 0;
  // Adding zero turns -0 into +0: the sign of a zero is the only thing that adding an exact zero could have changed.
  for (; d + W <= width; d += W) store(to + d, Tile::output(row, d) / divisor + zero);
  if (d < width) {
    T lanes[W];
    store(lanes, Tile::output(row, d) / divisor + zero);
    memcpy(to + d, lanes, (width - d) * sizeof(T));
  }
}

// `count` rows from row `row`, at the positions from `position` on; the keys of a sequence from `begin`, where a tile
// begins, to `end`; the query heads that read KV heads [kv_begin, kv_end).
struct Item {
  int64_t sequence, row, position, count, begin, end;
  bool resumes, is_shared;  // starts from a saved state; saves one
  int64_t kv_begin = 0, kv_end = 0;
  void open(const Problem& p, int64_t tile, Positions& at) const {
    at.open(p, sequence, tile, std::min<int64_t>(TILE, end - tile));
  }
};

template <typename T, typename Tile>
class Attending {
 public:
  Attending(const Problem& p, const Item& item, const Item* following, Scratch<Tile>& scratch, float* saved)
      : p_(p), item_(item), following_(following), scratch_(scratch), saved_(saved),
        group_(p.num_heads / p.num_kv_heads), sharing_(item.count * group_),
        query_width_(Tile::padded(p.key_width)), out_width_(Tile::padded(p.value_width)) {
    scratch.reserve(sharing_ * (item.kv_end - item.kv_begin), sharing_, p.key_width, p.value_width);
  }

  void run() {
    if constexpr (Tile::MULTIPLIES_ALL_ROWS) scratch_.tile.open(p_, sharing_, item_.kv_end - item_.kv_begin);
    for (int64_t head = item_.kv_begin; head < item_.kv_end; head++) begin(head);
    item_.open(p_, item_.begin, scratch_.next);
    for (int64_t t = item_.begin; t < item_.end; t += TILE) {
      std::swap(scratch_.at, scratch_.next);
      scratch_.next.count = 0;
      if (t + TILE < item_.end)
        item_.open(p_, t + TILE, scratch_.next);
      else if (following_)
        following_->open(p_, following_->begin, scratch_.next);
      if constexpr (Tile::MULTIPLIES_ALL_ROWS)
        walk_together(t);
      else
        for (int64_t head = item_.kv_begin; head < item_.kv_end; head++) walk(head, t);
    }
    for (int64_t head = item_.kv_begin; head < item_.kv_end; head++) finish(head);
    if constexpr (Tile::MULTIPLIES_ALL_ROWS) scratch_.tile.close();
  }

 private:
  int64_t state(int64_t kv_head, int64_t r) const { return (kv_head - item_.kv_begin) * sharing_ + r; }
  int64_t query_head(int64_t kv_head, int64_t r) const { return kv_head * group_ + r % group_; }
  Seen seen(int64_t r, int64_t t) const { return Seen(p_, item_.position + r / group_, t); }

  // The state of a row that a shared item saves: top, total, out.
  float* saved(int64_t kv_head, int64_t r) const {
    return saved_ + ((item_.row + r / group_) * p_.num_heads + query_head(kv_head, r)) * (2 * W + out_width_);
  }

  void begin(int64_t kv_head) {
    for (int64_t r = 0; r < sharing_; r++) {
      const int64_t head = query_head(kv_head, r), i = state(kv_head, r);
      Tile::put_query((const T*)p_.query + (item_.row + r / group_) * p_.query_row + head * p_.query_head, p_.key_width,
                      scratch_.query + i * query_width_);
      if (item_.resumes) {
        const float* from = saved(kv_head, r);
        scratch_.top[i] = from[0];
        store(scratch_.total + i * W, load(from + W));
        memcpy(scratch_.out + i * out_width_, from + 2 * W, out_width_ * sizeof(float));
        continue;
      }
      scratch_.top[i] = p_.sinks ? p_.sinks[head] : -INFINITY;
      store(scratch_.total + i * W, splat(0.0f));
      if (p_.sinks) scratch_.total[i * W] = 1.0f;
      memset(scratch_.out + i * out_width_, 0, out_width_ * sizeof(float));
    }
    if constexpr (Tile::MULTIPLIES_ALL_ROWS)
      scratch_.tile.put_queries(scratch_.query + state(kv_head, 0) * query_width_, kv_head - item_.kv_begin);
  }

  void walk(int64_t kv_head, int64_t t) {
    scratch_.next.template prefetch<T>(p_, kv_head);
    scratch_.tile.open_keys(p_, scratch_.at, kv_head);
    update_rows(kv_head, t);
    scratch_.tile.open_values(p_, scratch_.at, kv_head);
    add_values(kv_head, t);
  }

  // Runs each stage for all heads before the next stage: the waits of one head overlap the work of others.
  void walk_together(int64_t t) {
    Tile& tile = scratch_.tile;
    const int64_t first = item_.kv_begin, heads = item_.kv_end - first, begin = seen(0, t).begin;
    for (int64_t h = 0; h < heads; h++) {
      scratch_.next.template prefetch<T>(p_, first + h);
      tile.open_keys(p_, scratch_.at, first + h);
      tile.multiply_queries(p_, scratch_.at, h, begin);
    }
    for (int64_t h = 0; h < heads; h++) {
      tile.spread(h);
      update_rows(first + h, t);
      tile.put_probs(scratch_.probs, h);
    }
    for (int64_t h = 0; h < heads; h++) {
      tile.open_values(p_, scratch_.at, first + h, begin);
      tile.multiply_values(h);
    }
    for (int64_t h = 0; h < heads; h++) tile.add_sums(h, scratch_.out + state(first + h, 0) * out_width_);
  }

  void update_rows(int64_t kv_head, int64_t t) {
    for (int64_t r = 0; r < sharing_; r++) {
      const int64_t i = state(kv_head, r);
      update_row(p_, scratch_.tile, seen(r, t), scratch_.query + i * query_width_, r,
                 out_width_, scratch_.probs + r * TILE, scratch_.out + i * out_width_, scratch_.total + i * W,
                 scratch_.top + i);
    }
  }

  void add_values(int64_t kv_head, int64_t t) {
    for (int64_t r = 0, step; r < sharing_; r += step) {
      step = std::min<int64_t>(4, sharing_ - r);
      const Seen earliest = seen(r, t), latest = seen(r + step - 1, t);
      if (earliest.begin >= latest.end) continue;
      const float* probs = scratch_.probs + r * TILE;
      float* out = scratch_.out + state(kv_head, r) * out_width_;
      if (step == 4)
        scratch_.tile.template add<4>(probs, out, earliest.begin, latest.end);
      else if (step == 3)
        scratch_.tile.template add<3>(probs, out, earliest.begin, latest.end);
      else if (step == 2)
        scratch_.tile.template add<2>(probs, out, earliest.begin, latest.end);
      else
        scratch_.tile.template add<1>(probs, out, earliest.begin, latest.end);
    }
  }

  void finish(int64_t kv_head) {
    for (int64_t r = 0; r < sharing_; r++) {
      const int64_t i = state(kv_head, r);
      if (item_.is_shared) {
        float* to = saved(kv_head, r);
        to[0] = scratch_.top[i];
        store(to + W, load(scratch_.total + i * W));
        memcpy(to + 2 * W, scratch_.out + i * out_width_, out_width_ * sizeof(float));
        continue;
      }
      write_row<Tile>(scratch_.out + i * out_width_, sum(load(scratch_.total + i * W)), p_.value_width,
                      (T*)p_.out + (item_.row + r / group_) * p_.out_row + query_head(kv_head, r) * p_.out_head);
    }
  }

  const Problem& p_;
  const Item& item_;
  const Item* following_;  // the item that this thread probably takes next, or null
  Scratch<Tile>& scratch_;
  float* saved_;
  const int64_t group_, sharing_, query_width_, out_width_;
};

// Returns 0, or 1 + the first sequence whose rows, context or block ids do not fit the tensors.
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

// Returns the number of positions, in whole tiles, at which two decoding sequences have the same blocks; less than the
// context of either.
int64_t shared_positions(const Problem& p, int64_t s, int64_t other) {
  const int64_t longest = std::min(p.context(s), p.context(other)) - 1;
  const int32_t *mine = p.block_tables + s * p.table_stride, *theirs = p.block_tables + other * p.table_stride;
  int64_t blocks = 0;
  while (blocks * p.block_size < longest && mine[blocks] == theirs[blocks]) blocks++;
  return std::min(blocks * p.block_size, longest) / TILE * TILE;
}

// Finds runs of up to `largest` decoding sequences that begin with the same blocks; sets `shared` to the length of this
// beginning for each sequence, 0 for sequences in no run.
std::vector<Item> shared_beginnings(const Problem& p, int64_t largest, std::vector<int64_t>& shared) {
  std::vector<Item> runs;
  shared.assign(p.num_sequences, 0);
  if (!p.block_tables || p.window) return runs;
  for (int64_t s = 0, next; s < p.num_sequences; s = next) {
    int64_t length = 0;
    for (next = s + 1; p.rows(s) == 1 && next < p.num_sequences && next - s < largest && p.rows(next) == 1; next++) {
      const int64_t common = shared_positions(p, s, next);
      if (common == 0 || common < length / 2) break;
      length = length ? std::min(length, common) : common;
    }
    if (next - s == 1) continue;
    std::fill(shared.begin() + s, shared.begin() + next, length);
    runs.push_back({s, p.query_start[s], length - 1, next - s, 0, length, false, true});
  }
  return runs;
}

// Lists all other work: positions of one sequence, a tile of query rows at a time.
std::vector<Item> rows_alone(const Problem& p, int64_t positions, const std::vector<int64_t>& shared) {
  std::vector<Item> items;
  for (int64_t s = 0; s < p.num_sequences; s++)
    for (int64_t i = 0; i < p.rows(s); i += positions) {
      const int64_t count = std::min(positions, p.rows(s) - i), position = p.context(s) - p.rows(s) + i;
      const int64_t unseen = p.window ? std::max<int64_t>(0, position - p.window + 1) / TILE * TILE : 0;
      items.push_back({s, p.query_start[s] + i, position, count, shared[s] ? shared[s] : unseen, position + count,
                       shared[s] > 0, false});
    }
  return items;
}

// Gives an item enough KV heads for QUERY_ROWS rows: the heads of a token are contiguous in the cache.
std::vector<Item> with_heads(const Problem& p, const std::vector<Item>& rows, int threads) {
  const int64_t group = p.num_heads / p.num_kv_heads, shares = (int64_t)rows.size();
  int64_t widest = p.num_kv_heads;
  while (widest > 1 && shares * (p.num_kv_heads / widest) < 4 * threads) widest = (widest + 1) / 2;
  std::vector<Item> items;
  for (Item item : rows) {
    const int64_t heads = std::clamp<int64_t>(QUERY_ROWS / (item.count * group), 1, widest);
    for (int64_t head = 0; head < p.num_kv_heads; head += heads) {
      item.kv_begin = head, item.kv_end = std::min(head + heads, p.num_kv_heads);
      items.push_back(item);
    }
  }
  return items;
}

template <typename T, typename Tile>
void attend(const Problem& p, const std::vector<Item>& rows, int threads, float* saved) {
  const std::vector<Item> items = with_heads(p, rows, threads);
  int64_t work = 0;
  for (const Item& item : rows) work += item.count * (item.end - item.begin);
  work *= p.num_heads * (p.key_width + p.value_width);
  const int64_t num_items = (int64_t)items.size(), run = std::max<int64_t>(1, num_items / (4 * threads));
#pragma omp parallel for schedule(dynamic, run) num_threads(threads) if (threads > 1 && work > SERIAL_WORK)
  for (int64_t i = 0; i < num_items; i++) {
    static thread_local Scratch<Tile> scratch;
    Attending<T, Tile>(p, items[i], i + 1 < num_items ? &items[i + 1] : nullptr, scratch, saved).run();
  }
}

template <typename T, typename Tile>
void attend_all(const Problem& p, int threads) {
  static thread_local std::vector<float> memory;
  const int64_t positions = std::max<int64_t>(1, QUERY_ROWS / (p.num_heads / p.num_kv_heads));
  // Runs are short enough that each thread gets some of them.
  const int64_t largest = std::min(positions, p.num_sequences * p.num_kv_heads / (2 * threads));
  std::vector<int64_t> shared;
  const std::vector<Item> beginnings = shared_beginnings(p, largest, shared);
  if (!beginnings.empty()) {
    const int64_t size = p.query_start[p.num_sequences] * p.num_heads * (2 * W + Tile::padded(p.value_width));
    if ((int64_t)memory.size() < size) memory.resize(size);
    attend<T, Tile>(p, beginnings, threads, memory.data());
  }
  attend<T, Tile>(p, rows_alone(p, positions, shared), threads, memory.data());
}

// Writes new rows into the cache before attention reads it.
template <typename T>
void append(const Problem& p, int64_t num_rows) {
  for (int64_t i = 0; i < num_rows; i++) {
    const int64_t block = p.slots[i] / p.block_size, offset = p.slots[i] % p.block_size;
    T* key = (T*)p.key + block * p.key_block + offset * p.key_token;
    T* value = (T*)p.value + block * p.value_block + offset * p.value_token;
    for (int64_t h = 0; h < p.num_kv_heads; h++) {
      memcpy(key + h * p.key_head, (const T*)p.new_key + i * p.new_key_row + h * p.new_key_head,
             p.key_width * sizeof(T));
      memcpy(value + h * p.value_head, (const T*)p.new_value + i * p.new_value_row + h * p.new_value_head,
             p.value_width * sizeof(T));
    }
  }
}

int64_t first_bad_slot(const Problem& p, int64_t num_rows) {
  for (int64_t i = 0; i < num_rows; i++)
    if (p.slots[i] < 0 || p.slots[i] >= p.num_blocks * p.block_size) return 1 + i;
  return 0;
}

}  // namespace

// Returns 0; -1 where the row offsets do not fit, 1 + s where sequence s does not; -2 - i where the slot of row i does
// not.
extern "C" int64_t lockstep_attention(const Problem* problem, int64_t num_rows, int64_t is_bf16,
                                      int64_t threads) {
  const Problem& p = *problem;
  if (p.query_start[0] != 0 || p.query_start[p.num_sequences] != num_rows) return -1;
  int64_t bad = first_bad_sequence(p, num_rows);
  if (bad) return bad;
  if (p.slots) {
    bad = first_bad_slot(p, num_rows);
    if (bad) return -1 - bad;
    is_bf16 ? append<bf16>(p, num_rows) : append<float>(p, num_rows);
  }
  if (!is_bf16)
    attend_all<float, Widened<float>>(p, (int)threads);
  else
#if defined(ATTENTION_HAS_AMX)
    amx::is_permitted() ? attend_all<bf16, ByMatrix>(p, (int)threads) : attend_all<bf16, Paired>(p, (int)threads);
#elif defined(ATTENTION_HAS_PAIRS)
    attend_all<bf16, Paired>(p, (int)threads);
#else
    attend_all<bf16, Widened<bf16>>(p, (int)threads);
#endif
  return 0;
}
