// Functions with packed arguments: one word each, so that a list of calls to different functions can be played.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace packed {

template <typename T>
T unpacked(int64_t word) {
  if constexpr (std::is_floating_point_v<T>) {
    static_assert(sizeof(T) == 4);
    T value;
    memcpy(&value, &word, sizeof value);
    return value;
  } else {
    return (T)word;
  }
}

template <typename R, typename... A, size_t... I>
int64_t call(R (*function)(A...), const int64_t* words, std::index_sequence<I...>) {
  if constexpr (std::is_void_v<R>) {
    function(unpacked<A>(words[I])...);
    return 0;
  } else {
    return (int64_t)function(unpacked<A>(words[I])...);
  }
}

template <typename R, typename... A>
int64_t call(R (*function)(A...), const int64_t* words) {
  return call(function, words, std::index_sequence_for<A...>());
}

}  // namespace packed

// Exports NAME_packed, which native.py finds beside NAME. It returns what NAME does, or 0.
#define LOCKSTEP_PACKED(name) \
  extern "C" int64_t name##_packed(const int64_t* words) { return packed::call(name, words); }
