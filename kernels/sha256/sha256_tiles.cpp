// SHA-256 (FIPS 180-4) of the tiles of strided blocks, LANES tiles at a time: by the SHA instructions of x86 where the
// processor has them, by ordinary vectors elsewhere.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "machine/memory.h"

#if defined(__SHA__)
#include "instructions.h"
#else
#include "lanes.h"
#endif

namespace {

// A block is [bands, rows, cells, row_bytes] with the given strides, its last dimension contiguous; all sizes in bytes.
// A cell [rows, row_bytes] is cut into strips of `strip_rows` rows, and those into pieces of `piece_bytes` per row.
struct Block {
    const uint8_t* data;
    int64_t bands, rows, cells, row_bytes, band_stride, row_stride, cell_stride, strip_rows, piece_bytes;
};

struct Tile {
    const uint8_t* data;
    int64_t height, width, row_stride;
    uint8_t* out;

    int64_t size() const { return height * width; }
};

// Append the tiles of a block in the order band, cell, strip (each row where it is cut), piece; returns the end of `out`.
uint8_t* cut(const Block& block, uint8_t* out, std::vector<Tile>& tiles) {
    for (int64_t band = 0; band < block.bands; ++band)
        for (int64_t cell = 0; cell < block.cells; ++cell)
            for (int64_t row = 0; row < block.rows; row += block.strip_rows)
                for (int64_t start = 0; start < block.row_bytes; start += block.piece_bytes, out += 32) {
                    const uint8_t* data = block.data + band * block.band_stride + cell * block.cell_stride;
                    tiles.push_back({data + row * block.row_stride + start,
                                     std::min(block.rows - row, block.strip_rows),
                                     std::min(block.row_bytes - start, block.piece_bytes), block.row_stride, out});
                }
    return out;
}

// out: 32 bytes a tile, block after block.
void digest_all(const Block* blocks, int64_t num_blocks, uint8_t* out) {
    std::vector<Tile> tiles;
    for (int64_t i = 0; i < num_blocks; ++i) out = cut(blocks[i], out, tiles);
    // Tiles of one size together, so that no lane waits for a longer neighbour.
    std::stable_sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) { return a.size() > b.size(); });
    sha256::Message messages[sha256::LANES];
    for (size_t first = 0; first < tiles.size(); first += sha256::LANES) {
        const int count = static_cast<int>(std::min<size_t>(sha256::LANES, tiles.size() - first));
        for (int lane = 0; lane < count; ++lane) {
            const Tile& tile = tiles[first + lane];
            messages[lane].start(tile.size());
            for (int64_t i = 0; i < tile.height; ++i)
                std::memcpy(messages[lane].bytes.data() + i * tile.width, tile.data + i * tile.row_stride, tile.width);
        }
        sha256::hash(messages, count);
        for (int lane = 0; lane < count; ++lane) messages[lane].digest(tiles[first + lane].out);
    }
}

}  // namespace

// Returns 0 or memory::NONE_LEFT.
extern "C" int64_t sha256_tiles(const Block* blocks, int64_t num_blocks, uint8_t* out) {
    return memory::at_edge([&] { digest_all(blocks, num_blocks, out); });
}
