// Attention of one item of work: rows of one sequence, or of sequences that share their first blocks, over its tiles of
// keys, with an online softmax (paged_attention.cpp has the rules). Everything is in an unnamed namespace: the one source
// that includes this file gets it.
#pragma once

#include "attention/attention_amx.h"
#include "attention/attention_tiles.h"

namespace attention {
namespace {

// One thread's workspace.
template <typename Tile>
struct Scratch {
  typename Tile::Element* query;
  float *out, *probs, *total, *top;
  Tile tile;
  Positions tiles[2];  // this tile, and the one to prefetch meanwhile
  Fetch keys, values;  // of the next tile
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
  Seen(const Problem& p, int64_t row, int64_t position, int64_t first) {
    begin = p.window ? std::max<int64_t>(0, position - p.window + 1 - first) : 0;
    end = std::min<int64_t>(TILE, p.end_of(row, position) - first);
  }
  bool any() const { return begin < end; }
};

// What a row adds to the scores of the keys before it, by their distance to its position.
template <typename T>
struct Bias {
  const T* line;  // of its row and head
  int64_t position, reach;
  // Returns those of the keys at W positions from `first` on.
  Floats of(int64_t first) const {
    const int64_t distance = position - first;
    if (distance < reach && distance >= W - 1) return reversed(load(line + distance - (W - 1)));
    float lanes[W];
    for (int64_t i = 0; i < W; i++) {
      const bool is_near = distance >= i && distance - i < reach;
      lanes[i] = is_near ? scalar(line[distance - i]) : 0.0f;
    }
    return load(lanes);
  }
};

// Computes the scores of R rows in a tile, and the largest of each. add_bias(r, j, score): of row r and W keys from j on.
template <int R, typename Tile, typename AddBias>
void score_rows(const Problem& p, const Tile& tile, const Seen* seen, const AddBias& add_bias,
                const typename Tile::Element* query, int64_t stride, int64_t row, Fetch& next, float* scores,
                float* peaks) {
  const Floats minus_infinity = splat(-INFINITY);
  int64_t begin = TILE, end = 0;
  Floats peak[R];
  for (int r = 0; r < R; r++) {
    peak[r] = minus_infinity;
    if (seen[r].any()) begin = std::min(begin, seen[r].begin), end = std::max(end, seen[r].end);
  }
  for (int64_t j = 0; j < TILE; j += W) {
    Floats found[R];
    const bool any = j < end && j + W > begin;
    if (any) tile.template scores<R>(query, stride, row, j, next, found);
    for (int r = 0; r < R; r++) {
      Floats score = minus_infinity;
      if (any && j < seen[r].end && j + W > seen[r].begin) {
        score = found[r] * splat(p.scale);
        if (p.softcap != 0.0f) score = simd::tanh(score / splat(p.softcap)) * splat(p.softcap);
        add_bias(r, j, score);
        Ints lane = lane_numbers() + (int32_t)j;
        if (j < seen[r].begin || j + W > seen[r].end)
          score = select((lane >= (int32_t)seen[r].begin) & (lane < (int32_t)seen[r].end), score, minus_infinity);
        peak[r] = larger(score, peak[r]);
      }
      store(scores + r * TILE + j, score);
    }
  }
  for (int r = 0; r < R; r++) peaks[r] = largest(peak[r]);
}

// Raises a row's top score to `peak` if that is larger, and shrinks its sums; returns what to subtract from its scores.
float raise_top(float peak, int64_t value_width, float* out, float* total, float* top) {
  float before = *top, now = std::max(before, peak);
  *top = now;
  if (now == -INFINITY)
    now = 0.0f;  // every score is -inf; exp(-inf - 0) is 0, exp(-inf + inf) is NaN
  if (before != now) {
    Floats shrink = exp_nonpositive(splat(before - now));
    store(total, load(total) * shrink);
    for (int64_t d = 0; d < value_width; d += W) store(out + d, load(out + d) * shrink);
  }
  return now;
}

// Turns the scores of a row into probabilities of the top score, and adds them to its total.
void exponentiate(const Seen& seen, float now, float* probs, float* total) {
  Floats sum_of_lanes = load(total);
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

constexpr int64_t FEW = 4;  // rows whose stages run side by side, that are scored and that add values together

// Calls visit with a number of rows, 1 to FEW, that is known to the compiler.
template <int R = FEW, typename Visit>
void with_few(int64_t rows, Visit visit) {
  if constexpr (R > 1)
    if (rows < R) return with_few<R - 1>(rows, visit);
  visit(std::integral_constant<int, R>());
}

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
    item_.open(p_, item_.begin, *at_);
    for (int64_t t = item_.begin; t < item_.end; t += TILE, std::swap(at_, next_)) {
      next_->count = 0;
      if (t + TILE < item_.end)
        item_.open(p_, t + TILE, *next_);
      else if (following_)
        following_->open(p_, following_->begin, *next_);
      fetch_next(t + TILE < item_.end || !following_ ? item_ : *following_);
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
  Seen seen(int64_t r, int64_t t) const {
    const int64_t i = std::min(r / group_, item_.count - 1);  // rows beyond the last are asked for, and not read
    return Seen(p_, item_.row + i, item_.position + i, t);
  }

  Bias<T> bias(int64_t kv_head, int64_t r) const {
    const int64_t line = (item_.row + r / group_) * p_.bias_row + query_head(kv_head, r) * p_.bias_reach;
    const int64_t position = item_.is_shared ? p_.context(item_.sequence + r / group_) - 1 : item_.position + r / group_;
    return {(const T*)p_.bias + line, position, p_.bias_reach};
  }

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
      scratch_.top[i] = p_.sinks ? p_.sinks[(item_.row + r / group_) * p_.sink_row + head] : -INFINITY;
      store(scratch_.total + i * W, splat(0.0f));
      if (p_.sinks) scratch_.total[i * W] = 1.0f;
      memset(scratch_.out + i * out_width_, 0, out_width_ * sizeof(float));
    }
    if constexpr (Tile::MULTIPLIES_ALL_ROWS)
      scratch_.tile.put_queries(scratch_.query + state(kv_head, 0) * query_width_, kv_head - item_.kv_begin);
  }

  void walk(int64_t kv_head, int64_t t) {
    scratch_.tile.open_keys(p_, *at_, kv_head);
    update_rows(kv_head, t);
    scratch_.tile.open_values(p_, *at_, kv_head);
    add_values(kv_head, t);
  }

  // Runs each stage for all heads before the next stage: the waits of one head overlap the work of others.
  void walk_together(int64_t t) {
    Tile& tile = scratch_.tile;
    const int64_t first = item_.kv_begin, heads = item_.kv_end - first, begin = seen(0, t).begin;
    const auto ahead = [this] { scratch_.keys.some() || scratch_.values.some(); };
    for (int64_t h = 0; h < heads; h++) {
      tile.open_keys(p_, *at_, first + h);
      tile.multiply_queries(p_, *at_, h, begin, ahead);
    }
    for (int64_t h = 0; h < heads; h++) {
      tile.spread(h);
      update_rows(first + h, t);
      tile.put_probs(scratch_.probs, h);
    }
    for (int64_t h = 0; h <= heads; h++) {
      if (h < heads) tile.open_values(p_, *at_, first + h, h, begin, ahead);
      if (h > 0) tile.multiply_values(h - 1);
    }
    for (int64_t h = 0; h < heads; h++) tile.add_sums(h, scratch_.out + state(first + h, 0) * out_width_);
  }

  // Begins to prefetch the next tile, which is of this item or another.
  void fetch_next(const Item& item) {
    const int64_t first = item.kv_begin, heads = item.kv_end - first, count = next_->count;
    const int64_t walked = item_.kv_end - item_.kv_begin, parts = (sharing_ + FEW - 1) / FEW;
    int64_t key_calls = walked * parts * TILE / W, value_calls = walked * parts * TILE / VALUES_A_FETCH;
    if constexpr (Tile::MULTIPLIES_ALL_ROWS)  // all calls prefetch first keys and then values
      key_calls = value_calls = std::max<int64_t>(1, walked * scratch_.tile.calls_ahead() / 2);
    // Between heads that lie apart, as in packed keys in the order of heads, is a whole tensor: then of the first alone.
    const auto bytes = [&](int64_t head, int64_t width) -> int64_t {
      return (head == width ? heads : 1) * width * sizeof(T);
    };
    scratch_.keys.begin((const T*)p_.key + first * p_.key_head, next_->key, sizeof(T), count,
                        bytes(p_.key_head, p_.key_width), key_calls);
    scratch_.values.begin((const T*)p_.value + first * p_.value_head, next_->value, sizeof(T), count,
                          bytes(p_.value_head, p_.value_width), value_calls);
  }

  // Updates the softmax state (top, total, out) of all rows and sets their probabilities, each stage for FEW rows before
  // the next: the chains of one row overlap those of others.
  void update_rows(int64_t kv_head, int64_t t) {
    for (int64_t first = 0; first < sharing_; first += FEW) {
      const int64_t last = std::min(first + FEW, sharing_);
      float peaks[FEW], tops[FEW];
      float* probs = scratch_.probs + first * TILE;
      const Seen its[FEW] = {seen(first, t), seen(first + 1, t), seen(first + 2, t), seen(first + 3, t)};
      const auto score = [&](const auto& add_bias) {
        with_few(last - first, [&](auto rows) {
          score_rows<rows>(p_, scratch_.tile, its, add_bias, scratch_.query + state(kv_head, first) * query_width_,
                           query_width_, first, scratch_.keys, probs, peaks);
        });
      };
      if (p_.bias)
        score([&](int r, int64_t j, Floats& score) { score = score + bias(kv_head, first + r).of(t + j); });
      else
        score([](int, int64_t, Floats&) {});
      for (int64_t r = first; r < last; r++)
        if (!seen(r, t).any()) memset(scratch_.probs + r * TILE, 0, TILE * sizeof(float));  // scored beside others
      for (int64_t r = first; r < last; r++) {
        const int64_t i = state(kv_head, r);
        if (seen(r, t).any())
          tops[r - first] = raise_top(peaks[r - first], out_width_, scratch_.out + i * out_width_,
                                      scratch_.total + i * W, scratch_.top + i);
      }
      for (int64_t r = first; r < last; r++)
        if (seen(r, t).any())
          exponentiate(seen(r, t), tops[r - first], scratch_.probs + r * TILE,
                       scratch_.total + state(kv_head, r) * W);
    }
  }

  void add_values(int64_t kv_head, int64_t t) {
    for (int64_t r = 0, step; r < sharing_; r += step) {
      step = std::min(FEW, sharing_ - r);
      const Seen earliest = seen(r, t), latest = seen(r + step - 1, t);
      if (earliest.begin >= latest.end) continue;
      const float* probs = scratch_.probs + r * TILE;
      float* out = scratch_.out + state(kv_head, r) * out_width_;
      with_few(step, [&](auto rows) {
        scratch_.tile.template add<rows>(probs, out, earliest.begin, latest.end, scratch_.values);
      });
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
  Positions *at_ = scratch_.tiles, *next_ = scratch_.tiles + 1;
  float* saved_;
  const int64_t group_, sharing_, query_width_, out_width_;
};

}  // namespace
}  // namespace attention
