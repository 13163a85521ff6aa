// What processes of one machine share, and the messages of one group of calls between them.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

// Whether who must wait for another rank is to come again (driver.cpp).
extern "C" bool emulated_trying();

namespace {

enum Status { Success = 0, UnhandledCudaError = 1, SystemError = 2, InternalError = 3, InvalidArgument = 4, InvalidUsage = 5,
              RemoteError = 6 };
// What work answers that must wait for another rank, and is to be gone on with later.
constexpr int UNFINISHED = -1;
enum Type { F32 = 7, Bf16 = 9 };
enum Kind : uint32_t { Sends = 1, ReduceScatters, Reduces, AllGathers, Broadcasts };

enum Op { Sum = 0 };

const char* const KINDS[] = {"nothing", "a send", "a reduce-scatter", "a reduce", "an all-gather", "a broadcast"};

thread_local std::string words = "nothing is wrong";

int failed(int status, const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    words = text;
    return status;
}

size_t bytes_of(int type) { return type == F32 ? 4 : type == Bf16 ? 2 : 0; }

// What a library does wrong, where a test wants it so (EMULATED_NCCL_FAULT): "places" puts what an all-gather brings of a rank in
// another one's place, "chunk" loses 512 bytes of long messages, "receive" leaves what ncclRecv should bring in a buffer of its
// own, "hang" lets rank 1 never come to a reduce-scatter.
bool is_wrong(const char* what) {
    static const char* told = std::getenv("EMULATED_NCCL_FAULT");
    return told && !std::strcmp(told, what);
}

constexpr size_t LOST_FROM = 65536, LOST_TO = LOST_FROM + 512;

// ---- what processes share ----

constexpr size_t ROOM = 1 << 18;

// Bytes from one rank to another, in order.
struct Channel {
    std::atomic<uint64_t> written, read;
    uint8_t bytes[ROOM];
};

constexpr int RANKS_MAX = 64;

struct Shared {
    std::atomic<uint32_t> joined, broken;
    // How many calls each rank has captured, and the last two of them; whether one refuses to.
    std::atomic<uint64_t> captured[RANKS_MAX], calls[RANKS_MAX][2];
    std::atomic<uint32_t> refuses;
    Channel channels[1];
};

// How long a rank waits for others without a byte that moves, in seconds.
constexpr int PATIENCE_S = 100;

// A number of a call that graphs hold.
constexpr uint64_t CAPTURED = uint64_t{1} << 63;

struct Header {
    uint32_t kind, type;
    uint64_t root, count, number;
};

struct Comm {
    int rank = 0, ranks = 0;
    Shared* shared = nullptr;
    // Collectives that were called so far; sends to and receipts from each rank.
    uint64_t collectives = 0;
    std::vector<uint64_t> sent, received;
    // The same of calls that were captured, which keep their numbers at each launch.
    uint64_t captured = 0;
    // Which kinds of messages went to and came from whom outside of captures: kind, peer, whether it was sent.
    std::set<std::tuple<uint32_t, int, bool>> met;
    std::vector<uint64_t> captured_sent, captured_received;
    std::atomic<bool> aborted{false};
    std::atomic<int> fault{Success};
    // A connection that broke beside the host: nothing comes any more, until somebody leaves.
    std::atomic<bool> lost{false};

    Channel& channel(int from, int to) { return shared->channels[from * ranks + to]; }
    bool broken() { return aborted || shared->broken.load() != 0; }
};

bool later_than(time_t seconds, time_t since) { return std::time(nullptr) - since > seconds; }

void pause(int& idle) {
    if (++idle < 64) sched_yield();
    else usleep(50);
}

// ---- one group of calls ----

// A message on its way, its header first.
struct Transfer {
    int peer;
    bool sends;
    Header header;
    uint8_t* data;
    size_t bytes, done = 0;
};

struct Run {
    const uint8_t* at;
    size_t bytes;
    bool written;
};

// What a group of calls on one communicator will do.
struct Work {
    Comm* comm;
    void* queue;
    std::vector<std::deque<Transfer>> sends, receives;
    std::vector<std::function<void()>> after;
    std::vector<std::shared_ptr<std::vector<uint8_t>>> room;
    std::vector<Run> runs;
    // When a byte moved last.
    time_t since = 0;

    Work(Comm* comm, void* queue) : comm(comm), queue(queue), sends(comm->ranks), receives(comm->ranks) {}

    void send(int to, const Header& header, const void* data, size_t bytes) {
        sends[to].push_back({to, true, header, static_cast<uint8_t*>(const_cast<void*>(data)), bytes});
    }

    void receive(int from, const Header& header, void* data, size_t bytes) {
        receives[from].push_back({from, false, header, static_cast<uint8_t*>(data), bytes});
    }

    // Memory for what is received and then added.
    uint8_t* scratch(size_t bytes) {
        room.push_back(std::make_shared<std::vector<uint8_t>>(bytes));
        return room.back()->data();
    }

    // Whether a call may read, or write, these bytes beside the others of the group.
    bool takes(const void* data, size_t bytes, bool written) {
        Run run{static_cast<const uint8_t*>(data), bytes, written};
        for (const Run& other : runs) {
            bool apart = run.at + run.bytes <= other.at || other.at + other.bytes <= run.at;
            if (!apart && (run.written || other.written)) return false;
        }
        runs.push_back(run);
        return true;
    }

    int move(Transfer& t, bool& moved) {
        Channel& c = t.sends ? comm->channel(comm->rank, t.peer) : comm->channel(t.peer, comm->rank);
        size_t whole = sizeof(Header) + t.bytes;
        while (t.done < whole) {
            uint64_t written = c.written.load(std::memory_order_acquire), read = c.read.load(std::memory_order_acquire);
            bool in_header = t.done < sizeof(Header);
            uint8_t* at = in_header ? reinterpret_cast<uint8_t*>(&t.header) + t.done : t.data + t.done - sizeof(Header);
            size_t place = (t.sends ? written : read) % ROOM;
            size_t ready = t.sends ? ROOM - (written - read) : written - read;
            size_t n = (in_header ? sizeof(Header) : whole) - t.done;
            // A header is looked at in one piece.
            if (!t.sends && in_header && ready < sizeof(Header)) break;
            n = std::min(std::min(n, ready), ROOM - place);
            if (n == 0) break;
            if (t.sends) {
                std::memcpy(c.bytes + place, at, n);
                c.written.store(written + n, std::memory_order_release);
            } else if (in_header) {
                // Never split by the end of the ring: see `pad`.
                Header theirs;
                std::memcpy(&theirs, c.bytes + place, sizeof theirs);
                if (int status = compared(t, theirs)) return status;
                c.read.store(read + n, std::memory_order_release);
            } else {
                size_t first = t.done - sizeof(Header), end = first + n;
                size_t lost = is_wrong("chunk") ? std::min(std::max(first, LOST_FROM), end) : end;
                size_t again = is_wrong("chunk") ? std::max(first, std::min(LOST_TO, end)) : end;
                std::memcpy(at, c.bytes + place, lost - first);
                std::memcpy(at + (again - first), c.bytes + place + (again - first), end - again);
                c.read.store(read + n, std::memory_order_release);
            }
            t.done += n;
            moved = true;
        }
        return Success;
    }

    int compared(const Transfer& t, const Header& theirs) {
        const Header& mine = t.header;
        if (!std::memcmp(&mine, &theirs, sizeof mine)) return Success;
        const char* kind = theirs.kind < 6 ? KINDS[theirs.kind] : "noise";
        return failed(InvalidUsage,
                      "rank %d waits for %s of %llu values (type %u, root %llu, number %llu), rank %d brings %s of %llu "
                      "(type %u, root %llu, number %llu)",
                      comm->rank, KINDS[mine.kind], (unsigned long long)mine.count, mine.type,
                      (unsigned long long)mine.root, (unsigned long long)mine.number, t.peer, kind,
                      (unsigned long long)theirs.count, theirs.type, (unsigned long long)theirs.root,
                      (unsigned long long)theirs.number);
    }

    int run() {
        int idle = 0;
        if (!since) since = std::time(nullptr);
        for (bool open = true; open;) {
            bool moved = false;
            open = false;
            for (auto* all : {&sends, &receives}) {
                for (auto& line : *all) {
                    while (!line.empty()) {
                        Transfer& front = line.front();
                        if (int status = move(front, moved)) return broke(status);
                        if (front.done < sizeof(Header) + front.bytes) break;
                        // So that headers begin at multiples of their size.
                        if (!pad(front)) break;
                        line.pop_front();
                    }
                    open |= !line.empty();
                }
            }
            if (comm->broken()) return failed(RemoteError, "rank %d: the group was left or broken", comm->rank);
            open |= comm->lost;
            if (moved) {
                idle = 0;
                since = std::time(nullptr);
            } else if (open && later_than(PATIENCE_S, since)) {
                return broke(failed(RemoteError, "rank %d: nothing has come for %d s", comm->rank, PATIENCE_S));
            } else if (open && emulated_trying()) {
                return UNFINISHED;
            } else {
                pause(idle);
            }
        }
        for (auto& finish : after) finish();
        return Success;
    }

    // Moves the ring on to the next multiple of a header's size behind a message.
    bool pad(Transfer& t) {
        Channel& c = t.sends ? comm->channel(comm->rank, t.peer) : comm->channel(t.peer, comm->rank);
        std::atomic<uint64_t>& end = t.sends ? c.written : c.read;
        uint64_t at = end.load(), next = (at + sizeof(Header) - 1) / sizeof(Header) * sizeof(Header);
        bool there = t.sends ? next - c.read.load() <= ROOM : next <= c.written.load();
        if (there) end.store(next, std::memory_order_release);
        return there;
    }

    int broke(int status) {
        comm->fault = status;
        comm->shared->broken = 1;
        return status;
    }
};

static_assert(ROOM % sizeof(Header) == 0, "headers are never split");

}  // namespace
