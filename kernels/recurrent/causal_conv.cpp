// Causal convolution of each channel: the taps of a row are added from the oldest input to the newest, so a row's bits
// depend on its own inputs alone. Letters: R rows, C channels, w width, S sequences.
#include "layers/gated.h"
#include "machine/packed.h"
#include "recurrent/rows.h"

using namespace simd;
using rows::load_some;
using rows::store_some;

namespace {

constexpr int MAX_WIDTH = 16, BLOCK = 512;  // channels of a task

struct Conv {
  const void* x;          // [R, C], rows `x_row` apart
  const void* weight;     // [C, w]
  const void* bias;       // [C] or null
  const void* initial;    // [*, w - 1, C] or null
  void *out, *final;      // [R, C]; [*, w - 1, C]
  rows::Slots slots;      // each sequence's places in `initial` and `final`
  const int32_t* starts;  // [S + 1]
  int64_t x_row, channels, width, silu;
};

// TAPS: the width where the compiler knows it, or 0. The channels `first` to `end` of one sequence.
template <typename T, int TAPS>
void convolve(const Conv& p, int64_t sequence, int64_t first, int64_t end) {
  const int64_t taps = TAPS ? TAPS : p.width, C = p.channels, start = p.starts[sequence];
  auto state = [&](int64_t slot) { return slot * (taps - 1) * C + first; };
  const int64_t num_rows = p.starts[sequence + 1] - start;
  const T zeros[BLOCK + W] = {};
  auto input = [&](int64_t row) {  // of the channels from `first`; rows below zero are the initial ones
    if (row >= 0) return (const T*)p.x + (start + row) * p.x_row + first;
    return p.initial ? (const T*)p.initial + state(p.slots.read(sequence)) + (taps - 1 + row) * C : zeros;
  };
  float weights[TAPS ? TAPS : MAX_WIDTH][BLOCK + W];
  for (int64_t j = 0; j < taps; j++)
    for (int64_t c = first; c < end; c++) weights[j][c - first] = scalar(((const T*)p.weight)[c * taps + j]);
  for (int64_t row = 0; row < num_rows; row++) {
    const T* inputs[MAX_WIDTH];
    for (int64_t j = 0; j < taps; j++) inputs[j] = input(row - (taps - 1) + j);
    T* out = (T*)p.out + (start + row) * C + first;
    for (int64_t c = 0; c < end - first; c += W) {
      const int64_t count = end - first - c;
      Floats sum = p.bias ? load_some((const T*)p.bias + first + c, count) : splat(0.0f);
      for (int64_t j = 0; j < taps; j++) sum = fused(load(weights[j] + c), load_some(inputs[j] + c, count), sum);
      if (p.silu) sum = gated::product<float>(rounded(sum, T()), splat(1.0f));
      store_some(out + c, sum, count);
    }
  }
  for (int64_t j = 0; j < taps - 1; j++)
    memcpy((T*)p.final + state(p.slots.write(sequence)) + j * C, input(num_rows - (taps - 1) + j), (end - first) * sizeof(T));
}

template <typename T, int TAPS>
void convolve_all(const Conv& p, int64_t sequences, int threads) {
  const int64_t blocks = (p.channels + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t task = 0; task < sequences * blocks; task++) {
    const int64_t first = task % blocks * BLOCK, end = first + BLOCK < p.channels ? first + BLOCK : p.channels;
    p.slots.each(task / blocks, sequences, [&](int64_t sequence) { convolve<T, TAPS>(p, sequence, first, end); });
  }
}

template <typename T>
void convolve_all(const Conv& p, int64_t sequences, int threads) {
  if (p.width == 4)
    convolve_all<T, 4>(p, sequences, threads);
  else if (p.width == 3)
    convolve_all<T, 3>(p, sequences, threads);
  else
    convolve_all<T, 0>(p, sequences, threads);
}

}  // namespace

extern "C" void lockstep_causal_conv(const void* x, const void* weight, const void* bias, const void* initial,
                                     void* out, void* final, const void* reads, const void* writes, const void* starts,
                                     int64_t sequences, int64_t x_row, int64_t channels, int64_t width, int64_t silu,
                                     int64_t is_bf16, int64_t threads) {
  const Conv p{x, weight, bias, initial, out, final, {(const int64_t*)reads, (const int64_t*)writes},
               (const int32_t*)starts, x_row, channels, width, silu};
  if (is_bf16)
    convolve_all<bf16>(p, sequences, (int)threads);
  else
    convolve_all<float>(p, sequences, (int)threads);
}

LOCKSTEP_PACKED(lockstep_causal_conv)
