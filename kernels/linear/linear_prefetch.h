// Prefetching of the memory that is multiplied next.
#pragma once
#include <cstdint>

struct MemoryRows {  // some rows of a matrix
  const void* start;
  int64_t row_bytes, stride_bytes, count;
};

struct Ahead {  // what is read next, in this order
  MemoryRows first, second;
};

// Prefetches what is read next during the current products, line by line in the order of memory: a few lines between
// any two instructions that multiply. A processor has a limited number of outstanding lines and stalls at the first one
// above it.
class Prefetch {
 public:
  Prefetch() = default;
  // blocks: how many times the current weights are read, once for each block of rows. times: how often as many lines as
  // they have are prefetched.
  Prefetch(const Ahead& ahead, int64_t blocks, int times = 1)
      : second_(ahead.second), blocks_((int)blocks), times_(times) {
    begin(ahead.first);
  }
  // Lines to prefetch after each of the instructions that read together `lines` lines of the current weights.
  int share(int lines, int instructions) const { return (lines * times_ - 1) / (instructions * blocks_) + 1; }
  // Returns the address of the next `count` lines, which the caller prefetches; `other` where so many do not lie there.
  const char* take(int count, const void* other) {
    if (left_ < count) {
      if (rows_) last_lines();
      return (const char*)other;
    }
    const char* first = at_;
    left_ -= count, at_ += 64 * count;
    return first;
  }
  void lines(int count) {
    if (left_ < count) {
      if (rows_) last_lines();
      return;
    }
    left_ -= count;
    for (; count >= 4; count -= 4) four_lines();  // straight code: these instructions stand in the innermost loop
    for (; count > 0; count--, at_ += 64) __builtin_prefetch(at_, 0, 2);
  }

 private:
  void begin(const MemoryRows& rows) {
    at_ = (const char*)rows.start, gap_ = rows.stride_bytes - rows.row_bytes, rows_ = rows.count;
    row_lines_ = rows.row_bytes;
    if (!gap_ && rows_) row_lines_ *= rows_, rows_ = 1;  // contiguous rows
    left_ = row_lines_ = rows_ ? (row_lines_ + 63) / 64 : 0;
  }
  void four_lines() {
    __builtin_prefetch(at_, 0, 2);
    __builtin_prefetch(at_ + 64, 0, 2);
    __builtin_prefetch(at_ + 128, 0, 2);
    __builtin_prefetch(at_ + 192, 0, 2);
    at_ += 256;
  }
  void last_lines() {  // the last lines of a row
    for (; left_ > 0; left_--, at_ += 64) __builtin_prefetch(at_, 0, 2);
    if (--rows_) {
      at_ += gap_, left_ = row_lines_;
    } else {
      begin(second_);
      second_.count = 0;
    }
  }

  const char* at_ = nullptr;
  MemoryRows second_ = {};
  int64_t gap_ = 0, rows_ = 0, row_lines_ = 0, left_ = 0;
  int blocks_ = 1, times_ = 1;
};
