// What launches are counted by: instructions of each class, passes over the banks of shared memory, sectors of memory.
#include "run.h"

#include <algorithm>
#include <cstdio>

namespace ptx {

namespace {

const char* const NAMES[CLASSES] = {"mma",     "ldmatrix", "copy", "shared", "global", "f32",
                                    "f64",     "integer",  "conversion", "move", "lanes", "control"};

}  // namespace

// Shared memory has 32 banks of four bytes. Accesses of 4 bytes and less are served for 32 lanes at once, those of 8 for 16,
// of 16 for 8; words of one bank that differ come one after another.
void count_shared(Warp& w, u32 lanes, const u64* at, u32 bytes) {
    Counts& counts = w.block->launch->counts;
    int together = bytes <= 4 ? LANES : bytes == 8 ? LANES / 2 : LANES / 4;
    for (int first = 0; first < LANES; first += together) {
        u64 words[LANES];
        int count = 0;
        for (int l = first; l < first + together; l++) {
            if (!(lanes >> l & 1)) continue;
            for (u32 k = 0; k < (bytes + 3) / 4; k++) words[count++] = at[l] / 4 + k;
        }
        if (!count) continue;
        std::sort(words, words + count);
        count = (int)(std::unique(words, words + count) - words);
        int of_bank[32] = {}, most = 0;
        for (int k = 0; k < count; k++) most = std::max(most, ++of_bank[words[k] % 32]);
        counts.wavefronts += (u64)most;
        counts.wavefronts_least++;
    }
}

void count_global(Warp& w, u32 lanes, const u64* at, u32 bytes) {
    Counts& counts = w.block->launch->counts;
    u64 sectors[2 * LANES];
    int count = 0;
    for (int l = 0; l < LANES; l++) {
        if (!(lanes >> l & 1)) continue;
        sectors[count++] = at[l] / 32;
        if ((at[l] + bytes - 1) / 32 != at[l] / 32) sectors[count++] = at[l] / 32 + 1;
        counts.sector_bytes += bytes;
    }
    std::sort(sectors, sectors + count);
    counts.sectors += (u64)(std::unique(sectors, sectors + count) - sectors);
}

void write_counts(const Launch& launch, const char* path, double seconds) {
    std::FILE* file = std::fopen(path, "a");
    if (!file) return;
    const Counts& c = launch.counts;
    std::fprintf(file, "%s %s %u %u %u %u %u", launch.unit->name.c_str(), launch.kernel->name.c_str(), launch.grid[0], launch.grid[1],
                 launch.grid[2], launch.threads, launch.shared_bytes);
    for (int k = 0; k < CLASSES; k++) std::fprintf(file, " %s=%llu", NAMES[k], c.issued[k]);
    std::fprintf(file, " lanes_issued=%llu wavefronts=%llu wavefronts_least=%llu sectors=%llu bytes=%llu seconds=%.6f\n",
                 c.lane_instructions, c.wavefronts, c.wavefronts_least, c.sectors, c.sector_bytes, seconds);
    std::fclose(file);
}

}  // namespace ptx
