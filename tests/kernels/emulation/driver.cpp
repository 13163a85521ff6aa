// The driver of the emulated GPU: the functions of libcuda.so.1, of libnvidia-ml.so.1 and of NVRTC that src/device/cuda calls, over
// the kernels of the same library.
//
// It is as late as a real one may be: work in a stream runs only when a caller waits for it, and only as far as needed.
// With CUDA_LAUNCH_BLOCKING=1 it runs at once, and a launch returns its own failure. It rejects the same calls as a
// real driver: calls and frees of threads without the context; cubins newer than itself (EMULATED_CUDA, 13000 if
// unset); blocks and shared memory beyond the limits of the cubin and the GPU; elapsed times of events without timing
// or that are not reached; waits in a capture; memory beyond EMULATED_BYTES. Its compute capability is
// EMULATED_CAPABILITY (80 if unset), and it loads PTX on any. It also rejects copies of unpinned host memory, which a
// real driver makes, but not asynchronously, and launches with another number of arguments than the kernel has. It has
// EMULATED_GPUS GPUs; if unset one for each rank, at least 2.
//
// A graph runs its nodes in an order that only respects its edges. A stream joins a capture by waiting for an event of
// it, and must be joined again before the capture ends. Waits for events across a capture's border are rejected. A
// launch of a graph whose arguments point to freed memory fails, and so does every later call.
//
// EMULATED_FAILS selects calls that fail (failing.h). After a failure from which a real driver does not recover, such
// as an illegal address, every later call returns it, too. Another process uses EMULATED_TAKEN bytes of the GPU's
// memory.
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>
#include "failing.h"
#include "cubin.h"
#include "streams.h"

// The kernels (launch.cpp, memory.cpp).
extern "C" {
const emulated::Entry* emulated_find(const char* name);
const char* emulated_launch(const emulated::Entry& kernel, const uint32_t* grid, uint32_t block, uint64_t shared_bytes, void** arguments);
void* emulated_allocate(uint64_t bytes);
void emulated_free(void* memory, uint64_t bytes);
void emulated_clear(uint64_t address, uint64_t bytes);
}

namespace {

enum Status {
    Success = 0,
    InvalidValue = 1,
    OutOfMemory = 2,
    Unavailable = 46,
    InvalidImage = 200,
    InvalidContext = 201,
    InvalidHandle = 400,
    NotFound = 500,
    NotReady = 600,
    LaunchOutOfResources = 701,
    LaunchFailed = 719,
    CaptureUnsupported = 900,
    CaptureInvalidated = 901,
    CaptureUnmatched = 903,
    CaptureUnjoined = 904,
    CaptureIsolation = 905,
    CapturedEvent = 907,
};

// Statuses with the names and messages of a real driver.
struct Words {
    int status;
    const char *name, *meaning;
    // Whether the context is lost: then every later call returns the same status.
    bool lasts;
};

const Words WORDS[] = {
    {InvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument", false},
    {OutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory", false},
    {Unavailable, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable", false},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected", false},
    {InvalidImage, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid", false},
    {InvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context", false},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered", true},
    {InvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle", false},
    {NotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found", false},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered", true},
    {LaunchOutOfResources, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch", false},
    {LaunchFailed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure", true},
    {CaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing", false},
    {CaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture",
     false},
};

const Words* words_of(int status) {
    for (const Words& words : WORDS) {
        if (words.status == status) return &words;
    }
    return nullptr;
}

std::recursive_mutex driver;
thread_local bool entered = false;
bool started = false;
// The error of the last kernel that failed.
std::string complaint;
// A kernel's fault, which every later call returns.
std::atomic<int> fault{Success};
size_t total = size_t{1} << 30, used = 0;
struct Run {
    size_t bytes;
    // The serial number of the allocation.
    uint64_t serial;
};
std::map<uint64_t, Run> allocated;
// Pinned host memory. A real driver also copies other memory, but not asynchronously.
std::map<uint64_t, size_t> pinned;
// Active captures.
std::map<uint64_t, Graph*> capturing;

// Never destroyed: a thread may use them when the process ends.
std::vector<Stream*>& streams = *new std::vector<Stream*>;
// Calls that were made.
std::atomic<uint64_t> calls{0};

int setting(const char* name, int otherwise) {
    const char* value = std::getenv(name);
    return value ? std::atoi(value) : otherwise;
}

// The beginning of every call.
int ready() {
    calls++;
    if (!started || !entered) return InvalidContext;
    return fault;
}

// The requested result of a call. A call that fails late has started work that fails when the first stream reaches it.
int told(const char* call) {
    failing::Answer answer = failing::next(call);
    if (!answer.status) return Success;
    int status = answer.status;
    if (answer.late && !streams.empty()) {
        streams[0]->add([=] { fault = status; });
        return Success;
    }
    const Words* known = words_of(status);
    if (known && known->lasts) fault = status;
    return status;
}

// A resource that a thread without the context destroys or frees leaks, and callers ignore the status.
int gone(const char* call) {
    if (entered) return Success;
    std::fprintf(stderr, "emulated driver: %s by a thread without the context\n", call);
    fault = LaunchFailed;
    return InvalidContext;
}

// Runs the work in the streams, as far as it does not wait for another rank.
void try_all() {
    for (size_t i = 0; i < streams.size(); i++) {
        unfinished = false;
        streams[i]->run();
    }
    unfinished = false;
}

// Whether the GPU is as late as possible, for tests (EMULATED_PASSIVE).
bool is_late() {
    static bool late = std::getenv("EMULATED_PASSIVE") != nullptr;
    return late;
}

// Runs a stream until it has reached a point. While it waits for another rank the other streams continue, as that rank
// may wait for them, and other threads of this one may make calls.
template <class Done> void wait_for(Stream* stream, Done done) {
    trying = true;
    for (;;) {
        unfinished = false;
        stream->run_until(done);
        if (!unfinished) break;
        if (!is_late()) try_all();
        driver.unlock();
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        driver.lock();
    }
    trying = false;
}

// With several GPUs, one may wait for another whose host waits for something else. So if no call is made for a
// while, this GPU runs its work by itself.
void go_on() {
    entered = trying = true;
    bool idle = false;
    for (uint64_t before = calls;;) {
        std::this_thread::sleep_for(std::chrono::milliseconds(idle ? 1 : 20));
        idle = before == calls;
        before = calls;
        std::lock_guard<std::recursive_mutex> lock(driver);
        if (idle) try_all();
    }
}

// The last entry that begins at an address or before it; the end if there is none.
template <class Runs> typename Runs::iterator before(Runs& runs, uint64_t address) {
    auto after = runs.upper_bound(address);
    return after == runs.begin() ? runs.end() : --after;
}

bool within(uint64_t address, size_t bytes) {
    auto run = before(allocated, address);
    return run == allocated.end() ? bytes == 0 : address + bytes <= run->first + run->second.bytes;
}

bool is_pinned(uint64_t address, size_t bytes) {
    auto run = before(pinned, address);
    return run != pinned.end() && address + bytes <= run->first + run->second;
}

Use use_of(uint64_t address) {
    auto run = before(allocated, address);
    bool inside = run != allocated.end() && address < run->first + run->second.bytes;
    return {address, inside ? run->second.serial : 0};
}

// The work of a node. It fails if memory of its arguments was freed.
Work guarded(const Node& node) {
    return [work = node.work, uses = node.uses] {
        for (const Use& use : uses) {
            if (!use.serial || use_of(use.address).serial == use.serial) continue;
            std::fprintf(stderr, "emulated driver: a graph uses memory at %llx that was freed\n", (unsigned long long)use.address);
            fault = LaunchFailed;
            return;
        }
        work();
    };
}

// A status that also ends the capture that the stream belongs to.
int ends_capture(Stream* stream, int status) {
    if (stream->capture && !stream->capture->broken) stream->capture->broken = CaptureInvalidated;
    return status;
}

// Whether work runs concurrently with the compute stream.
bool is_beside(const Stream* stream) { return stream != streams[0] && !stream->capture; }

int copy(uint64_t to, uint64_t from, size_t bytes, Stream* stream) {
    if (int status = ready()) return status;
    stream->add([=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes); });
    // EMULATED_EARLY: copies on other streams than the first are done as early as possible, not as late.
    bool early = is_beside(stream) && setting("EMULATED_EARLY", 0);
    if (early) stream->run();
    return Success;
}

}  // namespace

using std::size_t;
#define API extern "C" int
#define LOCK std::lock_guard<std::recursive_mutex> lock(driver)
#define TOLD \
    if (int status = told(__func__)) return status
// A call that frees, also of a thread that it should not come from.
#define FREES                                      \
    LOCK;                                          \
    if (int status = gone(__func__)) return status; \
    TOLD
#define READY                               \
    LOCK;                                   \
    if (int status = ready()) return status; \
    TOLD

API cuInit(unsigned) {
    LOCK;
    TOLD;
    const char* bytes = std::getenv("EMULATED_BYTES");
    total = bytes ? std::strtoull(bytes, nullptr, 10) : size_t{1} << 30;
    used = static_cast<size_t>(setting("EMULATED_TAKEN", 0));
    blocking = setting("CUDA_LAUNCH_BLOCKING", 0);
    started = true;
    return Success;
}

API cuDriverGetVersion(int* version) {
    TOLD;
    *version = setting("EMULATED_CUDA", 13000);
    return Success;
}

API cuGetErrorName(int status, const char** words) {
    const Words* known = words_of(status);
    if (known) *words = known->name;
    return known ? Success : InvalidValue;
}

API cuGetErrorString(int status, const char** words) {
    const Words* known = words_of(status);
    if (known) *words = status == LaunchFailed && !complaint.empty() ? complaint.c_str() : known->meaning;
    return known ? Success : InvalidValue;
}

// ---- devices ----

API cuDeviceGetCount(int* count) {
    TOLD;
    *count = setting("EMULATED_GPUS", std::max(2, setting("OMPI_COMM_WORLD_SIZE", 1)));
    return started ? Success : InvalidContext;
}

API cuDeviceGet(int* device, int index) {
    TOLD;
    *device = index;
    return Success;
}

API cuDeviceGetName(char* name, int length, int) {
    TOLD;
    std::snprintf(name, static_cast<size_t>(length), "Emulated GPU");
    return Success;
}

API cuDeviceGetPCIBusId(char* name, int length, int device) {
    TOLD;
    std::snprintf(name, static_cast<size_t>(length), "00000000:%02X:00.0", device && !std::getenv("EMULATED_MIG") ? 0xae + device : 0x3b);
    return Success;
}

// MIG instances of one GPU have the same PCI address: with EMULATED_MIG every GPU is one.
API cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
    TOLD;
    for (int i = 0; i < 16; i++) uuid[i] = static_cast<unsigned char>(i ? 0x10 + i : device);
    return Success;
}

API cuDeviceTotalMem_v2(size_t* bytes, int) {
    TOLD;
    *bytes = total;
    return Success;
}

// The compute capability of a GPU: that of the second one may be another.
static int capability(int device) {
    const int first = setting("EMULATED_CAPABILITY", 80);
    return device == 1 ? setting("EMULATED_CAPABILITY_1", first) : first;
}

API cuDeviceGetAttribute(int* value, int attribute, int device) {
    TOLD;
    switch (attribute) {
        case 16: *value = 108; return Success;          // multiprocessors
        case 75: *value = capability(device) / 10; return Success;  // major
        case 76: *value = capability(device) % 10; return Success;  // and minor
        case 97: *value = SHARED_MAX; return Success;   // shared memory of a block
        case 20: *value = setting("EMULATED_MODE", 0); return Success;  // compute mode
        default: return InvalidValue;
    }
}

API cuDevicePrimaryCtxRetain(void** context, int) {
    TOLD;
    *context = &driver;
    return Success;
}

API cuCtxSetCurrent(void* context) {
    TOLD;
    entered = context == &driver;
    return entered ? Success : InvalidContext;
}

API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    TOLD;
    *least = 0;
    *greatest = -5;
    return Success;
}

// ---- memory ----

API cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    READY;
    if (bytes == 0) return InvalidValue;
    // EMULATED_STRICT: no capture is relaxed.
    if (setting("EMULATED_STRICT", 0)) {
        for (Stream* stream : streams) {
            if (stream->capture) return ends_capture(stream, CaptureUnsupported);
        }
    }
    if (bytes > total - used) return OutOfMemory;
    void* memory = emulated_allocate(bytes);
    if (!memory) return OutOfMemory;
    used += bytes;
    *address = reinterpret_cast<uint64_t>(memory);
    static uint64_t serial = 0;
    allocated[*address] = {bytes, ++serial};
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
        if (stream->capture) return ends_capture(stream, CaptureUnsupported);
        wait_for(stream, [] { return false; });
    }
    auto run = allocated.find(address);
    if (run == allocated.end()) return InvalidValue;
    size_t bytes = run->second.bytes;
    used -= bytes;
    allocated.erase(run);
    void* memory = reinterpret_cast<void*>(address);
    emulated_free(memory, bytes);
    return Success;
}

API cuMemHostRegister_v2(void* memory, size_t bytes, unsigned) {
    READY;
    pinned[reinterpret_cast<uint64_t>(memory)] = bytes;
    return Success;
}

API cuMemHostUnregister(void* memory) {
    FREES;
    pinned.erase(reinterpret_cast<uint64_t>(memory));
    return fault;
}

API cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, Stream* stream) {
    READY;
    uint64_t host = reinterpret_cast<uint64_t>(from);
    if (!within(to, bytes) || !is_pinned(host, bytes)) return InvalidValue;
    return copy(to, host, bytes, stream);
}

API cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, Stream* stream) {
    READY;
    uint64_t host = reinterpret_cast<uint64_t>(to);
    if (!within(from, bytes) || !is_pinned(host, bytes)) return InvalidValue;
    return copy(host, from, bytes, stream);
}

API cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, Stream* stream) {
    READY;
    return within(to, bytes) && within(from, bytes) ? copy(to, from, bytes, stream) : InvalidValue;
}

API cuMemsetD8Async(uint64_t at, unsigned char value, size_t bytes, Stream* stream) {
    READY;
    if (!within(at, bytes)) return InvalidValue;
    stream->add([=] {
        if (value) std::memset(reinterpret_cast<void*>(at), value, bytes);
        else emulated_clear(at, bytes);
    });
    return Success;
}

// Starts work of another emulated library on this GPU.
API cuLaunchHostFunc(Stream* stream, void (*work)(void*), void* of) {
    LOCK;
    if (int status = ready()) return status;
    stream->add([=] { work(of); });
    return Success;
}

// ---- streams and events ----

API cuStreamCreateWithPriority(Stream** stream, unsigned, int priority) {
    READY;
    streams.push_back(*stream = new Stream);
    (*stream)->priority = priority;
    return Success;
}

extern "C" int emulated_priority(Stream* stream) { return stream->priority; }

// Memory of this GPU that another emulated library uses.
extern "C" void emulated_take(size_t bytes) {
    LOCK;
    used += bytes;
}

API cuStreamSynchronize(Stream* stream) {
    READY;
    if (stream->capture) return ends_capture(stream, CaptureUnsupported);
    wait_for(stream, [] { return false; });
    return fault;
}

API cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    READY;
    Stream* other = event->stream;
    uint64_t place = event->recorded;
    if (uint64_t id = event->capture) {
        auto of = capturing.find(id);
        if (of == capturing.end()) return ends_capture(stream, CapturedEvent);
        if (stream->capture && stream->capture != of->second) return ends_capture(stream, CaptureIsolation);
        if (!stream->capture) {
            stream->capture = of->second;
            stream->tips.clear();
            of->second->streams.push_back(stream);
        }
        stream->behind(event->tips);
        return Success;
    }
    if (stream->capture && other) return ends_capture(stream, CaptureIsolation);
    if (other && other != stream) stream->add([=] { other->run_until([=] { return event->passed >= place; }); });
    return Success;
}

API cuEventCreate(Event** event, unsigned flags) {
    READY;
    *event = new Event;
    (*event)->is_timed = !(flags & 2);
    return Success;
}

API cuEventRecord(Event* event, Stream* stream) {
    READY;
    event->stream = stream;
    event->capture = stream->capture ? stream->capture->id : 0;
    if (stream->capture) {
        event->tips = stream->tips;
        return Success;
    }
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
    if (event->capture) return CapturedEvent;
    wait_for(event->stream, [=] { return event->passed >= event->recorded; });
    return fault;
}

// Without the lock: another thread may run a stream's work for a long time.
API cuEventQuery(Event* event) {
    if (!started || !entered) return InvalidContext;
    TOLD;
    if (fault) return fault;
    if (event->capture) return CapturedEvent;
    return event->passed >= event->recorded ? Success : NotReady;
}

API cuEventElapsedTime(float* milliseconds, Event* start, Event* end) {
    READY;
    for (Event* event : {start, end}) {
        if (!event->is_timed || !event->stream) return InvalidHandle;
        if (event->capture) return CapturedEvent;
        if (event->passed < event->recorded) return NotReady;
    }
    *milliseconds = static_cast<float>((end->at - start->at) * 1e3);
    return Success;
}

// An event may be destroyed before its stream has reached it, so it is kept.
API cuEventDestroy_v2(Event*) {
    FREES;
    return fault;
}

// Whether work returns -1 instead of waiting for another rank.
extern "C" bool emulated_trying() { return trying; }

// The result of work of another emulated library.
void answered(int status) {
    if (status < 0) unfinished = true;
    else if (status) fault = LaunchFailed;
}

// For other emulated libraries: enqueues their work in a stream. It returns 0 on success.
API emulated_enqueue(Stream* stream, int (*work)(void*), void* data) {
    std::unique_lock<std::recursive_mutex> lock(driver);
    if (int status = ready()) return status;
    if (blocking && !stream->capture) {
        // The work waits for other ranks, which may wait for another thread of this rank.
        lock.unlock();
        return work(data) ? LaunchFailed : Success;
    }
    static bool alone = is_late();
    if (!alone) std::thread(go_on).detach();
    alone = true;
    stream->add([=] { answered(work(data)); });
    return Success;
}

#include "graphs.h"

// ---- kernels ----

// The output of the emulated NVRTC for any source.
const char COMPILED[] = "emulated";

API cuModuleLoadData(Module** module, const void* data) {
    READY;
    const char* image = static_cast<const char*>(data);
    if (!std::strcmp(image, COMPILED)) return *module = new Module, Success;
    if (!std::memcmp(image, "//", 2)) return *module = new Module{{}, image}, Success;
    bool is_cubin = !std::memcmp(image, "\177ELF", 4) && static_cast<unsigned char>(image[18]) == 190;
    // Cubins of CUDA 13 have ABI 8.
    if (!is_cubin || (image[8] >= 8 && setting("EMULATED_CUDA", 13000) < 13000)) return InvalidImage;
    size_t sections = size_t{number_at<uint16_t>(image + 58)} * number_at<uint16_t>(image + 60);
    size_t bytes = number_at<uint64_t>(image + 40) + sections;
    *module = new Module{std::vector<char>(image, image + bytes), {}};
    return Success;
}

// A kernel that the library does not contain is an error at its launch.
API cuModuleGetFunction(Function** function, Module* module, const char* name) {
    READY;
    *function = new Function{emulated_find(name), name};
    bool is_missing = !module->ptx.empty() && module->ptx.find(".entry " + std::string(name) + "(") == std::string::npos;
    if (is_missing) return NotFound;
    if (module->image.empty()) return Success;
    if (!section(*module, std::string(".text.") + name)) return NotFound;
    const char* shared = section(*module, std::string(".nv.shared.") + name);
    (*function)->threads_max = threads_max(*module, name);
    (*function)->fixed = shared ? number_at<int32_t>(shared + 32) : 0;
    return Success;
}

API cuFuncGetAttribute(int* value, int attribute, Function* function) {
    READY;
    if (attribute > 4 || attribute == 2) return InvalidValue;
    *value = std::array{function->threads_max, function->fixed, 0, LOCAL_BYTES, REGISTERS}[attribute];
    return Success;
}

API cuFuncSetAttribute(Function* function, int attribute, int value) {
    READY;
    if (attribute == 9 && value >= -1 && value <= 100) {
        function->carveout = value;
        return Success;
    }
    if (attribute != 8 || value > SHARED_MAX - function->fixed) return InvalidValue;
    function->shared_max = value;
    return Success;
}

API cuLaunchKernel(Function* function, unsigned x, unsigned y, unsigned z, unsigned block, unsigned block_y, unsigned block_z,
                   unsigned shared, Stream* stream, void** arguments, void** extra) {
    READY;
    bool fits = x && y && z && x <= INT32_MAX && y <= BLOCKS_OVER && z <= BLOCKS_OVER;
    fits = fits && block && static_cast<int>(block) <= function->threads_max && block_y == 1 && block_z == 1 && !extra;
    if (!fits || static_cast<int>(shared) > function->shared_max) return InvalidValue;
    const emulated::Entry* kernel = function->kernel;
    complaint = kernel ? "" : "there is no such kernel";
    // A real GPU runs it with fewer blocks per multiprocessor.
    if (shared > 48 << 10 && function->carveout != 100) complaint = "more than 48 KiB of shared memory without a carve-out";
    uint32_t count = kernel ? kernel->parameters : 0;
    // The caller's list ends with a null.
    for (uint32_t i = 0; kernel && i <= count; i++) {
        if (!arguments[i] == (i < count)) complaint = "the kernel has " + std::to_string(count) + " parameters";
    }
    if (!complaint.empty()) return LaunchFailed;
    // The caller's arguments are valid only during this call.
    std::vector<uint64_t> words(count);
    std::vector<Use> uses;
    for (uint32_t i = 0; i < count; i++) {
        std::memcpy(&words[i], arguments[i], kernel->types[i].bytes);
        if (stream->capture && kernel->types[i].is_address && words[i]) uses.push_back(use_of(words[i]));
    }
    Work run = [=]() mutable {
        std::vector<void*> places;
        for (uint64_t& word : words) places.push_back(&word);
        uint32_t grid[3] = {x, y, z};
        // A delay of exact GEMMs that tests can set.
        const char* delay = std::getenv("EMULATED_MATMUL_DELAY_MS");
        if (delay && function->name.rfind("matmul_", 0) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(delay)));
        if (const char* why = emulated_launch(*kernel, grid, block, shared, places.data())) {
            complaint = "kernel " + function->name + ": " + why;
            std::fprintf(stderr, "emulated GPU: %s\n", complaint.c_str());
            fault = LaunchFailed;
        }
        failing::next(function->name.c_str());
        static failing::Calls spoils("EMULATED_SPOILS");
        failing::Answer spoiled = spoils.next(function->name.c_str());
        if (spoiled.comes) std::memset(reinterpret_cast<void*>(words[static_cast<size_t>(spoiled.status)]), 0, 1024);
    };
    stream->add(std::move(run), std::move(uses));
    // A blocking launch returns its own failure, and later launches may succeed.
    return blocking && !stream->capture ? fault.exchange(Success) : static_cast<int>(Success);
}

// ---- NVRTC ----

struct Program {};

API nvrtcVersion(int* major, int* minor) {
    *major = 0, *minor = 1;
    return Success;
}

extern "C" const char* nvrtcGetErrorString(int) { return "an emulated failure"; }

API nvrtcCreateProgram(Program** program, const char*, const char*, int, const char* const*, const char* const*) {
    *program = new Program;
    return Success;
}

API nvrtcCompileProgram(Program*, int, const char* const*) { return failing::next(__func__).status; }

API nvrtcGetProgramLogSize(Program*, size_t* bytes) {
    *bytes = 0;
    return Success;
}

API nvrtcGetProgramLog(Program*, char*) { return Success; }

API nvrtcGetCUBINSize(Program*, size_t* bytes) {
    *bytes = sizeof COMPILED;
    return Success;
}

API nvrtcGetPTXSize(Program*, size_t* bytes) {
    *bytes = 0;
    return Success;
}

API nvrtcGetPTX(Program*, char*) { return Success; }

API nvrtcGetCUBIN(Program*, char* cubin) {
    std::memcpy(cubin, COMPILED, sizeof COMPILED);
    return Success;
}

API nvrtcDestroyProgram(Program** program) {
    delete *program;
    return Success;
}
