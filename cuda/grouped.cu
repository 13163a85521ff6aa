// Products of groups of rows, each with a matrix of its own: the experts of a mixture. The bits of a group are those of matmul.cu and
// matmul_backward.cu on its rows: the tiles and the chains are the same.
//
// Only the GPU knows the groups: the rows of group e are ends[e]..ends[e + 1]. So a grid has as many tiles as any groups of that many
// rows may need, and a block without a tile ends at once. A captured graph replays it for other groups.
#include "matmul.cuh"

// The length of a chain is rounded up as in matmul.cu and in matmul_backward.cu.
#define FORWARD_CHAIN 128
#define BACKWARD_CHAIN 64

//                          rows columns depth warps stages, as there
using Forward16 = Tile<16, 32, 128, 1, 2, 6>;
using Forward64 = Tile<64, 64, 64, 2, 2, 5>;
using Forward128 = Tile<128, 128, 32, 2, 2, 4>;
using Wide128x128 = Tile<128, 128, 64, 8, 1, 6>;
using Input64 = Tile<64, 64, 64, 2, 2, 5, ALONG, ACROSS>;
using Input128 = Tile<128, 128, 32, 2, 2, 4, ALONG, ACROSS>;
using WideInput128 = Tile<128, 128, 64, 8, 1, 6, ALONG, ACROSS>;
using Weight64 = Tile<64, 64, 64, 2, 2, 5, ACROSS, ACROSS>;
using Weight128 = Tile<128, 128, 32, 2, 2, 4, ACROSS, ACROSS>;
using WideWeight128 = Tile<128, 128, 64, 8, 1, 6, ACROSS, ACROSS>;

// A group, its rows, and its first tile of rows. `index` is -1 if there is none.
struct Group {
    int index, first, rows, tile;
};

DEVICE int tiles_of_rows(const u32* ends, int group, int of_tile) {
    return ((int)(ends[group + 1] - ends[group]) + of_tile - 1) / of_tile;
}

// The group of tile number `tile`, if each group begins with a new tile of `of_tile` rows. Each lane takes neighbouring groups.
DEVICE Group group_of(const u32* ends, int groups, int tile, int of_tile) {
    int each = (groups + WARP - 1) / WARP, begin = lane_id() * each, end = begin + each < groups ? begin + each : groups;
    int own = 0, found = 0, at = 0;
    for (int e = begin; e < end; e++) own += tiles_of_rows(ends, e, of_tile);
    int sum = own;
    for (int lanes = 1; lanes < WARP; lanes *= 2) {
        int lower = shuffle(sum, lane_id() >= lanes ? lane_id() - lanes : 0);
        if (lane_id() >= lanes) sum += lower;
    }
    int before = sum - own;
    if (before <= tile && tile < sum) {
        for (int e = begin; !found; e++) {
            int tiles = tiles_of_rows(ends, e, of_tile);
            if (tile < before + tiles) found = e + 1, at = before;
            before += tiles;
        }
    }
    // One lane has found it, or none.
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
        found += shuffle_xor(found, lanes);
        at += shuffle_xor(at, lanes);
    }
    if (!found) return Group{-1, 0, 0, 0};
    int first = (int)ends[found - 1];
    return Group{found - 1, first, (int)ends[found] - first, at};
}

#define FORWARD_PARAMETERS                                                                                              \
    const bf16 *x, const u32 *ends, const bf16 *w, const bf16 *w_1, bf16 *y, bf16 *y_1, int lists, int groups, int n, int k, \
        i64 apart
#define FORWARD_ARGUMENTS x, ends, w, w_1, y, y_1, lists, groups, n, k, apart

template <class TILE> DEVICE void grouped_forward(FORWARD_PARAMETERS) {
    int over = (n + TILE::COLUMNS - 1) / TILE::COLUMNS * lists;
    Group group = group_of(ends, groups, blockIdx.x / over, TILE::ROWS);
    if (group.index < 0) return;
    int block = blockIdx.x - group.tile * over, tiles = tiles_of<TILE>(group.rows, n);
    if (block >= tiles) block -= tiles, w = w_1, y = y_1;
    product<TILE>(block, Operand{x + (i64)group.first * k, k, group.rows, k}, Operand{w + group.index * apart, k, n, k},
                  (k + FORWARD_CHAIN - 1) / FORWARD_CHAIN * (FORWARD_CHAIN / TILE::DEPTH),
                  Result<bf16>{y + (i64)group.first * n, n, group.rows, n, nullptr, nullptr});
}

// grouped_forward_16  y[i][n] = sum_k x[i][k] W_e[n][k] for the rows i of group e
// x (s, k), W_e (n, k) `apart` values after the one before, y (s, n) bf16; ends (groups + 1) u32; w_1 and y_1 alike if there are two `lists`
// grid tiles of 16 rows of any groups of s rows, times lists ceil(n / 32); block 64; needs k % 8 == 0, 16-byte alignment
// roofline 2 groups n k bytes for few rows, 2 s n k flops for many
KERNEL __launch_bounds__(64, 2) grouped_forward_16(FORWARD_PARAMETERS) { grouped_forward<Forward16>(FORWARD_ARGUMENTS); }

// grouped_forward_64  as above, the same bits; grid of 64 x 64 tiles, block 128
KERNEL __launch_bounds__(128) grouped_forward_64(FORWARD_PARAMETERS) { grouped_forward<Forward64>(FORWARD_ARGUMENTS); }

// grouped_forward_128  as above, the same bits; grid of 128 x 128 tiles, block 128
KERNEL __launch_bounds__(128) grouped_forward_128(FORWARD_PARAMETERS) { grouped_forward<Forward128>(FORWARD_ARGUMENTS); }

// grouped_forward_128x128  as above, the same bits; grid of 128 x 128 tiles, block 256
KERNEL __launch_bounds__(256, 1) grouped_forward_128x128(FORWARD_PARAMETERS) {
    grouped_forward<Wide128x128>(FORWARD_ARGUMENTS);
}

#define INPUT_PARAMETERS \
    const bf16 *dy, const u32 *ends, const bf16 *w, bf16 *dx, int groups, int n, int k, i64 apart, int add
#define INPUT_ARGUMENTS dy, ends, w, dx, groups, n, k, apart, add

template <class TILE> DEVICE void grouped_backward_input(INPUT_PARAMETERS) {
    int over = (k + TILE::COLUMNS - 1) / TILE::COLUMNS;
    Group group = group_of(ends, groups, blockIdx.x / over, TILE::ROWS);
    if (group.index < 0) return;
    bf16* own = dx + (i64)group.first * k;
    product<TILE>(blockIdx.x - group.tile * over, Operand{dy + (i64)group.first * n, n, group.rows, n},
                  Operand{w + group.index * apart, k, n, k},
                  (n + BACKWARD_CHAIN - 1) / BACKWARD_CHAIN * (BACKWARD_CHAIN / TILE::DEPTH),
                  Result<bf16>{own, k, group.rows, k, nullptr, add ? own : nullptr});
}

// grouped_backward_input_64  dx[i][k] (+)= sum_n dy[i][n] W_e[n][k] for the rows i of group e
// dy (s, n), W_e (n, k) `apart` values after the one before, dx (s, k) bf16; ends (groups + 1) u32
// grid tiles of 64 rows of any groups of s rows, times ceil(k / 64); block 128; needs n and k % 8 == 0, 16-byte alignment
// roofline 2 s n k flops
KERNEL __launch_bounds__(128) grouped_backward_input_64(INPUT_PARAMETERS) {
    grouped_backward_input<Input64>(INPUT_ARGUMENTS);
}

// grouped_backward_input_128  as above, the same bits; grid of 128 x 128 tiles
KERNEL __launch_bounds__(128) grouped_backward_input_128(INPUT_PARAMETERS) {
    grouped_backward_input<Input128>(INPUT_ARGUMENTS);
}

// grouped_backward_input_128x128  as above, the same bits; grid of 128 x 128 tiles, block 256
KERNEL __launch_bounds__(256, 1) grouped_backward_input_128x128(INPUT_PARAMETERS) {
    grouped_backward_input<WideInput128>(INPUT_ARGUMENTS);
}

#define WEIGHT_PARAMETERS const bf16 *dy, const bf16 *x, const u32 *ends, float *dw, int n, int k, i64 apart
#define WEIGHT_ARGUMENTS dy, x, ends, dw, n, k, apart

template <class TILE> DEVICE void grouped_backward_weight(WEIGHT_PARAMETERS) {
    int tiles = tiles_of<TILE>(n, k), e = blockIdx.x / tiles;
    int first = (int)ends[e], rows = (int)ends[e + 1] - first;
    if (rows == 0) return;
    float* own = dw + e * apart;
    product<TILE>(blockIdx.x - e * tiles, Operand{dy + (i64)first * n, n, rows, n}, Operand{x + (i64)first * k, k, rows, k},
                  (rows + BACKWARD_CHAIN - 1) / BACKWARD_CHAIN * (BACKWARD_CHAIN / TILE::DEPTH),
                  Result<float>{own, k, n, k, nullptr, own});
}

// grouped_backward_weight_64  dW_e[n][k] += sum_i dy[i][n] x[i][k] over the rows i of group e
// dy (s, n), x (s, k) bf16, dW_e (n, k) f32 `apart` values after the one before; ends (groups + 1) u32
// grid groups ceil(n / 64) ceil(k / 64), block 128; needs n and k % 8 == 0, 16-byte alignment
// roofline 2 s n k flops
KERNEL __launch_bounds__(128) grouped_backward_weight_64(WEIGHT_PARAMETERS) {
    grouped_backward_weight<Weight64>(WEIGHT_ARGUMENTS);
}

// grouped_backward_weight_128  as above, the same bits; grid of 128 x 128 tiles
KERNEL __launch_bounds__(128) grouped_backward_weight_128(WEIGHT_PARAMETERS) {
    grouped_backward_weight<Weight128>(WEIGHT_ARGUMENTS);
}

// grouped_backward_weight_128x128  as above, the same bits; grid of 128 x 128 tiles, block 256
KERNEL __launch_bounds__(256, 1) grouped_backward_weight_128x128(WEIGHT_PARAMETERS) {
    grouped_backward_weight<WideWeight128>(WEIGHT_ARGUMENTS);
}
