// The parts of a cubin or of PTX that the emulated driver reads.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>
#include "emulate.h"

namespace {

struct Module {
    std::vector<char> image;
    std::string ptx;
};

// A kernel's limits from its cubin: threads of a block, and bytes of shared memory before the bytes that a launch asks
// for.
struct Function {
    const emulated::Entry* kernel;
    std::string name;
    int threads_max = 1024, fixed = 0, shared_max = 48 << 10, carveout = -1;
};

// Shared memory of a block, as an H200 has it, whose tiles run here too; blocks along y and z.
const int SHARED_MAX = 227 << 10;
const unsigned BLOCKS_OVER = 65535;
// Resources of a thread, the same for every kernel.
const int REGISTERS = 40, LOCAL_BYTES = 8;

template <class T> T number_at(const char* at) {
    T number;
    std::memcpy(&number, at, sizeof number);
    return number;
}

// The header of a section of a cubin; null if it has no section of that name.
const char* section(const Module& module, const std::string& name) {
    const char* image = module.image.data();
    const char* sections = image + number_at<uint64_t>(image + 40);
    auto header = [&](size_t i) { return sections + 64 * i; };
    const char* names = image + number_at<uint64_t>(header(number_at<uint16_t>(image + 62)) + 24);
    for (size_t i = 0; i < number_at<uint16_t>(image + 60); i++) {
        if (name == names + number_at<uint32_t>(header(i))) return header(i);
    }
    return nullptr;
}

// Attributes of a kernel are records of a form, a number and a length or a value; number 5 has the threads of its launch bounds.
int threads_max(const Module& module, const std::string& kernel) {
    const char* of = section(module, ".nv.info." + kernel);
    if (!of) return 1024;
    const char *at = module.image.data() + number_at<uint64_t>(of + 24), *end = at + number_at<uint64_t>(of + 32);
    while (at < end) {
        bool is_long = *at == 4;
        if (is_long && at[1] == 5) return number_at<int32_t>(at + 4);
        at += 4 + (is_long ? number_at<uint16_t>(at + 2) : 0);
    }
    return 1024;
}

}  // namespace
