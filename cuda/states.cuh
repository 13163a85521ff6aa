// States of sequences in a paged cache: a page has one sequence's, in f32.
#pragma once
#include "paged.cuh"

// The page with the state of a sequence, at its last token's slot; null without a cache, and for a sequence that is not kept.
DEVICE float* page_of(const Sequence& sequence, const i32* slots, float* pages, u64 page_len) {
    if (!slots || sequence.tokens == 0) return nullptr;
    const i32 slot = slots[sequence.row + sequence.tokens - 1];
    return slot < 0 ? nullptr : pages + (u64)(slot / PAGE) * page_len;
}
