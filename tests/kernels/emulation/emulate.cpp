// The scheduler of the played GPU, and the functions by which the host starts kernels.
#include "emulate.h"

#include <sys/mman.h>
#include <cstdio>
#include <cstdlib>
#include <vector>

// Switches stacks: saves what a call must keep, and goes on where `to` was left. Far cheaper than swapcontext, which asks the
// kernel about signals every time.
extern "C" void emulated_switch(void** from, void* to);
asm(R"(
.text
.globl emulated_switch
.type emulated_switch, @function
emulated_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

namespace emulated {

Here here;
const Entry* entries = nullptr;

namespace {

constexpr size_t STACK = 128 << 10;
constexpr int SLOT = 64;

enum class Wait { Nothing, Block, Warp, Leaving, Done };

struct Copy {
    void* to;
    const void* from;
    bool valid;
};

struct Fiber {
    void* stack_pointer = nullptr;
    char* stack = nullptr;
    Wait wait = Wait::Nothing;
    const char* operation = "";
    int detail = 0;
    // Asynchronous copies: committed groups, oldest first, and the group that is being filled.
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
};

std::vector<Fiber> fibers;
alignas(16) char slots[1024][SLOT];
std::vector<u8> shared;
u8* shared_start;
void* scheduler;
int current = -1;
int threads;
int order;
unsigned pass;
char message[512];
bool failed;
void (*body)(void**);
void** body_arguments;

void back() { emulated_switch(&fibers[current].stack_pointer, scheduler); }

[[noreturn]] void fail(const char* what) {
    const Fiber& f = fibers[current < 0 ? 0 : current];
    std::snprintf(message, sizeof message, "%s (block %u,%u,%u, thread %d, at %s)", what, here.block.x, here.block.y,
                  here.block.z, current, f.operation);
    failed = true;
    back();
    std::abort();
}

void run_fiber() {
    body(body_arguments);
    fibers[current].wait = Wait::Done;
    back();
    std::abort();
}

void prepare(int i) {
    Fiber& f = fibers[i];
    if (!f.stack) {
        void* at = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) std::abort();
        f.stack = static_cast<char*>(at);
    }
    f.wait = Wait::Nothing;
    f.operation = "its start";
    f.groups.clear();
    f.open.clear();
    // As after a call: the return address lies at a multiple of 16, less 8.
    void** top = reinterpret_cast<void**>(f.stack + STACK - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(run_fiber);
    for (int k = 0; k < 6; k++) *--top = nullptr;
    f.stack_pointer = top;
}

void step(int i) {
    current = i;
    here.thread = dim3(i % here.block_dim.x, i / here.block_dim.x % here.block_dim.y,
                       i / (here.block_dim.x * here.block_dim.y));
    emulated_switch(&scheduler, fibers[i].stack_pointer);
}

// Which fiber is the k-th of this pass. Orders 3 and 4 run one warp as far ahead of the others as it goes.
int nth(int k) {
    switch (order) {
        case 1: return threads - 1 - k;
        case 2: return (int)((k * 77u + pass * 13u) % (unsigned)threads);
        default: return k;
    }
}

int only_warp() {
    if (order < 3) return -1;
    for (int i = 0; i < threads; i++) {
        int j = order == 3 ? i : threads - 1 - i;
        if (fibers[j].wait == Wait::Nothing) return j / 32;
    }
    return -1;
}

// Lets the lanes of warp `w` go on where all of them wait for each other at the same operation.
bool release_warp(int w) {
    const Fiber& first = fibers[w];
    if (first.wait != Wait::Warp && first.wait != Wait::Leaving) return false;
    for (int i = w; i < w + 32; i++) {
        const Fiber& f = fibers[i];
        if (f.wait == Wait::Nothing) return false;
        if (f.wait != first.wait || std::strcmp(f.operation, first.operation) || f.detail != first.detail) {
            current = i;
            std::snprintf(message, sizeof message, "lanes of a warp part: thread %d at %s, thread %d at %s%s", w,
                          first.operation, i, f.wait == Wait::Done ? "its end" : f.operation,
                          f.wait == Wait::Block ? " (block)" : "");
            failed = true;
            return false;
        }
    }
    for (int i = w; i < w + 32; i++) fibers[i].wait = Wait::Nothing;
    return true;
}

bool release_block() {
    int waiting = 0, done = 0;
    for (int i = 0; i < threads; i++) {
        waiting += fibers[i].wait == Wait::Block;
        done += fibers[i].wait == Wait::Done;
    }
    if (!waiting || waiting + done < threads) return false;
    if (done) {
        std::snprintf(message, sizeof message, "%d threads wait for the block, %d have ended", waiting, done);
        failed = true;
        return false;
    }
    for (int i = 0; i < threads; i++) fibers[i].wait = Wait::Nothing;
    return true;
}

void run_block() {
    for (int i = 0; i < threads; i++) prepare(i);
    while (!failed) {
        bool moved = false;
        pass++;
        int warp = only_warp();
        for (int k = 0; k < threads && !failed; k++) {
            int i = nth(k);
            if (fibers[i].wait != Wait::Nothing || (warp >= 0 && i / 32 != warp)) continue;
            moved = true;
            step(i);
        }
        for (int w = 0; w < threads && !failed; w += 32) moved |= release_warp(w);
        if (failed) return;
        moved |= release_block();
        bool done = true;
        for (int i = 0; i < threads; i++) done &= fibers[i].wait == Wait::Done;
        if (done) return;
        if (!moved && !failed) {
            std::snprintf(message, sizeof message, "threads wait for threads that never come");
            failed = true;
        }
    }
}

float widened(u32 pair, int half) {
    u32 u = half ? pair & 0xffff0000u : pair << 16;
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

}  // namespace

u8* dynamic_shared() { return shared_start; }
int lane() { return current % 32; }
int warp_base() { return current / 32 * 32; }
void* slot(int thread) { return slots[thread]; }

void sync_block() {
    fibers[current].wait = Wait::Block;
    fibers[current].operation = "a barrier";
    back();
}

void meet(const char* operation, int detail) {
    Fiber& f = fibers[current];
    f.wait = Wait::Warp;
    f.operation = operation;
    f.detail = detail;
    back();
}

void leave(const char* operation) {
    Fiber& f = fibers[current];
    f.wait = Wait::Leaving;
    f.operation = operation;
    back();
}

void sync_warp() { meet("a warp's barrier", 0); }

void mma(float* d, const u32* a, const u32* b) {
    u32 mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    std::memcpy(slot(current), mine, sizeof mine);
    meet("mma", 0);
    auto of = [](int l, int i) { return reinterpret_cast<const u32*>(slot(warp_base() + l))[i]; };
    int g = lane() / 4, q = lane() % 4;
    for (int e = 0; e < 4; e++) {
        int row = g + (e >= 2 ? 8 : 0), column = 2 * q + e % 2;
        float sum = d[e];
        for (int k = 0; k < 16; k++) {
            float x = widened(of(row % 8 * 4 + k % 8 / 2, row / 8 + 2 * (k / 8)), k % 2);
            float y = widened(of(column * 4 + k % 8 / 2, 4 + k / 8), k % 2);
            sum += x * y;
        }
        d[e] = sum;
    }
    leave("mma");
}

void load_matrices(u32* r, const void* row, bool transposed) {
    if (reinterpret_cast<uintptr_t>(row) % 16) fail("load_matrices: a row that is not aligned to 16 bytes");
    std::memcpy(slot(current), &row, sizeof row);
    meet("load_matrices", transposed);
    auto at = [](int matrix, int row, int column) {
        const u16* from;
        std::memcpy(&from, slot(warp_base() + 8 * matrix + row), sizeof from);
        return (u32)from[column];
    };
    int i = lane() / 4, j = 2 * (lane() % 4);
    for (int m = 0; m < 4; m++) {
        r[m] = transposed ? at(m, j, i) | at(m, j + 1, i) << 16 : at(m, i, j) | at(m, i, j + 1) << 16;
    }
    leave("load_matrices");
}

void copy_async(void* to, const void* from, bool valid) {
    if (reinterpret_cast<uintptr_t>(to) % 16 || (valid && reinterpret_cast<uintptr_t>(from) % 16)) {
        fail("copy_async: addresses that are not aligned to 16 bytes");
    }
    fibers[current].open.push_back({to, from, valid});
}

void copy_commit() {
    Fiber& f = fibers[current];
    f.groups.push_back(std::move(f.open));
    f.open.clear();
}

// A copy lands as late as it may.
void copy_wait(int pending) {
    Fiber& f = fibers[current];
    while ((int)f.groups.size() > pending) {
        for (const Copy& c : f.groups.front()) {
            if (c.valid) std::memcpy(c.to, c.from, 16);
            else std::memset(c.to, 0, 16);
        }
        f.groups.erase(f.groups.begin());
    }
}

}  // namespace emulated

extern u8 __start_emulated_shared[] __attribute__((weak));
extern u8 __stop_emulated_shared[] __attribute__((weak));

// ---- what the host calls ----

extern "C" {

// The kernel `name`, or null.
const void* emulated_find(const char* name) {
    for (const emulated::Entry* e = emulated::entries; e; e = e->next) {
        if (!std::strcmp(e->name, name)) return e;
    }
    return nullptr;
}

u32 emulated_parameters(const void* kernel) { return static_cast<const emulated::Entry*>(kernel)->parameters; }

emulated::Parameter emulated_parameter(const void* kernel, u32 i) {
    return static_cast<const emulated::Entry*>(kernel)->types[i];
}

// 0: fibers run in order, 1: backwards, 2: mixed, 3 and 4: the first or last warp as far ahead as it goes.
void emulated_set_order(int order) { emulated::order = order; }

// Runs a kernel over its grid. Returns null, or what was wrong; one call at a time.
const char* emulated_launch(const void* kernel, const u32* grid, u32 block, u64 shared_bytes, void** arguments) {
    using namespace emulated;
    if (block == 0 || block > 1024 || block % 32) return "a block needs 32 to 1024 threads, whole warps";
    threads = (int)block;
    if ((int)fibers.size() < threads) fibers.resize(threads);
    body = static_cast<const Entry*>(kernel)->start;
    body_arguments = arguments;
    failed = false;
    here.grid = dim3(grid[0], grid[1], grid[2]);
    here.block_dim = dim3(block);
    shared.resize(shared_bytes + 256);
    shared_start = reinterpret_cast<u8*>((reinterpret_cast<uintptr_t>(shared.data()) + 127) / 128 * 128);
    for (u32 z = 0; z < grid[2]; z++)
        for (u32 y = 0; y < grid[1]; y++)
            for (u32 x = 0; x < grid[0]; x++) {
                here.block = dim3(x, y, z);
                // NaN in every dtype.
                std::memset(shared.data(), 0xff, shared.size());
                if (__start_emulated_shared) {
                    std::memset(__start_emulated_shared, 0xff, __stop_emulated_shared - __start_emulated_shared);
                }
                run_block();
                if (failed) return message;
            }
    return nullptr;
}

}  // extern "C"
