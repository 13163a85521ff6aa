// Between the parts of the emulated GPU that know addresses.
#pragma once
#include "state.h"

namespace emulated {

// An address of shared memory that is in no variable.
[[noreturn]] void fail_in_arena(State& s, const char* did, u64 address, size_t bytes, const void* at);

// Whether something lies in the library itself: constants of kernels.
bool of_the_library(const void* address);

}  // namespace emulated
