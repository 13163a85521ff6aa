// Blocks of one launch that wait for each other: flags, and values that a block publishes to later blocks.
//
// A block that reads another's flag is ordered after that block's accesses before its last barrier, and after the
// accesses that were ordered before them. Other accesses of both to the same bytes are an error, in any order.
#include "state.h"

#include <sched.h>
#include <chrono>
#include <mutex>
#include <unordered_map>

namespace emulated {

namespace {

// The time limit without a new flag while all blocks wait.
constexpr double PATIENCE_S = 3.0;

// The value at an address and its writer, before and now.
struct Said {
    u32 serial[2];
    u32 value[2];
    std::vector<Known> known[2];
};

std::mutex one;

std::unordered_map<u64, Said>& said() {
    static auto* said = new std::unordered_map<u64, Said>;
    return *said;
}

double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// An earlier entry of the same block has no more information.
void learn(std::vector<Known>& known, Known more) {
    for (Known& k : known) {
        if (k.serial != more.serial || k.thread != more.thread) continue;
        if (k.until < more.until) k = more;
        return;
    }
    known.push_back(more);
}

// Whether thread `i` is ordered after it now.
bool holds(const State& s, const Known& k, int i) {
    if (k.phase != s.phase || k.thread == i) return true;
    return k.thread / LANES == i / LANES && k.warp_phase != s.warp_phase[i / LANES];
}

void go_on(State& s) {
    if (s.waits) s.watch->waiting--;
    s.waits = false;
}

}  // namespace

bool ordered(const State& s, u32 serial, Record phase) {
    for (const Known& k : s.known) {
        if (k.serial == serial && phase < k.until && holds(s, k, s.current)) return true;
    }
    return false;
}

void open_block(State& s) {
    s.known.clear();
    s.looked.clear();
    s.abandoned = s.waits = false;
    s.watch->running++;
}

void close_block(State& s) {
    go_on(s);
    s.watch->running--;
    s.watch->events++;
}

u32 take_number(u32* count) {
    touch_atomic(count, sizeof *count, __builtin_return_address(0));
    std::lock_guard<std::mutex> lock(one);
    return (*count)++;
}

void store_release(u32* to, u32 x) {
    State& s = *mine;
    touch_atomic(to, sizeof *to, __builtin_return_address(0));
    go_on(s);
    std::lock_guard<std::mutex> lock(one);
    Said& at = said()[(u64)to];
    at.serial[0] = at.serial[1], at.known[0].swap(at.known[1]), at.value[0] = *to;
    at.serial[1] = s.serial, at.known[1].clear(), at.value[1] = x;
    for (const Known& k : s.known) {
        if (holds(s, k, s.current)) learn(at.known[1], {k.serial, k.until, 0, 0, 0});
    }
    learn(at.known[1], {s.serial, s.phase, 0, 0, 0});
    *to = x;
    s.watch->events++;
}

// In the other order a block's first read is early: it sees the previous value.
u32 load_acquire(const u32* from) {
    State& s = *mine;
    touch_atomic(from, sizeof *from, __builtin_return_address(0));
    std::lock_guard<std::mutex> lock(one);
    bool early = s.looked.insert((u64)from).second && s.launch->order;
    auto found = said().find((u64)from);
    if (found == said().end() || found->second.serial[1] < s.launch->first_serial) return *from;
    const Said& at = found->second;
    int which = early ? 0 : 1;
    if (at.serial[which] >= s.launch->first_serial) {
        u8 warp_phase = s.warp_phase[s.current / LANES];
        for (const Known& k : at.known[which]) learn(s.known, {k.serial, k.until, s.current, s.phase, warp_phase});
    }
    return at.value[which];
}

// The blocks that this one waits for run in other threads of the host; where none does, they never will.
void pause() {
    State& s = *mine;
    Watch& w = *s.watch;
    if (!s.waits) {
        s.waits = true;
        s.events = ~0ull;
        w.waiting++;
    }
    if (w.failed) {
        s.abandoned = true;
        fail(nullptr, "waits for a block that has failed");
    }
    u64 events = w.events;
    if (events != s.events || w.waiting < w.running) {
        s.events = events;
        s.quiet_s = now_s();
    } else if (w.running == 1 || now_s() - s.quiet_s > PATIENCE_S) {
        fail(__builtin_return_address(0), "waits for what no block says");
    }
    sched_yield();
}

}  // namespace emulated
