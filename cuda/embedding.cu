// y[t] = W[token[t]]
#include "rows.cuh"

// embedding_forward  y[t] = W[token[t] - first], 0 for tokens outside first..first + n
// tokens (t) u32; W (n, d) bf16; y (t, d) bf16; eights = d / 8
// grid ceil(t eights / 256), block 256, eight values a thread; needs d % 8 == 0
// roofline 4 t d bytes
KERNEL __launch_bounds__(256) embedding_forward(
    const u32* tokens, const bf16* w, bf16* y, u32 t, u32 eights, u32 first, u32 n) {
    u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= t * eights) return;
    u32 row = tokens[index / eights] - first;
    Eight values = {};
    if (row < n) values = ((const Eight*)w)[(u64)row * eights + index % eights];
    ((Eight*)y)[index] = values;
}

// embedding_backward  dW[token - first] += sum of dy[t] over the t of that token, ascending
// dy (t, d) bf16; tokens (lists), starts (lists + 1), rows (t) u32: the t of each token; dW (n, d) f32
// grid (lists, ceil(d / (8 block))), block 32 to 256, eight columns a thread; needs d % 8 == 0
// roofline 2 t d + 8 lists d bytes
KERNEL __launch_bounds__(256) embedding_backward(const bf16* dy, const u32* tokens, const u32* starts, const u32* rows,
                                                 float* dw, u32 first, u32 n, u32 d) {
    add_lists(dy, tokens, starts, rows, dw, first, n, d);
}
