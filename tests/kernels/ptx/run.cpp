// Warps and blocks: which lanes go on where, and who waits for whom.
#include "run.h"

#include <algorithm>
#include <cstring>

namespace ptx {

namespace {

// How often a warp looks at memory that others may change before these have their turn, and how often it may jump back.
constexpr int LOOKS = 64;
constexpr u64 JUMPS_BACK_MAX = 1ull << 31;

const char* where(const Warp& w, const Group& g) {
    const Instruction& i = w.block->launch->kernel->code[g.pc];
    return i.kind == Kind::BlockBarrier ? "a barrier of the block" : i.is == Class::Mma ? "mma"
           : i.is == Class::Matrices ? "ldmatrix" : "an instruction of several lanes";
}

void merge(std::vector<Group>& groups) {
    for (size_t a = 0; a < groups.size(); a++) {
        for (size_t b = a + 1; b < groups.size();) {
            if (groups[a].pc != groups[b].pc) {
                b++;
                continue;
            }
            groups[a].lanes |= groups[b].lanes;
            groups[a].waits = false;
            groups.erase(groups.begin() + (long)b);
        }
    }
}

// The lowest place from which lanes can go on, and the next one behind it.
Group* pick(std::vector<Group>& groups, u32& limit) {
    Group* lowest = nullptr;
    for (Group& g : groups) {
        if (!g.waits && (!lowest || g.pc < lowest->pc)) lowest = &g;
    }
    limit = ~0u;
    for (Group& g : groups) {
        if (lowest && &g != lowest && g.pc > lowest->pc && g.pc < limit) limit = g.pc;
    }
    return lowest;
}

// No lanes can go on: they wait for others that will not come.
[[noreturn]] void part(Warp& w) {
    const Group& one = w.groups[0];
    int first = __builtin_ctz(one.lanes);
    w.now = &w.block->launch->kernel->code[one.pc];
    if (w.groups.size() > 1) {
        const Group& other = w.groups[1];
        int second = __builtin_ctz(other.lanes);
        fault(first, "lanes of a warp part: thread %d is at %s, thread %d at %s", w.thread(first), where(w, one),
              w.thread(second), where(w, other));
    }
    fault(first, "lanes of a warp part: thread %d is at %s, thread %d at its end", w.thread(first), where(w, one),
          w.thread(__builtin_ctz(~one.lanes)));
}

enum class Left { Go, Choose, Stop };

// Executes from a group's place on until it must be chosen anew.
Left go(Warp& w, Group& g, u32 limit) {
    Launch& launch = *w.block->launch;
    const Instruction* code = launch.kernel->code.data();
    u32 pc = g.pc, lanes = g.lanes;
    int looks = 0;
    auto leave = [&](u32 at, Left how) { return g.pc = at, g.lanes = lanes, how; };
    while (pc < limit) {
        const Instruction& i = code[pc];
        w.now = &i;
        u32 on = lanes;
        if (i.guard != NONE) on &= i.guard_is_not ? ~*w.in<u32>(i.guard) : *w.in<u32>(i.guard);
        launch.counts.issued[(int)i.is]++;
        launch.counts.lane_instructions += (u32)__builtin_popcount(on);
        switch (i.kind) {
            case Kind::Plain:
                if (on) i.run(w, i, on);
                pc++;
                break;
            case Kind::Branch: {
                bool back = on && i.target <= pc;
                if (back && ++w.jumps_back > JUMPS_BACK_MAX) fault(__builtin_ctz(on), "runs without an end");
                if (on == lanes) {
                    pc = i.target;
                } else if (!on) {
                    pc++;
                } else {
                    lanes &= ~on;
                    leave(pc + 1, Left::Choose);
                    w.groups.push_back({i.target, on, false});
                    return Left::Choose;
                }
                break;
            }
            case Kind::Exit:
                lanes &= ~on;
                if (!lanes) return leave(pc, Left::Choose);
                pc++;
                break;
            case Kind::BlockBarrier:
            case Kind::Together: {
                if (on && on != lanes) {
                    w.groups.push_back({pc + 1, lanes & ~on, false});
                    lanes = on;
                    return leave(pc, Left::Choose);
                }
                if (!on) {
                    pc++;
                    break;
                }
                u32 needed = i.members == NONE ? ALL : w.in<u32>(i.members)[__builtin_ctz(on)];
                u32 others = on & ~needed;
                if (others) fault(__builtin_ctz(others), "is not among the lanes %#x that an instruction names", needed);
                if (on != needed) {
                    g.waits = true;
                    return leave(pc, Left::Choose);
                }
                if (i.kind == Kind::BlockBarrier) return leave(pc, Left::Stop);
                i.run(w, i, on);
                pc++;
                if (launch.takes_turns()) return leave(pc, Left::Go);
                break;
            }
            case Kind::Poll:
                if (on) i.run(w, i, on);
                pc++;
                if (++looks == LOOKS) {
                    w.stop = Stop::Polls;
                    return leave(pc, Left::Stop);
                }
                break;
        }
    }
    return leave(pc, Left::Choose);
}

}  // namespace

Stop run_warp(Warp& w) {
    running = &w;
    for (;;) {
        for (size_t k = 0; k < w.groups.size();) {
            if (w.groups[k].lanes) k++;
            else w.groups.erase(w.groups.begin() + (long)k);
        }
        if (w.groups.size() > 1) merge(w.groups);
        if (w.groups.empty()) return w.stop = Stop::Done;
        u32 limit;
        Group* g = pick(w.groups, limit);
        if (!g) part(w);
        w.stop = Stop::AtBarrier;
        size_t index = (size_t)(g - w.groups.data());
        // Groups may move while this one runs.
        w.groups.reserve(LANES + 2);
        Left left = go(w, w.groups[index], limit);
        if (left == Left::Stop) return w.stop;
        if (left == Left::Go) return w.stop = Stop::Turn;
    }
}

void Block::open(Launch& of, u32 number) {
    launch = &of;
    const Kernel& kernel = *of.kernel;
    u64 index = of.block_of(number), over = index / of.grid[0];
    at[0] = (u32)(index % of.grid[0]), at[1] = (u32)(over % of.grid[1]), at[2] = (u32)(over / of.grid[1]);
    phase = 1, serial = of.first_serial + number;
    u32 count = of.threads / LANES;
    warps.resize(count);
    size_t bytes = (size_t)kernel.file_bytes * count;
    if (bytes > files_bytes) files.reset(new u8[bytes + 64]), files_bytes = bytes;
    u8* start = (u8*)(((uintptr_t)files.get() + 63) / 64 * 64);
    for (u32 k = 0; k < count; k++) {
        Warp& w = warps[k];
        w.block = this, w.index = (int)k;
        w.registers = start + (size_t)kernel.file_bytes * k;
        w.constants = kernel.constants.data();
        w.groups.assign(1, {0, ALL, false});
        w.stop = Stop::Turn, w.phase = 0, w.jumps_back = 0;
        w.copies.clear();
        std::memset(w.committed, 0, sizeof w.committed);
        w.local.assign((size_t)kernel.local_bytes * LANES, 0xff);
    }
    // Static variables, then at a fixed place what the launch asked for.
    u32 dynamic = 64u << 10, most = of.shared_bytes ? dynamic + (of.shared_bytes + 15) / 16 * 16 : 0;
    for (const SharedVariable& v : kernel.variables) most = std::max(most, v.start - SHARED_START + (v.bytes + 15) / 16 * 16);
    if (shared.size() != most) {
        shared.assign(most, 0);
        writes.assign(most / 2 + 8, OUTSIDE);
        reads.assign(most / 2 + 8, 0);
    }
    auto clear = [&](u32 from, u32 bytes) {
        for (u32 k = 0; k + 1 < bytes + 1; k += 2) std::memcpy(&shared[from + k], &UNWRITTEN, 2);
        std::memset(&writes[from / 2], 0, (bytes + 1) / 2 * sizeof(Record));
        std::memset(&reads[from / 2], 0, (bytes + 1) / 2 * sizeof(Record));
    };
    if (of.shared_bytes) clear(dynamic, of.shared_bytes);
    for (const SharedVariable& v : kernel.variables) clear(v.start - SHARED_START, v.bytes);
}

namespace {

// Lets a block go on when all its warps have come to a barrier; whether it has ended. `done` and `at_barrier` are how many.
bool pass_barrier(Block& b, u32 at_barrier, u32 done) {
    u32 count = (u32)b.warps.size();
    if (done == count) return true;
    if (at_barrier + done < count) return false;
    if (done) fault(-1, "%u threads wait for the block, %u have ended", at_barrier * LANES, done * LANES);
    for (Warp& w : b.warps) w.groups[0].pc++, w.stop = Stop::Turn;
    b.phase = b.phase % 0xffe + 1;
    return false;
}

}  // namespace

bool run_block(Block& b) {
    u32 count = (u32)b.warps.size();
    for (;;) {
        u32 at_barrier = 0, done = 0, moved = 0;
        for (u32 k = 0; k < count; k++) {
            Warp& w = b.warps[b.launch->is_backward() ? count - 1 - k : k];
            if (w.stop == Stop::Turn || w.stop == Stop::Polls) {
                bool polled = w.stop == Stop::Polls;
                run_warp(w);
                moved += !(polled && w.stop == Stop::Polls);
            }
            at_barrier += w.stop == Stop::AtBarrier, done += w.stop == Stop::Done;
        }
        if (pass_barrier(b, at_barrier, done)) return true;
        // All that can run wait for other blocks.
        if (!moved && at_barrier + done < count) return false;
    }
}

// splitmix64
u32 Chance::below(u32 count) {
    u64 x = state += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return (u32)(((x ^ x >> 31) >> 32) * count >> 32);
}

Step run_some_warp(Block& b, Chance& chance) {
    u32 ready[WARPS_MAX], count = 0;
    auto counted = [&](Stop stop) {
        u32 found = 0;
        for (const Warp& w : b.warps) found += w.stop == stop;
        return found;
    };
    for (u32 k = 0; k < b.warps.size(); k++) {
        if (b.warps[k].stop == Stop::Turn || b.warps[k].stop == Stop::Polls) ready[count++] = k;
    }
    Warp& w = b.warps[ready[chance.below(count)]];
    bool polled = w.stop == Stop::Polls;
    run_warp(w);
    if (pass_barrier(b, counted(Stop::AtBarrier), counted(Stop::Done))) return Step::Ended;
    return polled && w.stop == Stop::Polls ? Step::Waits : Step::Moved;
}

}  // namespace ptx
