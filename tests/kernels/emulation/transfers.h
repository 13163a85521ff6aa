// Memory and pipes that processes of one machine share, and the messages of one group of calls between them.
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
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

// Whether a call returns instead of waiting for another rank, and is retried later (driver.cpp).
extern "C" bool emulated_trying();

namespace {

enum Status { Success = 0, UnhandledCudaError = 1, SystemError = 2, InternalError = 3, InvalidArgument = 4, InvalidUsage = 5,
              RemoteError = 6 };
// The result of work that must wait for another rank and is continued later.
constexpr int UNFINISHED = -1;
enum Type { F32 = 7, Bf16 = 9 };
enum Kind : uint32_t { Sends = 1, ReduceScatters, AllGathers, Broadcasts };

enum Op { Sum = 0 };

const char* const KINDS[] = {"nothing", "a send", "a reduce-scatter", "an all-gather", "a broadcast"};

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

// A fault of the library, for tests (EMULATED_NCCL_FAULT): "places" swaps the ranks' ranges of an all-gather, "chunk"
// loses 512 bytes of long messages, "receive" does not copy the result of ncclRecv to the caller's buffer.
bool is_wrong(const char* what) {
    static const char* told = std::getenv("EMULATED_NCCL_FAULT");
    return told && !std::strcmp(told, what);
}

constexpr size_t LOST_FROM = 65536, LOST_TO = LOST_FROM + 512;

// ---- shared by processes ----

constexpr int RANKS = 16;

struct Shared {
    std::atomic<uint32_t> joined, connected, broken;
    // Each rank's process, and its ordered pipes to each rank.
    int process[RANKS], pipes[RANKS][RANKS];
};

// The time limit without any byte moved, in seconds.
constexpr int PATIENCE_S = 300;

// The number of a call in a graph.
constexpr uint64_t CAPTURED = uint64_t{1} << 63;

struct Header {
    uint32_t kind, type;
    uint64_t root, count, number;
};

struct Comm {
    int rank = 0, ranks = 0;
    Shared* shared = nullptr;
    // From each rank to each other rank.
    std::vector<int> pipes;
    // The number of calls of each kind: in a capture or not, collectives (-1) or sends to and receives from each rank.
    std::map<std::pair<bool, int>, uint64_t> numbers;
    // The kinds of messages exchanged outside of captures: kind, peer, whether it was sent.
    std::set<std::tuple<uint32_t, int, bool>> met;
    std::atomic<bool> aborted{false};
    std::atomic<int> fault{Success};
    // A connection that broke asynchronously: nothing arrives until a rank leaves.
    std::atomic<bool> lost{false};

    int pipe(int from, int to) { return pipes[from * ranks + to]; }
    bool broken() { return aborted || shared->broken.load() != 0; }
};

bool later_than(time_t seconds, time_t since) { return std::time(nullptr) - since > seconds; }

void pause(int& idle) {
    if (++idle < 64) sched_yield();
    else usleep(50);
}

// ---- one group of calls ----

// A message in flight, its header first.
struct Transfer {
    int peer;
    bool sends;
    Header header;
    uint8_t* data;
    size_t bytes, done = 0;
    // The other rank's header.
    Header theirs{};
};

struct Run {
    const uint8_t* at;
    size_t bytes;
    bool written;
};

// The pending messages of a group of calls on one communicator.
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

    // Memory for values that are received and then added.
    uint8_t* scratch(size_t bytes) {
        room.push_back(std::make_shared<std::vector<uint8_t>>(bytes));
        return room.back()->data();
    }

    // Whether a call may read, or write, these bytes concurrently with the others of the group.
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
        int pipe = t.sends ? comm->pipe(comm->rank, t.peer) : comm->pipe(t.peer, comm->rank);
        size_t whole = sizeof(Header) + t.bytes;
        uint8_t lost[LOST_TO - LOST_FROM];
        while (t.done < whole) {
            bool in_header = t.done < sizeof(Header);
            size_t at = in_header ? t.done : t.done - sizeof(Header), n = (in_header ? sizeof(Header) : t.bytes) - at;
            uint8_t* bytes = (in_header ? reinterpret_cast<uint8_t*>(t.sends ? &t.header : &t.theirs) : t.data) + at;
            if (is_wrong("chunk") && !t.sends && !in_header && at < LOST_TO) {
                bytes = at < LOST_FROM ? bytes : lost;
                n = std::min(n, (at < LOST_FROM ? LOST_FROM : LOST_TO) - at);
            }
            ssize_t some = t.sends ? write(pipe, bytes, n) : read(pipe, bytes, n);
            if (some <= 0) break;
            t.done += static_cast<size_t>(some);
            moved = true;
            if (t.sends || t.done != sizeof(Header)) continue;
            if (int status = compared(t)) return status;
        }
        return Success;
    }

    int compared(const Transfer& t) {
        const Header &mine = t.header, &theirs = t.theirs;
        if (!std::memcmp(&mine, &theirs, sizeof mine)) return Success;
        const char* kind = theirs.kind < 5 ? KINDS[theirs.kind] : "noise";
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

    int broke(int status) {
        comm->fault = status;
        comm->shared->broken = 1;
        return status;
    }
};

}  // namespace
