// Launches, as the host asks for them: the interface of the emulation's library.
#include "hardware.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>

// The texts of this library: (name of the unit, PTX), up to a null, and of each kernel the kinds of its parameters as its
// source has them: `p` a pointer, `i` an integer, `f` a number.
struct EmbeddedUnit {
    const char *name, *text;
};
struct EmbeddedKernel {
    const char *name, *kinds;
};
extern "C" const EmbeddedUnit ptx_units[];
extern "C" const EmbeddedKernel ptx_kernels[];

namespace ptx {

const Meanings& meanings() {
    static const Meanings* all = [] {
        Meanings* made = new Meanings;
        add_integers(*made), add_comparisons(*made), add_floats(*made), add_conversions(*made), add_lanes(*made);
        if (hardware() != Hardware::Kind) become(hardware(), *made);
        return made;
    }();
    return *all;
}

namespace {

struct Module {
    std::map<std::string, Unit> units;
    std::map<std::string, Kernel> kernels;
};

Module& module() {
    static Module* all = [] {
        Module* made = new Module;
        for (const EmbeddedUnit* u = ptx_units; u->name; u++) {
            Unit& unit = made->units[u->name];
            unit.name = u->name, unit.text = u->text;
            parse(unit, made->kernels);
        }
        for (const EmbeddedKernel* k = ptx_kernels; k->name; k++) {
            auto found = made->kernels.find(k->name);
            if (found == made->kernels.end()) continue;
            std::vector<Parameter>& parameters = found->second.parameters;
            if (parameters.size() != std::strlen(k->kinds)) {
                std::fprintf(stderr, "%s has other parameters than its source\n", k->name);
                std::abort();
            }
            for (size_t i = 0; i < parameters.size(); i++) 
                parameters[i].kind = k->kinds[i] == 'p' ? 0 : k->kinds[i] == 'f' ? 2 : 1;
        }
        return made;
    }();
    return *all;
}

// Blocks that wait for others, at most: a GPU holds a few for each of its multiprocessors.
constexpr size_t WAITING_MAX = 256, ROUNDS_MAX = 10000;

// PTX_RESIDENT: how many blocks a GPU holds at a time; 0 for as many as there are, in order.
const u32 RESIDENT = [] {
    const char* count = std::getenv("PTX_RESIDENT");
    return count ? (u32)std::strtoul(count, nullptr, 0) : 0;
}();

int order = 0;
u32 serial = 1;
// Blocks that alone run of grids that have more than so many.
std::vector<u64> wanted;
constexpr u64 CHOSEN_FROM = 4096;
char complaint[1536];

// What was wrong, and where: block, thread, line of the source and of the PTX.
void complain(const Launch& launch, const Block& b, const Fault& f) {
    char thread[32] = "", line[256] = "";
    if (f.lane >= 0 && running) std::snprintf(thread, sizeof thread, ", thread %d", running->thread(f.lane));
    if (running && running->now) {
        const Instruction& i = *running->now;
        auto file = launch.unit->files.find(i.source_file);
        const char* name = file == launch.unit->files.end() ? "?" : file->second.c_str();
        std::snprintf(line, sizeof line, ", %s:%u, line %u of its PTX", name, i.source_line, i.line);
    }
    std::snprintf(complaint, sizeof complaint, "%s (%s, block %u,%u,%u%s%s)", f.what.c_str(), launch.kernel->name.c_str(), b.at[0],
                  b.at[1], b.at[2], thread, line);
}

// Blocks one after another. One that waits for others gives way: to later ones, and then to those that wait, too.
class Grid {
public:
    Grid(Launch& launch, u32 all) : launch(launch), all(all) {
        // For counts alone some blocks may stand for all (PTX_BLOCKS).
        const char* most = std::getenv("PTX_BLOCKS");
        bool is_part = most && !launch.kernel->waits_for_blocks;
        blocks = is_part ? std::min(all, (u32)std::atoi(most)) : all;
    }

    bool run() { return RESIDENT ? run_at_random() : run_in_order(); }

private:
    bool run_in_order() {
        size_t rounds = 0;
        for (u32 taken = 0; taken < blocks || !waiting.empty();) {
            std::unique_ptr<Block> b;
            if (taken < blocks && waiting.size() < WAITING_MAX) {
                b = fresh();
                u32 index = (u32)((u64)taken * all / blocks);
                b->open(launch, launch.is_backward() ? all - 1 - index : index);
                taken++;
            } else {
                b = std::move(waiting.front()), waiting.pop_front();
                rounds++;
            }
            bool ended = false;
            try {
                ended = run_block(*b);
                if (rounds > ROUNDS_MAX) fault(-1, "blocks wait for what never comes");
            } catch (const Fault& f) {
                complain(launch, *b, f);
                return false;
            }
            if (ended) rounds = 0;
            if (ended) spare.push_back(std::move(b));
            else waiting.push_back(std::move(b));
        }
        return true;
    }

    // Blocks begin in any order, as many at a time as a GPU may hold, and no other begins before one of them has ended. Whose
    // turn it is, and which of its warps', is left to chance.
    bool run_at_random() {
        static const char* seed = std::getenv("PTX_SEED");
        Chance chance{(seed ? std::strtoull(seed, nullptr, 0) : 0) + ((u64)launch.first_serial << 8) + (u64)launch.order};
        std::vector<u32> begin(all);
        for (u32 k = 0; k < all; k++) begin[k] = k;
        for (u32 k = all; k > 1; k--) std::swap(begin[k - 1], begin[chance.below(k)]);
        size_t idle = 0;
        for (u32 taken = 0; taken < blocks || !waiting.empty();) {
            if (taken < blocks && waiting.size() < RESIDENT) {
                std::unique_ptr<Block> b = fresh();
                b->open(launch, begin[taken++]);
                waiting.push_back(std::move(b));
                continue;
            }
            std::unique_ptr<Block>& b = waiting[chance.below((u32)waiting.size())];
            Step step = Step::Moved;
            try {
                // A few turns at a time, as registers leave the cache in between.
                for (u32 turns = 1 + chance.below(2 * (u32)b->warps.size()); turns > 0 && step == Step::Moved; turns--) {
                    step = run_some_warp(*b, chance);
                }
                idle = step == Step::Waits ? idle + 1 : 0;
                if (idle > ROUNDS_MAX + 100 * waiting.size()) fault(-1, "blocks wait for what never comes");
            } catch (const Fault& f) {
                complain(launch, *b, f);
                return false;
            }
            if (step != Step::Ended) continue;
            std::swap(b, waiting.back());
            spare.push_back(std::move(waiting.back()));
            waiting.pop_back();
        }
        return true;
    }

    Launch& launch;
    u32 all, blocks;
    std::deque<std::unique_ptr<Block>> waiting;

    std::unique_ptr<Block> fresh() {
        if (spare.empty()) return std::make_unique<Block>();
        std::unique_ptr<Block> b = std::move(spare.back());
        spare.pop_back();
        return b;
    }
    // Their memory is kept from launch to launch.
    static std::vector<std::unique_ptr<Block>> spare;
};

std::vector<std::unique_ptr<Block>> Grid::spare;

const char* launch_kernel(Kernel& kernel, const u32* grid, u32 block, u64 shared_bytes, void** arguments) {
    if (block == 0 || block > THREADS_MAX || block % LANES) return "a block needs 32 to 1024 threads, whole warps";
    if (shared_bytes > SHARED_MAX) return "more shared memory than a block can have";
    if (grid[0] > 0x7fffffff) return "a grid of more than 2147483647 in x";
    if (grid[1] > 65535 || grid[2] > 65535) return "a grid of more than 65535 in y or z";
    const Unit& unit = module().units[kernel.unit];
    try {
        if (!kernel.is_decoded) decode(unit, kernel);
        if (kernel.shared_bytes + shared_bytes > SHARED_MAX) fault(-1, "more than %u bytes of shared memory", SHARED_MAX);
    } catch (const Fault& f) {
        std::snprintf(complaint, sizeof complaint, "%s, %s: %s", unit.name.c_str(), kernel.name.c_str(), f.what.c_str());
        return complaint;
    }
    std::vector<u8> parameters(kernel.parameter_bytes);
    for (size_t i = 0; i < kernel.parameters.size(); i++) {
        std::memcpy(&parameters[kernel.parameter_offsets[i]], arguments[i], kernel.parameters[i].bytes);
    }
    static const char *report = std::getenv("PTX_COUNTS"), *part = std::getenv("PTX_BLOCKS");
    u64 blocks = (u64)grid[0] * grid[1] * grid[2];
    std::vector<u64> chosen;
    bool is_part = !wanted.empty() && blocks > CHOSEN_FROM;
    for (u64 b : wanted) {
        if (is_part && b < blocks) chosen.push_back(b);
    }
    if (is_part) blocks = chosen.size();
    if (serial + blocks > ~0u) return "more blocks than this machine can tell apart";
    Launch launch{&kernel, &unit, {grid[0], grid[1], grid[2]}, block, (u32)shared_bytes, order, parameters.data(),
                  report != nullptr, !part, serial, is_part ? &chosen : nullptr, {}};
    serial += (u32)blocks;
    running = nullptr;
    Beside beside(kernel, parameters.data());
    auto begun = std::chrono::steady_clock::now();
    bool succeeds = Grid(launch, (u32)blocks).run();
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    if (report) write_counts(launch, report, seconds);
    return succeeds ? beside.run(grid, block, shared_bytes, arguments, order) : complaint;
}

}  // namespace

const Warp* running = nullptr;

}  // namespace ptx

extern "C" {

const void* emulated_find(const char* name) {
    auto found = ptx::module().kernels.find(name);
    return found == ptx::module().kernels.end() ? nullptr : &found->second;
}

ptx::u32 emulated_parameters(const void* kernel) {
    return (ptx::u32) static_cast<const ptx::Kernel*>(kernel)->parameters.size();
}

ptx::Parameter emulated_parameter(const void* kernel, ptx::u32 i) { return static_cast<const ptx::Kernel*>(kernel)->parameters[i]; }

// 0 and 1: warps forwards or backwards, each as far ahead as it goes; 2: warps take turns; 3 and 4: as 0, and as 1 and 2, but
// copies land at once.
void emulated_set_order(int order) { ptx::order = order; }

// From now on these blocks alone run (ascending; x goes first, then y, then z) of grids that have more than CHOSEN_FROM; none: all.
void emulated_choose(const ptx::u64* blocks, ptx::u64 count) { ptx::wanted.assign(blocks, blocks + count); }

const char* emulated_launch(const void* kernel, const ptx::u32* grid, ptx::u32 block, ptx::u64 shared_bytes, void** arguments) {
    ptx::Kernel* found = static_cast<ptx::Kernel*>(const_cast<void*>(kernel));
    return ptx::launch_kernel(*found, grid, block, shared_bytes, arguments);
}

void* emulated_allocate(ptx::u64 bytes) { return ptx::allocate(bytes); }
void emulated_free(void* memory, ptx::u64 bytes) { ptx::release(memory, bytes); }
void emulated_clear(ptx::u64 address, ptx::u64 bytes) { ptx::clear(address, bytes); }
bool emulated_holds(ptx::u64 address, ptx::u64 bytes) { return ptx::holds(address, bytes); }

}  // extern "C"
