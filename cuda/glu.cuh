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

// A gate alone: sigmoid(x)
struct Sigmoid {
    DEVICE float gated(float gate, float up) { return sigmoid(gate) * up; }

    // As Silu's.
    DEVICE float backward(float gate, float& up, float dy) {
        float s = sigmoid(gate);
        float dgate = dy * up * (s * (1.0f - s));
        up = dy * s;
        return dgate;
    }
};

// GeGLU with the tanh form of GELU: x (1 + tanh(u)) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
struct GeluTanh {
    DEVICE float doubled(float x) { return 1.5957691f * (x + 0.044715f * x * x * x); }

    DEVICE float gated(float gate, float up) { return gate * sigmoid(doubled(gate)) * up; }

    // As Silu's.
    DEVICE float backward(float gate, float& up, float dy) {
        float s = sigmoid(doubled(gate)), inner = 1.5957691f * (1.0f + 0.134145f * gate * gate);
        float dgate = dy * up * (s * (1.0f + gate * (1.0f - s) * inner));
        up = dy * (gate * s);
        return dgate;
    }
};
