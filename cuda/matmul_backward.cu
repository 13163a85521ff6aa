// The gradients of y = x W^T + bias: of x, of W, of the bias. Deterministic: every output is one chain, as in `matmul.cu`.
#include "matmul.cuh"

// The length of a chain rounded up to a whole number of slices of both families: both have the same steps, also over
// zeros.
#define CHAIN 64

//                    rows columns depth warps stages; shared memory; blocks on an SM of an A100 (164 KiB)
template <bool RAGGED> using Input64 = Tile<64, 64, 64, 2, 2, 5, ALONG, ACROSS, RAGGED>;     // 80 KiB, 2
template <bool RAGGED> using Input128 = Tile<128, 128, 32, 2, 2, 4, ALONG, ACROSS, RAGGED>;  // 64 KiB, 2 (registers)
template <bool RAGGED> using InputBroad = Tile<128, 256, 32, 2, 4, 4, ALONG, ACROSS, RAGGED>;  // 96 KiB, 1 (registers)
using Weight64 = Tile<64, 64, 64, 2, 2, 5, ACROSS, ACROSS>;                                  // 80 KiB, 2
using Weight128 = Tile<128, 128, 32, 2, 2, 4, ACROSS, ACROSS>;                               // 64 KiB, 2 (registers)
using WeightBroad = Tile<128, 256, 32, 2, 4, 4, ACROSS, ACROSS>;                             // 96 KiB, 1 (registers)
// For an H200 (227 KiB), as in matmul.cu.
template <bool RAGGED> using WideInput128 = Tile<128, 128, 64, 8, 1, 6, ALONG, ACROSS, RAGGED>;  // 192 KiB, 1
template <bool RAGGED> using WideInput256 = Tile<256, 128, 64, 16, 1, 4, ALONG, ACROSS, RAGGED>; // 192 KiB, 1
using WideWeight128 = Tile<128, 128, 64, 8, 1, 6, ACROSS, ACROSS>;                               // 192 KiB, 1
using WideWeight256 = Tile<256, 128, 64, 16, 1, 4, ACROSS, ACROSS>;                              // 192 KiB, 1

#define INPUT_PARAMETERS                                                                                             \
    const bf16 *dy, const bf16 *w, bf16 *dx, int m, int n, int k, int dy_stride, int w_stride, int dx_stride, int add
#define INPUT_ARGUMENTS dy, w, dx, m, n, k, dy_stride, w_stride, dx_stride, add
#define WEIGHT_PARAMETERS                                                                                            \
    const bf16 *dy, const bf16 *x, float *dw, int m, int n, int k, int dy_stride, int x_stride, int dw_stride
#define WEIGHT_ARGUMENTS dy, x, dw, m, n, k, dy_stride, x_stride, dw_stride

template <class TILE> DEVICE void matmul_backward_input(INPUT_PARAMETERS) {
    product<TILE>(blockIdx.x, Operand{dy, dy_stride, m, n}, Operand{w, w_stride, n, k},
                  (n + CHAIN - 1) / CHAIN * (CHAIN / TILE::DEPTH),
                  Result<bf16>{dx, dx_stride, m, k, nullptr, add ? dx : nullptr});
}

template <class TILE> DEVICE void matmul_backward_weight(WEIGHT_PARAMETERS) {
    product<TILE>(blockIdx.x, Operand{dy, dy_stride, m, n}, Operand{x, x_stride, m, k},
                  (m + CHAIN - 1) / CHAIN * (CHAIN / TILE::DEPTH), Result<float>{dw, dw_stride, n, k, nullptr, dw});
}

// matmul_backward_input_64  dx[m][k] (+)= sum_n dy[m][n] W[n][k]
// dy (m, n) bf16, W (n, k) bf16, dx (m, k) bf16
// grid ceil(m / 64) ceil(k / 64), block 128; needs n and k % 8 == 0, strides of dy and W % 8 == 0, 16-byte alignment
// roofline 2 m n k flops
KERNEL __launch_bounds__(128) matmul_backward_input_64(INPUT_PARAMETERS) {
    matmul_backward_input<Input64<false>>(INPUT_ARGUMENTS);
}

// matmul_backward_input_ragged_64  as above, the same bits, for any n (a vocabulary); dy's rows may hold anything past
// column n
KERNEL __launch_bounds__(128) matmul_backward_input_ragged_64(INPUT_PARAMETERS) {
    matmul_backward_input<Input64<true>>(INPUT_ARGUMENTS);
}

// matmul_backward_input_128  as above, the same bits; grid ceil(m / 128) ceil(k / 128), n % 8 == 0
KERNEL __launch_bounds__(128) matmul_backward_input_128(INPUT_PARAMETERS) {
    matmul_backward_input<Input128<false>>(INPUT_ARGUMENTS);
}

// matmul_backward_input_ragged_128  as above, the same bits; grid ceil(m / 128) ceil(k / 128), any n
KERNEL __launch_bounds__(128) matmul_backward_input_ragged_128(INPUT_PARAMETERS) {
    matmul_backward_input<Input128<true>>(INPUT_ARGUMENTS);
}

// matmul_backward_input_broad_128  as above, the same bits; grid ceil(m / 128) ceil(k / 256), block 256, n % 8 == 0
KERNEL __launch_bounds__(256, 1) matmul_backward_input_broad_128(INPUT_PARAMETERS) {
    matmul_backward_input<InputBroad<false>>(INPUT_ARGUMENTS);
}

// matmul_backward_input_ragged_broad_128  as above, the same bits, any n
KERNEL __launch_bounds__(256, 1) matmul_backward_input_ragged_broad_128(INPUT_PARAMETERS) {
    matmul_backward_input<InputBroad<true>>(INPUT_ARGUMENTS);
}

// matmul_backward_input_128x128  as above, the same bits; grid ceil(m / 128) ceil(k / 128), block 256, n % 8 == 0
KERNEL __launch_bounds__(256, 1) matmul_backward_input_128x128(INPUT_PARAMETERS) {
    matmul_backward_input<WideInput128<false>>(INPUT_ARGUMENTS);
}

// matmul_backward_input_ragged_128x128  as above, the same bits, any n
KERNEL __launch_bounds__(256, 1) matmul_backward_input_ragged_128x128(INPUT_PARAMETERS) {
    matmul_backward_input<WideInput128<true>>(INPUT_ARGUMENTS);
}

// matmul_backward_input_256x128  as above, the same bits; grid ceil(m / 256) ceil(k / 128), block 512, n % 8 == 0
KERNEL __launch_bounds__(512, 1) matmul_backward_input_256x128(INPUT_PARAMETERS) {
    matmul_backward_input<WideInput256<false>>(INPUT_ARGUMENTS);
}

// matmul_backward_input_ragged_256x128  as above, the same bits, any n
KERNEL __launch_bounds__(512, 1) matmul_backward_input_ragged_256x128(INPUT_PARAMETERS) {
    matmul_backward_input<WideInput256<true>>(INPUT_ARGUMENTS);
}

// matmul_backward_weight_64  dW[n][k] += sum_m dy[m][n] x[m][k]
// dy (m, n) bf16, x (m, k) bf16, dW (n, k) f32
// grid ceil(n / 64) ceil(k / 64), block 128; needs k % 8 == 0, strides of dy and x % 8 == 0, 16-byte alignment
// roofline 2 m n k flops
KERNEL __launch_bounds__(128) matmul_backward_weight_64(WEIGHT_PARAMETERS) {
    matmul_backward_weight<Weight64>(WEIGHT_ARGUMENTS);
}

// matmul_backward_weight_128  as above, the same bits; grid ceil(n / 128) ceil(k / 128)
KERNEL __launch_bounds__(128) matmul_backward_weight_128(WEIGHT_PARAMETERS) {
    matmul_backward_weight<Weight128>(WEIGHT_ARGUMENTS);
}

// matmul_backward_weight_broad_128  as above, the same bits; grid ceil(n / 128) ceil(k / 256), block 256
KERNEL __launch_bounds__(256, 1) matmul_backward_weight_broad_128(WEIGHT_PARAMETERS) {
    matmul_backward_weight<WeightBroad>(WEIGHT_ARGUMENTS);
}

// matmul_backward_weight_128x128  as above, the same bits; grid ceil(n / 128) ceil(k / 128), block 256
KERNEL __launch_bounds__(256, 1) matmul_backward_weight_128x128(WEIGHT_PARAMETERS) {
    matmul_backward_weight<WideWeight128>(WEIGHT_ARGUMENTS);
}

// matmul_backward_weight_256x128  as above, the same bits; grid ceil(n / 256) ceil(k / 128), block 512
KERNEL __launch_bounds__(512, 1) matmul_backward_weight_256x128(WEIGHT_PARAMETERS) {
    matmul_backward_weight<WideWeight256>(WEIGHT_ARGUMENTS);
}

// matmul_backward_bias  db[n] += sum_m dy[m][n]
// dy (m, n) bf16, db (n) f32
// grid ceil(n / 32), block 256: four neighbouring threads take 32 columns of a row, 64 rows at a time; then the 64 sums of
// a column are added in order of rows; needs a stride % 8 == 0, 16-byte alignment
// roofline 2 m n bytes
KERNEL __launch_bounds__(256) matmul_backward_bias(const bf16* dy, float* db, int m, int n, int dy_stride) {
    SHARED float sums[64][33];
    int column = blockIdx.x * 32 + threadIdx.x % 4 * 8;
    float sum[8] = {};
    if (column < n) {
#pragma unroll 4
        for (int row = threadIdx.x / 4; row < m; row += 64) {
            Eight eight = *(const Eight*)(dy + (i64)row * dy_stride + column);
            for (int i = 0; i < 4; i++) {
                sum[2 * i] += low_of(eight.pair[i]);
                sum[2 * i + 1] += high_of(eight.pair[i]);
            }
        }
    }
    for (int i = 0; i < 8; i++) sums[threadIdx.x / 4][threadIdx.x % 4 * 8 + i] = sum[i];
    SYNC_BLOCK();
    int mine = blockIdx.x * 32 + threadIdx.x;
    if (threadIdx.x < 32 && mine < n) {
        float all = 0.0f;
        for (int i = 0; i < 64; i++) all += sums[i][threadIdx.x];
        db[mine] += all;
    }
}
