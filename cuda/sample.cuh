// What a row of logits is drawn by.
#pragma once
#include "common.cuh"

// As `SampleParams`; nothing is drawn for an idle row.
struct alignas(8) Params {
    float temperature, top_p, min_p, repetition_penalty;
    u32 top_k, idle;
};

// Tokens of a row in a list of all: from, to behind the last.
struct alignas(8) List {
    u32 start, end;
};
