// The sampling inputs of a row of logits.
#pragma once
#include "common.cuh"

// The same as `SampleParams`; nothing is sampled for an idle row.
struct alignas(8) Params {
    float temperature, top_p, min_p, repetition_penalty;
    u32 top_k, idle;
};

// Tokens of a row in a list of all: start and end.
struct alignas(8) List {
    u32 start, end;
};
