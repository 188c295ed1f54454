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
#include "attention/attention_rows.h"
#include "machine/memory.h"
#include "machine/packed.h"

using namespace attention;

namespace {

constexpr int QUERY_ROWS = 32;  // about as many rows (positions x heads of one group) of a KV head share a tile
constexpr int64_t SERIAL_WORK = 1 << 17;  // with fewer multiply-adds, starting threads costs more than it saves

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
    for (int64_t i = 0; fits && p.row_ends && i < rows; i++) {  // in ascending order, so that tiles end with their last row
      const int32_t* end = p.row_ends + p.query_start[s] + i;
      fits = *end > context - rows + i && *end <= context && (i == 0 || end[-1] <= *end);
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

// Returns the end of a run of decoding sequences from `s` on that are positions of one sequence, one behind the other, as
// the rows of a draft are.
int64_t end_of_draft(const Problem& p, int64_t s) {
  int64_t next = s + 1;
  const auto follows = [&] {
    const int64_t context = p.context(next - 1), blocks = (context + p.block_size - 1) / p.block_size;
    const int32_t* before = p.block_tables + (next - 1) * p.table_stride;
    return p.rows(next) == 1 && p.context(next) == context + 1 &&
           std::equal(before, before + blocks, before + p.table_stride);
  };
  if (p.block_tables && p.rows(s) == 1)
    while (next < p.num_sequences && follows()) next++;
  return next;
}

// Finds runs of up to `largest` decoding sequences that begin with the same blocks; sets `shared` to the length of this
// beginning for each sequence, 0 for sequences in no run. The rows of one draft alone are none: they go together anyway.
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
    if (end_of_draft(p, s) >= next) continue;
    std::fill(shared.begin() + s, shared.begin() + next, length);
    runs.push_back({s, p.query_start[s], length - 1, next - s, 0, length, false, true});
  }
  return runs;
}

// Lists all other work: positions of one sequence, a tile of query rows at a time.
std::vector<Item> rows_alone(const Problem& p, int64_t positions, const std::vector<int64_t>& shared) {
  std::vector<Item> items;
  for (int64_t s = 0, next; s < p.num_sequences; s = next) {
    next = end_of_draft(p, s);
    next = std::find_if(shared.begin() + s, shared.begin() + next, [&](int64_t its) { return its != shared[s]; }) -
           shared.begin();
    const int64_t last = next - 1, rows = p.query_start[next] - p.query_start[s];
    for (int64_t i = 0; i < rows; i += positions) {
      const int64_t count = std::min(positions, rows - i), position = p.context(last) - rows + i;
      const int64_t unseen = p.window ? std::max<int64_t>(0, position - p.window + 1) / TILE * TILE : 0;
      const int64_t row = p.query_start[s] + i, end = p.end_of(row + count - 1, position + count - 1);
      items.push_back({last, row, position, count, shared[s] ? shared[s] : unseen, end, shared[s] > 0, false});
    }
  }
  return items;
}

// Gives an item enough KV heads for `most` rows: the heads of a token are contiguous in the cache.
std::vector<Item> with_heads(const Problem& p, const std::vector<Item>& rows, int64_t most, int threads) {
  const int64_t group = p.num_heads / p.num_kv_heads, shares = (int64_t)rows.size();
  int64_t widest = p.num_kv_heads;
  while (widest > 1 && shares * (p.num_kv_heads / widest) < 4 * threads) widest = (widest + 1) / 2;
  std::vector<Item> items;
  for (Item item : rows) {
    const int64_t heads = std::clamp<int64_t>(most / (item.count * group), 1, widest);
    for (int64_t head = 0; head < p.num_kv_heads; head += heads) {
      item.kv_begin = head, item.kv_end = std::min(head + heads, p.num_kv_heads);
      items.push_back(item);
    }
  }
  return items;
}

template <typename T, typename Tile>
void attend(const Problem& p, const std::vector<Item>& rows, int threads, float* saved) {
  const std::vector<Item> items = with_heads(p, rows, Tile::ROWS_AT_ONCE, threads);
  int64_t work = 0;
  for (const Item& item : rows) work += item.count * (item.end - item.begin);
  work *= p.num_heads * (p.key_width + p.value_width);
  // A thread prefetches the next item of its run; long runs at the end would leave one thread alone with the last.
  const int64_t num_items = (int64_t)items.size(), run = std::clamp<int64_t>(num_items / (4 * threads), 1, 8);
  memory::Shortage shortage;
#pragma omp parallel for schedule(dynamic, run) num_threads(threads) if (threads > 1 && work > SERIAL_WORK)
  for (int64_t i = 0; i < num_items; i++) {
    static thread_local Scratch<Tile> memory;
    Scratch<Tile>* scratch = &memory;
    asm volatile("" : "+r"(scratch));  // else the thread's address is looked up again at every use
    try {
      Attending<T, Tile>(p, items[i], i + 1 < num_items ? &items[i + 1] : nullptr, *scratch, saved).run();
    } catch (const std::bad_alloc&) {
      shortage.note();
    }
  }
  shortage.raise();
}

template <typename T, typename Tile>
void attend_all(const Problem& p, int threads) {
  static thread_local memory::Kept<float> kept;
  std::unique_ptr<float[]> own;
  float* saved = nullptr;
  const int64_t positions = std::max<int64_t>(1, QUERY_ROWS / (p.num_heads / p.num_kv_heads));
  // Runs are short enough that each thread gets some of them.
  const int64_t largest = std::min(positions, p.num_sequences * p.num_kv_heads / (2 * threads));
  std::vector<int64_t> shared;
  const std::vector<Item> beginnings = shared_beginnings(p, largest, shared);
  if (!beginnings.empty()) {
    // By row of the step, of which only those that share a beginning are touched.
    saved = memory::take(p.query_start[p.num_sequences] * p.num_heads * (2 * W + Tile::padded(p.value_width)), kept, own);
    attend<T, Tile>(p, beginnings, threads, saved);
  }
  attend<T, Tile>(p, rows_alone(p, positions, shared), threads, saved);
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
// not; memory::NONE_LEFT.
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
  return memory::at_edge([&] {
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
  });
}

LOCKSTEP_PACKED(lockstep_attention)
