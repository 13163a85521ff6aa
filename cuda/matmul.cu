// y = x W^T + bias, in tiles of 16, 32, 64 and 128 rows; every output has the same bits whatever the family.
//
// Few rows (16, 32, 64): the time is that of reading W once. Tiles are narrow, so that n = 4096 already keeps all SMs reading;
// a block has 60 KiB of W and x under way. Tensor cores wait most of the time: the padding of a row or two to 16 costs
// nothing. Many rows (128): 64 x 64 outputs of a warp, 64 tensor core instructions to 16 loads of fragments.
#include "matmul.cuh"

// Values of k in a whole number of slices of every family: all of them take the same steps, also over zeros.
#define CHAIN 128

//               rows columns depth warps stages; shared memory; blocks on an SM of an A100 (164 KiB)
using Forward16 = Tile<16, 32, 128, 1, 2, 6>;    // 72 KiB, 2
using Forward32 = Tile<32, 64, 64, 1, 4, 6>;     // 72 KiB, 2
using Forward64 = Tile<64, 64, 64, 2, 2, 5>;     // 80 KiB, 2
using Forward128 = Tile<128, 128, 32, 2, 2, 4>;  // 64 KiB, 2 (registers)

DEVICE int slices_of(int k, int depth) { return (k + CHAIN - 1) / CHAIN * (CHAIN / depth); }

template <class TILE, class Y>
DEVICE void matmul_forward(u8* shared, const bf16* x, const bf16* w, const bf16* bias, const Y* c, Y* y, int m, int n, int k,
                           int x_stride, int w_stride, int y_stride) {
    product<TILE>(shared, blockIdx.x, Operand{x, x_stride, m, k}, Operand{w, w_stride, n, k},
                  slices_of(k, TILE::DEPTH), Result<Y>{y, y_stride, m, n, bias, c});
}

// One of several products of the same x.
struct Output {
    const bf16 *w, *bias;
    bf16* y;
    int n, w_stride, y_stride;
};

// The blocks of the first output come first, then those of the second and the third.
template <class TILE>
DEVICE void matmul_forward_each(u8* shared, const bf16* x, int m, int k, int x_stride, Output first, Output second,
                                Output third) {
    int block = blockIdx.x, down = tiles_down<TILE>(m);
    Output one = first;
    if (block >= down * tiles_over<TILE>(first.n)) {
        block -= down * tiles_over<TILE>(first.n);
        one = second;
        if (block >= down * tiles_over<TILE>(second.n)) {
            block -= down * tiles_over<TILE>(second.n);
            one = third;
        }
    }
    product<TILE>(shared, block, Operand{x, x_stride, m, k}, Operand{one.w, one.w_stride, one.n, k},
                  slices_of(k, TILE::DEPTH), Result<bf16>{one.y, one.y_stride, m, one.n, one.bias, nullptr});
}

// matmul_forward_16  y[m][n] = c[m][n] + (sum_k x[m][k] W[n][k] + bias[n]), y rounded once
// x (m, k), W (n, k), bias (n) or null, y (m, n) bf16; strides in values
// c (m, n) or null, with the strides of y: y itself, or a matrix that shares no memory with it
// grid ceil(m / 16) ceil(n / 32), block 64; needs k % 8 == 0, strides of x and W % 8 == 0, their 16-byte alignment
// roofline 2 n k bytes for few rows, 2 m n k flops for many
KERNEL __launch_bounds__(64) matmul_forward_16(const bf16* x, const bf16* w, const bf16* bias, const bf16* c, bf16* y,
    int m, int n, int k, int x_stride, int w_stride, int y_stride) {
    DYNAMIC_SHARED(shared);
    matmul_forward<Forward16>(shared, x, w, bias, c, y, m, n, k, x_stride, w_stride, y_stride);
}

// matmul_forward_f32_16  as above, y f32: the sums as they are
KERNEL __launch_bounds__(64) matmul_forward_f32_16(const bf16* x, const bf16* w, const bf16* bias, const float* c, float* y,
    int m, int n, int k, int x_stride, int w_stride, int y_stride) {
    DYNAMIC_SHARED(shared);
    matmul_forward<Forward16>(shared, x, w, bias, c, y, m, n, k, x_stride, w_stride, y_stride);
}

// matmul_forward_32  as matmul_forward_16; grid ceil(m / 32) ceil(n / 64), block 128
KERNEL __launch_bounds__(128) matmul_forward_32(const bf16* x, const bf16* w, const bf16* bias, const bf16* c, bf16* y,
    int m, int n, int k, int x_stride, int w_stride, int y_stride) {
    DYNAMIC_SHARED(shared);
    matmul_forward<Forward32>(shared, x, w, bias, c, y, m, n, k, x_stride, w_stride, y_stride);
}

// matmul_forward_f32_32  as above, y f32
KERNEL __launch_bounds__(128) matmul_forward_f32_32(const bf16* x, const bf16* w, const bf16* bias, const float* c, float* y,
    int m, int n, int k, int x_stride, int w_stride, int y_stride) {
    DYNAMIC_SHARED(shared);
    matmul_forward<Forward32>(shared, x, w, bias, c, y, m, n, k, x_stride, w_stride, y_stride);
}

// matmul_forward_64  as matmul_forward_16; grid ceil(m / 64) ceil(n / 64), block 128
KERNEL __launch_bounds__(128) matmul_forward_64(const bf16* x, const bf16* w, const bf16* bias, const bf16* c, bf16* y,
    int m, int n, int k, int x_stride, int w_stride, int y_stride) {
    DYNAMIC_SHARED(shared);
    matmul_forward<Forward64>(shared, x, w, bias, c, y, m, n, k, x_stride, w_stride, y_stride);
}

// matmul_forward_f32_64  as above, y f32
KERNEL __launch_bounds__(128) matmul_forward_f32_64(const bf16* x, const bf16* w, const bf16* bias, const float* c, float* y,
    int m, int n, int k, int x_stride, int w_stride, int y_stride) {
    DYNAMIC_SHARED(shared);
    matmul_forward<Forward64>(shared, x, w, bias, c, y, m, n, k, x_stride, w_stride, y_stride);
}

// matmul_forward_128  as matmul_forward_16; grid ceil(m / 128) ceil(n / 128), block 128
KERNEL __launch_bounds__(128) matmul_forward_128(const bf16* x, const bf16* w, const bf16* bias, const bf16* c, bf16* y,
    int m, int n, int k, int x_stride, int w_stride, int y_stride) {
    DYNAMIC_SHARED(shared);
    matmul_forward<Forward128>(shared, x, w, bias, c, y, m, n, k, x_stride, w_stride, y_stride);
}

// matmul_forward_f32_128  as above, y f32
KERNEL __launch_bounds__(128) matmul_forward_f32_128(const bf16* x, const bf16* w, const bf16* bias, const float* c, float* y,
    int m, int n, int k, int x_stride, int w_stride, int y_stride) {
    DYNAMIC_SHARED(shared);
    matmul_forward<Forward128>(shared, x, w, bias, c, y, m, n, k, x_stride, w_stride, y_stride);
}

// matmul_forward_each_16  up to three products of one x, bit for bit as matmul_forward_16: narrow ones (keys and values of few
// heads) are then read while wide ones are, instead of one after another; an output of n = 0 is none
// grid ceil(m / 16) (ceil(n0 / 32) + ceil(n1 / 32) + ceil(n2 / 32)), block 64; needs as above
// roofline 2 (n0 + n1 + n2) k bytes
KERNEL __launch_bounds__(64) matmul_forward_each_16(const bf16* x, int m, int k, int x_stride,
    const bf16* w0, const bf16* bias0, bf16* y0, int n0, int w_stride0, int y_stride0,
    const bf16* w1, const bf16* bias1, bf16* y1, int n1, int w_stride1, int y_stride1,
    const bf16* w2, const bf16* bias2, bf16* y2, int n2, int w_stride2, int y_stride2) {
    DYNAMIC_SHARED(shared);
    matmul_forward_each<Forward16>(shared, x, m, k, x_stride, Output{w0, bias0, y0, n0, w_stride0, y_stride0},
                                   Output{w1, bias1, y1, n1, w_stride1, y_stride1},
                                   Output{w2, bias2, y2, n2, w_stride2, y_stride2});
}

// matmul_forward_each_32  as above, in tiles of 32 x 64, block 128
KERNEL __launch_bounds__(128) matmul_forward_each_32(const bf16* x, int m, int k, int x_stride,
    const bf16* w0, const bf16* bias0, bf16* y0, int n0, int w_stride0, int y_stride0,
    const bf16* w1, const bf16* bias1, bf16* y1, int n1, int w_stride1, int y_stride1,
    const bf16* w2, const bf16* bias2, bf16* y2, int n2, int w_stride2, int y_stride2) {
    DYNAMIC_SHARED(shared);
    matmul_forward_each<Forward32>(shared, x, m, k, x_stride, Output{w0, bias0, y0, n0, w_stride0, y_stride0},
                                   Output{w1, bias1, y1, n1, w_stride1, y_stride1},
                                   Output{w2, bias2, y2, n2, w_stride2, y_stride2});
}

// matmul_forward_each_64  as above, in tiles of 64 x 64, block 128
KERNEL __launch_bounds__(128) matmul_forward_each_64(const bf16* x, int m, int k, int x_stride,
    const bf16* w0, const bf16* bias0, bf16* y0, int n0, int w_stride0, int y_stride0,
    const bf16* w1, const bf16* bias1, bf16* y1, int n1, int w_stride1, int y_stride1,
    const bf16* w2, const bf16* bias2, bf16* y2, int n2, int w_stride2, int y_stride2) {
    DYNAMIC_SHARED(shared);
    matmul_forward_each<Forward64>(shared, x, m, k, x_stride, Output{w0, bias0, y0, n0, w_stride0, y_stride0},
                                   Output{w1, bias1, y1, n1, w_stride1, y_stride1},
                                   Output{w2, bias2, y2, n2, w_stride2, y_stride2});
}
