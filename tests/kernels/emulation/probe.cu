// Kernels with one thing wrong each, and right ones beside them: what the emulated GPU notices, and what it lets pass.
#include "common.cuh"

// y = x, one value a thread, of `block` threads; `skew` moves where it reads.
KERNEL probe_copy(const float* x, float* y, i64 skew) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    y[at] = x[(i64)at + skew];
}

// Reads sixteen bytes from `skew` bytes behind x.
KERNEL probe_eight(const u8* x, Eight* y, i64 skew) { y[threadIdx.x] = *(const Eight*)(x + 16 * threadIdx.x + skew); }

// Each thread reads what another wrote, of its own warp or of another; `barrier` is 0: none, 1: the warp's, 2: the block's.
KERNEL probe_barrier(float* y, i32 distance, i32 barrier) {
    SHARED float room[256];
    room[threadIdx.x] = (float)threadIdx.x;
    if (barrier == 1) SYNC_WARP();
    if (barrier == 2) SYNC_BLOCK();
    y[threadIdx.x] = room[threadIdx.x ^ distance];
}

// The same room used twice: the second writes need a barrier behind the first reads.
KERNEL probe_room(float* y, i32 barrier) {
    SHARED float room[256];
    room[threadIdx.x] = 1.0f;
    SYNC_BLOCK();
    float first = room[threadIdx.x ^ 32];
    if (barrier) SYNC_BLOCK();
    room[threadIdx.x] = 2.0f;
    SYNC_BLOCK();
    y[threadIdx.x] = first + room[threadIdx.x ^ 32];
}

// Writes into the room of a sum as soon as the sum is there.
KERNEL probe_sum(float* y) {
    SHARED float room[33];
    float sum = block_sum(1.0f, room);
    if (threadIdx.x < 33) room[threadIdx.x] = sum;
    y[threadIdx.x] = sum;
}

// Copies sixteen bytes a thread through shared memory; a thread reads its own, or another's behind a barrier.
KERNEL probe_async(const Eight* x, Eight* y, i32 wait, i32 distance, i32 barrier) {
    DYNAMIC_SHARED(room);
    Eight* rows = (Eight*)room;
    copy_async(rows + threadIdx.x, x + threadIdx.x, true);
    copy_commit();
    if (wait) copy_wait<0>();
    else copy_wait<1>();
    if (barrier) SYNC_BLOCK();
    y[threadIdx.x] = rows[threadIdx.x ^ distance];
}

// Reads four matrices that the lanes wrote.
KERNEL probe_matrices(u32* y, i32 barrier) {
    SHARED Eight rows[32];
    rows[threadIdx.x] = Eight{{threadIdx.x, 0, 0, 0}};
    if (barrier) SYNC_WARP();
    u32 r[4];
    load_matrices(r, rows + threadIdx.x);
    y[threadIdx.x] = r[0];
}

// Lanes part: those from `from` on leave, or go another way.
KERNEL probe_part(float* y, i32 from, i32 way) {
    float x = 1.0f;
    if (way == 0 && (int)threadIdx.x >= from) return;
    if (way == 1 && (int)threadIdx.x >= from) SYNC_BLOCK();
    else x = warp_sum(x);
    if (way == 2) SYNC_BLOCK();
    y[threadIdx.x] = x;
}

// All blocks write one value, or each its own.
KERNEL probe_blocks(float* y, i32 apart) {
    if (threadIdx.x == 0) y[blockIdx.x * (u32)apart] = 1.0f;
}

// Dynamic shared memory up to byte `at`, and an index of an array.
KERNEL probe_bounds(float* y, i32 at, i32 index) {
    DYNAMIC_SHARED(room);
    SHARED float few[8];
    if (threadIdx.x == 0) room[at] = 1;
    if (threadIdx.x == 0) few[index] = 1.0f;
    if (threadIdx.x == 0) y[0] = few[index];
}

// A sum of shared memory that nobody wrote.
KERNEL probe_unwritten(float* y) {
    SHARED float room[32];
    y[threadIdx.x] = room[threadIdx.x];
}

// `steps` shuffles, and as many products.
KERNEL probe_speed(float* y, i32 steps, i32 products) {
    float x = (float)threadIdx.x;
    for (int i = 0; i < steps; i++) x = shuffle_xor(x, 1 + i % 31);
    float d[4] = {x, 0, 0, 0};
    u32 a[4] = {1, 2, 3, 4}, b[2] = {5, 6};
    for (int i = 0; i < products; i++) mma(d, a, b);
    y[(u64)blockIdx.x * blockDim.x + threadIdx.x] = d[0];
}

#ifdef EMULATED
// Calls that go `depth` deep.
static __attribute__((noinline)) float deep(i32 depth, float* y) {
    float kept[64];
    for (int i = 0; i < 64; i++) kept[i] = y[i % 32];
    float below = depth > 0 ? deep(depth - 1, y) : 0.0f;
    return below + kept[(int)below & 63];
}
KERNEL probe_stack(float* y, i32 depth) {
    float sum = deep(depth, y);
    SYNC_BLOCK();
    y[threadIdx.x] = sum;
}
#endif

// Blocks add in the order of their start. `fault`: 1: they do not wait, 2: or without a barrier behind it, 3: they tell before a
// barrier, 4: or tell nothing.
KERNEL probe_turns(float* y, u32* counters, i32 fault) {
    SHARED u32 number[1];
    if (threadIdx.x == 0) number[0] = take_number(counters);
    SYNC_BLOCK();
    if (threadIdx.x == 0) {
        while (fault != 1 && load_acquire(counters + 1) != number[0]) pause();
    }
    if (fault != 2) SYNC_BLOCK();
    add_in_memory(y + threadIdx.x, 1.0f);
    if (fault != 3) SYNC_BLOCK();
    if (threadIdx.x == 0 && fault != 4) store_release(counters + 1, number[0] + 1);
}
