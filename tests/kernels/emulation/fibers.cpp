// Fibers: one for each thread of a block. Lanes of a warp switch to each other, and the scheduler chooses among warps.
#include "state.h"

#include <sys/mman.h>
#include <cstdio>
#include <cstdlib>

// Switches stacks: saves the registers that a call must keep, and continues where `to` was left. Much cheaper than
// swapcontext, which asks the kernel about signals every time.
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

thread_local State* mine __attribute__((tls_model("initial-exec"))) = nullptr;

namespace {

void hand_over(State& s, int to) {
    void** from = &s.fibers[s.current].stack_pointer;
    s.current = to;
    emulated_switch(from, s.fibers[to].stack_pointer);
}

// The lane that continues after lane `l` of a warp, among the ready ones.
int following(const State& s, u32 ready, int l) {
    int stride = s.launch->order ? 13 : 1;
    do l = (l + stride) % LANES;
    while (!(ready >> l & 1));
    return l;
}

// All lanes of a warp have stopped: at one operation together, or one by one at the block's barrier or their end.
// Returns whether they can continue.
bool settle(State& s, int first) {
    const Fiber& one = s.fibers[first];
    for (int i = first; i < first + LANES; i++) {
        const Fiber& f = s.fibers[i];
        bool warp = f.wait == Wait::Warp || one.wait == Wait::Warp;
        if (!warp || (f.wait == one.wait && f.operation == one.operation)) continue;
        auto where = [](const Fiber& f) {
            return f.wait == Wait::Block ? "a barrier of the block" : f.wait == Wait::Done ? "its end" : f.operation->name;
        };
        fail(nullptr, "lanes of a warp part: thread %d is at %s, thread %d at %s", first, where(one), i, where(f));
    }
    if (one.wait != Wait::Warp) return false;
    int current = s.current;
    one.operation->run(s, first, s.arguments + first);
    s.current = current;
    for (int i = first; i < first + LANES; i++) s.fibers[i].wait = Wait::Nothing;
    s.ready[first / LANES] = ~0u;
    return true;
}

// The running fiber waits, as it has recorded; returns when it may continue.
void stop(State& s) {
    int i = s.current, first = i / LANES * LANES;
    u32& ready = s.ready[i / LANES];
    ready &= ~(1u << i % LANES);
    if (ready) hand_over(s, first + following(s, ready, i % LANES));
    // In the other order, warps alternate.
    else if (!settle(s, first) || s.launch->order) emulated_switch(&s.fibers[i].stack_pointer, s.scheduler);
}

void run_fiber() {
    State& s = *mine;
    s.launch->body(s.launch->arguments);
    s.fibers[s.current].wait = Wait::Done;
    stop(s);
    std::abort();
}

void prepare(State& s, int i) {
    Fiber& f = s.fibers[i];
    if (!f.stack) {
        // The lowest page catches a stack that grows too far.
        f.stack = s.stacks + i * STACK;
        if (mprotect(f.stack + PAGE, STACK - PAGE, PROT_READ | PROT_WRITE)) std::abort();
    }
    f.wait = Wait::Nothing;
    f.copies.clear();
    f.groups.clear();
    // As after a call: the return address is at a multiple of 16, minus 8. Stack tops differ in their lower bits,
    // otherwise all fibers would share a few sets of the cache.
    void** top = reinterpret_cast<void**>(f.stack + STACK - 64 - i % 64 * 832 % PAGE);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(run_fiber);
    for (int k = 0; k < 6; k++) *--top = nullptr;
    f.stack_pointer = top;
}

// Whether all threads have reached the barrier, and continue.
bool release_block(State& s) {
    int waiting = 0;
    for (int i = 0; i < s.launch->threads; i++) waiting += s.fibers[i].wait == Wait::Block;
    if (!waiting) return false;
    if (waiting < s.launch->threads) {
        std::snprintf(s.message, sizeof s.message, "%d threads wait for the block, %d have ended", waiting,
                      s.launch->threads - waiting);
        s.failed = true;
        return false;
    }
    for (int i = 0; i < s.launch->threads; i++) s.fibers[i].wait = Wait::Nothing;
    for (int w = 0; w < s.launch->threads / LANES; w++) s.ready[w] = ~0u;
    s.phase = (s.phase + 1) & (PHASE >> 20);
    return true;
}

}  // namespace

State::State() {
    void* at = mmap(nullptr, STACKS, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) std::abort();
    stacks = static_cast<u8*>(at);
    arena = static_cast<u8*>(std::aligned_alloc(PAGE, ARENA));
    writes = static_cast<Record*>(std::calloc(ARENA / 2, sizeof(Record)));
    reads = static_cast<Record*>(std::calloc(ARENA / 2, sizeof(Record)));
}

static unsigned along(dim3 of, int axis) { return axis == 0 ? of.x : axis == 1 ? of.y : of.z; }

unsigned thread_x() { return (unsigned)mine->current; }
unsigned threads_x() { return (unsigned)mine->launch->threads; }
unsigned block_along(int axis) { return along(mine->block, axis); }
unsigned blocks_along(int axis) { return along(mine->launch->grid, axis); }

void meet(const Operation& operation, void* argument) {
    State& s = *mine;
    Fiber& f = s.fibers[s.current];
    s.arguments[s.current] = argument;
    f.wait = Wait::Warp;
    f.operation = &operation;
    stop(s);
}

void sync_block() {
    State& s = *mine;
    s.fibers[s.current].wait = Wait::Block;
    stop(s);
}

void run_block(State& s) {
    int threads = s.launch->threads, warps = threads / LANES;
    for (int i = 0; i < threads; i++) prepare(s, i);
    for (int w = 0; w < warps; w++) s.ready[w] = ~0u;
    std::memset(s.warp_phase, 0, sizeof s.warp_phase);
    s.phase = 0;
    do {
        bool moved = true;
        while (moved) {
            moved = false;
            for (int k = 0; k < warps; k++) {
                int w = s.launch->order ? warps - 1 - k : k;
                if (!s.ready[w]) continue;
                moved = true;
                s.current = w * LANES + following(s, s.ready[w], LANES - 1);
                emulated_switch(&s.scheduler, s.fibers[s.current].stack_pointer);
                if (s.failed) return;
            }
        }
    } while (release_block(s));
}

}  // namespace emulated
