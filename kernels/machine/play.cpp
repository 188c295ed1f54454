// Plays a list of calls: a step has a hundred of them, and Python's share of one is longer than many kernels.
#include <cstdint>

struct Recorded {
  int64_t (*function)(const int64_t* words);  // true: an error
  const int64_t* words;
};

// Returns 0, or 1 + the index of the call that failed, after which none is made.
extern "C" int64_t lockstep_play(const Recorded* calls, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (calls[i].function(calls[i].words)) return i + 1;
  return 0;
}
