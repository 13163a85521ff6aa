// The activations of gated linear units, y = act(gate) up (arXiv:2002.05202), for separate kernels (glu.cu) and for
// GEMMs of few rows (matmul_glu.cuh).
#pragma once
#include "common.cuh"

DEVICE float sigmoid(float x) { return reciprocal_fast(1.0f + exp2_fast(-LOG2_E * x)); }

// SwiGLU: silu(x) = x sigmoid(x)
struct Silu {
    DEVICE float gated(float gate, float up) { return gate * sigmoid(gate) * up; }

    // The gradients of one value: returns dgate, and writes dup to `up`.
    DEVICE float backward(float gate, float& up, float dy) {
        float s = sigmoid(gate);
        float dgate = dy * up * (s * (1.0f + gate * (1.0f - s)));
        up = dy * (gate * s);
        return dgate;
    }
};
