// Decay and rate of the gated delta rule (arXiv:2412.06464), for each token and value head: a = exp(-exp(A) softplus(x + d)),
// b = sigmoid(y)
#include "common.cuh"

// Where the softplus is the identity, as in torch.
#define SOFTPLUS_MAX 20.0f

DEVICE float softplus(float x) { return x > SOFTPLUS_MAX ? x : log1pf(expf(x)); }
DEVICE float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }

// delta_gates  decay = exp(-exp(A) softplus(x + d)), rate = sigmoid(y)
// x, y (count = t heads), log_a, bias (heads) bf16; decay, rate (count) f32
// grid ceil(count / 256), block 256
// roofline 12 count bytes
KERNEL __launch_bounds__(256) delta_gates(const bf16* x, const bf16* y, const bf16* log_a, const bf16* bias, float* decay,
                                          float* rate, u32 count, u32 heads) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const u32 head = i % heads;
    decay[i] = expf(-expf(to_f32(log_a[head])) * softplus(to_f32(x[i]) + to_f32(bias[head])));
    rate[i] = sigmoid_of(to_f32(y[i]));
}

// delta_gates_backward  dx and dy; parts: the sums of dA and dd over `each` tokens
// as delta_gates; d_decay, d_rate (t, heads) f32; dx, dy (t, heads) bf16; of_a, of_bias (ceil(t / each), heads) f32, which
// parts_add adds
// grid ceil(t / each), block heads in whole warps, a head a thread; needs heads <= 1024
// roofline 16 t heads bytes
KERNEL __launch_bounds__(1024) delta_gates_backward(const bf16* x, const bf16* y, const bf16* log_a, const bf16* bias,
                                                    const float* d_decay, const float* d_rate, bf16* dx, bf16* dy, float* of_a,
                                                    float* of_bias, u32 t, u32 heads, u32 each) {
    const u32 head = threadIdx.x, begin = blockIdx.x * each;
    if (head >= heads) return;
    const float factor = -expf(to_f32(log_a[head])), shift = to_f32(bias[head]);
    float sum_a = 0.0f, sum_bias = 0.0f;
    for (u32 row = begin; row < begin + each && row < t; row++) {
        const u64 i = (u64)row * heads + head;
        const float input = to_f32(x[i]) + shift, gate = factor * softplus(input), slope = d_decay[i] * expf(gate);
        const float of_input = slope * factor * (input > SOFTPLUS_MAX ? 1.0f : sigmoid_of(input));
        const float b = sigmoid_of(to_f32(y[i]));
        sum_a = fmaf(slope, gate, sum_a);
        sum_bias += of_input;
        dx[i] = to_bf16(of_input);
        dy[i] = to_bf16(d_rate[i] * (b * (1.0f - b)));
    }
    of_a[(u64)blockIdx.x * heads + head] = sum_a;
    of_bias[(u64)blockIdx.x * heads + head] = sum_bias;
}
