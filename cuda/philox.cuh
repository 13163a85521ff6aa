// Philox 4x32-10 (Salmon et al., SC11, section 4.2): the numbers of `src/rng.rs`.
#pragma once
#include "common.cuh"

struct alignas(16) Words {
    u32 at[4];
};

DEVICE Words philox(u32 key0, u32 key1, Words c) {
    for (int round = 0; round < 10; round++) {
        u64 p0 = (u64)0xD2511F53u * c.at[0], p1 = (u64)0xCD9E8D57u * c.at[2];
        c = Words{{(u32)(p1 >> 32) ^ c.at[1] ^ key0, (u32)p1, (u32)(p0 >> 32) ^ c.at[3] ^ key1, (u32)p0}};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return c;
}

// Uniform in [0, 1), 24 bits.
DEVICE float uniform(u32 word) { return (float)(word >> 8) * (1.0f / 16777216.0f); }
