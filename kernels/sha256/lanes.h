// SHA-256 by ordinary vectors: one message in each lane, as "Multi-Buffer" hashing does (Gueron and Krasnov, 2012).
#pragma once
#include <algorithm>

#include "machine/simd.h"
#include "message.h"

namespace sha256 {

constexpr int LANES = simd::W;
typedef simd::Words Words;

inline Words splat(uint32_t x) { return Words{} + x; }

template <int BITS>
inline Words rotate(Words x) { return (x >> BITS) | (x << (32 - BITS)); }

// Read the 16 words of a block of each message; a message that has ended gives its last block again.
inline void load(const uint8_t* const* blocks, Words* words) {
    alignas(64) uint32_t raw[16][LANES];
    for (int lane = 0; lane < LANES; ++lane)
        for (int t = 0; t < 16; ++t) {
            uint32_t word;
            std::memcpy(&word, blocks[lane] + 4 * t, 4);
            raw[t][lane] = __builtin_bswap32(word);
        }
    std::memcpy(words, raw, sizeof raw);
}

inline void compress(const uint8_t* const* blocks, Words* state) {
    Words w[16];
    load(blocks, w);
    Words a = state[0], b = state[1], c = state[2], d = state[3];
    Words e = state[4], f = state[5], g = state[6], h = state[7];
#pragma GCC unroll 64
    for (int t = 0; t < 64; ++t) {
        Words& word = w[t % 16];
        if (t >= 16) {
            const Words w15 = w[(t + 1) % 16], w2 = w[(t + 14) % 16];
            word += w[(t + 9) % 16] + (rotate<7>(w15) ^ rotate<18>(w15) ^ (w15 >> 3));
            word += rotate<17>(w2) ^ rotate<19>(w2) ^ (w2 >> 10);
        }
        const Words choice = g ^ (e & (f ^ g)), majority = (a & b) | (c & (a | b));
        const Words first = h + (rotate<6>(e) ^ rotate<11>(e) ^ rotate<25>(e)) + choice + (word + K[t]);
        const Words second = (rotate<2>(a) ^ rotate<13>(a) ^ rotate<22>(a)) + majority;
        h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
}

// Hash `count` messages, at most LANES.
inline void hash(Message* messages, int count) {
    Words state[8], lengths = splat(0);
    int64_t longest = 0;
    for (int lane = 0; lane < LANES; ++lane) {
        const Message& message = messages[std::min(lane, count - 1)];
        for (int i = 0; i < 8; ++i) state[i][lane] = message.state[i];
        lengths[lane] = static_cast<uint32_t>(message.num_blocks);
        longest = std::max(longest, message.num_blocks);
    }
    for (int64_t block = 0; block < longest; ++block) {
        const uint8_t* blocks[LANES];
        for (int lane = 0; lane < LANES; ++lane) {
            const Message& message = messages[std::min(lane, count - 1)];
            blocks[lane] = message.bytes.data() + std::min(block, message.num_blocks - 1) * BLOCK;
        }
        Words before[8];
        std::copy(state, state + 8, before);
        compress(blocks, state);
        const Words is_open = (Words)(lengths > static_cast<uint32_t>(block));
        for (int i = 0; i < 8; ++i) state[i] = (state[i] & is_open) | (before[i] & ~is_open);
    }
    for (int lane = 0; lane < count; ++lane)
        for (int i = 0; i < 8; ++i) messages[lane].state[i] = state[i][lane];
}

}  // namespace sha256
