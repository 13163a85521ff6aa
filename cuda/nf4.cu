// Matrices in nf4 (arXiv:2305.14314, the format of bitsandbytes): dequantization, and a GEMM of few rows that reads the
// four bits. A weight is bf16(table[code] scale), so the GEMM has the bits of matmul.cu on the dequantized matrix.
//
// W (n, k) is flattened by rows: two codes a byte, the first in the high half, and a scale for each 64 values.
#include "eight.cuh"
#include "matmul.cuh"

#define SCALE_BLOCK 64
#define NESTED_BLOCK 256

// codes; tables: the 16 values of codes, then the 256 values of the codes of scales; scales f32, or null. Without
// scales: a code of each, in `nested`, and the largest magnitude of each 256; `first` is the index of the first scale in
// its 256.
#define SCALE_PARAMETERS \
    const float *tables, const float *scales, const u8 *nested, const float *largest, float offset, u32 first
#define SCALE_ARGUMENTS tables, scales, nested, largest, offset, first
#define NF4_PARAMETERS const u8 *codes, SCALE_PARAMETERS

DEVICE float scale_of(SCALE_PARAMETERS, u64 block) {
    if (scales) return scales[block];
    return times(tables[16 + nested[block]], largest[(block + first) / NESTED_BLOCK]) + offset;
}

// A table in shared memory: lanes that read different values meet no bank twice.
DEVICE void share_table(float* table, const float* tables) {
    if (threadIdx.x < 16) table[threadIdx.x] = tables[threadIdx.x];
    SYNC_BLOCK();
}

// Two neighbouring weights from their byte.
DEVICE u32 two_weights(const float* table, u32 byte, float scale) {
    return pack(times(table[byte >> 4 & 15], scale), times(table[byte & 15], scale));
}

// nf4_dequantize  to[i] = bf16(table[code] scale) of value start + i
// codes and scales of the matrix; to (len) bf16
// grid ceil(len / 2048), block 256, eight values a thread; needs start % 8 == 0 and 16-byte alignment
// roofline 2.56 len bytes
KERNEL __launch_bounds__(256) nf4_dequantize(NF4_PARAMETERS, bf16* to, u64 start, u64 len) {
    SHARED float table[16];
    share_table(table, tables);
    u64 at = flat_eight();
    if (at >= len) return;
    int count = eight_or_rest(at, len);
    const u8* from = codes + (start + at) / 2;
    float scale = scale_of(SCALE_ARGUMENTS, (start + at) / SCALE_BLOCK);
    if (count == 8) {
        u32 four = *(const u32*)from;
        Eight eight;
#pragma unroll
        for (int i = 0; i < 4; i++) eight.pair[i] = two_weights(table, four >> 8 * i, scale);
        return store(to + at, eight);
    }
    for (int i = 0; i < count; i++) {
        u32 byte = from[i / 2];
        store(to + at + i, times(table[i % 2 ? byte & 15 : byte >> 4], scale));
    }
}

// ---- the GEMM: matmul.cu's tile of few rows, with W's codes in shared memory instead of its values ----

// The stages hold x as Tile does. Of W, a line has 64 bytes of codes; padded to 80, eight lines use different banks.
using Few = Tile<16, 32, 128, 1, 2, 6>;
#define CODE_LINE 80
#define STAGE_BYTES (Few::A::BYTES + Few::COLUMNS * CODE_LINE)

// The scales of a lane's columns of W: two in a slice for each mma.
struct Scales {
    float at[Few::MMA_OVER][2];
};

// Copies a slice of x and of W's codes to a stage, if there is one, as a group.
DEVICE void copy_codes(u8* stage, Few::CopierA& from_x, const u8* codes, int column, int n, int k, int slice, bool is_there) {
    if (is_there) {
        Few::CopierA::copy(from_x, stage, 0, Few::DEPTH);
#pragma unroll
        for (int j = 0; j < Few::COLUMNS * 4; j += Few::THREADS) {
            int i = j + threadIdx.x;
            int line = i / 4, chunk = i % 4, at = slice * Few::DEPTH + 32 * chunk;
            const u8* from = codes + ((i64)(column + line) * k + at) / 2;
            copy_async(stage + Few::A::BYTES + line * CODE_LINE + chunk * 16, from, column + line < n && at < k);
        }
    }
    copy_commit();
}

// Values outside W count as zero.
DEVICE Scales load_scales(SCALE_PARAMETERS, int column, int n, int k, int slice) {
    Scales s;
#pragma unroll
    for (int j = 0; j < Few::MMA_OVER; j++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int line = column + 8 * j, at = slice * Few::DEPTH + half * SCALE_BLOCK;
            bool is_there = line < n && at < k;
            s.at[j][half] = is_there ? scale_of(SCALE_ARGUMENTS, ((u64)line * k + at) / SCALE_BLOCK) : 0.0f;
        }
    }
    return s;
}

// The products of a slice, in ascending steps of 16.
DEVICE void multiply_codes(Sums<Few>& sums, const u8* stage, const float* table, const Scales& scales) {
    u32 g = lane_id() / 4, q = lane_id() % 4;
    const u8* lines = stage + Few::A::BYTES + (warp_id() * Few::WARP_COLUMNS + g) * CODE_LINE;
#pragma unroll
    for (int step = 0; step < Few::STEPS; step++) {
        u32 a[4];
        Few::A::load_a(a, stage, 0, step);
#pragma unroll
        for (int j = 0; j < Few::MMA_OVER; j++) {
            // The 16 values of the step; a lane's are in byte q of either half.
            u64 codes = *(const u64*)(lines + 8 * j * CODE_LINE + 8 * step);
            float scale = scales.at[j][step / 4];
            u32 low = (u32)codes >> 8 * q, high = (u32)(codes >> 32) >> 8 * q;
            u32 b[2] = {two_weights(table, low, scale), two_weights(table, high, scale)};
            mma(sums.at[0][j], a, b);
        }
    }
}

// nf4_matmul_16  y[m][n] = c[m][n] + (sum_k x[m][k] W[n][k] + bias[n]), y rounded once: the bits of matmul_forward_16
// x (m, k) bf16, W (n, k) in nf4, bias (n) or null, y (m, n) bf16; c (m, n) or null, with the stride of y: y itself, or a
// matrix that shares no memory with it
// grid ceil(m / 16) ceil(n / 32), block 64; needs k % 64 == 0, a stride of x % 8 == 0, and 16-byte alignment
// roofline 0.56 n k bytes for few rows
KERNEL __launch_bounds__(64) nf4_matmul_16(const bf16* x, NF4_PARAMETERS, const bf16* bias, const bf16* c, bf16* y, int m,
                                           int n, int k, int x_stride, int y_stride) {
    DYNAMIC_SHARED(shared);
    SHARED float table[16];
    share_table(table, tables);
    int tile_row, tile_column;
    tile_of_block(blockIdx.x, (m + Few::ROWS - 1) / Few::ROWS, (n + Few::COLUMNS - 1) / Few::COLUMNS, tile_row, tile_column);
    int slices = (k + Few::DEPTH - 1) / Few::DEPTH, column = tile_column * Few::COLUMNS;
    int own_column = column + warp_id() * Few::WARP_COLUMNS + lane_id() / 4;
    auto from_x = Few::CopierA::start(Operand{x, x_stride, m, k}, tile_row * Few::ROWS, 0);
    constexpr int AHEAD = Few::STAGES - 1;
    for (int i = 0; i < AHEAD; i++) copy_codes(shared + i * STAGE_BYTES, from_x, codes, column, n, k, i, i < slices);
    Scales now = load_scales(SCALE_ARGUMENTS, own_column, n, k, 0);
    Sums<Few> sums = {};
    int read = 0, write = AHEAD;
    for (int slice = 0; slice < slices; slice++) {
        // Scales come a slice ahead, as they are not copied asynchronously.
        Scales next = load_scales(SCALE_ARGUMENTS, own_column, n, k, slice + 1);
        copy_wait<AHEAD - 1>();
        SYNC_BLOCK();  // this slice is there, and no warp reads the previous one
        copy_codes(shared + write * STAGE_BYTES, from_x, codes, column, n, k, slice + AHEAD, slice + AHEAD < slices);
        multiply_codes(sums, shared + read * STAGE_BYTES, table, now);
        now = next;
        read = read == Few::STAGES - 1 ? 0 : read + 1;
        write = write == Few::STAGES - 1 ? 0 : write + 1;
    }
    SYNC_BLOCK();
    Result<bf16> result{y, y_stride, m, n, bias, c};
    put_sums(shared, sums, result, tile_row, tile_column);
}
