// The activation of a gated MLP (arXiv:2002.05202): kernels of its own have it (swiglu.cu), and products of few rows
// (matmul_swiglu.cuh).
#pragma once
#include "common.cuh"

DEVICE float sigmoid(float x) { return reciprocal_fast(1.0f + exp2_fast(-LOG2_E * x)); }

// silu(gate) up, silu(x) = x sigmoid(x)
DEVICE float swiglu(float gate, float up) { return gate * sigmoid(gate) * up; }
