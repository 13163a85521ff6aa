// The state of running blocks: one State for each host thread that runs blocks.
#pragma once
#include "emulate.h"
#include <atomic>
#include <unordered_set>
#include <vector>

namespace emulated {

constexpr int LANES = 32, THREADS_MAX = 1024, WARPS_MAX = THREADS_MAX / LANES;
// Shared memory of a block on an A100, all of it and the part that kernels declare.
constexpr size_t SHARED_MAX = 227 << 10, SHARED_DECLARED_MAX = 48 << 10;
// The arena of shared memory holds declared variables first, each apart from the next.
constexpr size_t ARENA = 256 << 10, APART = 128;
// Bytes of a matrix row that a warp loads.
constexpr size_t ROW = 16;
constexpr size_t PAGE = 4096, STACK = 33 * PAGE, STACKS = THREADS_MAX * STACK;

// The last access to two bytes: serial of the block (32 bits), its barriers so far (12), its warp's barriers (8),
// thread (10), and a kind. Counts wrap: a false match would need exactly that many barriers between two accesses.
typedef u64 Record;
constexpr Record KIND = 3, THREAD = 0x3ffull << 2, WARP_OF_THREAD = 0x1full << 7, WARP_PHASE = 0xffull << 12;
constexpr Record PHASE = 0xfffull << 20;
// Kinds. Writes: UNDER_WAY (a pending copy). Reads: by several lanes of a warp, several warps, several blocks.
constexpr Record UNDER_WAY = 1, BY_LANES = 1, BY_WARPS = 2, BY_BLOCKS = 3;

// An operation of all lanes of a warp, once all have arrived: `run` finds each lane's argument.
struct State;
struct Operation {
    const char* name;
    void (*run)(State& s, int first, void* const* arguments);
};

enum class Wait : u8 { Nothing, Warp, Block, Done };

struct Copy {
    u8* to;
    const u8* from;
    bool valid;
    size_t bytes;
};

struct Fiber {
    void* stack_pointer = nullptr;
    u8* stack = nullptr;
    Wait wait = Wait::Done;
    const Operation* operation = nullptr;
    // Pending asynchronous copies, oldest first, and the ends of committed groups among them.
    std::vector<Copy> copies;
    std::vector<size_t> groups;
};

struct Variable {
    const char* name;
    u8 *start, *end;
};

struct Launch {
    void (*body)(void**);
    void** arguments;
    dim3 grid;
    int threads;
    size_t shared_bytes;
    // See emulated_set_order.
    int order;
    // Serial of the first block: smaller ones belong to an earlier launch.
    u32 first_serial;
    // The blocks that run, if not all do.
    const std::vector<u64>* chosen;

    // The block of the grid that runs as number `k`.
    u64 block_of(u32 k) const { return chosen ? (*chosen)[k] : k; }
};

struct Region;

// A block's knowledge of another: its accesses before its barrier `until` are done. Thread `thread` has seen it,
// between the barriers of the block and of its warp with these numbers; after them the others may rely on it.
struct Known {
    u32 serial;
    Record until;
    int thread;
    Record phase;
    u8 warp_phase;
};

// Running blocks, blocks that wait for another, the count of flags and ends so far, and whether any has failed.
struct Watch {
    std::atomic<u32> running{0}, waiting{0};
    std::atomic<u64> events{0};
    std::atomic<bool> failed{false};
};

struct State {
    const Launch* launch = nullptr;
    dim3 block{};
    u32 serial = 0;
    int current = -1;
    Record phase = 0;
    u8 warp_phase[WARPS_MAX] = {};
    // Lanes that can continue, by warp.
    u32 ready[WARPS_MAX] = {};
    Fiber fibers[THREADS_MAX];
    void* arguments[THREADS_MAX] = {};
    void* scheduler = nullptr;
    // The stacks of all fibers.
    u8* stacks = nullptr;
    u8* arena = nullptr;
    Record *writes = nullptr, *reads = nullptr;
    Variable dynamic{};
    // Memory, and the allocation that was touched last.
    Region* region = nullptr;
    u64 recent_start = 0, recent_end = 0;
    std::vector<Variable> variables;
    // Knowledge of other blocks of the launch.
    Watch* watch = nullptr;
    std::vector<Known> known;
    std::unordered_set<u64> looked;
    bool waits = false, abandoned = false;
    u64 events = 0;
    double quiet_s = 0;
    bool failed = false;
    char message[768] = {};

    State();
    // The stamp of an access by thread `i`, now.
    Record stamp(int i) const {
        return (Record)serial << 32 | phase << 20 | (Record)warp_phase[i / LANES] << 12 | (Record)i << 2;
    }
    // Whether copies complete at once. On a GPU they may complete at any time until they are waited for.
    bool lands_early() const { return launch->order; }
};

// The state of this host thread while it runs blocks. (A plain thread-local: it is read at every load and store.)
extern thread_local State* mine __attribute__((tls_model("initial-exec")));

// Ends the launch with an error, with the place in the code if `at` is not null.
[[noreturn]] void fail(const void* at, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Waits for the other lanes of the warp at `operation`; when it returns, the operation has run over all lanes' arguments.
void meet(const Operation& operation, void* argument);

// Checks an access by the running fiber, and records it. `kind` is UNDER_WAY for the target of a copy.
void touch_read(const void* address, size_t bytes, const void* at);
void touch_write(const void* address, size_t bytes, Record kind, const void* at);
// Checks an access that cannot race.
void touch_atomic(const void* address, size_t bytes, const void* at);
// Whether another block's accesses between two of its barriers are known to be done.
bool ordered(const State& s, u32 serial, Record phase);
// Checks a read by a whole warp.
void touch_together(const void* row);
// A pending copy has completed.
void landed(void* address, size_t bytes);

void open_region(State& s);
void open_shared(State& s);
void run_block(State& s);
void open_block(State& s);
void close_block(State& s);

// An address of shared memory that is in no variable.
[[noreturn]] void fail_in_arena(State& s, const char* did, u64 address, size_t bytes, const void* at);

// Whether an address is in the library itself: constants of kernels.
bool of_the_library(const void* address);

}  // namespace emulated
