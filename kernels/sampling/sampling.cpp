// Log-probabilities of rows of logits, their gradient, and one token drawn from each row. The results of a row depend
// on that row and its settings alone: all processors add in sixteen lanes and blocks of BLOCK tokens, in one order, and
// a row is never divided among threads.
//
// Of a row with logits x and temperature t: z = (x - largest x) * (1 / t), e = exp(z), and the log-probability is
// z - log(sum of e). Letters: R rows, V vocabulary.
#include <algorithm>
#include <cmath>
#include <vector>

#include "machine/simd.h"

using namespace simd;

namespace {

constexpr int LANES = 16, PARTS = LANES / W;
constexpr int64_t BLOCK = 256;        // tokens whose e are added in fp32; sums of blocks are added in double
constexpr int64_t SPAN = 1024;        // tokens of LANES groups; the largest logit of each group is kept
constexpr int64_t SERIAL = 1 << 15;   // with fewer logits, starting threads costs more than it saves
constexpr float LOWEST = -88.0f;      // z below which e is zero
constexpr int MAX_HALVINGS = 24;      // of the interval with the cut; after that all its candidates are sorted

struct Lanes {
  Floats part[PARTS];
};

template <typename Function>
inline Lanes lanes(Function function) {
  Lanes r;
#pragma GCC unroll 4
  for (int u = 0; u < PARTS; u++) r.part[u] = function(u);
  return r;
}

template <typename T>
inline Lanes read(const T* x, int64_t start, int64_t end) {  // -inf after the end
  if (start + LANES <= end) return lanes([&](int u) { return load(x + start + u * W); });
  float padded[LANES];
  for (int i = 0; i < LANES; i++) padded[i] = start + i < end ? scalar(x[start + i]) : -INFINITY;
  return lanes([&](int u) { return load(padded + u * W); });
}

template <typename T>
inline void write(T* to, int64_t start, int64_t end, const Lanes& v) {
  T padded[LANES];
  bool fits = start + LANES <= end;
  T* out = fits ? to + start : padded;
  for (int u = 0; u < PARTS; u++) store(out + u * W, v.part[u]);
  if (!fits) std::copy(padded, padded + (end - start), to + start);
}

inline float fold(const Lanes& v) {  // the lanes' sum, by halves
  float a[LANES];
  for (int u = 0; u < PARTS; u++) store(a + u * W, v.part[u]);
  for (int n = LANES / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) a[i] += a[i + n];
  return a[0];
}

inline Lanes zeros() {
  return lanes([](int) { return splat(0.0f); });
}

inline Ints positions() {  // 0, 1, 2, ... in the lanes of one part
  Ints r;
  for (int i = 0; i < W; i++) r[i] = i;
  return r;
}

// A row of logits, without the tokens that a mask (a bit each, lowest first) leaves out.
template <typename T>
struct Row {
  const T* x;
  int64_t V;
  float inverse;  // 1 / temperature
  const uint16_t* allowed;
  float largest = 0, log_sum = 0;

  Row(const void* logits, int64_t V, float temperature, const uint16_t* allowed = nullptr)
      : x(static_cast<const T*>(logits)), V(V), inverse(1.0f / temperature), allowed(allowed) {}

  Lanes logits(int64_t i) const {
    Lanes v = read(x, i, V);
    if (!allowed) return v;
    int32_t bits = allowed[i / LANES];
    return lanes([&](int u) {
      Ints left = ((Ints{} + (bits >> (u * W))) >> positions()) & 1;
      return select(left != 0, v.part[u], splat(-INFINITY));
    });
  }
  Lanes scaled(int64_t i) const {
    Lanes v = logits(i);
    return lanes([&](int u) { return (v.part[u] - splat(largest)) * splat(inverse); });
  }
  float scaled_at(int64_t i) const { return (scalar(x[i]) - largest) * inverse; }
  float logprob(int64_t i) const { return scaled_at(i) - log_sum; }

  void find_largest(std::vector<float>* groups) {  // groups: the largest logit of each, if wanted
    if (groups) groups->clear();
    float found = -INFINITY;
    for (int64_t start = 0; start < V; start += SPAN) {
      Lanes top = lanes([](int) { return splat(-INFINITY); });
      for (int64_t i = start, end = std::min(start + SPAN, V); i < end; i += LANES) {
        Lanes v = logits(i);
        top = lanes([&](int u) { return larger(v.part[u], top.part[u]); });
      }
      float tops[LANES];
      for (int u = 0; u < PARTS; u++) store(tops + u * W, top.part[u]);
      for (float one : tops) found = one > found ? one : found;
      if (groups) groups->insert(groups->end(), tops, tops + LANES);
    }
    largest = found;
  }

  // Sums e and computes `log_sum`; NaN where a logit is NaN or +inf, or all are -inf. Where `kept` is given, e [V]
  // rounded up to LANES goes there, and to `running` the sum up to the end of each block.
  double sum(float* kept, double* running) {
    double total = 0;
    for (int64_t start = 0; start < V; start += BLOCK) {
      Lanes added = zeros();
      for (int64_t i = start, end = std::min(start + BLOCK, V); i < end; i += LANES) {
        Lanes z = scaled(i);
        Lanes e = lanes([&](int u) { return exp_nonpositive(z.part[u]); });
        if (kept)
          for (int u = 0; u < PARTS; u++) store(kept + i + u * W, e.part[u]);
        added = lanes([&](int u) { return added.part[u] + e.part[u]; });
      }
      total += fold(added);
      if (running) running[start / BLOCK] = total;
    }
    log_sum = (float)std::log(total);
    return total;
  }
  void normalise() {
    find_largest(nullptr);
    sum(nullptr, nullptr);
  }
};

// -- which tokens of a row are kept -----------------------------------------------------------------------------

struct Limits {
  int64_t top_k;  // at least 1; 1 takes the first of the most likely tokens
  double top_p;
  float min_p;
};

struct Scratch {
  std::vector<float> kept, groups;
  std::vector<double> running;
  std::vector<std::pair<float, int64_t>> ranked;
};

struct Above {  // count and mass of the tokens whose z is above some value
  int64_t count;
  double mass;
};

template <typename T>
Above above(const Row<T>& row, const float* kept, float value) {
  Above found{0, 0};
  for (int64_t start = 0; start < row.V; start += BLOCK) {
    Lanes mass = zeros(), count = zeros();
    for (int64_t i = start, end = std::min(start + BLOCK, row.V); i < end; i += LANES) {
      Lanes z = row.scaled(i);
      for (int u = 0; u < PARTS; u++) {
        Ints is_above = z.part[u] > splat(value);
        mass.part[u] += select(is_above, load(kept + i + u * W), splat(0.0f));
        count.part[u] += select(is_above, splat(1.0f), splat(0.0f));
      }
    }
    found.mass += fold(mass);
    found.count += (int64_t)fold(count);
  }
  return found;
}

// The end of the kept ranking: tokens with z > `value`, and those with z == `value` up to index `last`.
struct Cut {
  float value;
  int64_t last;
};

// Returns a z below that of every token kept by top-k and top-p: tokens below it hold at most 1 - top_p of the mass, or
// top_k groups have a larger logit.
template <typename T>
float lower_bound_of_cut(const Row<T>& row, const Limits& limits, double total, std::vector<float>& groups) {
  float low = LOWEST;
  if (limits.top_p < 1.0)
    low = std::max(low, (float)std::log(0.5 * (1.0 - limits.top_p) * total / (double)row.V) - 0.01f);
  if (limits.top_k <= (int64_t)groups.size()) {
    auto kth = groups.begin() + (limits.top_k - 1);
    std::nth_element(groups.begin(), kth, groups.end(), std::greater<float>());
    low = std::max(low, std::nextafterf((*kth - row.largest) * row.inverse, -INFINITY));
  }
  return low;
}

// Tokens are ranked by z, equal ones by index, and kept while fewer than top_k tokens with no more than top_p of the
// mass rank before them. The interval (low, high] of z that holds the last kept token is halved until it has few
// tokens; these are sorted.
template <typename T>
Cut find_cut(const Row<T>& row, const Limits& limits, double total, Scratch& s) {
  double limit = limits.top_p < 1.0 ? limits.top_p * total : INFINITY;
  auto is_beyond = [&](const Above& a) { return a.count >= limits.top_k || a.mass > limit; };
  float low = lower_bound_of_cut(row, limits, total, s.groups), high = 0;
  Above beyond_low = above(row, s.kept.data(), low), beyond_high{0, 0};
  if (!is_beyond(beyond_low)) return {low, -1};
  int64_t few = std::clamp<int64_t>(row.V / 128, 64, 1024);
  for (int i = 0; i < MAX_HALVINGS && beyond_low.count - beyond_high.count > few; i++) {
    float middle = 0.5f * (low + high);
    Above a = above(row, s.kept.data(), middle);
    (is_beyond(a) ? low : high) = middle;
    (is_beyond(a) ? beyond_low : beyond_high) = a;
  }
  auto& ranked = s.ranked;
  ranked.clear();
  for (int64_t i = 0; i < row.V; i += LANES) {
    Lanes z = row.scaled(i);
    for (int u = 0; u < PARTS; u++) {
      uint32_t inside = bits((z.part[u] > splat(low)) & (z.part[u] <= splat(high)));
      for (; inside; inside &= inside - 1) {
        int lane = __builtin_ctz(inside);
        ranked.push_back({z.part[u][lane], i + u * W + lane});
      }
    }
  }
  auto before = [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  };
  if (!std::is_sorted(ranked.begin(), ranked.end(), before)) std::sort(ranked.begin(), ranked.end(), before);
  Cut cut{high, -1};
  Above so_far = beyond_high;
  for (const auto& [z, index] : ranked) {
    if (so_far.count >= limits.top_k || so_far.mass > limit) break;
    cut = {z, index};
    so_far.count++;
    so_far.mass += s.kept[index];
  }
  return cut;
}

// Removes the tokens that are not kept from s.kept, and their e from s.running. Returns the sum of the rest.
template <typename T>
double filter(const Row<T>& row, const Limits& limits, double total, Scratch& s) {
  bool cuts = limits.top_k < row.V || limits.top_p < 1.0;
  Cut cut = cuts ? find_cut(row, limits, total, s) : Cut{-INFINITY, -1};
  total = 0;
  for (int64_t start = 0; start < row.V; start += BLOCK) {
    Lanes added = zeros();
    for (int64_t i = start, end = std::min(start + BLOCK, row.V); i < end; i += LANES) {
      Lanes z = row.scaled(i);
      int32_t ties = (int32_t)std::clamp<int64_t>(cut.last - i + 1, 0, LANES);  // lanes of i that are kept if they tie
      for (int u = 0; u < PARTS; u++) {
        Floats e = load(s.kept.data() + i + u * W);
        Ints is_kept = (z.part[u] > splat(cut.value)) |
                       ((z.part[u] == splat(cut.value)) & (positions() + u * W < ties));
        e = select(is_kept & (e >= splat(limits.min_p)), e, splat(0.0f));
        store(s.kept.data() + i + u * W, e);
        added.part[u] += e;
      }
    }
    total += fold(added);
    s.running[start / BLOCK] = total;
  }
  return total;
}

// Returns the token at which the running sum passes noise * total; never one without probability.
int64_t token_at(double noise, double total, int64_t V, const Scratch& s) {
  double threshold = noise * total;
  auto end = s.running.begin() + (V + BLOCK - 1) / BLOCK;
  int64_t block = std::upper_bound(s.running.begin(), end, threshold) - s.running.begin();
  double passed = block ? s.running[block - 1] : 0.0;
  int64_t found = block * BLOCK;
  for (int64_t i = found; i < std::min((block + 1) * BLOCK, V); i++) {
    if (s.kept[i] == 0) continue;
    found = i;
    passed += s.kept[i];
    if (passed > threshold) break;
  }
  return found;
}

// -- noise: `uniform_noise` in sampling.py ----------------------------------------------------------------------------

uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}
double noise_of(int64_t seed, int64_t position) {
  constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15u;
  uint64_t bits = mix(mix((uint64_t)seed + GAMMA) + ((uint64_t)position + 1) * GAMMA);
  return (double)(bits >> 12) * 0x1p-52;
}

// -- rows -------------------------------------------------------------------------------------------------------------

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
void draw(Row<T>& row, const Limits& limits, double noise, int64_t* token, float* chance) {
  static thread_local Scratch s;
  int64_t padded = (row.V + LANES - 1) / LANES * LANES;
  if ((int64_t)s.kept.size() < padded) s.kept.resize(padded);
  if ((int64_t)s.running.size() < (row.V + BLOCK - 1) / BLOCK) s.running.resize((row.V + BLOCK - 1) / BLOCK);
  row.find_largest(&s.groups);
  bool is_greedy = limits.top_k == 1;
  double total = row.sum(s.kept.data(), s.running.data());
  *token = 0;
  *chance = (float)total;
  if (std::isnan(total)) return;
  if (is_greedy) {
    while (s.kept[*token] != 1.0f || row.scaled_at(*token) != 0.0f) ++*token;
    *chance = (float)(1.0 / total);
    return;
  }
  bool filters = limits.top_k < row.V || limits.top_p < 1.0 || limits.min_p > 0.0f;
  double left = filters ? filter(row, limits, total, s) : total;
  *token = token_at(noise, left, row.V, s);
  *chance = (float)(s.kept[*token] / total);
}

template <typename T>
void draw_all(const Rows& rows, const Draws& d) {
  for_each(rows, [&](int64_t r) {
    Row<T> row = rows.row<T>(r);
    Limits limits{d.top_k[r], d.top_p[r], d.min_p[r]};
    double noise = noise_of(d.seeds[r], d.positions[r]);
    int64_t reshaped = d.reshaped_row[r], masked = d.allowed_row[r];
    int64_t* token = d.token_ids + r;
    float temperature = rows.temperatures[r * rows.temperature_stride];
    const uint16_t* allowed = masked < 0 ? nullptr : d.allowed + masked * d.allowed_width;
    if (reshaped < 0 && masked < 0) {
      draw(row, limits, noise, token, d.chances + r);
    } else {
      if (reshaped >= 0) {
        Row<float> other(d.reshaped + reshaped * rows.V, rows.V, temperature, allowed);
        draw(other, limits, noise, token, d.chances + r);
      } else {
        Row<T> other(row.x, rows.V, temperature, allowed);
        draw(other, limits, noise, token, d.chances + r);
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
      Lanes z = row.scaled(i);
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
      Lanes z = row.scaled(i);
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
