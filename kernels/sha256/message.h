// A SHA-256 message (FIPS 180-4): its padded bytes and its state.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

namespace sha256 {

alignas(64) constexpr uint32_t K[64] = {
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
    alignas(16) uint32_t state[8];

    void start(int64_t size) {
        constexpr uint32_t first[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                       0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
        std::memcpy(state, first, sizeof state);
        num_blocks = (size + 9 + BLOCK - 1) / BLOCK;
        if (static_cast<int64_t>(bytes.size()) < num_blocks * BLOCK) bytes.resize(num_blocks * BLOCK);
        uint8_t* end = bytes.data() + num_blocks * BLOCK;
        std::memset(bytes.data() + size, 0, end - bytes.data() - size);
        bytes[size] = 0x80;
        const uint64_t length = __builtin_bswap64(static_cast<uint64_t>(size) * 8);
        std::memcpy(end - 8, &length, 8);
    }

    void digest(uint8_t* out) const {
        for (int i = 0; i < 8; ++i) {
            const uint32_t word = __builtin_bswap32(state[i]);
            std::memcpy(out + 4 * i, &word, 4);
        }
    }
};

}  // namespace sha256
