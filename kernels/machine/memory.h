// Kernels that find no memory for their scratch: an error that leaves a function of a library, or a parallel region, ends
// the process, so it is caught there and returned as a number, of which native.py makes a MemoryError.
#pragma once
#include <atomic>
#include <cstdint>
#include <new>

namespace memory {

constexpr int64_t NONE_LEFT = INT64_MIN;  // what such a kernel returns; no other result

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
