// The gated delta rule, one token after another in fp32: S *= exp(g); d = beta (v - S'k); S += k d'; o = S'q.
// A column of S depends on its own column of v alone, and sums over K run from first to last: the bits of a row are a
// function of its sequence up to it, for any cut of the sequence and any neighbours.
// Without the correction by what S holds already, d = beta v, it is the state space recurrence of Mamba-2; with a beta of
// each value and a decay exp(beta a) of each element of S, that of Mamba-1.
// Letters: R rows, S sequences, G key heads, H heads, K key size, V value size.
#include <cmath>
#include <memory>
#include <vector>

#include "machine/memory.h"
#include "machine/packed.h"
#include "recurrent/rows.h"

using namespace simd;
using rows::load_some;
using rows::store_some;

namespace {

constexpr int COLUMNS = 64;  // of a tile of S, which stays in the L1 cache
constexpr int LANES = 16;    // of the sum of squares, on every processor
constexpr int LINE = 16;     // floats of a cache line: vectors that cross lines cost twice

struct Rule {
  const void *q, *k, *v;     // [R, G, K], [R, G, K], [R, H, V], rows q_row, k_row and v_row apart
  const float *g, *beta;     // [R, H] or, with a decay per channel, [R, H, K]; [R, H]. Per element: a [H, K, V]; [R, H, V]
  const float* initial;      // [*, H, K, V] or null
  void* out;                 // [R, H, V]
  float* final;              // [*, H, K, V]
  rows::Slots slots;         // each sequence's places in `initial` and `final`
  const int32_t* starts;     // [S + 1]
  int64_t q_row, k_row, v_row, key_heads, heads, K, V;
  float scale, eps;          // of q; of the norm of q and k, negative for none
};

enum class Decay { HEAD, CHANNEL, ELEMENT };  // what has a decay of its own

// One token's q, k and decay of one head, in fp32.
struct Token {
  std::vector<float> q, k, decay;  // [K] each, up to a whole vector; decay per channel only
  float head_decay = 1.0f;

  explicit Token(int64_t K) : q(K + W), k(K + W), decay(K + W) {}
};

// One thread's workspace.
struct Scratch {
  std::vector<float> room;  // [K, COLUMNS], from a line's beginning on
  Token now, next;

  explicit Scratch(int64_t K) : room(K * COLUMNS + LINE), now(K), next(K) {}
};

template <typename T>
void read(const T* from, int64_t K, float eps, float scale, float* to) {
  for (int64_t i = 0; i < K; i += W) store(to + i, load_some(from + i, K - i));
  if (eps >= 0.0f) {
    float lanes[LANES] = {};
    for (int64_t i = 0; i < K; i += LANES)
      for (int j = 0; j < LANES; j++) {
        const float x = i + j < K ? to[i + j] : 0.0f;
        lanes[j] += x * x;
      }
    for (int n = LANES / 2; n > 0; n /= 2)
      for (int j = 0; j < n; j++) lanes[j] += lanes[j + n];
    const Floats norm = splat(1.0f / std::sqrt(lanes[0] + eps));
    for (int64_t i = 0; i < K; i += W) store(to + i, load(to + i) * norm);
  }
  if (scale != 1.0f)
    for (int64_t i = 0; i < K; i += W) store(to + i, load(to + i) * splat(scale));
}

template <typename T, Decay DECAY>
void read_token(const Rule& p, int64_t row, int64_t head, Token& token) {
  const int64_t key_head = head / (p.heads / p.key_heads);
  read((const T*)p.q + row * p.q_row + key_head * p.K, p.K, p.eps, p.scale, token.q.data());
  read((const T*)p.k + row * p.k_row + key_head * p.K, p.K, p.eps, 1.0f, token.k.data());
  if (DECAY == Decay::CHANNEL) {
    const float* g = p.g + (row * p.heads + head) * p.K;
    for (int64_t i = 0; i < p.K; i += W) store(token.decay.data() + i, exp_nonpositive(load_some(g + i, p.K - i)));
  } else if (DECAY == Decay::HEAD) {
    token.head_decay = exp_nonpositive(splat(p.g[row * p.heads + head]))[0];
  }
}

// NV vectors of columns of S, of which `count` columns are real, from the sequence's first row to its last.
template <typename T, Decay DECAY, bool CORRECTS, int NV>
void run(const Rule& p, int64_t sequence, int64_t head, int64_t column, int64_t count, float* s, Token& now,
         Token& next) {
  const int64_t K = p.K, V = p.V, first = p.starts[sequence], end = p.starts[sequence + 1];
  auto place = [&](int64_t slot) { return (slot * p.heads + head) * K * V + column; };
  const float* initial = p.initial ? p.initial + place(p.slots.read(sequence)) : nullptr;
  float* final = p.final + place(p.slots.write(sequence));
  auto lanes = [&](int n) { return NV > 1 ? (int64_t)W : count; };
  Floats mem[NV], out[NV], d[NV], beta[NV], next_beta[NV];
  auto read_betas = [&](int64_t row, Floats* to) {  // of each value, or one for all
    const float* from = DECAY == Decay::ELEMENT ? p.beta + (row * p.heads + head) * V + column : p.beta + row * p.heads + head;
    for (int n = 0; n < NV; n++) to[n] = DECAY == Decay::ELEMENT ? load_some(from + n * W, lanes(n)) : splat(*from);
  };
  auto decay = [&](const Token& t, const Floats* betas, int64_t i, int n) {
    if (DECAY == Decay::ELEMENT)
      return exp_nonpositive(betas[n] * load_some(p.g + (head * K + i) * V + column + n * W, lanes(n)));
    return splat(DECAY == Decay::CHANNEL ? t.decay[i] : t.head_decay);
  };
  if (first == end) {
    for (int64_t i = 0; i < K; i++)
      for (int n = 0; n < NV; n++)
        store_some(final + i * V + n * W, initial ? load_some(initial + i * V + n * W, lanes(n)) : splat(0.0f), lanes(n));
    return;
  }
  read_token<T, DECAY>(p, first, head, now);
  read_betas(first, beta);
  for (int n = 0; n < NV; n++) mem[n] = splat(0.0f);
  for (int64_t i = 0; i < K; i++) {
    const Floats k = splat(now.k[i]);
    for (int n = 0; n < NV; n++) {
      Floats x = (initial ? load_some(initial + i * V + n * W, lanes(n)) : splat(0.0f)) * decay(now, beta, i, n);
      if (CORRECTS) mem[n] = fused(x, k, mem[n]);
      store(s + (i * NV + n) * W, x);
    }
  }
  for (int64_t row = first; row < end; row++) {
    const T* v = (const T*)p.v + row * p.v_row + head * V + column;
    for (int n = 0; n < NV; n++) {
      const Floats x = load_some(v + n * W, lanes(n));
      d[n] = (CORRECTS ? x - mem[n] : x) * beta[n];
      out[n] = mem[n] = splat(0.0f);
    }
    if (row + 1 < end) {  // the update by this token and the decay by the next one in one pass over the tile
      read_token<T, DECAY>(p, row + 1, head, next);
      read_betas(row + 1, next_beta);
      for (int64_t i = 0; i < K; i++) {
        const Floats k = splat(now.k[i]), q = splat(now.q[i]), k_next = splat(next.k[i]);
        for (int n = 0; n < NV; n++) {
          Floats x = fused(k, d[n], load(s + (i * NV + n) * W));
          out[n] = fused(x, q, out[n]);
          x = x * decay(next, next_beta, i, n);
          if (CORRECTS) mem[n] = fused(x, k_next, mem[n]);
          store(s + (i * NV + n) * W, x);
        }
      }
      std::swap(now, next);
      for (int n = 0; n < NV; n++) beta[n] = next_beta[n];
    } else {
      for (int64_t i = 0; i < K; i++) {
        const Floats k = splat(now.k[i]), q = splat(now.q[i]);
        for (int n = 0; n < NV; n++) {
          Floats x = fused(k, d[n], load(s + (i * NV + n) * W));
          out[n] = fused(x, q, out[n]);
          store_some(final + i * V + n * W, x, lanes(n));
        }
      }
    }
    T* to = (T*)p.out + (row * p.heads + head) * V + column;
    for (int n = 0; n < NV; n++) store_some(to + n * W, out[n], lanes(n));
  }
}

template <typename T, Decay DECAY, bool CORRECTS>
void run_all(const Rule& p, int64_t sequences, int threads) {
  const int64_t tiles = (p.V + COLUMNS - 1) / COLUMNS;
  memory::Shortage shortage;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::unique_ptr<Scratch> scratch;
    try {
      scratch = std::make_unique<Scratch>(p.K);
    } catch (const std::bad_alloc&) {
      shortage.note();
    }
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < sequences * p.heads * tiles; task++) {
      if (!scratch) continue;  // each thread comes to the loop's end
      auto& [room, now, next] = *scratch;
      float* tile = (float*)(((uintptr_t)room.data() + 4 * LINE - 1) / (4 * LINE) * (4 * LINE));
      const int64_t head = task / tiles % p.heads, first = task % tiles * COLUMNS;
      p.slots.each(task / (p.heads * tiles), sequences, [&](int64_t sequence) {
        if (first + COLUMNS <= p.V) {
          run<T, DECAY, CORRECTS, COLUMNS / W>(p, sequence, head, first, COLUMNS, tile, now, next);
        } else {
          for (int64_t column = first; column < p.V; column += W)
            run<T, DECAY, CORRECTS, 1>(p, sequence, head, column, p.V - column < W ? p.V - column : W, tile, now, next);
        }
      });
    }
  }
  shortage.raise();
}

}  // namespace

// Returns 0 or memory::NONE_LEFT.
extern "C" int64_t lockstep_gated_delta_rule(const void* q, const void* k, const void* v, const void* g,
                                             const void* beta, const void* initial, void* out, void* final,
                                             const void* reads, const void* writes, const void* starts,
                                             int64_t sequences, int64_t q_row, int64_t k_row, int64_t v_row,
                                             int64_t key_heads, int64_t heads, int64_t K, int64_t V, float scale,
                                             float eps, int64_t decay_of, int64_t corrects, int64_t is_bf16,
                                             int64_t threads) {
  const Rule p{q, k, v, (const float*)g, (const float*)beta, (const float*)initial, out, (float*)final,
               {(const int64_t*)reads, (const int64_t*)writes}, (const int32_t*)starts, q_row, k_row, v_row, key_heads, heads, K, V, scale, eps};
  const Decay decay = (Decay)decay_of;
  auto in = [&](auto type) {
    using T = decltype(type);
    if (decay == Decay::CHANNEL)
      run_all<T, Decay::CHANNEL, true>(p, sequences, (int)threads);
    else
      run_all<T, Decay::HEAD, true>(p, sequences, (int)threads);
  };
  return memory::at_edge([&] {
    if (!corrects)  // of float32
      decay == Decay::ELEMENT ? run_all<float, Decay::ELEMENT, false>(p, sequences, (int)threads)
                              : run_all<float, Decay::HEAD, false>(p, sequences, (int)threads);
    else
      is_bf16 ? in(bf16()) : in(float());
  });
}

LOCKSTEP_PACKED(lockstep_gated_delta_rule)
