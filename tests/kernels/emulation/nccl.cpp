// NCCL between emulated GPUs: the functions of libnccl.so.2 that src/comm/nccl.rs calls, over memory that processes of one machine
// share.
//
// The calls of all ranks are compared: kind, type, count, root and order must be the same, otherwise the call fails
// with a message (ncclGetLastError). Rank r adds r, r-1, r-2 ... in this order, like the host's reduce-scatter, so the
// two can be compared bit by bit.
//
// A call is enqueued in its stream and runs when a caller waits for it. On a captured stream it becomes a node of
// the graph, and runs at each launch. The calls in graphs have their own numbers, so that ranks that capture or
// launch different calls are reported. With EMULATED_STRICT a message of a kind that two ranks did not exchange before
// is rejected in a capture: a real one connects them there, and allocates memory. The first call of a communicator uses
// EMULATED_NCCL_BYTES of the GPU's memory.
#include <algorithm>
#include <map>
#include "bf16.h"
#include "failing.h"
#include "transfers.h"

// The driver's functions that enqueue work in a stream.
extern "C" {
int emulated_enqueue(void* stream, int (*work)(void*), void* data);
uint64_t emulated_capture(void* stream);
void emulated_take(size_t bytes);
int emulated_capture_work(void* stream, int (*work)(void*), void* data, void (*drop)(void*), const uint64_t* uses, size_t count);
}

namespace {

thread_local int depth = 0;
thread_local int group_status = Success;
thread_local std::vector<std::unique_ptr<Work>> group;

Work& work_on(Comm* comm, void* queue) {
    for (auto& work : group) {
        if (work->comm == comm && work->queue == queue) return *work;
    }
    group.push_back(std::make_unique<Work>(comm, queue));
    return *group.back();
}

bool is_captured(void* queue) { return emulated_capture(queue); }

// The number of a call, the same at each launch of a graph.
uint64_t next(Comm* comm, void* queue, int of = -1) {
    uint64_t number = comm->numbers[{is_captured(queue), of}]++;
    return is_captured(queue) ? CAPTURED | number : number;
}

int told_of(int status) {
    if (status > 0) std::fprintf(stderr, "emulated NCCL: %s\n", words.c_str());
    return status;
}

int late(void* work) {
    std::unique_ptr<Work> own(static_cast<Work*>(work));
    int status = own->run();
    if (status == UNFINISHED) own.release();
    return told_of(status);
}

// A graph runs it more than once, each time to its end.
int again(void* work) {
    static std::map<void*, std::unique_ptr<Work>> begun;
    std::unique_ptr<Work>& own = begun[work];
    if (!own) own = std::make_unique<Work>(*static_cast<Work*>(work));
    int status = own->run();
    if (status != UNFINISHED) own.reset();
    return told_of(status);
}

void forget(void* work) { delete static_cast<Work*>(work); }

std::set<std::tuple<uint32_t, int, bool>> messages(const Work& work) {
    std::set<std::tuple<uint32_t, int, bool>> all;
    for (auto* lines : {&work.sends, &work.receives}) {
        for (const auto& line : *lines) {
            for (const Transfer& transfer : line) all.insert({transfer.header.kind, transfer.peer, transfer.sends});
        }
    }
    return all;
}

int capture(std::unique_ptr<Work> work) {
    Comm* comm = work->comm;
    for (const auto& met : messages(*work)) {
        if (!std::getenv("EMULATED_STRICT") || comm->met.count(met)) continue;
        return failed(InvalidUsage, "%s to or from rank %d for the first time, in a capture", KINDS[std::get<0>(met)], std::get<1>(met));
    }
    std::vector<uint64_t> uses;
    for (const Run& run : work->runs) uses.push_back(reinterpret_cast<uint64_t>(run.at));
    void* queue = work->queue;
    return emulated_capture_work(queue, again, work.release(), forget, uses.data(), uses.size()) ? UnhandledCudaError : Success;
}

int launch() {
    int status = group_status;
    auto works = std::move(group);
    group.clear();
    group_status = Success;
    for (auto& work : works) {
        if (status != Success) break;
        const char* bytes = std::getenv("EMULATED_NCCL_BYTES");
        if (bytes && work->comm->met.empty()) emulated_take(std::strtoull(bytes, nullptr, 10));
        if (!is_captured(work->queue)) work->comm->met.merge(messages(*work));
        if (is_captured(work->queue)) {
            status = capture(std::move(work));
        } else {
            void* queue = work->queue;
            status = emulated_enqueue(queue, late, work.release()) ? UnhandledCudaError : Success;
        }
    }
    return status;
}

// The end of every call: it is enqueued at once, unless a group is open.
int ended(int status) {
    if (status != Success) group_status = status;
    if (depth == 0) return launch();
    return status;
}

int checked(Comm* comm, size_t count, int type, int root, std::initializer_list<const void*> data) {
    if (!comm) return failed(InvalidArgument, "no communicator");
    if (comm->broken()) return failed(RemoteError, "the communicator was aborted, or its group is broken");
    if (!bytes_of(type)) return failed(InvalidArgument, "values of type %d", type);
    if (root < 0 || root >= comm->ranks) return failed(InvalidArgument, "rank %d of %d", root, comm->ranks);
    for (const void* at : data) {
        if (count && !at) return failed(InvalidArgument, "%zu values at no address", count);
        if (reinterpret_cast<uint64_t>(at) % bytes_of(type)) return failed(InvalidArgument, "values that are not aligned");
    }
    return Success;
}

void add(void* to, const void* from, size_t count, int type) {
    if (type == F32) {
        auto* x = static_cast<float*>(to);
        auto* y = static_cast<const float*>(from);
        for (size_t i = 0; i < count; i++) x[i] += y[i];
    } else {
        auto* x = static_cast<uint16_t*>(to);
        auto* y = static_cast<const uint16_t*>(from);
        for (size_t i = 0; i < count; i++) x[i] = narrowed(widened(x[i]) + widened(y[i]));
    }
}

const uint8_t* part(const void* at, size_t i, size_t bytes) { return static_cast<const uint8_t*>(at) + i * bytes; }
uint8_t* part(void* at, size_t i, size_t bytes) { return static_cast<uint8_t*>(at) + i * bytes; }

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) int
#define CHECKED(...)                                                            \
    do {                                                                        \
        failing::Answer told = failing::next(__func__);                         \
        if (told.hangs) sleep(60);                                              \
        if (told.late) comm->fault = told.status, comm->lost = true;            \
        if (int status = checked(__VA_ARGS__)) return ended(status);            \
    } while (0)
#define APART(...)                                                                                           \
    do {                                                                                                     \
        if (!(__VA_ARGS__)) return ended(failed(InvalidUsage, "%s: memory that overlaps", __func__));        \
    } while (0)

API ncclGetVersion(int* version) {
    const char* set = std::getenv("EMULATED_NCCL_VERSION");
    *version = set ? std::atoi(set) : 22105;
    return Success;
}

extern "C" const char* ncclGetErrorString(int status) {
    static thread_local std::string told;
    told = "emulated status " + std::to_string(status);
    return told.c_str();
}

extern "C" const char* ncclGetLastError(void*) {
    static thread_local std::string told;
    told = words + "\n";
    return told.c_str();
}

struct Id {
    char name[128];
};

API ncclGetUniqueId(Id* id) {
    std::memset(id, 0, sizeof *id);
    // Unnamed files, so that a killed run leaves nothing on the machine.
    int memory = memfd_create("emulated-nccl", MFD_CLOEXEC);
    if (memory < 0 || ftruncate(memory, sizeof(Shared))) return failed(SystemError, "no shared memory");
    std::snprintf(id->name, sizeof id->name, "/proc/%d/fd/%d", getpid(), memory);
    return Success;
}

API ncclCommInitRank(Comm** out, int ranks, Id id, int rank) {
    if (ranks < 1 || ranks > RANKS || rank < 0 || rank >= ranks) return failed(InvalidArgument, "rank %d of %d", rank, ranks);
    if (std::strncmp(id.name, "/proc/", 6)) return failed(InvalidArgument, "an id of nobody");
    int memory = open(id.name, O_RDWR | O_CLOEXEC);
    void* at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    close(memory);
    if (at == MAP_FAILED) return failed(SystemError, "no shared memory %s", id.name);
    auto* comm = new Comm;
    comm->rank = rank;
    comm->ranks = ranks;
    Shared& shared = *(comm->shared = static_cast<Shared*>(at));
    auto all_arrive = [&](std::atomic<uint32_t>& count) {
        count++;
        time_t since = std::time(nullptr);
        int idle = 0;
        while (count.load() < static_cast<uint32_t>(ranks)) {
            if (later_than(PATIENCE_S, since)) return false;
            pause(idle);
        }
        return true;
    };
    shared.process[rank] = getpid();
    for (int to = 0; to < ranks; to++) {
        int ends[2];
        if (pipe2(ends, O_CLOEXEC)) return failed(SystemError, "no pipe");
        fcntl(ends[0], F_SETPIPE_SZ, 1 << 18);
        shared.pipes[rank][to] = ends[0];
    }
    if (!all_arrive(shared.joined)) return failed(SystemError, "%u of %d ranks have joined", shared.joined.load(), ranks);
    for (int i = 0; i < ranks * ranks; i++) {
        int from = i / ranks;
        std::string name = "/proc/" + std::to_string(shared.process[from]) + "/fd/" + std::to_string(shared.pipes[from][i % ranks]);
        comm->pipes.push_back(open(name.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
        if (comm->pipes[i] < 0) return failed(SystemError, "no pipe %s", name.c_str());
    }
    // A rank that leaves early leaves its pipes to the others.
    if (!all_arrive(shared.connected)) return failed(SystemError, "%u of %d ranks are connected", shared.connected.load(), ranks);
    *out = comm;
    return Success;
}

// Calls in flight end with an error. The memory is not freed, as a thread may use it.
API ncclCommAbort(Comm* comm) {
    if (!comm) return failed(InvalidArgument, "no communicator");
    comm->aborted = true;
    return Success;
}

API ncclCommGetAsyncError(Comm* comm, int* status) {
    if (!comm) return failed(InvalidArgument, "no communicator");
    *status = comm->fault;
    return Success;
}

API ncclGroupStart() {
    depth++;
    return Success;
}

API ncclGroupEnd() {
    if (depth == 0) return failed(InvalidUsage, "a group ends that was not begun");
    return --depth == 0 ? launch() : Success;
}

API ncclSend(const void* data, size_t count, int type, int peer, Comm* comm, void* queue) {
    CHECKED(comm, count, type, peer, {data});
    Work& work = work_on(comm, queue);
    APART(work.takes(data, count * bytes_of(type), false));
    Header header{Sends, static_cast<uint32_t>(type), 0, count, next(comm, queue, 2 * peer)};
    work.send(peer, header, data, count * bytes_of(type));
    return ended(Success);
}

API ncclRecv(void* data, size_t count, int type, int peer, Comm* comm, void* queue) {
    CHECKED(comm, count, type, peer, {data});
    Work& work = work_on(comm, queue);
    APART(work.takes(data, count * bytes_of(type), true));
    Header header{Sends, static_cast<uint32_t>(type), 0, count, next(comm, queue, 2 * peer + 1)};
    size_t bytes = count * bytes_of(type);
    work.receive(peer, header, is_wrong("receive") ? work.scratch(bytes) : data, bytes);
    return ended(Success);
}

API ncclAllGather(const void* mine, void* all, size_t count, int type, Comm* comm, void* queue) {
    CHECKED(comm, count, type, 0, {mine, all});
    size_t bytes = count * bytes_of(type);
    Work& work = work_on(comm, queue);
    uint8_t* own = part(all, comm->rank, bytes);
    APART(work.takes(all, bytes * comm->ranks, true) && (mine == own || work.takes(mine, bytes, false)));
    Header header{AllGathers, static_cast<uint32_t>(type), 0, count, next(comm, queue)};
    for (int r = 0; r < comm->ranks; r++) {
        if (r == comm->rank) continue;
        work.send(r, header, mine, bytes);
        int next = (r + 1) % comm->ranks, other = next == comm->rank ? (next + 1) % comm->ranks : next;
        work.receive(r, header, part(all, is_wrong("places") ? other : r, bytes), bytes);
    }
    if (mine != own) work.after.push_back([=] { std::memcpy(own, mine, bytes); });
    return ended(Success);
}

// In place, like all calls.
API ncclBroadcast(const void*, void* data, size_t count, int type, int root, Comm* comm, void* queue) {
    CHECKED(comm, count, type, root, {data});
    size_t bytes = count * bytes_of(type);
    Work& work = work_on(comm, queue);
    APART(work.takes(data, bytes, true));
    Header header{Broadcasts, static_cast<uint32_t>(type), static_cast<uint64_t>(root), count, next(comm, queue)};
    if (comm->rank != root) work.receive(root, header, data, bytes);
    for (int r = 0; comm->rank == root && r < comm->ranks; r++) {
        if (r != root) work.send(r, header, data, bytes);
    }
    return ended(Success);
}

// In place: mine += what rank - 1, rank - 2 ... send.
API ncclReduceScatter(const void* all, void* mine, size_t count, int type, int op, Comm* comm, void* queue) {
    CHECKED(comm, count, type, 0, {all, mine});
    size_t bytes = count * bytes_of(type);
    if (op != Sum || mine != part(all, comm->rank, bytes)) return ended(failed(InvalidArgument, "operation %d, or not in place", op));
    Work& work = work_on(comm, queue);
    APART(work.takes(all, bytes * comm->ranks, true));
    Header header{ReduceScatters, static_cast<uint32_t>(type), 0, count, next(comm, queue)};
    uint8_t* theirs = work.scratch(bytes * static_cast<size_t>(comm->ranks));
    for (int r = 0; r < comm->ranks; r++) {
        if (r == comm->rank) continue;
        work.send(r, header, part(all, r, bytes), bytes);
        work.receive(r, header, part(theirs, r, bytes), bytes);
    }
    work.after.push_back([=] {
        for (int s = 1; s < comm->ranks; s++) add(mine, part(theirs, (comm->rank + comm->ranks - s) % comm->ranks, bytes), count, type);
    });
    return ended(Success);
}
