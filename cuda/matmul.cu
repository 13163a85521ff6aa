// y = x W^T + bias, in tiles of 16, 32, 64 and 128 rows; every output has the same bits in every family of tiles.
//
// Few rows (16, 32, 64): the time is that of reading W once. Tiles are narrow, so that n = 4096 already keeps all SMs
// reading; a block has 60 KiB of W and x in flight. For the same reason, GEMMs of the same x share one launch. Tensor
// cores are mostly idle: padding one or two rows to 16 costs nothing. Many rows (128): 64 x 64 outputs per warp, 64
// tensor core instructions for 16 loads of fragments. For 65 to 256 rows, tall tiles (128 x 64) read three quarters of
// the bytes of 64 x 64 tiles if they fill all SMs. A broad tile (128 x 256) reads three quarters of the bytes of two
// square ones.
//
// On sm_90a the wide tiles replace them from 33 rows on: there one block occupies an SM, with 110 to 170 KiB in flight.
//
// The tiles of few rows also compute the gated linear unit of two GEMMs (matmul_glu.cuh), as launches matter in
// decoding.
#include "matmul_glu.cuh"

// k rounded up to a whole number of slices of every family: all of them have the same steps, also over zeros.
#define CHAIN 128

//               rows columns depth warps stages; shared memory; blocks on an SM of an A100 (164 KiB)
using Forward16 = Tile<16, 32, 128, 1, 2, 6>;    // 72 KiB, 2
using Forward32 = Tile<32, 64, 64, 1, 4, 6>;     // 72 KiB, 2
using Forward64 = Tile<64, 64, 64, 2, 2, 5>;     // 80 KiB, 2
using Narrow32 = Tile<32, 32, 128, 1, 2, 5>;     // 80 KiB, 2
using Narrow64 = Tile<64, 32, 64, 2, 2, 6>;      // 72 KiB, 2
using Tall128 = Tile<128, 64, 64, 2, 2, 3>;      // 72 KiB, 2
using Forward128 = Tile<128, 128, 32, 2, 2, 4>;  // 64 KiB, 2 (registers)
using Broad128 = Tile<128, 256, 32, 2, 4, 4>;    // 96 KiB, 1 (registers)
// For an H200 (227 KiB).
using Wide64x32 = Tile<64, 32, 64, 4, 1, 12>;     // 144 KiB, 1
using Wide64x128 = Tile<64, 128, 64, 4, 1, 8>;    // 192 KiB, 1
using Wide128x128 = Tile<128, 128, 64, 8, 1, 6>;  // 192 KiB, 1
using Wide256x128 = Tile<256, 128, 64, 16, 1, 4>; // 192 KiB, 1

#define PARAMETERS(Y)                                                                                                  \
    const bf16 *x, const bf16 *w, const bf16 *bias, const Y *c, Y *y, int m, int n, int k, int x_stride, int w_stride, \
        int y_stride, const bf16 *w_1, const bf16 *bias_1, Y *y_1, int n_1, const bf16 *w_2, const bf16 *bias_2, Y *y_2, int n_2
#define ARGUMENTS \
    x, w, bias, c, y, m, n, k, x_stride, w_stride, y_stride, w_1, bias_1, y_1, n_1, w_2, bias_2, y_2, n_2

// Blocks of the first GEMM precede those of the second, and these precede those of the third.
template <class TILE, class Y> DEVICE void matmul_forward(PARAMETERS(Y)) {
    int block = blockIdx.x, first = tiles_of<TILE>(m, n), second = tiles_of<TILE>(m, n_1);
    if (block >= first) {
        bool is_third = block >= first + second;
        block -= is_third ? first + second : first;
        w = is_third ? w_2 : w_1, bias = is_third ? bias_2 : bias_1, y = is_third ? y_2 : y_1;
        n = y_stride = is_third ? n_2 : n_1;
    }
    product<TILE>(block, Operand{x, x_stride, m, k}, Operand{w, w_stride, n, k},
                  (k + CHAIN - 1) / CHAIN * (CHAIN / TILE::DEPTH), Result<Y>{y, y_stride, m, n, bias, c});
}

// matmul_forward_16  y[m][n] = c[m][n] + (sum_k x[m][k] W[n][k] + bias[n]), y rounded once
// x (m, k), W (n, k), bias (n) or null, y (m, n) bf16; strides in values
// c (m, n) or null, with the strides of y: y itself, or a matrix that shares no memory with it
// y_i[m][n_i] of W_i and bias_i alike: up to two more products of x, without gaps between rows of y_i; n_i 0: none
// grid ceil(m / 16) ceil(n / 32), and as many for each n_i, block 64; needs k % 8 == 0, strides of x and W % 8 == 0, their 16-byte
// alignment
// roofline 2 n k bytes for few rows, 2 m n k flops for many
KERNEL __launch_bounds__(64, 2) matmul_forward_16(PARAMETERS(bf16)) { matmul_forward<Forward16>(ARGUMENTS); }

// matmul_forward_f32_16  as above, y f32: the sums as they are
KERNEL __launch_bounds__(64, 2) matmul_forward_f32_16(PARAMETERS(float)) { matmul_forward<Forward16>(ARGUMENTS); }

// matmul_forward_32  as matmul_forward_16; grid ceil(m / 32) ceil(n / 64), block 128
KERNEL __launch_bounds__(128) matmul_forward_32(PARAMETERS(bf16)) { matmul_forward<Forward32>(ARGUMENTS); }

// matmul_forward_f32_32  as above, y f32
KERNEL __launch_bounds__(128) matmul_forward_f32_32(PARAMETERS(float)) { matmul_forward<Forward32>(ARGUMENTS); }

// matmul_forward_64  as matmul_forward_16; grid ceil(m / 64) ceil(n / 64), block 128
KERNEL __launch_bounds__(128) matmul_forward_64(PARAMETERS(bf16)) { matmul_forward<Forward64>(ARGUMENTS); }

// matmul_forward_f32_64  as above, y f32
KERNEL __launch_bounds__(128) matmul_forward_f32_64(PARAMETERS(float)) { matmul_forward<Forward64>(ARGUMENTS); }

// matmul_forward_narrow_32  as matmul_forward_16; grid ceil(m / 32) ceil(n / 32), block 64
KERNEL __launch_bounds__(64, 2) matmul_forward_narrow_32(PARAMETERS(bf16)) { matmul_forward<Narrow32>(ARGUMENTS); }

// matmul_forward_f32_narrow_32  as above, y f32
KERNEL __launch_bounds__(64, 2) matmul_forward_f32_narrow_32(PARAMETERS(float)) { matmul_forward<Narrow32>(ARGUMENTS); }

// matmul_forward_narrow_64  as matmul_forward_16; grid ceil(m / 64) ceil(n / 32), block 128
KERNEL __launch_bounds__(128) matmul_forward_narrow_64(PARAMETERS(bf16)) { matmul_forward<Narrow64>(ARGUMENTS); }

// matmul_forward_f32_narrow_64  as above, y f32
KERNEL __launch_bounds__(128) matmul_forward_f32_narrow_64(PARAMETERS(float)) { matmul_forward<Narrow64>(ARGUMENTS); }

// matmul_forward_tall_128  as matmul_forward_16; grid ceil(m / 128) ceil(n / 64), block 128
KERNEL __launch_bounds__(128) matmul_forward_tall_128(PARAMETERS(bf16)) { matmul_forward<Tall128>(ARGUMENTS); }

// matmul_forward_f32_tall_128  as above, y f32
KERNEL __launch_bounds__(128) matmul_forward_f32_tall_128(PARAMETERS(float)) { matmul_forward<Tall128>(ARGUMENTS); }

// matmul_forward_128  as matmul_forward_16; grid ceil(m / 128) ceil(n / 128), block 128
KERNEL __launch_bounds__(128) matmul_forward_128(PARAMETERS(bf16)) { matmul_forward<Forward128>(ARGUMENTS); }

// matmul_forward_f32_128  as above, y f32
KERNEL __launch_bounds__(128) matmul_forward_f32_128(PARAMETERS(float)) { matmul_forward<Forward128>(ARGUMENTS); }

// matmul_forward_broad_128  as matmul_forward_16; grid ceil(m / 128) ceil(n / 256), block 256
KERNEL __launch_bounds__(256, 1) matmul_forward_broad_128(PARAMETERS(bf16)) { matmul_forward<Broad128>(ARGUMENTS); }

// matmul_forward_f32_broad_128  as above, y f32
KERNEL __launch_bounds__(256, 1) matmul_forward_f32_broad_128(PARAMETERS(float)) { matmul_forward<Broad128>(ARGUMENTS); }

// matmul_forward_64x32  as matmul_forward_16; grid ceil(m / 64) ceil(n / 32), block 128
KERNEL __launch_bounds__(128, 1) matmul_forward_64x32(PARAMETERS(bf16)) {
    matmul_forward<Wide64x32>(ARGUMENTS);
}

// matmul_forward_f32_64x32  as above, y f32
KERNEL __launch_bounds__(128, 1) matmul_forward_f32_64x32(PARAMETERS(float)) {
    matmul_forward<Wide64x32>(ARGUMENTS);
}

// matmul_forward_64x128  as matmul_forward_16; grid ceil(m / 64) ceil(n / 128), block 128
KERNEL __launch_bounds__(128, 1) matmul_forward_64x128(PARAMETERS(bf16)) {
    matmul_forward<Wide64x128>(ARGUMENTS);
}

// matmul_forward_f32_64x128  as above, y f32
KERNEL __launch_bounds__(128, 1) matmul_forward_f32_64x128(PARAMETERS(float)) {
    matmul_forward<Wide64x128>(ARGUMENTS);
}

// matmul_forward_128x128  as matmul_forward_16; grid ceil(m / 128) ceil(n / 128), block 256
KERNEL __launch_bounds__(256, 1) matmul_forward_128x128(PARAMETERS(bf16)) {
    matmul_forward<Wide128x128>(ARGUMENTS);
}

// matmul_forward_f32_128x128  as above, y f32
KERNEL __launch_bounds__(256, 1) matmul_forward_f32_128x128(PARAMETERS(float)) {
    matmul_forward<Wide128x128>(ARGUMENTS);
}

// matmul_forward_256x128  as matmul_forward_16; grid ceil(m / 256) ceil(n / 128), block 512
KERNEL __launch_bounds__(512, 1) matmul_forward_256x128(PARAMETERS(bf16)) {
    matmul_forward<Wide256x128>(ARGUMENTS);
}

// matmul_forward_f32_256x128  as above, y f32
KERNEL __launch_bounds__(512, 1) matmul_forward_f32_256x128(PARAMETERS(float)) {
    matmul_forward<Wide256x128>(ARGUMENTS);
}

#define PARAMETERS_GLU                                                                                                   \
    const bf16 *x, const bf16 *gate, const bf16 *gate_bias, const bf16 *up, const bf16 *up_bias, bf16 *y, int m, int n, int k, \
        int x_stride, int w_stride, int y_stride
#define ARGUMENTS_GLU x, gate, gate_bias, up, up_bias, y, m, n, k, x_stride, w_stride, y_stride

template <class TILE, class ACT> DEVICE void matmul_glu(PARAMETERS_GLU) {
    product_glu<TILE, ACT>(blockIdx.x, Operand{x, x_stride, m, k}, Operand{gate, w_stride, n, k}, up, up_bias,
                         (k + CHAIN - 1) / CHAIN * (CHAIN / TILE::DEPTH),
                         Result<bf16>{y, y_stride, m, n, gate_bias, nullptr});
}

// matmul_swiglu_16  y[m][n] = silu(gate) up, with gate[m][n] = sum_k x[m][k] Wgate[n][k] + gate_bias[n] and up alike, both rounded
// x (m, k), Wgate and Wup (n, k), biases (n) or null, y (m, n) bf16; strides in values, both W have one
// grid ceil(m / 16) ceil(n / 16), block 64; needs k % 8 == 0, strides of x and W % 8 == 0, their 16-byte alignment
// roofline 4 n k bytes
KERNEL __launch_bounds__(64, 2) matmul_swiglu_16(PARAMETERS_GLU) { matmul_glu<Forward16, Silu>(ARGUMENTS_GLU); }

// matmul_swiglu_32  as matmul_swiglu_16; grid ceil(m / 32) ceil(n / 32), block 128
KERNEL __launch_bounds__(128) matmul_swiglu_32(PARAMETERS_GLU) { matmul_glu<Forward32, Silu>(ARGUMENTS_GLU); }

// matmul_swiglu_64  as matmul_swiglu_16; grid ceil(m / 64) ceil(n / 32), block 128
KERNEL __launch_bounds__(128) matmul_swiglu_64(PARAMETERS_GLU) { matmul_glu<Forward64, Silu>(ARGUMENTS_GLU); }

// matmul_swiglu_narrow_32  as matmul_swiglu_16; grid ceil(m / 32) ceil(n / 16), block 64
KERNEL __launch_bounds__(64, 2) matmul_swiglu_narrow_32(PARAMETERS_GLU) { matmul_glu<Narrow32, Silu>(ARGUMENTS_GLU); }

// matmul_swiglu_narrow_64  as matmul_swiglu_16; grid ceil(m / 64) ceil(n / 16), block 128
KERNEL __launch_bounds__(128) matmul_swiglu_narrow_64(PARAMETERS_GLU) { matmul_glu<Narrow64, Silu>(ARGUMENTS_GLU); }
