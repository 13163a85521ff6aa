// y = act(gate) up (arXiv:2002.05202)
#include "eight.cuh"
#include "glu.cuh"

template <class ACT> DEVICE void glu_forward(const bf16* gate, const bf16* up, bf16* y, u64 len) {
    u64 at = flat_eight();
    if (at >= len) return;
    float g[8], u[8];
    load_eight(gate + at, g);
    load_eight(up + at, u);
#pragma unroll
    for (int i = 0; i < 8; i++) g[i] = ACT::gated(g[i], u[i]);
    store_eight(y + at, g);
}

template <class ACT>
DEVICE void glu_backward(const bf16* gate, const bf16* up, const bf16* dy, bf16* dgate, bf16* dup, u64 len) {
    u64 at = flat_eight();
    if (at >= len) return;
    float g[8], u[8], d[8];
    load_eight(gate + at, g);
    load_eight(up + at, u);
    load_eight(dy + at, d);
#pragma unroll
    for (int i = 0; i < 8; i++) g[i] = ACT::backward(g[i], u[i], d[i]);
    store_eight(dgate + at, g);
    store_eight(dup + at, u);
}

// swiglu_forward  y = gate sigmoid(gate) up
// gate, up, y (len) bf16
// grid ceil(len / 2048), block 256, eight values a thread; needs len % 8 == 0 and 16-byte alignment
// roofline 6 len bytes
KERNEL __launch_bounds__(256) swiglu_forward(const bf16* gate, const bf16* up, bf16* y, u64 len) {
    glu_forward<Silu>(gate, up, y, len);
}

// swiglu_backward  with s = sigmoid(gate): dgate = dy up s (1 + gate (1 - s)), dup = dy gate s
// gate, up, dy, dgate, dup (len) bf16; an output may overwrite an input
// grid ceil(len / 2048), block 256, eight values a thread; needs len % 8 == 0 and 16-byte alignment
// roofline 10 len bytes
KERNEL __launch_bounds__(256) swiglu_backward(
    const bf16* gate, const bf16* up, const bf16* dy, bf16* dgate, bf16* dup, u64 len) {
    glu_backward<Silu>(gate, up, dy, dgate, dup, len);
}

// geglu_forward  y = gate sigmoid(2 u) up, u = sqrt(2 / pi) (gate + 0.044715 gate^3)
// as swiglu_forward
// grid ceil(len / 2048), block 256, eight values a thread; needs len % 8 == 0 and 16-byte alignment
// roofline 6 len bytes
KERNEL __launch_bounds__(256) geglu_forward(const bf16* gate, const bf16* up, bf16* y, u64 len) {
    glu_forward<GeluTanh>(gate, up, y, len);
}

// geglu_backward  with s = sigmoid(2 u): dgate = dy up s (1 + 2 gate (1 - s) u'), dup = dy gate s
// as swiglu_backward
// grid ceil(len / 2048), block 256, eight values a thread; needs len % 8 == 0 and 16-byte alignment
// roofline 10 len bytes
KERNEL __launch_bounds__(256) geglu_backward(
    const bf16* gate, const bf16* up, const bf16* dy, bf16* dgate, bf16* dup, u64 len) {
    glu_backward<GeluTanh>(gate, up, dy, dgate, dup, len);
}

// sigmoid_forward  y = sigmoid(gate) up
// as swiglu_forward
// grid ceil(len / 2048), block 256, eight values a thread; needs len % 8 == 0 and 16-byte alignment
// roofline 6 len bytes
KERNEL __launch_bounds__(256) sigmoid_forward(const bf16* gate, const bf16* up, bf16* y, u64 len) {
    glu_forward<Sigmoid>(gate, up, y, len);
}

// sigmoid_backward  with s = sigmoid(gate): dgate = dy up s (1 - s), dup = dy s
// as swiglu_backward
// grid ceil(len / 2048), block 256, eight values a thread; needs len % 8 == 0 and 16-byte alignment
// roofline 10 len bytes
KERNEL __launch_bounds__(256) sigmoid_backward(
    const bf16* gate, const bf16* up, const bf16* dy, bf16* dgate, bf16* dup, u64 len) {
    glu_backward<Sigmoid>(gate, up, dy, dgate, dup, len);
}
