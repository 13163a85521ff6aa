// Launches: blocks distributed over host threads, shared memory for each block, and error messages.
#include "state.h"

#include <dlfcn.h>
#include <omp.h>
#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>

extern "C" {
void emulated_switch(void** from, void* to);
// The address range of the library, from the linker.
extern char __ehdr_start[] __attribute__((visibility("hidden"))), _end[] __attribute__((visibility("hidden")));
}

namespace emulated {

const Entry* entries = nullptr;

namespace {

// File and line of a code address if the machine has addr2line; else nothing.
void describe(const void* at, char* to, size_t bytes) {
    to[0] = 0;
    if (!of_the_library(at)) return;
    char command[512], line[256] = "";
    Dl_info library{};
    if (!dladdr((const void*)&entries, &library)) return;
    // The address is the one after the call.
    std::snprintf(command, sizeof command, "addr2line -e '%s' %#llx 2>/dev/null", library.dli_fname, (u64)at - (u64)__ehdr_start - 1);
    FILE* tool = popen(command, "r");
    if (!tool) return;
    if (std::fgets(line, sizeof line, tool) && line[0] != '?') {
        line[std::strcspn(line, " \n")] = 0;
        const char* name = std::strrchr(line, '/');
        std::snprintf(to, bytes, ", %s", name ? name + 1 : line);
    }
    pclose(tool);
}

// A running launch. Blocks are started in order, so the first that fails is the same every time.
struct Job {
    Launch launch;
    u32 blocks;
    std::atomic<u32> next{0}, failed{~0u};
    Watch watch;
    std::mutex one;
    char message[1024];
};

void work(State& s, Job& job) {
    s.launch = &job.launch;
    s.watch = &job.watch;
    open_region(s);
    mine = &s;
    for (;;) {
        u32 taken = job.next++;
        if (taken >= job.blocks || taken > job.failed) break;
        // In the other order, the last blocks are first.
        u32 number = job.launch.order ? job.blocks - 1 - taken : taken;
        u64 index = job.launch.block_of(number);
        dim3 grid = job.launch.grid;
        s.block = {(u32)(index % grid.x), (u32)(index / grid.x % grid.y), (u32)(index / grid.x / grid.y)};
        s.serial = job.launch.first_serial + number;
        s.failed = false;
        open_shared(s);
        open_block(s);
        run_block(s);
        close_block(s);
        s.current = -1;
        if (!s.failed || s.abandoned) continue;
        job.watch.failed = true;
        std::lock_guard<std::mutex> one(job.one);
        if (taken >= job.failed) continue;
        job.failed = taken;
        std::snprintf(job.message, sizeof job.message, "%s", s.message);
    }
    mine = nullptr;
}

// Blocks run on threads with one state each. One launch runs at a time, so the next one reuses the states.
void run(Job& job) {
    static State* states[16];
    int threads = std::min({16, omp_get_num_procs(), (int)job.blocks});
#pragma omp parallel num_threads(std::max(1, threads))
    {
        State*& own = states[omp_get_thread_num()];
        if (!own) own = new State;
        work(*own, job);
    }
}

u32 serial = 1;
int order;
// The only blocks that run in grids of more than CHOSEN_FROM blocks.
std::vector<u64> wanted;
constexpr u64 CHOSEN_FROM = 4096;
char complaint[1280];

}  // namespace

bool of_the_library(const void* address) { return (u64)address >= (u64)__ehdr_start && (u64)address < (u64)_end; }

void fail(const void* at, const char* format, ...) {
    State& s = *mine;
    char what[384], line[128];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    describe(at, line, sizeof line);
    std::snprintf(s.message, sizeof s.message, "%s (block %u,%u,%u, thread %d%s)", what, s.block.x, s.block.y, s.block.z,
                  s.current, line);
    s.failed = true;
    emulated_switch(&s.fibers[s.current].stack_pointer, s.scheduler);
    std::abort();
}

// ---- shared memory ----

void fail_in_arena(State& s, const char* did, u64 address, size_t bytes, const void* at) {
    const Variable* nearest = &s.dynamic;
    for (const Variable& v : s.variables) {
        if (address >= (u64)v.start && (nearest == &s.dynamic || v.start > nearest->start)) nearest = &v;
    }
    if (nearest == &s.dynamic || address >= (u64)s.dynamic.start) {
        fail(at, "%s %zu bytes at byte %lld of %zu bytes of shared memory", did, bytes, (i64)(address - (u64)s.dynamic.start),
             (size_t)(s.dynamic.end - s.dynamic.start));
    }
    fail(at, "%s %zu bytes at byte %lld of shared %s, which has %zu", did, bytes, (i64)(address - (u64)nearest->start),
         nearest->name, (size_t)(nearest->end - nearest->start));
}

// Dynamic shared memory comes after the memory that kernels may declare.
void open_shared(State& s) {
    s.variables.clear();
    s.dynamic = {"", s.arena + SHARED_DECLARED_MAX + APART * WARPS_MAX, nullptr};
    s.dynamic.end = s.dynamic.start + s.launch->shared_bytes;
    // NaN in every dtype.
    std::memset(s.dynamic.start, 0xff, s.launch->shared_bytes);
}

u8* dynamic_shared() { return mine->dynamic.start; }

// The first thread of a block that reaches a variable creates it. `name` is one pointer at each place of the source.
void* shared_variable(const char* name, size_t bytes) {
    State& s = *mine;
    for (const Variable& v : s.variables) {
        if (v.name == name) return v.start;
    }
    u8* start = s.variables.empty() ? s.arena : s.variables.back().end + APART;
    start = (u8*)(((u64)start + APART - 1) / APART * APART);
    size_t declared = bytes;
    for (const Variable& v : s.variables) declared += (size_t)(v.end - v.start);
    if (declared > SHARED_DECLARED_MAX || s.variables.size() + 1 == WARPS_MAX / 2) {
        fail(nullptr, "declares %zu bytes of shared memory", declared);
    }
    if (declared + s.launch->shared_bytes > SHARED_MAX) fail(nullptr, "more than %zu bytes of shared memory", SHARED_MAX);
    s.variables.push_back({name, start, start + bytes});
    std::memset(start, 0xff, bytes);
    return start;
}

}  // namespace emulated

// ---- functions for the host ----

extern "C" {

// The kernel `name`, or null.
const emulated::Entry* emulated_find(const char* name) {
    const emulated::Entry* e = emulated::entries;
    while (e && std::strcmp(e->name, name)) e = e->next;
    return e;
}

// 0: blocks, warps and lanes in ascending order, each warp runs as far as possible, copies complete when they are
// waited for. 1: blocks and warps in descending order, warps alternate, lanes are shuffled, copies complete at once.
void emulated_set_order(int order) { emulated::order = order; }

// From now on only these blocks run (ascending; x first, then y, then z) of grids of more than CHOSEN_FROM; none: all.
void emulated_choose(const u64* blocks, u64 count) { emulated::wanted.assign(blocks, blocks + count); }

// Runs a kernel over its grid, whose limits the driver has checked. Returns null or an error message. One call at a
// time.
const char* emulated_launch(const emulated::Entry& entry, const u32* grid, u32 block, u64 shared_bytes, void** arguments) {
    using namespace emulated;
    if (block == 0 || block > THREADS_MAX || block % LANES) return "a block needs 32 to 1024 threads, whole warps";
    u64 blocks = (u64)grid[0] * grid[1] * grid[2];
    std::vector<u64> chosen;
    bool is_part = !wanted.empty() && blocks > CHOSEN_FROM;
    for (u64 block : wanted) {
        if (is_part && block < blocks) chosen.push_back(block);
    }
    if (is_part) blocks = chosen.size();
    // Serials must not wrap, so after this many blocks launches fail.
    if (serial + blocks > 0xffffffffull) return "more blocks than the emulated GPU can distinguish";
    Job job;
    job.launch = {entry.start, arguments, {grid[0], grid[1], grid[2]}, (int)block, shared_bytes, order, serial,
                  is_part ? &chosen : nullptr};
    job.blocks = (u32)blocks;
    serial += job.blocks;
    run(job);
    if (job.failed == ~0u) return nullptr;
    std::snprintf(complaint, sizeof complaint, "%s", job.message);
    return complaint;
}

}  // extern "C"
