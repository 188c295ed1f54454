// The bf16 product by AMX tiles for many rows, with the bits of linear_amx.h: y = x weight^T. Here x is read in place, and
// the weights are arranged, a group of columns at a time that stays in the L2 cache while all rows of x pass: for many
// rows that costs little, and the sums come as rows of y.
#pragma once
#include "machine/amx.h"
#if defined(LOCKSTEP_AMX)
#include <omp.h>

#include <vector>

#include "linear/linear_amx_sums.h"
#include "linear/linear_call.h"
#include "linear/linear_prefetch.h"
#include "linear/linear_shares.h"

namespace amx {

constexpr int64_t MANY_ROWS = 1024;       // from so many rows on, this is faster
constexpr int64_t GROUP_BYTES = 1 << 20;  // arranged weights of a group, about half of the L2 cache
constexpr int64_t CHUNK_ROWS = 2 * PAIR;  // rows of a piece of work: threads share a call by groups and rows

struct Panel {  // columns that are multiplied together: up to 32, or up to 16 of a gate and of its `up`
  Half halves[2];
  bf16* y;  // their first column
  int64_t y_stride;
  bool is_gated;

  int num() const { return halves[1].count ? 2 : 1; }
};

// The sums of a block of up to 32 rows of a panel, which become rows of y while the next block is multiplied. Whole lines
// of y are written past the caches: so many rows do not fit there, and a cache would read each line before it is written.
class UnwrittenRows {
 public:
  float* next() { return sums_[1 - side_]; }  // where the sums of the next block are stored, [32 rows][32 columns]

  void begin(const Panel& panel, int64_t row, int64_t rows) {
    finish();
    side_ = 1 - side_, row_ = 0, rows_ = rows;
    y_ = panel.y + row * panel.y_stride, y_stride_ = panel.y_stride, is_gated_ = panel.is_gated;
    const Half* halves = panel.halves;
    mask_ = first_lanes(is_gated_ ? halves[0].count : halves[0].count + halves[1].count);
    for (int i = 0; i < 2; i++) bias_[i] = bias_of(halves[i]);
    is_line_ = !is_gated_ && mask_ == ~0u && !(((uintptr_t)y_ | (uintptr_t)(y_stride_ * 2)) & 63);
  }
  // Writes the rows before the given share of all.
  void until(int64_t share, int64_t shares) { write(rows_ * share / shares); }
  void finish() { write(rows_); }

 private:
  void write(int64_t end) {
    const float* sums = sums_[side_] + row_ * PAIR;
    bf16* y = y_ + row_ * y_stride_;
    for (; row_ < end; row_++, sums += PAIR, y += y_stride_) {
      const __m512 first = _mm512_add_ps(_mm512_load_ps(sums), bias_[0]);
      const __m512 second = _mm512_add_ps(_mm512_load_ps(sums + TILE), bias_[1]);
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
      if (is_gated_) {
        const __m256i gate = _mm512_castsi512_si256(both), up = _mm512_extracti64x4_epi64(both, 1);
        const simd::Floats out = silu_.product(gate, widened(up));
        _mm256_mask_storeu_epi16(y, (__mmask16)mask_, (__m256i)simd::halves(out));
      } else if (is_line_) {
        _mm512_stream_si512((__m512i*)y, both);
      } else {
        _mm512_mask_storeu_epi16(y, mask_, both);
      }
    }
  }

  alignas(64) float sums_[2][PAIR * PAIR];
  __m512 bias_[2];
  bf16* y_ = nullptr;
  int64_t y_stride_ = 0, row_ = 0, rows_ = 0;
  __mmask32 mask_;
  int side_ = 0;
  bool is_gated_, is_line_;
  const gated::SiluTable& silu_ = gated::SiluTable::get();
};

struct RowPair {  // up to 32 rows of x
  const bf16* x;
  int64_t stride, count;
  const Tile* tail;  // [2] the last K % 32 values, zeros beyond
};

// Computes the sums of MT tiles of rows by NT tiles of columns, w [NT][steps], and stores them at before.next(); meanwhile
// the sums `before` these are written to y, and `lines` lines of `next` prefetched a step.
template <int NT, int MT>
void multiply_block(const RowPair& rows, const Tile* w, int64_t K, Prefetch& next, int lines, UnwrittenRows& before) {
  const int64_t full_steps = K / STEP, steps = (K + STEP - 1) / STEP;
  _tile_zero(0);
  if (MT == 2) _tile_zero(1);
  if (NT == 2) _tile_zero(2);
  if (NT == 2 && MT == 2) _tile_zero(3);
  // The weights pass the first cache by, where the rows of x stay. Loads come before products: a processor whose core has
  // another busy thread loses time at each change between them.
  auto add = [&](const bf16* x0, const bf16* x1, int64_t stride, int64_t s) {
    _tile_stream_loadd(6, w[s].values, 64);
    if (NT == 2) _tile_stream_loadd(7, w[steps + s].values, 64);
    _tile_loadd(4, x0, stride * 2);
    if (MT == 2) _tile_loadd(5, x1, stride * 2);
    fence();
    _tile_dpbf16ps(0, 4, 6);
    if (NT == 2) _tile_dpbf16ps(2, 4, 7);
    if (MT == 2) _tile_dpbf16ps(1, 5, 6);
    if (NT == 2 && MT == 2) _tile_dpbf16ps(3, 5, 7);
    fence();
    next.lines(lines);
    fence();
  };
  const bf16 *first = rows.x, *second = rows.x + TILE * rows.stride;
  for (int64_t s = 0; s < full_steps; s++) {
    add(first + s * STEP, second + s * STEP, rows.stride, s);
    before.until(s + 1, full_steps);
    fence();
  }
  if (K % STEP) add(rows.tail[0].values, rows.tail[1].values, STEP, full_steps);
  float* sums = before.next();
  _tile_stored(0, sums, PAIR * 4);
  if (NT == 2) _tile_stored(2, sums + TILE, PAIR * 4);
  if (MT == 2) _tile_stored(1, sums + TILE * PAIR, PAIR * 4);
  if (NT == 2 && MT == 2) _tile_stored(3, sums + TILE * PAIR + TILE, PAIR * 4);
  fence();
}

inline std::vector<Panel> panels_of(const Call& call) {
  std::vector<Panel> panels;
  const auto half = [](const Part& part, int64_t n) {
    const int64_t at = std::min(n, part.N);
    return Half{(const bf16*)part.weight + at * part.weight_stride, part.bias ? (const bf16*)part.bias + at : nullptr,
                part.weight_stride, std::min(part.N - at, TILE)};
  };
  for (int64_t i = 0; i < call.num_parts; i++) {
    const Part& part = call.parts[i];
    for (int64_t n = 0; n < part.N; n += call.up ? TILE : PAIR)
      panels.push_back({{half(part, n), call.up ? half(*call.up, n) : half(part, n + TILE)},
                        (bf16*)part.y + n, part.N, call.up != nullptr});
  }
  return panels;
}

// One thread's work on a call: pieces, each a chunk of rows by a group of panels, whose weights it has arranged.
class ManyWorker {
 public:
  // memory: for the arranged weights of a group.
  ManyWorker(const Call& call, const std::vector<Panel>& panels, int64_t groups, std::vector<Tile>& memory)
      : call_(call), panels_(panels), groups_(groups), steps_((call.K + STEP - 1) / STEP), memory_(memory) {}

  static int64_t chunks(const Call& call) { return (call.M + CHUNK_ROWS - 1) / CHUNK_ROWS; }

  void multiply(int64_t piece) {
    const int64_t num = chunks(call_), group = piece / num, begin = piece % num * CHUNK_ROWS;
    if (group != group_) arrange_group(group);
    for (int64_t row = begin; row < std::min(begin + CHUNK_ROWS, call_.M); row += PAIR) multiply_rows(row);
  }
  void finish() {
    unwritten_.finish();
    _mm_sfence();  // lines that were written past the caches
  }

 private:
  void arrange_group(int64_t group) {
    const int64_t num = (int64_t)panels_.size();
    group_ = group, first_ = num * group / groups_, last_ = num * (group + 1) / groups_;
    if ((int64_t)memory_.size() < (last_ - first_) * 2 * steps_) memory_.resize((last_ - first_) * 2 * steps_);
    tiles_ = memory_.data();
    for (int64_t i = first_; i < last_; i++)
      for (int h = 0; h < panels_[i].num(); h++) {
        const Half& half = panels_[i].halves[h];
        arrange(half.weight, half.stride, half.count, call_.K, tiles_ + ((i - first_) * 2 + h) * steps_);
      }
    fence();
  }

  // Computes up to 32 rows of all panels of the group.
  void multiply_rows(int64_t row) {
    const int64_t K = call_.K, panels = last_ - first_, ahead = std::min(PAIR, call_.M - row - PAIR);
    const bf16* x = (const bf16*)call_.x + row * call_.x_stride;
    const RowPair rows{x, call_.x_stride, std::min(call_.M - row, PAIR), tail_};
    if (K % STEP) copy_tail(rows);
    const int64_t counts[2] = {std::min(rows.count, TILE), std::max<int64_t>(rows.count - TILE, 1)};
    if (memcmp(counts, configured_, sizeof counts)) {
      memcpy(configured_, counts, sizeof counts);
      configure(counts[0], counts[1]);
    }
    Prefetch next;
    if (ahead > 0) next = Prefetch({{x + PAIR * call_.x_stride, K * 2, call_.x_stride * 2, ahead}, {}}, 1);
    const int lines = (int)((PAIR - 1) / panels + 1);
    for (int64_t i = first_; i < last_; i++) {
      const Tile* w = tiles_ + (i - first_) * 2 * steps_;
      if (panels_[i].num() == 2)
        (rows.count > TILE ? multiply_block<2, 2> : multiply_block<2, 1>)(rows, w, K, next, lines, unwritten_);
      else
        (rows.count > TILE ? multiply_block<1, 2> : multiply_block<1, 1>)(rows, w, K, next, lines, unwritten_);
      unwritten_.begin(panels_[i], row, rows.count);
    }
  }
  void copy_tail(const RowPair& rows) {
    const int64_t k = call_.K / STEP * STEP;
    for (int64_t r = 0; r < rows.count; r++)
      _mm512_store_si512(tail_[r / TILE].values + r % TILE * STEP,
                         _mm512_maskz_loadu_epi16(first_lanes(call_.K - k), rows.x + r * rows.stride + k));
    fence();
  }

  const Call& call_;
  const std::vector<Panel>& panels_;
  const int64_t groups_, steps_;
  std::vector<Tile>& memory_;
  Tile* tiles_ = nullptr;
  int64_t group_ = -1, first_ = 0, last_ = 0;
  int64_t configured_[2] = {};  // rows of the two tiles of x
  Tile tail_[2];
  UnwrittenRows unwritten_;
};

inline void multiply_many(const Call& call, int threads) {
  const std::vector<Panel> panels = panels_of(call);
  threads = is_worth_threads(call) ? threads : 1;
  const int64_t panel_bytes = std::max<int64_t>(call.K, 1) * PAIR * 2, num = (int64_t)panels.size();
  int64_t groups = (num * panel_bytes - 1) / GROUP_BYTES + 1;
  groups = std::min((groups + threads - 1) / threads * threads, num);  // each thread as many
  const int64_t chunks = ManyWorker::chunks(call);
  Shares shares(groups * chunks, threads, chunks, 0);
  memory::Shortage shortage;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    static thread_local std::vector<Tile> arranged;
    ManyWorker worker(call, panels, groups, arranged);
    int64_t piece;
    const auto one = [](int64_t) { return 1; };
    try {
      for (int share = omp_get_thread_num(); share < threads; share += omp_get_num_threads())  // fewer may have started
        while (shares.take(share, one, &piece)) worker.multiply(piece);
      while (shares.take_last(&piece)) worker.multiply(piece);
    } catch (const std::bad_alloc&) {
      shortage.note();
    }
    worker.finish();
    _tile_release();
  }
  shortage.raise();
}

}  // namespace amx
#endif
