// A launch as it runs: blocks, their warps and what these wait for.
#pragma once
#include "machine.h"

#include <memory>

namespace ptx {

struct Block;

// Lanes at one place of the code. `waits`: at an instruction that needs more lanes than these.
struct Group {
    u32 pc, lanes;
    bool waits;
};

// One cp.async of a warp that has not landed: for each lane where to and from, how many bytes, and its group.
struct Copy {
    u32 lanes;
    u32 bytes;
    u32 to[LANES], group[LANES], given[LANES];
    u64 from[LANES];
};

enum class Stop : u8 { Turn, AtBarrier, Done, Polls };

struct Warp {
    Block* block = nullptr;
    u8* registers = nullptr;
    const u8* constants = nullptr;
    int index = 0;
    std::vector<Group> groups;
    Stop stop = Stop::Turn;
    // Its own barriers so far.
    u32 phase = 0;
    u64 jumps_back = 0;
    const Instruction* now = nullptr;
    std::vector<Copy> copies;
    // Groups of copies that each lane has committed.
    u32 committed[LANES] = {};
    std::vector<u8> local;

    template <class T> T* out(i32 place) { return reinterpret_cast<T*>(registers + place); }
    template <class T> const T* in(i32 place) const {
        return reinterpret_cast<const T*>(place >= 0 ? registers + place : constants + ~place);
    }
    int thread(int lane) const { return index * LANES + lane; }
};

struct Counts {
    u64 issued[CLASSES] = {};
    u64 lane_instructions = 0;
    // Passes over the banks of shared memory, and how few there could be.
    u64 wavefronts = 0, wavefronts_least = 0;
    // Sectors of 32 bytes of memory, and bytes that lanes asked for.
    u64 sectors = 0, sector_bytes = 0;
};

struct Launch {
    const Kernel* kernel;
    const Unit* unit;
    u32 grid[3];
    u32 threads;
    u32 shared_bytes;
    int order;
    const u8* parameters;
    bool counts_memory;
    // Whether it is a fault to use what nobody wrote.
    bool looks_for_unwritten;
    // Of its first block, among all that ever ran.
    u32 first_serial;
    // The blocks that run, where not all do.
    const std::vector<u64>* chosen;
    Counts counts;

    // The block of the grid that runs as number `k`.
    u64 block_of(u32 k) const { return chosen ? (*chosen)[k] : k; }
    bool lands_early() const { return order >= 3; }
    bool takes_turns() const { return order == 2 || order == 4; }
    bool is_backward() const { return order == 1 || order == 4; }
};

// Who touched two bytes of shared memory last: the block's barriers so far (12 bits, never 0), its warp's (8), thread (10), a
// kind (2). 0: nobody yet.
using Record = u32;
constexpr Record KIND = 3, THREAD = 0x3ff << 2, WARP_OF_THREAD = 0x1f << 7, WARP_PHASE = 0xff << 12, PHASE = 0xfffu << 20;
// Kinds of a write: a copy that is on its way; of reads: by lanes of a warp, by warps.
constexpr Record UNDER_WAY = 1, BY_LANES = 1, BY_WARPS = 2;
// Of no variable.
constexpr Record OUTSIDE = ~0u;

// Where shared memory begins among the addresses of its own space, and that space among generic addresses.
constexpr u32 SHARED_START = 1024, SHARED_MAX = 163 << 10;
constexpr u64 SHARED_WINDOW = 1ull << 56, LOCAL_WINDOW = 2ull << 56, WINDOW_BYTES = 1ull << 32;
// Memory that nobody wrote holds this: NaN in every dtype, and no number that is computed.
constexpr u16 UNWRITTEN = 0xffdb;

struct Block {
    Launch* launch = nullptr;
    u32 at[3] = {};
    u32 phase = 1, serial = 0;
    std::vector<Warp> warps;
    std::unique_ptr<u8[]> files;
    size_t files_bytes = 0;
    std::vector<u8> shared;
    std::vector<Record> writes, reads;

    // The one that runs as number `number`.
    void open(Launch& of, u32 number);
    Record stamp(const Warp& w, int lane) const {
        return phase << 20 | (w.phase & 0xff) << 12 | (u32)w.thread(lane) << 2;
    }
};

// Runs a warp until it must wait, has ended, or has had its turn.
Stop run_warp(Warp& w);
// Runs a block as far as it goes; whether it has ended.
bool run_block(Block& b);
// Numbers that look random, the same for the same seed.
struct Chance {
    u64 state;
    u32 below(u32 count);
};
enum class Step : u8 { Moved, Waits, Ended };
// Runs one of a block's warps, until it must wait or has had its turn.
Step run_some_warp(Block& b, Chance& chance);

// An access by a warp: checks it, and finds where the bytes are. `at` has addresses, and then places of the host.
void find_accesses(Warp& w, const Instruction& i, u32 lanes, u64* at, u32 bytes, bool writes);

// Memory that lanes reach: see memory.cpp.
void* allocate(u64 bytes);
void release(void* memory, u64 bytes);
bool holds(u64 address, u64 bytes);
// Sets bytes to 0; whole pages of many take no memory of the machine until they are touched again.
void clear(u64 address, u64 bytes);
void check_global(u64 address, u64 bytes, int lane, const char* did);
// The bounds of the allocation that was touched last.
extern u64 recent_start, recent_end;

// The bounds of the allocation of an address, where it lives.
bool allocation_of(u64 address, u64& start, u64& end);

// The emulation beside this machine, where it is asked for: see beside.cpp.
bool is_beside();
void* allocate_beside(u64 bytes);
void release_beside(void* at, u64 bytes);

class Beside {
public:
    // Keeps the memory that the arguments name.
    Beside(const Kernel& kernel, const u8* parameters);
    // Runs the launch once more from there, and compares; what the emulation said.
    const char* run(const u32* grid, u32 block, u64 shared_bytes, void** arguments, int order);

private:
    struct Kept {
        u64 start;
        std::vector<u8> before, after;
    };
    const Kernel& kernel;
    std::vector<Kept> kept;
};

// Checks of shared memory: see shared.cpp. Addresses are those of the shared space.
void shared_read(Warp& w, int lane, u32 address, u32 bytes);
void shared_write(Warp& w, int lane, u32 address, u32 bytes, Record kind);
void shared_read_together(Warp& w, int lane, u32 address, u32 bytes);
void shared_landed(Warp& w, int lane, u32 address, u32 bytes);
inline u8* shared_place(Warp& w, u32 address) { return w.block->shared.data() + (address - SHARED_START); }

// The warp that executes now.
extern const Warp* running;

void count_shared(Warp& w, u32 lanes, const u64* at, u32 bytes);
void count_global(Warp& w, u32 lanes, const u64* at, u32 bytes);
// Adds a line to a file: the kernel, its launch, and what was counted.
void write_counts(const Launch& launch, const char* file, double seconds);

}  // namespace ptx
