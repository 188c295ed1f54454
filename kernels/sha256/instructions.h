// SHA-256 by the SHA instructions of x86, two messages at a time.
//
// The instructions wait on their own results for half of the time; a second, independent message fills the gaps. The
// order of instructions inside one message is that of Intel's "Intel SHA Extensions" white paper (2013).
#pragma once
#include <immintrin.h>

#include <algorithm>

#include "message.h"

namespace sha256 {

constexpr int LANES = 2;

// The state words a .. h in the order that the instructions take: a b e f and c d g h, from the highest word down.
inline void load(const uint32_t* state, __m128i& abef, __m128i& cdgh) {
    abef = _mm_set_epi32(state[0], state[1], state[4], state[5]);
    cdgh = _mm_set_epi32(state[2], state[3], state[6], state[7]);
}

inline void store(__m128i abef, __m128i cdgh, uint32_t* state) {
    const __m128i ab_ef = _mm_shuffle_epi32(abef, 0x1b), cd_gh = _mm_shuffle_epi32(cdgh, 0x1b);  // a b e f, c d g h
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_unpacklo_epi64(ab_ef, cd_gh));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state) + 1, _mm_unpackhi_epi64(ab_ef, cd_gh));
}

template <int N>
void compress(Message* const* messages, int64_t first, int64_t last) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i abef[N], cdgh[N];
    for (int n = 0; n < N; ++n) load(messages[n]->state, abef[n], cdgh[n]);
    for (int64_t block = first; block < last; ++block) {
        __m128i w[N][4], abef_before[N], cdgh_before[N];
        for (int n = 0; n < N; ++n) abef_before[n] = abef[n], cdgh_before[n] = cdgh[n];
#pragma GCC unroll 16
        for (int g = 0; g < 16; ++g) {
            const __m128i k = _mm_load_si128(reinterpret_cast<const __m128i*>(K) + g);
#pragma GCC unroll 2
            for (int n = 0; n < N; ++n) {
                __m128i& word = w[n][g % 4];
                if (g < 4) {
                    const uint8_t* data = messages[n]->bytes.data() + block * BLOCK;
                    word = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + g), swap);
                } else {
                    const __m128i last4 = w[n][(g + 3) % 4];
                    const __m128i seventh = _mm_alignr_epi8(last4, w[n][(g + 2) % 4], 4);
                    const __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(word, w[n][(g + 1) % 4]), seventh);
                    word = _mm_sha256msg2_epu32(sum, last4);
                }
                const __m128i wk = _mm_add_epi32(word, k);
                cdgh[n] = _mm_sha256rnds2_epu32(cdgh[n], abef[n], wk);
                abef[n] = _mm_sha256rnds2_epu32(abef[n], cdgh[n], _mm_shuffle_epi32(wk, 0x0e));
            }
        }
        for (int n = 0; n < N; ++n) {
            abef[n] = _mm_add_epi32(abef[n], abef_before[n]);
            cdgh[n] = _mm_add_epi32(cdgh[n], cdgh_before[n]);
        }
    }
    for (int n = 0; n < N; ++n) store(abef[n], cdgh[n], messages[n]->state);
}

// Hash `count` messages, at most LANES.
inline void hash(Message* messages, int count) {
    Message* both[] = {messages, messages + 1};
    const int64_t first = messages[0].num_blocks, second = count == 2 ? messages[1].num_blocks : 0;
    const int64_t common = std::min(first, second);
    if (common > 0) compress<2>(both, 0, common);
    compress<1>(both, common, first);
    compress<1>(both + 1, common, second);
}

}  // namespace sha256
