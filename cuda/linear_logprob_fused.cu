// Statistics of logits = h W^T that are never stored: the head's GEMM followed by the softmax, for scoring.
//
// Each logit is one ascending chain of k16 products, so it has the bits of the exact GEMM. The order of the sums is
// that of softmax.cuh, so the statistics equal those of `linear_logprob_stats_f32` over stored logits, bitwise.
#include "softmax.cuh"
#include "tile.cuh"

#define FUSED_ROWS 128
#define FUSED_THREADS 256
// 64 x 64 logits per warp: 64 tensor core instructions for 16 loads of fragments. With 64 x 32, shared memory would
// take as long as the tensor cores.
using Logits = Tile<FUSED_ROWS, 256, 32, 2, 4, 4>;
// The shape for wgmma, on an H200.
using WideLogits = Tile<FUSED_ROWS, 128, 64, 8, 1, 4>;
// Floats from row to row of a tile of logits: 8 banks further each, so that a warp's pairs meet no bank twice.
#define LOGITS_STRIDE (STRIP + 8)
// Tiles of rows that run at the same time over the same part of W, so that both stay in L2.
#define GROUP 8
#define ROWS_OF_WARP (FUSED_ROWS * WARP / FUSED_THREADS)

struct alignas(8) Two {
    float at[2];
};

// Writes the warp's logits of this strip to the tile.
template <class TILE> DEVICE void put(const Sums<TILE>& sums, float* logits, int strip) {
    int first = warp_id() % TILE::OVER * TILE::WARP_COLUMNS - strip * STRIP;
    if (first < 0 || first >= STRIP) return;
    int g = lane_id() / 4, q = lane_id() % 4, m0 = warp_id() / TILE::OVER * TILE::WARP_ROWS;
#pragma unroll
    for (int i = 0; i < TILE::MMA_DOWN; i++)
#pragma unroll
        for (int j = 0; j < TILE::MMA_OVER; j++) {
            const float(&d)[4] = sums.at[i][j];
            float* at = logits + (m0 + 16 * i + g) * LOGITS_STRIDE + first + 8 * j + 2 * q;
            *(Two*)at = Two{{d[0], d[1]}};
            *(Two*)(at + 8 * LOGITS_STRIDE) = Two{{d[2], d[3]}};
        }
}

// Adds a strip of logits to the sums of the warp's rows, and stores the targets in it.
DEVICE void take(Part* parts, const float* logits, u64 first, u64 rows, int column, i32 v, float inverse_temperature,
                 const i32* places, float* targets) {
    int mine = column + 4 * lane_id();
#pragma unroll 4
    for (int i = 0; i < ROWS_OF_WARP; i++) {
        int row = warp_id() * ROWS_OF_WARP + i;
        const float* from = logits + row * LOGITS_STRIDE;
        Four four = *(const Four*)(from + 4 * lane_id());
        float z[4];
        for (int j = 0; j < 4; j++) z[j] = mine + j < v ? times(four.at[j], inverse_temperature) : -infinity();
        Part part = parts[row * WARP + lane_id()];
        add(part, z);
        parts[row * WARP + lane_id()] = part;
    }
    int row = warp_id() * ROWS_OF_WARP + lane_id();
    if (lane_id() < ROWS_OF_WARP && first + row < rows) {
        int place = places[first + row] - column;
        if (place >= 0 && place < STRIP && column + place < v) {
            targets[first + row] = logits[row * LOGITS_STRIDE + place];
        }
    }
}

#define FUSED_PARAMETERS                                                                                              \
    const bf16 *h, const bf16 *w, u64 rows, i32 v, i32 width, float inverse_temperature, const i32 *places,           \
        Part *spans, float *targets
#define FUSED_ARGUMENTS h, w, rows, v, width, inverse_temperature, places, spans, targets

template <class TILE> DEVICE void fused(FUSED_PARAMETERS) {
    DYNAMIC_SHARED(room);
    float* logits = (float*)room;                                        // (128, 128)
    Part* parts = (Part*)(room + TILE::STAGES * TILE::STAGE_BYTES);  // (128 rows, 32 lanes)
    static_assert(FUSED_ROWS * LOGITS_STRIDE * 4 <= TILE::STAGES * TILE::STAGE_BYTES, "logits fit where slices were");
    int span_count = (v + SPAN - 1) / SPAN;
    u64 tile_row = (u64)blockIdx.x / (GROUP * span_count) * GROUP + blockIdx.x % GROUP, first = tile_row * FUSED_ROWS;
    if (first >= rows) return;
    int span = blockIdx.x / GROUP % span_count, column = span * SPAN;
    int end = column + SPAN < v ? column + SPAN : v;
    Operand of_h{h + first * width, width, rows - first < FUSED_ROWS ? (int)(rows - first) : FUSED_ROWS, width};
    Part* own = parts + warp_id() * ROWS_OF_WARP * WARP + lane_id();
#pragma unroll
    for (int i = 0; i < ROWS_OF_WARP; i++) own[i * WARP] = no_part();
    for (; column < end; column += TILE::COLUMNS) {
        auto from_h = TILE::CopierA::start(of_h, 0, 0);
        auto from_w = TILE::CopierB::start(Operand{w, width, v, width}, column, 0);
        Sums<TILE> sums = {};
        multiply_slices<TILE>(room, from_h, from_w, (width + TILE::DEPTH - 1) / TILE::DEPTH, sums);
        for (int strip = 0; strip < TILE::COLUMNS / STRIP; strip++) {
            put(sums, logits, strip);
            SYNC_BLOCK();
            take(parts, logits, first, rows, column + strip * STRIP, v, inverse_temperature, places, targets);
            SYNC_BLOCK();
        }
    }
#pragma unroll 1
    for (int i = 0; i < ROWS_OF_WARP; i++) {
        u64 row = first + warp_id() * ROWS_OF_WARP + i;
        Part part = warp_merge(own[i * WARP]);
        if (lane_id() == 0 && row < rows) spans[row * span_count + span] = part;
    }
}

// linear_logprob_fused  sums of each span of 2048 columns of each row of h W^T / temperature, and the targets' logits
// h (rows, K) bf16; W (V, K) bf16; places (rows) i32; spans (rows, ceil(V / 2048), 4) f32; targets (rows) f32, written where
// the place lies in 0..V
// grid ceil(ceil(rows / 128) / 8) 8 ceil(V / 2048), block 256: tiles of 128 rows x 256 columns, 8 warps of 64 x 64, shared
// 160 KiB: four stages of copies, reused for 128 columns of logits at a time, and the lanes' sums of each row; needs
// K % 8 == 0
// roofline 2 rows V K flops
KERNEL __launch_bounds__(FUSED_THREADS, 1) linear_logprob_fused(FUSED_PARAMETERS) { fused<Logits>(FUSED_ARGUMENTS); }

// linear_logprob_fused_wide  as above, the same bits: tiles of 128 columns, 8 warps of 16 x 128, shared 192 KiB
KERNEL __launch_bounds__(FUSED_THREADS, 1) linear_logprob_fused_wide(FUSED_PARAMETERS) { fused<WideLogits>(FUSED_ARGUMENTS); }

// linear_logprob_finish  the statistics of rows from the sums of their spans
// spans (rows, count, 4) f32; targets (rows) f32; places (rows) i32; stats (rows, 4) f32
// grid ceil(rows / 4), block 128: a warp a row
// roofline 16 rows count bytes
KERNEL linear_logprob_finish(const Part* spans, i32 count, const float* targets, const i32* places, u64 rows, i32 v,
                             Stats* stats) {
    u64 row = (u64)blockIdx.x * 4 + warp_id();
    if (row >= rows) return;
    Stats found = finished(merged(spans + row * count, count));
    if (lane_id() > 0) return;
    i32 place = places[row];
    found.target = place >= 0 && place < v ? targets[row] : 0.0f;
    stats[row] = found;
}
