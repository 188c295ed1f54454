// Log-probabilities of rows of logits, their gradient, and one token drawn from each row. Letters: R rows, V vocabulary.
#include "machine/memory.h"
#include "machine/packed.h"
#include "sampling/filters.h"
#include "sampling/gumbel.h"

using namespace sampling;

namespace {

constexpr int64_t SERIAL = 1 << 15;  // with fewer logits, starting threads costs more than it saves

// -- rows ---------------------------------------------------------------------------------------------------------

struct Rows {
  const void* logits;  // [R, V], rows `stride` elements apart
  const float* temperatures;
  int64_t R, V, stride, is_bf16, temperature_stride, threads;

  template <typename T>
  Row<T> row(int64_t r) const {
    return Row<T>(static_cast<const T*>(logits) + r * stride, V, temperatures[r * temperature_stride]);
  }
};

struct Draws {
  const int64_t *seeds, *positions, *top_k;  // [R] each
  const double* top_p;
  const float* min_p;
  const float* reshaped;        // [*, V]: rows to draw from in place of the model's
  const int64_t* reshaped_row;  // [R]: row of `reshaped`; -1: the model's own logits; null: for all
  const uint16_t* allowed;      // [*, allowed_width]
  const int64_t* allowed_row;   // [R]: row of `allowed`; -1: all tokens; null: for all
  int64_t allowed_width;
  int64_t* token_ids;  // [R]
  float *logprobs, *chances;
};

template <typename Function>
void for_each(const Rows& rows, Function function) {
  int threads = rows.R * rows.V < SERIAL ? 1 : (int)std::min(rows.threads, rows.R);
  memory::Shortage shortage;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows.R; r++) try {
      function(r);
    } catch (const std::bad_alloc&) {
      shortage.note();
    }
  shortage.raise();
}

// Draws a token of the row and its probability before the filters; also computes the row's sums.
template <typename T>
void draw(Row<T>& row, const Limits& limits, const RowKey& key, int64_t* token, float* chance) {
  static thread_local std::vector<float> groups;
  static thread_local std::vector<std::pair<float, int64_t>> ranked;
  groups.clear();  // those of a row before, which may have had a larger vocabulary, would decide this row's cut
  row.find_largest(limits.top_k < row.V ? &groups : nullptr);
  *token = 0;
  if (limits.top_k == 1) {
    double total = row.sum([](int64_t, const Lanes&) {});
    *chance = (float)(1.0 / total);
    if (std::isnan(total)) return;
    while (row.logit_at(*token) != row.largest) ++*token;
    return;
  }
  Contest<T> all(row, key);
  double total = row.sum([&](int64_t i, const Lanes& e) { all.show(i, e); });
  *chance = (float)total;
  if (std::isnan(total)) return;
  *token = all.token;
  if (limits.top_k < row.V || limits.top_p < 1.0 || limits.min_p > 0.0f) {
    Filter<T> filter(row, limits, all.token, groups, ranked);
    if (!filter.keeps_winner) {  // else the kept tokens have the same winner
      Contest<T> kept(row, key);
      filter.show_kept([&](int64_t i, const Lanes& e) { kept.show(i, e); });
      *token = kept.token;
    }
  }
  *chance = (float)(exp_nonpositive(splat(row.scaled_at(*token)))[0] / total);
}

template <typename T>
void draw_all(const Rows& rows, const Draws& d) {
  for_each(rows, [&](int64_t r) {
    Row<T> row = rows.row<T>(r);
    Limits limits{d.top_k[r], d.top_p[r], d.min_p[r]};
    RowKey key(d.seeds[r], d.positions[r]);
    int64_t reshaped = d.reshaped_row ? d.reshaped_row[r] : -1, masked = d.allowed_row ? d.allowed_row[r] : -1;
    int64_t* token = d.token_ids + r;
    float temperature = rows.temperatures[r * rows.temperature_stride];
    const uint16_t* allowed = masked < 0 ? nullptr : d.allowed + masked * d.allowed_width;
    if (reshaped < 0 && masked < 0) {
      draw(row, limits, key, token, d.chances + r);
    } else {
      if (reshaped >= 0) {
        Row<float> other(d.reshaped + reshaped * rows.V, rows.V, temperature, allowed);
        draw(other, limits, key, token, d.chances + r);
      } else {
        Row<T> other(row.x, rows.V, temperature, allowed);
        draw(other, limits, key, token, d.chances + r);
      }
      row.normalise();
    }
    d.logprobs[r] = row.logprob(*token);
  });
}

// -- rows that are cut over ranks, each part at a multiple of BLOCK -----------------------------------------------------

struct Parts {
  const float* largest;                        // [R]: of the whole row
  const int64_t *seeds, *positions, *is_greedy;  // [R] each
  int64_t first_id;                            // of this part
  double* out;                                 // [R, 4 + blocks]: score high, low, token id, its logit, sums of blocks
};

template <typename T>
void draw_parts(const Rows& rows, const Parts& p) {
  int64_t width = 4 + (rows.V + BLOCK - 1) / BLOCK;
  for_each(rows, [&](int64_t r) {
    Row<T> row = rows.row<T>(r);
    row.largest = p.largest[r];
    Contest<T> contest(row, RowKey(p.seeds[r], p.positions[r]), p.first_id);
    double* out = p.out + r * width;
    double* block = out + 4;
    auto add = [&](float sum) { *block++ = sum; };
    if (p.is_greedy[r]) {  // every token with the largest logit has one score
      row.add([](int64_t, const Lanes&) {}, add);
      for (int64_t i = 0; i < row.V && contest.best.high != 0; i++)
        if (row.logit_at(i) == row.largest) contest.token = i, contest.best = Score(0, 0);
    } else {
      row.add([&](int64_t i, const Lanes& e) { contest.show(i, e); }, add);
    }
    out[0] = contest.best.high;
    out[1] = contest.best.low;
    out[2] = (double)(p.first_id + contest.token);
    out[3] = row.logit_at(contest.token);
  });
}

template <typename T>
void logprobs_of_all(const Rows& rows, float* out) {
  for_each(rows, [&](int64_t r) {
    Row<T> row = rows.row<T>(r);
    row.normalise();
    for (int64_t i = 0; i < rows.V; i += LANES) {
      Lanes z = row.scaled(row.logits(i));
      write(out + r * rows.V, i, rows.V, lanes([&](int u) { return z.part[u] - splat(row.log_sum); }));
    }
  });
}

template <typename T>
void logprobs_of_selected(const Rows& rows, const int64_t* token_ids, float* out, float* stats) {
  for_each(rows, [&](int64_t r) {
    Row<T> row = rows.row<T>(r);
    row.normalise();
    out[r] = row.logprob(token_ids[r]);
    stats[2 * r] = row.largest;
    stats[2 * r + 1] = row.log_sum;
  });
}

template <typename T>
void gradient_of_selected(const Rows& rows, const int64_t* token_ids, const float* grad, const float* stats, T* out) {
  for_each(rows, [&](int64_t r) {
    Row<T> row = rows.row<T>(r);
    row.largest = stats[2 * r];
    row.log_sum = stats[2 * r + 1];
    float factor = grad[r] * row.inverse;
    T* to = out + r * rows.V;
    for (int64_t i = 0; i < rows.V; i += LANES) {
      Lanes z = row.scaled(row.logits(i));
      write(to, i, rows.V, lanes([&](int u) {
        return exp_nonpositive(z.part[u] - splat(row.log_sum)) * splat(-factor);
      }));
    }
    int64_t token = token_ids[r];
    float chance = exp_nonpositive(splat(row.logprob(token)))[0];
    store_scalar(to + token, (1.0f - chance) * factor);
  });
}

}  // namespace

extern "C" {

// Returns 0 or memory::NONE_LEFT: of these functions, this one alone has scratch.
int64_t lockstep_draw(const Rows* rows, const Draws* draws) {
  return memory::at_edge([&] { rows->is_bf16 ? draw_all<bf16>(*rows, *draws) : draw_all<float>(*rows, *draws); });
}

void lockstep_draw_parts(const Rows* rows, const Parts* parts) {
  rows->is_bf16 ? draw_parts<bf16>(*rows, *parts) : draw_parts<float>(*rows, *parts);
}

// Computes log-probabilities [R] of tokens with these logits from the sums of all blocks [R, num_blocks], in the order of
// `Row::sum`. Rows' logits are not read; their V is the number of blocks.
void lockstep_logprobs_of_parts(const Rows* rows, const double* blocks, const float* largest, const float* logits,
                                float* out) {
  for (int64_t r = 0; r < rows->R; r++) {
    Row<float> row(nullptr, 0, rows->temperatures[r * rows->temperature_stride]);
    row.largest = largest[r];
    double total = 0;
    for (int64_t i = 0; i < rows->V; i++) total += blocks[r * rows->V + i];
    row.log_sum = (float)std::log(total);
    row.x = logits + r;
    out[r] = row.logprob(0);
  }
}

// The definition's two functions of numbers, for tests: noise of token_ids in the row of a key, and weights of z.
void lockstep_gumbel(int64_t seed, int64_t position, const int64_t* token_ids, int64_t count, double* out) {
  RowKey key(seed, position);
  for (int64_t i = 0; i < count; i++) out[i] = gumbel_noise(key, (uint32_t)token_ids[i]);
}
void lockstep_weights(const float* z, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i++) out[i] = weight(splat(z[i]))[0];
}

void lockstep_logprobs(const Rows* rows, float* out) {
  rows->is_bf16 ? logprobs_of_all<bf16>(*rows, out) : logprobs_of_all<float>(*rows, out);
}

// stats [R, 2]: for the gradient.
void lockstep_selected(const Rows* rows, const int64_t* token_ids, float* out, float* stats) {
  if (rows->is_bf16)
    logprobs_of_selected<bf16>(*rows, token_ids, out, stats);
  else
    logprobs_of_selected<float>(*rows, token_ids, out, stats);
}

// out [R, V]: grad[r] * d out[r] / d logits, in the logits' type.
void lockstep_selected_gradient(const Rows* rows, const int64_t* token_ids, const float* grad, const float* stats,
                                void* out) {
  if (rows->is_bf16)
    gradient_of_selected(*rows, token_ids, grad, stats, static_cast<bf16*>(out));
  else
    gradient_of_selected(*rows, token_ids, grad, stats, static_cast<float*>(out));
}

}  // extern "C"

LOCKSTEP_PACKED(lockstep_draw)
