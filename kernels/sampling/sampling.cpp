// Log-probabilities of rows of logits, their gradient, and one token drawn from each row. Letters: R rows, V vocabulary.
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
  const int64_t* reshaped_row;  // [R]: row of `reshaped`; -1: the model's own logits
  const uint16_t* allowed;      // [*, allowed_width]
  const int64_t* allowed_row;   // [R]: row of `allowed`; -1: all tokens
  int64_t allowed_width;
  int64_t* token_ids;  // [R]
  float *logprobs, *chances;
};

template <typename Function>
void for_each(const Rows& rows, Function function) {
  int threads = rows.R * rows.V < SERIAL ? 1 : (int)std::min(rows.threads, rows.R);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows.R; r++) function(r);
}

// Draws a token of the row and its probability before the filters; also computes the row's sums.
template <typename T>
void draw(Row<T>& row, const Limits& limits, const RowKey& key, int64_t* token, float* chance) {
  static thread_local std::vector<float> groups;
  static thread_local std::vector<std::pair<float, int64_t>> ranked;
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
    int64_t reshaped = d.reshaped_row[r], masked = d.allowed_row[r];
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

void lockstep_draw(const Rows* rows, const Draws* draws) {
  rows->is_bf16 ? draw_all<bf16>(*rows, *draws) : draw_all<float>(*rows, *draws);
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
