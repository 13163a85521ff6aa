// A GPU that is less kind than the document demands (PTX_HARDWARE = a100 or h100): tensor cores that cut, approximate
// instructions as far off as they may be. With it blocks and warps take turns at random: see launch.cpp.
#pragma once
#include "run.h"

namespace ptx {

enum class Hardware { Kind, A100, H100 };
Hardware hardware();

// Replaces what computes otherwise there.
void become(Hardware hardware, Meanings& meanings);

// See tensor_core.cpp.
Run mma_of(Hardware hardware);
// See lanes.cpp: in the order of k, each sum rounded to f32; and what is checked first.
void mma(Warp& w, const Instruction& i, u32 lanes);
void check_factors(const Warp& w, const Instruction& i);

}  // namespace ptx
