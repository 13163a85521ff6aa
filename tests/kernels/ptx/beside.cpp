// Every launch twice: as PTX, and then from the same memory by the emulation (PTX_BESIDE names its library). What they leave in
// memory is compared, and the sums go to the file PTX_COMPARED, a line for each launch.
#include "run.h"

#include <dlfcn.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace ptx {

namespace {

struct Emulation {
    const void* (*find)(const char*);
    const char* (*launch)(const void*, const u32*, u32, u64, void**);
    void* (*allocate)(u64);
    void (*release)(void*, u64);
    void (*set_order)(i32);
};

template <class F> void find(void* library, const char* name, F& to) {
    to = reinterpret_cast<F>(dlsym(library, name));
    if (!to) std::fprintf(stderr, "the emulation has no %s\n", name), std::abort();
}

const Emulation* emulation() {
    static const Emulation* opened = []() -> const Emulation* {
        const char* path = std::getenv("PTX_BESIDE");
        if (!path) return nullptr;
        void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!library) std::fprintf(stderr, "%s\n", dlerror()), std::abort();
        Emulation* e = new Emulation;
        find(library, "emulated_find", e->find);
        find(library, "emulated_launch", e->launch);
        find(library, "emulated_allocate", e->allocate);
        find(library, "emulated_free", e->release);
        find(library, "emulated_set_order", e->set_order);
        return e;
    }();
    return opened;
}

float single(const u8* at) {
    float x;
    std::memcpy(&x, at, 4);
    return x;
}

float brain(const u8* at) {
    u16 half;
    std::memcpy(&half, at, 2);
    u32 bits = (u32)half << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// The largest difference of numbers, against the largest number.
double apart(const std::vector<u8>& a, const u8* b, size_t bytes, float (*number)(const u8*)) {
    double scale = 0, most = 0;
    for (size_t i = 0; i + bytes <= a.size(); i += bytes) {
        float x = number(&a[i]), y = number(b + i);
        if (std::isfinite(x)) scale = std::max(scale, (double)std::fabs(x));
        if (std::memcmp(&a[i], b + i, bytes) == 0) continue;
        if (!std::isfinite(x) || !std::isfinite(y)) {
            if (!(std::isnan(x) && std::isnan(y))) return INFINITY;
            continue;
        }
        most = std::max(most, (double)std::fabs(x - y));
    }
    return most == 0 ? 0 : most / scale;
}

}  // namespace

bool is_beside() { return emulation() != nullptr; }
void* allocate_beside(u64 bytes) { return emulation()->allocate(bytes); }
void release_beside(void* at, u64 bytes) { emulation()->release(at, bytes); }

Beside::Beside(const Kernel& kernel, const u8* parameters) : kernel(kernel) {
    if (!emulation()) return;
    for (size_t i = 0; i < kernel.parameters.size(); i++) {
        u64 address;
        if (kernel.parameters[i].kind != 0) continue;
        std::memcpy(&address, parameters + kernel.parameter_offsets[i], 8);
        u64 start, end;
        if (!allocation_of(address, start, end)) continue;
        bool known = std::any_of(kept.begin(), kept.end(), [&](const Kept& k) { return k.start == start; });
        if (!known) kept.push_back({start, std::vector<u8>((const u8*)start, (const u8*)end), {}});
    }
}

const char* Beside::run(const u32* grid, u32 block, u64 shared_bytes, void** arguments, int order) {
    if (!emulation()) return nullptr;
    for (Kept& k : kept) {
        k.after.assign((const u8*)k.start, (const u8*)k.start + k.before.size());
        std::memcpy((void*)k.start, k.before.data(), k.before.size());
    }
    emulation()->set_order(order);
    const char* said = emulation()->launch(emulation()->find(kernel.name.c_str()), grid, block, shared_bytes, arguments);
    u64 bytes = 0, differ = 0;
    double most = 0;
    for (const Kept& k : kept) {
        const u8* now = (const u8*)k.start;
        u64 changed = 0;
        for (size_t i = 0; i < k.after.size(); i++) changed += k.after[i] != now[i];
        bytes += k.after.size(), differ += changed;
        if (changed) most = std::max(most, std::min(apart(k.after, now, 4, single), apart(k.after, now, 2, brain)));
    }
    const char* path = std::getenv("PTX_COMPARED");
    std::FILE* file = path ? std::fopen(path, "a") : nullptr;
    if (file) {
        std::fprintf(file, "%s %llu %llu %.3e\n", kernel.name.c_str(), bytes, differ, most);
        std::fclose(file);
    }
    return said;
}

}  // namespace ptx
