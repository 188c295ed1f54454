// Vectors at the end of a row: loads and stores of fewer than W lanes. Sequences that continue one another.
#pragma once
#include "machine/simd.h"

namespace rows {

using namespace simd;

template <typename T>
static inline Floats load_some(const T* p, int64_t count) {  // zeros after the first `count` lanes
  if (count >= W) return load(p);
  T lanes[W] = {};
  memcpy(lanes, p, count * sizeof(T));
  return load(lanes);
}

template <typename T>
static inline void store_some(T* p, Floats v, int64_t count) {
  if (count >= W) return store(p, v);
  T lanes[W];
  store(lanes, v);
  memcpy(p, lanes, count * sizeof(T));
}

// The slots of the sequences of a call; null where each has its own place.
struct Slots {
  const int64_t *reads, *writes;  // [S]

  int64_t read(int64_t sequence) const { return reads ? reads[sequence] : sequence; }
  int64_t write(int64_t sequence) const { return writes ? writes[sequence] : sequence; }
  // Whether a sequence begins where the one before it ends: it reads the slot that this one writes.
  bool continues(int64_t sequence) const { return writes && sequence > 0 && reads[sequence] == writes[sequence - 1]; }

  // Calls run(s) for a sequence and those that continue it, in their order; for none if it continues another.
  template <typename Run>
  void each(int64_t sequence, int64_t sequences, Run run) const {
    if (continues(sequence)) return;
    do run(sequence++);
    while (sequence < sequences && continues(sequence));
  }
};

}  // namespace rows
