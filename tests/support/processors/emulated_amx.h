// The tile instructions of AMX, in C++: a library that is built with `-include` of this file takes its AMX path on any
// processor with AVX512_BF16. Their definition is Intel's (Software Developer's Manual, TDPBF16PS and others): a tile
// has 16 rows of 64 bytes; of 32 products, those of even and those of odd places are summed apart, then both are added
// to the tile. Subnormal numbers are not flushed.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1

namespace emulated_amx {

struct alignas(64) Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

struct alignas(64) Registers {
  uint8_t data[8][16][64] = {};
  Config config = {};
};
inline thread_local Registers registers;

inline void load_config(const void* from) {
  memcpy(&registers.config, from, sizeof registers.config);
  memset(registers.data, 0, sizeof registers.data);
}
inline void release() { memset(&registers.config, 0, sizeof registers.config); }
inline void zero(int tile) { memset(registers.data[tile], 0, sizeof registers.data[tile]); }
inline void load(int tile, const void* base, int64_t stride) {
  zero(tile);
  for (int r = 0; r < registers.config.rows[tile]; r++)
    memcpy(registers.data[tile][r], (const char*)base + r * stride, registers.config.row_bytes[tile]);
}
inline void store(int tile, void* base, int64_t stride) {
  for (int r = 0; r < registers.config.rows[tile]; r++)
    memcpy((char*)base + r * stride, registers.data[tile][r], registers.config.row_bytes[tile]);
}
inline float widened(uint32_t half) {
  const uint32_t bits = half << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline void multiply(int sums, int left, int right) {
  const Config& config = registers.config;
  const int columns = config.row_bytes[sums] / 4, pairs = config.row_bytes[left] / 4;
  for (int m = 0; m < config.rows[sums]; m++) {
    float even[16] = {}, odd[16] = {}, total[16];
    for (int k = 0; k < pairs; k++) {
      uint32_t a, b[16];
      memcpy(&a, registers.data[left][m] + 4 * k, 4);
      memcpy(b, registers.data[right][k], 64);
      for (int n = 0; n < columns; n++) {
        even[n] += widened(a & 0xffff) * widened(b[n] & 0xffff);
        odd[n] += widened(a >> 16) * widened(b[n] >> 16);
      }
    }
    memcpy(total, registers.data[sums][m], 64);
    for (int n = 0; n < columns; n++) total[n] += even[n] + odd[n];
    memcpy(registers.data[sums][m], total, 64);
  }
}

}  // namespace emulated_amx

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) emulated_amx::load_config(from)
#define _tile_release() emulated_amx::release()
#define _tile_zero(tile) emulated_amx::zero(tile)
#define _tile_loadd(tile, base, stride) emulated_amx::load(tile, base, stride)
#define _tile_stream_loadd(tile, base, stride) emulated_amx::load(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated_amx::store(tile, base, stride)
#define _tile_dpbf16ps(sums, left, right) emulated_amx::multiply(sums, left, right)
#define syscall(...) 0L  // Linux permits the use of tiles
