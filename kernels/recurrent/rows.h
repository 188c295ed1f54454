// Vectors at the end of a row: loads and stores of fewer than W lanes.
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

}  // namespace rows
