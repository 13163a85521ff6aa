// A CUDA driver played on the CPU: the functions of libcuda.so.1 and of libnvidia-ml.so.1 that src/device/cuda calls, over the
// kernels of the played GPU (PLAYED_KERNELS names their library).
//
// It is as late as a real one may be: what is put into a stream is done only when somebody waits for it, and no more of it. It refuses what a real
// one refuses: threads without the context, cubins newer than itself (PLAYED_CUDA, 13000 if unset), waits in a capture, memory
// beyond PLAYED_BYTES. What it was asked for it writes to the file PLAYED_LOG, a line each. With PLAYED_FORGETS=1 its first
// stream does not wait for others, with 2 those do not wait.
#include <dlfcn.h>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>
#include "streams.h"

namespace {

enum Status {
    Success = 0,
    InvalidValue = 1,
    OutOfMemory = 2,
    InvalidImage = 200,
    InvalidContext = 201,
    NotFound = 500,
    NotReady = 600,
    LaunchFailed = 719,
    CaptureUnsupported = 900,
};

struct Parameter {
    uint32_t kind, bytes;
};

// The library of the kernels.
const void* (*find)(const char*);
uint32_t (*parameters)(const void*);
Parameter (*parameter)(const void*, uint32_t);
const char* (*launch)(const void*, const uint32_t*, uint32_t, uint64_t, void**);
// Where the library knows the memory of its GPU, kernels reach nothing else.
void* (*allocate)(uint64_t);
void (*release)(void*, uint64_t);

std::recursive_mutex driver;
thread_local bool entered = false;
bool started = false;
// A kernel's fault is told by every later call.
int fault = Success;
size_t total = size_t{1} << 30, used = 0;
std::map<uint64_t, size_t> allocated;

struct Module {
    std::vector<char> image;
};

struct Function {
    const void* kernel;
    int shared_max = 48 << 10;
};

// Never destroyed: a thread may be at them when the process ends.
std::vector<Stream*>& streams = *new std::vector<Stream*>;
// Calls that were made.
std::atomic<uint64_t> calls{0};

int setting(const char* name, int otherwise) {
    const char* value = std::getenv(name);
    return value ? std::atoi(value) : otherwise;
}

void note(const char* what, size_t number) {
    static std::FILE* log = [] {
        const char* path = std::getenv("PLAYED_LOG");
        return path ? std::fopen(path, "a") : nullptr;
    }();
    if (!log) return;
    std::fprintf(log, "%s %zu\n", what, number);
    std::fflush(log);
}

// What every call begins with.
int ready() {
    calls++;
    if (!started || !entered) return InvalidContext;
    return fault;
}

// Where GPUs work together one may wait for another whose host waits for something else: so when nothing is asked of it for a
// while, this one goes on by itself. Not where facts want it as late as can be (PLAYED_FORGETS is set, to anything).
void go_on() {
    entered = true;
    for (uint64_t before = calls;;) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        if (before == calls) {
            std::lock_guard<std::recursive_mutex> lock(driver);
            for (size_t i = 0; i < streams.size(); i++) {
                if (!streams[i]->capture) streams[i]->run();
            }
        }
        before = calls;
    }
}

bool within(uint64_t address, size_t bytes) {
    auto after = allocated.upper_bound(address);
    if (after == allocated.begin()) return bytes == 0;
    --after;
    return address + bytes <= after->first + after->second;
}

int copy(uint64_t to, uint64_t from, size_t bytes, Stream* stream) {
    if (int status = ready()) return status;
    stream->add([=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes); });
    // PLAYED_EARLY: copies beside the first stream are done as soon as they may be, not as late.
    bool early = stream != streams[0] && !stream->capture && setting("PLAYED_EARLY", 0);
    if (early) stream->run();
    return Success;
}

}  // namespace

using std::size_t;
#define API extern "C" int
#define LOCK std::lock_guard<std::recursive_mutex> lock(driver)
#define READY                              \
    LOCK;                                  \
    if (int status = ready()) return status

API cuInit(unsigned) {
    LOCK;
    void* library = dlopen(std::getenv("PLAYED_KERNELS"), RTLD_NOW | RTLD_LOCAL);
    if (!library) return NotFound;
    find = reinterpret_cast<decltype(find)>(dlsym(library, "emulated_find"));
    parameters = reinterpret_cast<decltype(parameters)>(dlsym(library, "emulated_parameters"));
    parameter = reinterpret_cast<decltype(parameter)>(dlsym(library, "emulated_parameter"));
    launch = reinterpret_cast<decltype(launch)>(dlsym(library, "emulated_launch"));
    allocate = reinterpret_cast<decltype(allocate)>(dlsym(library, "emulated_allocate"));
    release = reinterpret_cast<decltype(release)>(dlsym(library, "emulated_free"));
    total = static_cast<size_t>(setting("PLAYED_BYTES", 1 << 30));
    started = true;
    return find && parameters && parameter && launch ? Success : NotFound;
}

API cuDriverGetVersion(int* version) {
    *version = setting("PLAYED_CUDA", 13000);
    return Success;
}

API cuGetErrorName(int status, const char** words) {
    *words = status == OutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY"
             : status == InvalidImage ? "CUDA_ERROR_INVALID_IMAGE"
             : status == LaunchFailed ? "CUDA_ERROR_LAUNCH_FAILED"
                                      : "CUDA_ERROR_PLAYED";
    return Success;
}

API cuGetErrorString(int, const char** words) {
    *words = "as played";
    return Success;
}

// ---- devices ----

API cuDeviceGetCount(int* count) {
    *count = 2;
    return started ? Success : InvalidContext;
}

API cuDeviceGet(int* device, int index) {
    *device = index;
    return index < 2 ? Success : InvalidValue;
}

API cuDeviceGetName(char* name, int length, int) {
    std::snprintf(name, static_cast<size_t>(length), "Played GPU");
    return Success;
}

API cuDeviceGetPCIBusId(char* name, int length, int device) {
    std::snprintf(name, static_cast<size_t>(length), "00000000:%s:00.0", device ? "AF" : "3B");
    return Success;
}

API cuDeviceTotalMem_v2(size_t* bytes, int) {
    *bytes = total;
    return Success;
}

API cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 16: *value = 108; return Success;          // multiprocessors
        case 75: *value = 8; return Success;            // capability, major
        case 76: *value = 0; return Success;            // and minor
        case 97: *value = 163 << 10; return Success;    // shared memory of a block
        default: return InvalidValue;
    }
}

API cuDevicePrimaryCtxRetain(void** context, int) {
    *context = &driver;
    return Success;
}

API cuCtxSetCurrent(void* context) {
    entered = context == &driver;
    return entered ? Success : InvalidContext;
}

API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return Success;
}

// ---- memory ----

API cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    READY;
    if (bytes == 0) return InvalidValue;
    if (bytes > total - used) return OutOfMemory;
    void* memory = allocate ? allocate(bytes) : std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!memory) return OutOfMemory;
    std::memset(memory, 0xff, bytes);
    used += bytes;
    note("allocate", bytes);
    *address = reinterpret_cast<uint64_t>(memory);
    allocated[*address] = bytes;
    return Success;
}

API cuMemGetInfo_v2(size_t* free, size_t* all) {
    READY;
    *free = total - used;
    *all = total;
    return Success;
}

API cuMemFree_v2(uint64_t address) {
    READY;
    for (Stream* stream : streams) {
        if (stream->capture) return CaptureUnsupported;
        stream->run();
    }
    auto run = allocated.find(address);
    if (run == allocated.end()) return InvalidValue;
    size_t bytes = run->second;
    used -= bytes;
    allocated.erase(run);
    void* memory = reinterpret_cast<void*>(address);
    if (release) release(memory, bytes);
    else std::free(memory);
    return Success;
}

API cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
    READY;
    *memory = std::malloc(bytes);
    return Success;
}

API cuMemFreeHost(void* memory) {
    std::free(memory);
    return Success;
}

API cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, Stream* stream) {
    LOCK;
    note("upload", bytes);
    return within(to, bytes) ? copy(to, reinterpret_cast<uint64_t>(from), bytes, stream) : InvalidValue;
}

API cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, Stream* stream) {
    LOCK;
    note("download", bytes);
    return within(from, bytes) ? copy(reinterpret_cast<uint64_t>(to), from, bytes, stream) : InvalidValue;
}

API cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, Stream* stream) {
    LOCK;
    return within(to, bytes) && within(from, bytes) ? copy(to, from, bytes, stream) : InvalidValue;
}

API cuMemsetD8Async(uint64_t at, unsigned char value, size_t bytes, Stream* stream) {
    READY;
    if (!within(at, bytes)) return InvalidValue;
    stream->add([=] { std::memset(reinterpret_cast<void*>(at), value, bytes); });
    return Success;
}

// How a library that plays on this GPU starts its work.
API cuLaunchHostFunc(Stream* stream, void (*work)(void*), void* of) {
    READY;
    stream->add([=] { work(of); });
    return Success;
}

// ---- streams and events ----

API cuStreamCreateWithPriority(Stream** stream, unsigned, int) {
    READY;
    streams.push_back(*stream = new Stream);
    return Success;
}

API cuStreamSynchronize(Stream* stream) {
    READY;
    if (stream->capture) return CaptureUnsupported;
    stream->run();
    return fault;
}

API cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    READY;
    Stream* other = event->stream;
    uint64_t place = event->recorded;
    // PLAYED_HASTY: a GPU on which nobody waits for another stream, for facts that must notice it.
    if (setting("PLAYED_HASTY", 0)) return Success;
    // The first stream that was made is the one of all kernels.
    if (setting("PLAYED_FORGETS", 0) == (stream == streams[0] ? 1 : 2)) return Success;
    if (other && other != stream) stream->add([=] { other->run_until([=] { return event->passed >= place; }); });
    return Success;
}

API cuEventCreate(Event** event, unsigned) {
    READY;
    *event = new Event;
    return Success;
}

API cuEventRecord(Event* event, Stream* stream) {
    READY;
    static size_t records = 0;
    event->stream = stream;
    event->number = ++records;
    note("record", event->number);
    uint64_t place = ++event->recorded;
    stream->add([=] {
        event->at = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
        event->passed = place;
    });
    return Success;
}

API cuEventSynchronize(Event* event) {
    READY;
    if (!event->stream) return fault;
    if (event->stream->capture) return CaptureUnsupported;
    note("wait", event->number);
    event->stream->run_until([=] { return event->passed >= event->recorded; });
    return fault;
}

// Without the lock: another thread may be in a stream's work for long.
API cuEventQuery(Event* event) { return event->passed >= event->recorded ? Success : NotReady; }

API cuEventElapsedTime(float* milliseconds, Event* start, Event* end) {
    READY;
    *milliseconds = static_cast<float>((end->at - start->at) * 1e3);
    return Success;
}

// An event may be destroyed before its stream has come to it, so it stays.
API cuEventDestroy_v2(Event*) { return Success; }

// For libraries that are played, too: work of theirs in the order of a stream. It answers 0 where it succeeds.
API played_enqueue(Stream* stream, int (*work)(void*), void* data) {
    READY;
    static bool alone = std::getenv("PLAYED_FORGETS") != nullptr;
    if (!alone) std::thread(go_on).detach();
    alone = true;
    stream->add([=] {
        if (work(data)) fault = LaunchFailed;
    });
    return Success;
}

// ---- graphs ----

API cuStreamBeginCapture_v2(Stream* stream, int) {
    READY;
    if (stream->capture) return CaptureUnsupported;
    stream->capture = new Graph;
    return Success;
}

API cuStreamEndCapture(Stream* stream, Graph** graph) {
    READY;
    if (!stream->capture) return CaptureUnsupported;
    *graph = stream->capture;
    stream->capture = nullptr;
    return Success;
}

API cuGraphInstantiateWithFlags(Graph** exec, Graph* graph, unsigned long long) {
    READY;
    *exec = new Graph(*graph);
    return Success;
}

API cuGraphDestroy(Graph* graph) {
    READY;
    delete graph;
    return Success;
}

API cuGraphUpload(Graph*, Stream*) { return ready(); }

API cuGraphLaunch(Graph* graph, Stream* stream) {
    READY;
    note("graph", graph->work.size());
    for (const Work& work : graph->work) stream->add(work);
    return Success;
}

API cuGraphExecDestroy(Graph* graph) {
    LOCK;
    delete graph;
    return Success;
}

// ---- NVML ----

API nvmlInit_v2() { return Success; }

API nvmlDeviceGetHandleByPciBusId_v2(const char* pci, void** device) {
    *device = reinterpret_cast<void*>(std::strstr(pci, "3b") ? 1 : 2);
    return Success;
}

// The first GPU has twelve links, of which one is down; the other none.
API nvmlDeviceGetNvLinkState(void* device, unsigned link, unsigned* up) {
    *up = link != 3;
    return reinterpret_cast<uintptr_t>(device) == 1 && link < 12 ? Success : InvalidValue;
}

// ---- kernels ----

API cuModuleLoadData(Module** module, const void* data) {
    READY;
    const unsigned char* image = static_cast<const unsigned char*>(data);
    bool is_cubin = !std::memcmp(image, "\177ELF", 4) && image[18] == 190;
    // Cubins of CUDA 13 are of ABI 8.
    if (!is_cubin || (image[8] >= 8 && setting("PLAYED_CUDA", 13000) < 13000)) return InvalidImage;
    uint64_t sections_at;
    uint16_t section_bytes, sections;
    std::memcpy(&sections_at, image + 40, 8);
    std::memcpy(&section_bytes, image + 58, 2);
    std::memcpy(&sections, image + 60, 2);
    size_t bytes = sections_at + size_t{section_bytes} * sections;
    *module = new Module{std::vector<char>(image, image + bytes)};
    return Success;
}

API cuModuleGetFunction(Function** function, Module* module, const char* name) {
    READY;
    // As in the cubin's table of sections.
    char section[256];
    int length = std::snprintf(section, sizeof section, ".text.%s", name) + 1;
    void* found = memmem(module->image.data(), module->image.size(), section, static_cast<size_t>(length));
    const void* kernel = found ? find(name) : nullptr;
    if (!kernel) return NotFound;
    *function = new Function{kernel};
    return Success;
}

API cuFuncGetAttribute(int* value, int attribute, Function*) {
    READY;
    *value = attribute == 0 ? 1024 : 0;
    return Success;
}

API cuFuncSetAttribute(Function* function, int attribute, int value) {
    READY;
    if (attribute != 8 || value > 163 << 10) return InvalidValue;
    function->shared_max = value;
    return Success;
}

API cuLaunchKernel(Function* function, unsigned x, unsigned y, unsigned z, unsigned block, unsigned block_y, unsigned block_z,
                   unsigned shared, Stream* stream, void** arguments, void** extra) {
    READY;
    bool fits = x && y && z && block && block <= 1024 && block_y == 1 && block_z == 1 && !extra;
    if (!fits || static_cast<int>(shared) > function->shared_max) return InvalidValue;
    if (!stream->capture) note("launch", size_t{x} * y * z);
    // The caller's arguments end with this call.
    std::vector<uint64_t> words(parameters(function->kernel));
    for (size_t i = 0; i < words.size(); i++) {
        std::memcpy(&words[i], arguments[i], parameter(function->kernel, static_cast<uint32_t>(i)).bytes);
    }
    stream->add([=]() mutable {
        std::vector<void*> places;
        for (uint64_t& word : words) places.push_back(&word);
        uint32_t grid[3] = {x, y, z};
        if (const char* words_of_failure = launch(function->kernel, grid, block, shared, places.data())) {
            std::fprintf(stderr, "%s\n", words_of_failure);
            fault = LaunchFailed;
        }
    });
    return Success;
}
