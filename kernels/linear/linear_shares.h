// Numbered pieces of work in shares, one a thread. A thread that has done its own share takes pieces from the ends of
// others': two cores seldom run equally fast, and a call lasts as long as its slowest thread.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

class Shares {
 public:
  // pieces: fewer than 2^31. The shares are contiguous and begin at multiples of `align` pieces, if they are of several
  // times as many: with more threads, each gets a piece. owners: the last pieces of a share that are left to its owner,
  // who may have prefetched them. At most one `Shares` a thread is in use at a time, by the threads that it
  // starts.
  Shares(int64_t pieces, int count, int64_t align, int64_t owners)
      : pieces_(pieces), align_(align), owners_(owners), count_(count) {
    static thread_local std::unique_ptr<Share[]> memory;
    static thread_local int size = 0;
    if (size < count) memory.reset(new Share[count]), size = count;
    shares_ = memory.get();
    if (pieces < 2 * align * count) align_ = 1;
    deal();
  }
  // Deals all pieces out once more. No thread takes one meanwhile.
  void deal() {
    const auto start = [&](int64_t i) { return i == count_ ? pieces_ : pieces_ * i / count_ / align_ * align_; };
    for (int i = 0; i < count_; i++) shares_[i].left.store(packed(start(i), start(i + 1)), std::memory_order_relaxed);
  }
  // Takes up to most(first) pieces from the front of a share; returns their number, 0 where none is left.
  template <typename Most>
  int64_t take(int share, Most most, int64_t* first) {
    std::atomic<uint64_t>& left = shares_[share].left;
    uint64_t now = left.load(std::memory_order_relaxed);
    while (num_left(now) > 0) {
      const int64_t front = first_of(now), count = std::min<int64_t>(most(front), num_left(now));
      if (left.compare_exchange_weak(now, now + ((uint64_t)count << 32), std::memory_order_relaxed)) {
        *first = front;
        return count;
      }
    }
    return 0;
  }
  bool has_more(int share) const { return num_left(shares_[share].left.load(std::memory_order_relaxed)) > 0; }
  // Takes the last piece of the share that has most left; returns whether it has taken one. Every share needs a thread that
  // takes from it to its end.
  bool take_last(int64_t* piece) {
    for (;;) {
      int longest = 0;
      for (int i = 1; i < count_; i++)
        if (num_left(shares_[i].left) > num_left(shares_[longest].left)) longest = i;
      std::atomic<uint64_t>& left = shares_[longest].left;
      uint64_t now = left.load(std::memory_order_relaxed);
      if (num_left(now) <= owners_) return false;
      if (left.compare_exchange_weak(now, now - 1, std::memory_order_relaxed)) {
        *piece = last_of(now) - 1;
        return true;
      }
    }
  }

 private:
  struct alignas(64) Share {
    std::atomic<uint64_t> left;  // the first piece, and the one after the last
  };
  static uint64_t packed(int64_t first, int64_t last) { return (uint64_t)first << 32 | (uint64_t)last; }
  static int64_t first_of(uint64_t left) { return (int64_t)(left >> 32); }
  static int64_t last_of(uint64_t left) { return (int64_t)(uint32_t)left; }
  static int64_t num_left(uint64_t left) { return last_of(left) - first_of(left); }

  int64_t pieces_, align_, owners_;
  int count_;
  Share* shares_;
};
