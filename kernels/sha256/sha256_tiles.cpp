// SHA-256 (FIPS 180-4) of many tiles of a strided block, two tiles at a time.
//
// The SHA instructions of x86 wait on their own results for half of the time; a second, independent message fills the
// gaps. The order of instructions inside one message is that of Intel's "Intel SHA Extensions" white paper (2013).
// Without these instructions the library exports `sha256_tiles_supported() == 0` and no other usable function.

#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __SHA__
#include <immintrin.h>

namespace {

alignas(16) constexpr uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr int64_t BLOCK = 64;  // bytes that SHA-256 takes at once

struct Message {
    std::vector<uint8_t> bytes;  // padded to whole blocks
    int64_t num_blocks = 0;
    __m128i abef, cdgh;  // the eight state words, in the order that the instructions take

    void start(int64_t size) {
        num_blocks = (size + 9 + BLOCK - 1) / BLOCK;
        if (static_cast<int64_t>(bytes.size()) < num_blocks * BLOCK) bytes.resize(num_blocks * BLOCK);
        uint8_t* end = bytes.data() + num_blocks * BLOCK;
        std::memset(bytes.data() + size, 0, end - bytes.data() - size);
        bytes[size] = 0x80;
        const uint64_t length = __builtin_bswap64(static_cast<uint64_t>(size) * 8);
        std::memcpy(end - 8, &length, 8);
        abef = _mm_set_epi32(0x6a09e667, static_cast<int>(0xbb67ae85), 0x510e527f, static_cast<int>(0x9b05688c));
        cdgh = _mm_set_epi32(0x3c6ef372, static_cast<int>(0xa54ff53a), 0x1f83d9ab, 0x5be0cd19);
    }

    void digest(uint8_t* out) const {
        const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
        const __m128i ab_ef = _mm_shuffle_epi32(abef, 0x1b), cd_gh = _mm_shuffle_epi32(cdgh, 0x1b);  // a b e f, c d g h
        const __m128i first = _mm_unpacklo_epi64(ab_ef, cd_gh), second = _mm_unpackhi_epi64(ab_ef, cd_gh);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_shuffle_epi8(first, swap));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out) + 1, _mm_shuffle_epi8(second, swap));
    }
};

template <int N>
void compress(Message* const* messages, int64_t first, int64_t last) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i abef[N], cdgh[N];
    for (int n = 0; n < N; ++n) abef[n] = messages[n]->abef, cdgh[n] = messages[n]->cdgh;
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
    for (int n = 0; n < N; ++n) messages[n]->abef = abef[n], messages[n]->cdgh = cdgh[n];
}

void hash_two(Message* a, Message* b) {
    Message* both[] = {a, b};
    const int64_t common = a->num_blocks < b->num_blocks ? a->num_blocks : b->num_blocks;
    compress<2>(both, 0, common);
    compress<1>(both, common, a->num_blocks);
    compress<1>(both + 1, common, b->num_blocks);
}

}  // namespace

extern "C" {

int sha256_tiles_supported() { return 1; }

// A block is [bands, rows, cells, row_bytes] with the given strides, its last dimension contiguous; all sizes in bytes.
// A cell [rows, row_bytes] is cut into strips of `strip_rows` rows, and those into pieces of `piece_bytes` per row.
// out: 32 bytes a tile, in the order band, cell, strip (each row where it is cut), piece.
void sha256_tiles(const uint8_t* data, int64_t bands, int64_t rows, int64_t cells, int64_t row_bytes,
                  int64_t band_stride, int64_t row_stride, int64_t cell_stride, int64_t strip_rows,
                  int64_t piece_bytes, uint8_t* out) {
    Message messages[2];
    int lane = 0;
    for (int64_t band = 0; band < bands; ++band)
        for (int64_t cell = 0; cell < cells; ++cell)
            for (int64_t row = 0; row < rows; row += strip_rows)
                for (int64_t start = 0; start < row_bytes; start += piece_bytes) {
                    const uint8_t* from = data + band * band_stride + cell * cell_stride + row * row_stride + start;
                    const int64_t height = rows - row < strip_rows ? rows - row : strip_rows;
                    const int64_t width = row_bytes - start < piece_bytes ? row_bytes - start : piece_bytes;
                    Message& message = messages[lane];
                    message.start(height * width);
                    for (int64_t i = 0; i < height; ++i)
                        std::memcpy(message.bytes.data() + i * width, from + i * row_stride, width);
                    if (++lane < 2) continue;
                    hash_two(&messages[0], &messages[1]);
                    for (lane = 0; lane < 2; ++lane, out += 32) messages[lane].digest(out);
                    lane = 0;
                }
    if (lane == 1) {
        Message* only = messages;
        compress<1>(&only, 0, only->num_blocks);
        only->digest(out);
    }
}

}  // extern "C"

#else

extern "C" int sha256_tiles_supported() { return 0; }

#endif
