// Gathers and sums over the ranks of one host through memory that they share. A sum adds the ranks' partial products in
// a fixed order, in fp32 lanes, and rounds once: its bits are those of one process that has all of them.
//
// Every rank has two slots by turns. A rank writes a slot again only after all ranks have published the exchange in
// between, which each of them does after it has read the slot.
#include <atomic>
#include <cstdint>
#include <ctime>
#include <sched.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "machine/simd.h"

using namespace simd;

namespace {

struct alignas(64) Head {  // of a rank, in the shared memory
  std::atomic<uint32_t> published;  // the number of its last exchange
  std::atomic<uint32_t> waiters;    // ranks that sleep until `published` changes
  std::atomic<int64_t> bytes[2];    // that it gave to the exchange in each slot
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(Head) == 64, "shared by processes");

struct Exchange {  // a rank's view
  uint8_t* memory;  // heads, then [2, num_ranks] slots
  const int64_t* stop;  // of this process: other than 0 when waiting is of no use
  int64_t num_ranks, rank, slot_bytes, timeout_ns;
  int64_t late_rank;  // set where an exchange fails: the rank that did not take part
  uint32_t count;     // of exchanges so far
};

enum Result : int64_t { DONE = 0, STOPPED = 1, TIMED_OUT = 2, DIFFERS = 3 };

constexpr int SPINS = 4000, YIELDS = 2000;  // before a rank sleeps: it keeps its core for the time of a usual exchange
constexpr int64_t NAP_NS = 5'000'000;       // after which it looks at `stop` again
constexpr int64_t GAP_NS = 5'000'000'000;   // between two looks: this process was stopped, and did not wait

Head& head(const Exchange& e, int64_t rank) { return ((Head*)e.memory)[rank]; }
uint8_t* slot(const Exchange& e, int64_t rank) {
  return e.memory + e.num_ranks * sizeof(Head) + ((e.count & 1) * e.num_ranks + rank) * e.slot_bytes;
}

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1'000'000'000 + t.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void sleep_until_changed(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
  const timespec nap{0, NAP_NS};
  syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT, seen, &nap, nullptr, 0);
#else
  (void)word, (void)seen;
  sched_yield();
#endif
}

void publish(Exchange& e, int64_t bytes) {
  Head& mine = head(e, e.rank);
  mine.bytes[e.count & 1].store(bytes, std::memory_order_relaxed);
  mine.published.store(e.count, std::memory_order_seq_cst);
#if defined(__linux__)
  if (mine.waiters.load(std::memory_order_seq_cst))
    syscall(SYS_futex, (uint32_t*)&mine.published, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

// Waits until a rank has published this exchange.
int64_t wait_for(Exchange& e, int64_t rank, int64_t bytes) {
  Head& other = head(e, rank);
  int64_t deadline = 0, looked = 0;
  const auto is_there = [&](uint32_t seen) { return (int32_t)(seen - e.count) >= 0; };
  for (int64_t i = 0;; i++) {
    const uint32_t seen = other.published.load(std::memory_order_acquire);
    if (is_there(seen)) break;
    if (i < SPINS) {
      relax();
      continue;
    }
    e.late_rank = rank;
    if (*(volatile const int64_t*)e.stop) return STOPPED;
    const int64_t now = now_ns();
    if (!deadline) deadline = now + e.timeout_ns;
    else if (now - looked > GAP_NS) deadline += now - looked;
    looked = now;
    if (now > deadline) return TIMED_OUT;
    if (i < SPINS + YIELDS) {
      sched_yield();
      continue;
    }
    other.waiters.fetch_add(1, std::memory_order_seq_cst);
    if (!is_there(other.published.load(std::memory_order_seq_cst))) sleep_until_changed(other.published, seen);
    other.waiters.fetch_sub(1, std::memory_order_seq_cst);
  }
  e.late_rank = rank;
  return other.bytes[e.count & 1].load(std::memory_order_relaxed) == bytes ? DONE : DIFFERS;
}

// Begins an exchange: publishes what `fill(slot)` writes, and waits for all ranks.
template <typename Fill>
int64_t exchange(Exchange& e, int64_t bytes, Fill fill) {
  e.count++;
  fill(slot(e, e.rank));
  publish(e, bytes);
  for (int64_t i = 1; i < e.num_ranks; i++)
    if (int64_t failed = wait_for(e, (e.rank + i) % e.num_ranks, bytes)) return failed;
  return DONE;
}

template <typename T>
Floats load_some(const T* p, int64_t count) {
  T lanes[W] = {};
  memcpy(lanes, p, count * sizeof(T));
  return load(lanes);
}

template <typename T>
void store_some(T* p, Floats v, int64_t count) {
  T lanes[W];
  store(lanes, v);
  memcpy(p, lanes, count * sizeof(T));
}

// Adds `blocks` of each rank, each of `stride` elements, from the first to the last, and the bias; rounds once.
template <typename T>
void add_blocks(const Exchange& e, int64_t blocks, int64_t stride, int64_t count, const float* bias, T* out) {
  for (int64_t i = 0; i < count; i += W) {
    const int64_t lanes = count - i < W ? count - i : W;
    Floats total = {};
    for (int64_t rank = 0; rank < e.num_ranks; rank++) {
      const T* part = (const T*)slot(e, rank) + i;
      for (int64_t b = 0; b < blocks; b++) {
        const Floats value = lanes == W ? load(part + b * stride) : load_some(part + b * stride, lanes);
        total = rank + b ? total + value : value;
      }
    }
    if (bias) total = total + (lanes == W ? load(bias + i) : load_some(bias + i, lanes));
    if (lanes == W)
      store(out + i, total);
    else
      store_some(out + i, total, lanes);
  }
}

template <typename T>
int64_t add(Exchange& e, const T* partials, int64_t blocks, int64_t count, const float* bias, T* out) {
  const int64_t most = e.slot_bytes / (blocks * (int64_t)sizeof(T));
  for (int64_t first = 0; first < count; first += most) {
    const int64_t size = count - first < most ? count - first : most;
    const int64_t failed = exchange(e, blocks * size * sizeof(T), [&](uint8_t* mine) {
      for (int64_t b = 0; b < blocks; b++)
        memcpy((T*)mine + b * size, partials + b * count + first, size * sizeof(T));
    });
    if (failed) return failed;
    add_blocks(e, blocks, size, size, bias ? bias + first : nullptr, out + first);
  }
  return DONE;
}

}  // namespace

// Returns the bytes of shared memory that ranks with slots of this size need.
extern "C" int64_t lockstep_exchange_bytes(int64_t num_ranks, int64_t slot_bytes) {
  return num_ranks * (int64_t)sizeof(Head) + 2 * num_ranks * slot_bytes;
}

// Gathers `part` of every rank, `bytes` each, side by side in the order of ranks.
extern "C" int64_t lockstep_exchange_gather(Exchange* e, const uint8_t* part, int64_t bytes, uint8_t* out) {
  for (int64_t first = 0; first < bytes; first += e->slot_bytes) {
    const int64_t size = bytes - first < e->slot_bytes ? bytes - first : e->slot_bytes;
    const int64_t failed = exchange(*e, size, [&](uint8_t* mine) { memcpy(mine, part + first, size); });
    if (failed) return failed;
    for (int64_t rank = 0; rank < e->num_ranks; rank++) memcpy(out + rank * bytes + first, slot(*e, rank), size);
  }
  return DONE;
}

// Adds partials [blocks, count] of every rank, in order, and the bias [count] or null.
extern "C" int64_t lockstep_exchange_add(Exchange* e, const void* partials, int64_t blocks, int64_t count,
                                         const float* bias, void* out, int64_t is_bf16) {
  if (is_bf16) return add(*e, (const bf16*)partials, blocks, count, bias, (bf16*)out);
  return add(*e, (const float*)partials, blocks, count, bias, (float*)out);
}
