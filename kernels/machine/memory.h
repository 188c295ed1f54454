// The scratch of kernels. Where one finds no memory for it, an error that leaves a function of a library, or a parallel
// region, ends the process, so it is caught there and returned as a number, of which native.py makes a MemoryError.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>

namespace memory {

constexpr int64_t NONE_LEFT = INT64_MIN;  // what such a kernel returns; no other result

constexpr int64_t KEPT_BYTES = int64_t(128) << 20;  // to touch new memory costs some percent of the work on it

// Uninitialised memory that a thread keeps from call to call.
template <typename T>
struct Kept {
  std::unique_ptr<T[]> data;
  int64_t size = 0;
};

// Takes uninitialised memory for a call. More than KEPT_BYTES is its own, and is given back as the call ends.
template <typename T>
T* take(int64_t size, Kept<T>& kept, std::unique_ptr<T[]>& own) {
  if (size * (int64_t)sizeof(T) > KEPT_BYTES) {
    own.reset(new T[size]);
    return own.get();
  }
  if (kept.size < size) {
    kept.size = 0;
    kept.data.reset(new T[size]);
    kept.size = size;
  }
  return kept.data.get();
}

// Does a kernel's work at the edge of its library. Returns 0, or NONE_LEFT.
template <typename Work>
int64_t at_edge(Work work) {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    return NONE_LEFT;
  }
}

// The want of memory of any thread of a parallel region, in which each catches its own std::bad_alloc.
class Shortage {
 public:
  void note() { found_.store(true, std::memory_order_relaxed); }
  // Throws std::bad_alloc behind the region if a thread has noted one.
  void raise() const {
    if (found_.load(std::memory_order_relaxed)) throw std::bad_alloc();
  }

 private:
  std::atomic<bool> found_{false};
};

}  // namespace memory
