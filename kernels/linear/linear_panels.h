// The product by vector instructions, divided into panels of columns by blocks of rows, which threads take from shares.
#pragma once
#include <omp.h>

#include <vector>

#include "layers/gated.h"
#include "linear/linear_lanes.h"
#include "linear/linear_shares.h"
#include "machine/memory.h"

namespace lanes {

constexpr int64_t X_BYTES = 1 << 17;  // bytes of x that stay in the L2 cache while all weights are read

template <typename T>
void widen(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store(to + i, load(from + i));
  for (; i < count; i++) to[i] = scalar(from[i]);
}

// Some rows of x, and where their results go.
template <typename Dot, typename T>
struct Rows {
  const typename Dot::X* x;
  int64_t x_stride, count, K;
  T* y;
  int64_t y_stride;
};

// Returns up to PANEL rows of a weight, from n on.
template <typename T>
MemoryRows weights_at(const Part& part, int64_t n, int64_t last, int64_t K) {
  const int64_t size = sizeof(T);
  return {(const T*)part.weight + n * part.weight_stride, K * size, part.weight_stride * size,
          std::clamp<int64_t>(last - n, 0, PANEL)};
}

// Computes up to PANEL columns of a part, from n on, of some rows. ahead: what is read next.
template <typename Dot, typename T>
void multiply_panel(const Part& part, int64_t n, int64_t last, const Rows<Dot, T>& rows, const Ahead& ahead) {
  const int64_t count = std::min(PANEL, last - n), stride = part.weight_stride, K = rows.K;
  const auto* weight = (const typename Dot::Weight*)part.weight + n * stride;
  float bias[PANEL] = {};
  if (part.bias)
    for (int64_t c = 0; c < count; c++) bias[c] = scalar(((const T*)part.bias)[n + c]);
  // A processor drops some prefetches. While many rows read these weights there is time to ask for each line twice.
  const int64_t blocks = (rows.count + ROWS - 1) / ROWS;
  Prefetch next(ahead, blocks);
  if (blocks > 1 && !ahead.second.count) next = Prefetch({ahead.first, ahead.first}, blocks, 2);
  if constexpr (std::is_same_v<Dot, Widened<bf16>>) {
    if (rows.count > 4) {  // many rows read these weights: widen them once
      static thread_local std::vector<float> widened;
      if ((int64_t)widened.size() < PANEL * K) widened.resize(PANEL * K);
      for (int64_t c = 0; c < count; c++) widen(weight + c * stride, K, widened.data() + c * K);
      return multiply_tile<Widened<float>, T>(rows.x, rows.x_stride, rows.count, widened.data(), K, K, count, bias,
                                              next, rows.y, rows.y_stride);
    }
  }
  multiply_tile<Dot, T>(rows.x, rows.x_stride, rows.count, weight, stride, K, count, bias, next, rows.y,
                        rows.y_stride);
}

// The same for a gate and its `up`, of which only silu(gate) * up is stored.
template <typename Dot, typename T>
void multiply_gated(const Part& gate, const Part& up, int64_t n, int64_t last, const Rows<Dot, T>& rows,
                    const Ahead& ahead) {
  static thread_local std::vector<T> memory;
  const int64_t size = rows.count * PANEL;
  if ((int64_t)memory.size() < 2 * size) memory.resize(2 * size);
  Rows<Dot, T> found = rows;
  found.y = memory.data(), found.y_stride = PANEL;
  multiply_panel<Dot, T>(gate, n, last, found, {weights_at<T>(up, n, last, rows.K), {}});
  found.y += size;
  multiply_panel<Dot, T>(up, n, last, found, ahead);
  const int64_t count = std::min(PANEL, last - n);
  for (int64_t r = 0; r < rows.count; r++)
    gated::multiply_some(memory.data() + r * PANEL, found.y + r * PANEL, rows.y + r * rows.y_stride, count);
}

// A call's tiles of columns in the order of its blocks of rows, and in a block of its parts.
template <typename Dot, typename T>
class Pieces {
 public:
  using X = typename Dot::X;
  Pieces(const Call& call, const X* x, int64_t x_stride) : call_(call), tiles_(call), x_(x), x_stride_(x_stride) {
    const int64_t row_bytes = std::max<int64_t>(call.K * sizeof(X), 1);
    const int64_t fitting = std::max<int64_t>(X_BYTES / row_bytes, 3 * ROWS);
    const int64_t blocks = std::max<int64_t>((call.M + fitting / 2) / fitting, 1);
    const int64_t each = std::max<int64_t>((call.M + blocks - 1) / blocks, 1);
    block_rows_ = (each + ROWS - 1) / ROWS * ROWS;  // whole tiles of rows
    while (count() > INT32_MAX) block_rows_ *= 2;
  }
  int64_t count() const { return (call_.M + block_rows_ - 1) / block_rows_ * tiles_.count(); }

  // Returns the number of pieces from `piece` on that are multiplied together.
  int64_t num_together(int64_t piece) const {
    const Place place = place_of(piece);
    return std::min((PANEL - place.n % PANEL) / TILE, tiles_of(place.part->N - place.n));
  }
  // Computes `num` pieces, at most num_together(piece). next: the piece that probably follows, or -1.
  void multiply(int64_t piece, int64_t num, int64_t next) const {
    const Place place = place_of(piece);
    const Part& part = *place.part;
    const int64_t last = std::min(place.n + num * TILE, part.N);
    const Rows<Dot, T> rows{x_ + place.row * x_stride_, x_stride_, num_rows(place), call_.K,
                            (T*)part.y + place.row * part.N + place.n, part.N};
    const Ahead ahead = next < 0 ? Ahead{} : ahead_of(place_of(next), place.row);
    if (call_.up)
      multiply_gated<Dot, T>(part, *call_.up, place.n, last, rows, ahead);
    else
      multiply_panel<Dot, T>(part, place.n, last, rows, ahead);
  }

 private:
  struct Place {
    int64_t row;
    const Part* part;
    int64_t n;
  };
  int64_t num_rows(const Place& place) const { return std::min(block_rows_, call_.M - place.row); }
  Place place_of(int64_t piece) const {
    const ColumnTiles::Place columns = tiles_[piece % tiles_.count()];
    return {piece / tiles_.count() * block_rows_, columns.part, columns.n};
  }
  Ahead ahead_of(const Place& next, int64_t row) const {
    const MemoryRows weights = weights_at<T>(*next.part, next.n, next.part->N, call_.K);
    if (next.row == row) return {weights, {}};
    const int64_t size = sizeof(X);
    return {{x_ + next.row * x_stride_, call_.K * size, x_stride_ * size, num_rows(next)}, weights};
  }

  const Call& call_;
  const ColumnTiles tiles_;
  const X* x_;
  int64_t x_stride_, block_rows_;
};

// T: the type of x, weight, bias and y. Dot: the way to add their products.
template <typename Dot, typename T>
void multiply(const Call& call, int threads) {
  using X = typename Dot::X;
  static thread_local std::vector<X> converted;
  const bool converts = !std::is_same_v<X, T>;
  if (converts && (int64_t)converted.size() < call.M * call.K) converted.resize(call.M * call.K);
  X* x = converts ? converted.data() : (X*)call.x;
  const int64_t x_stride = converts ? call.K : call.x_stride;
  const Pieces<Dot, T> pieces(call, x, x_stride);
  threads = is_worth_threads(call) ? threads : 1;
  Shares shares(pieces.count(), threads, PANEL / TILE, 2);
  memory::Shortage shortage;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    if constexpr (!std::is_same_v<X, T>) {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < call.M; row++)
        widen((const T*)call.x + row * call.x_stride, call.K, x + row * call.K);
    }
    int64_t piece, num;
    try {
      for (int share = omp_get_thread_num(); share < threads; share += omp_get_num_threads())  // fewer may have started
        while ((num = shares.take(share, [&](int64_t front) { return pieces.num_together(front); }, &piece)))
          pieces.multiply(piece, num, shares.has_more(share) ? piece + num : -1);
      while (shares.take_last(&piece)) pieces.multiply(piece, 1, piece - 1);
    } catch (const std::bad_alloc&) {
      shortage.note();
    }
  }
  shortage.raise();
}

}  // namespace lanes
