// cuBLASLt emulated on the CPU, on the memory of the emulated GPU: the functions that src/device/cuda/cublaslt.rs calls.
//
// It computes what the descriptors say (column-major, transposed or not, leading dimensions, a bias, beta), and refuses whatever
// a real one refuses or reads wrongly: sizes that do not fit each other, types that do not go together, addresses outside of live
// memory or less aligned than was promised, an algorithm of another product, too small a workspace.
// As a real one may, it cuts long sums where that is faster, by the number of columns: a column's bits depend on how many there
// are. It takes the worst that its caller allows: where sums may wait in the result's own type, they do.
#include <unistd.h>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>
#include "bf16.h"
#include "failing.h"

extern "C" {
bool emulated_holds(unsigned long long address, unsigned long long bytes);
int cuLaunchHostFunc(void* stream, void (*work)(void*), void* of);
}

namespace {

using std::size_t;

enum Status { Success = 0, NotInitialized = 1, InvalidValue = 7, ExecutionFailed = 13, NotSupported = 15 };
enum Type { F32 = 0, Bf16 = 14 };
constexpr int COMPUTE_32F = 68;
constexpr int EPILOGUE_DEFAULT = 1, EPILOGUE_BIAS = 4;
constexpr uint32_t SUMS_IN_F32 = 2, SUMS_IN_OUTPUT_TYPE = 4;
// As large as a real algorithm's workspace may become.
constexpr size_t WORKSPACE_MAX = size_t{1} << 30;

struct Handle {};

struct Product {
    int transposed[2] = {0, 0};
    int epilogue = EPILOGUE_DEFAULT;
    const void* bias = nullptr;
};

struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t stride;

    size_t value_bytes() const { return type == F32 ? 4 : 2; }
    uint64_t bytes() const { return rows && columns ? ((columns - 1) * stride + rows) * value_bytes() : 0; }
};

struct Preference {
    uint64_t workspace = 0;
    uint32_t sums = 7;
    // The alignments of A, B, C, D.
    uint32_t aligns[4] = {256, 256, 256, 256};
};

// 64 bytes that callers keep and do not look into.
struct Algorithm {
    // Identifies everything except the numbers of columns.
    uint64_t product;
    uint32_t cuts, sums;
    uint32_t aligns[4];
    uint64_t bias_align;
    uint64_t reserved[3];
};
static_assert(sizeof(Algorithm) == 64);

struct Heuristic {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

// Prints the reason of a refusal, which a status alone does not give.
int refused(Status status, const char* why) {
    std::fprintf(stderr, "emulated cuBLASLt: %s\n", why);
    return status;
}

bool is_on_the_gpu(const void* address, uint64_t bytes) { return emulated_holds(reinterpret_cast<uint64_t>(address), bytes); }

bool is_aligned(const void* address, uint64_t to) { return to && reinterpret_cast<uint64_t>(address) % to == 0; }

uint64_t mixed(uint64_t hash, uint64_t value) { return (hash ^ value) * 0x100000001b3; }

// The sizes of D = op(A) op(B), or why there is none.
struct Sizes {
    uint64_t m, n, k;
};

const char* sizes(const Product& p, const Layout& a, const Layout& b, const Layout& c, const Layout& d, Sizes* s) {
    uint64_t a_rows = p.transposed[0] ? a.columns : a.rows, a_columns = p.transposed[0] ? a.rows : a.columns;
    uint64_t b_rows = p.transposed[1] ? b.columns : b.rows, b_columns = p.transposed[1] ? b.rows : b.columns;
    if (a_columns != b_rows || a_rows != d.rows || b_columns != d.columns) return "matrices that do not fit each other";
    if (c.rows != d.rows || c.columns != d.columns || c.type != d.type || c.stride != d.stride) return "C is not as D";
    if (a.type != Bf16 || b.type != Bf16) return "factors that are not bf16";
    if (p.epilogue == EPILOGUE_BIAS && d.type != Bf16) return "a bias of bf16 for a result of f32";
    *s = {a_rows, b_columns, a_columns};
    return nullptr;
}

uint64_t identity(const Product& p, const Layout& a, const Layout& b, const Layout& d, const Sizes& s) {
    uint64_t hash = 0xcbf29ce484222325;
    // The sizes among m, n and k that set the length of columns: a change of the number of columns alone keeps an
    // algorithm.
    for (uint64_t value : {uint64_t(p.transposed[0]), uint64_t(p.transposed[1]), uint64_t(p.epilogue), uint64_t(d.type), s.m,
                           a.rows, b.rows, uint64_t(a.stride), uint64_t(b.stride), uint64_t(d.stride)}) {
        hash = mixed(hash, value);
    }
    return hash;
}

size_t workspace_of(const Algorithm& algorithm, const Layout& d) {
    return algorithm.cuts > 1 ? size_t{4} * algorithm.cuts * d.rows * d.columns : 0;
}

// Three cuts are not made where the rows of B are odd in number: an algorithm may end to suit its product.
bool suits(const Algorithm& algorithm, const Layout& b) { return algorithm.cuts != 3 || b.columns % 2 == 0; }

float number(const void* memory, int type, uint64_t at) {
    return type == F32 ? static_cast<const float*>(memory)[at] : widened(static_cast<const uint16_t*>(memory)[at]);
}

float rounded(float value, int type) { return type == F32 ? value : widened(narrowed(value)); }

struct Work {
    Product product;
    Layout a, b, d;
    Sizes sizes;
    const void *a_at, *b_at, *c_at;
    void *d_at, *workspace;
    float alpha, beta;
    Algorithm algorithm;
};

// Columns of op(matrix), or its rows if `along_memory` asks for them, one after the other.
std::vector<float> lines(const Layout& of, const void* at, bool along_memory) {
    std::vector<float> values(of.rows * of.columns);
    for (uint64_t column = 0; column < of.columns; column++) {
        for (uint64_t row = 0; row < of.rows; row++) {
            uint64_t to = along_memory ? column * of.rows + row : row * of.columns + column;
            values[to] = number(at, of.type, column * of.stride + row);
        }
    }
    return values;
}

void compute(const Work& w) {
    // Tests let it take its time.
    if (const char* delay = std::getenv("EMULATED_CUBLASLT_DELAY_MS")) usleep(1000 * std::atoi(delay));
    auto [m, n, k] = w.sizes;
    std::vector<float> a = lines(w.a, w.a_at, w.product.transposed[0]), b = lines(w.b, w.b_at, !w.product.transposed[1]);
    uint64_t cuts = w.algorithm.cuts;
    std::vector<float> alone(cuts > 1 ? 0 : m * n);
    float* sums = cuts > 1 ? static_cast<float*>(w.workspace) : alone.data();
    for (uint64_t cut = 0; cut < cuts; cut++) {
        uint64_t from = k * cut / cuts, to = k * (cut + 1) / cuts;
        for (uint64_t j = 0; j < n; j++) {
            for (uint64_t i = 0; i < m; i++) {
                float sum = 0;
                for (uint64_t l = from; l < to; l++) sum += a[i * k + l] * b[j * k + l];
                sums[(cut * n + j) * m + i] = w.algorithm.sums == SUMS_IN_OUTPUT_TYPE ? rounded(sum, w.d.type) : sum;
            }
        }
    }
    for (uint64_t j = 0; j < n; j++) {
        for (uint64_t i = 0; i < m; i++) {
            float sum = sums[j * m + i];
            for (uint64_t cut = 1; cut < cuts; cut++) sum += sums[(cut * n + j) * m + i];
            uint64_t at = j * w.d.stride + i;
            float value = w.alpha * sum;
            // C is not read where beta is 0.
            if (w.beta != 0) value += w.beta * number(w.c_at, w.d.type, at);
            if (w.product.epilogue == EPILOGUE_BIAS) value += number(w.product.bias, Bf16, i);
            if (w.d.type == F32) static_cast<float*>(w.d_at)[at] = value;
            else static_cast<uint16_t*>(w.d_at)[at] = narrowed(value);
        }
    }
}

template <typename T>
int set(T* to, const void* from, size_t bytes) {
    if (!from || bytes != sizeof(T)) return refused(InvalidValue, "an attribute of another size");
    std::memcpy(to, from, bytes);
    return Success;
}

}  // namespace

#define API extern "C" int
// Returns the requested failure of a call (failing.h).
#define TOLD \
    if (int status = failing::next(__func__).status) return status

// How often a function was called, or a product of a form was asked for.
extern "C" uint64_t emulated_calls(const char* name) { return failing::calls().count(name); }

extern "C" size_t cublasLtGetVersion() {
    const char* version = std::getenv("EMULATED_CUBLASLT_VERSION");
    return version ? static_cast<size_t>(std::atoi(version)) : 120803;
}

extern "C" const char* cublasLtGetStatusName(int status) {
    switch (status) {
        case NotInitialized: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case 3: return "CUBLAS_STATUS_ALLOC_FAILED";
        case InvalidValue: return "CUBLAS_STATUS_INVALID_VALUE";
        case NotSupported: return "CUBLAS_STATUS_NOT_SUPPORTED";
        case ExecutionFailed: return "CUBLAS_STATUS_EXECUTION_FAILED";
        case 14: return "CUBLAS_STATUS_INTERNAL_ERROR";
        default: return "CUBLAS_STATUS_PLAYED";
    }
}

extern "C" const char* cublasLtGetStatusString(int) { return "as emulated"; }

API cublasLtCreate(Handle** handle) {
    TOLD;
    *handle = new Handle;
    return Success;
}

API cublasLtMatmulDescCreate(Product** product, int compute, int scale) {
    TOLD;
    if (compute != COMPUTE_32F || scale != F32) return refused(NotSupported, "sums that are not f32");
    *product = new Product;
    return Success;
}

API cublasLtMatmulDescSetAttribute(Product* product, int attribute, const void* value, size_t bytes) {
    TOLD;
    switch (attribute) {
        case 3: return set(&product->transposed[0], value, bytes);
        case 4: return set(&product->transposed[1], value, bytes);
        case 7: return set(&product->epilogue, value, bytes);
        case 8: return set(&product->bias, value, bytes);
        default: return refused(InvalidValue, "an attribute of products that is not emulated");
    }
}

API cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    TOLD;
    if (type != F32 && type != Bf16) return refused(NotSupported, "values that are neither f32 nor bf16");
    if (stride < 0 || static_cast<uint64_t>(stride) < rows) return refused(InvalidValue, "columns that overlap");
    *layout = new Layout{type, rows, columns, stride};
    return Success;
}

API cublasLtMatrixLayoutSetAttribute(Layout* layout, int attribute, const void* value, size_t bytes) {
    TOLD;
    if (attribute != 3) return refused(InvalidValue, "an attribute of layouts that is not emulated");
    return set(&layout->columns, value, bytes);
}

API cublasLtMatmulPreferenceCreate(Preference** preference) {
    TOLD;
    *preference = new Preference;
    return Success;
}

API cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const void* value, size_t bytes) {
    TOLD;
    switch (attribute) {
        case 1: return set(&preference->workspace, value, bytes);
        case 3: return set(&preference->sums, value, bytes);
        case 5: case 6: case 7: case 8: return set(&preference->aligns[attribute - 5], value, bytes);
        default: return refused(InvalidValue, "an attribute of preferences that is not emulated");
    }
}

API cublasLtMatmulPreferenceDestroy(Preference* preference) {
    TOLD;
    delete preference;
    return Success;
}

API cublasLtMatmulAlgoGetHeuristic(Handle*, Product* product, Layout* a, Layout* b, Layout* c, Layout* d,
                                   Preference* preference, int, Heuristic* out, int* found) {
    TOLD;
    *found = 0;
    Sizes s;
    if (const char* why = sizes(*product, *a, *b, *c, *d, &s)) return refused(NotSupported, why);
    Algorithm algorithm{identity(*product, *a, *b, *d, s), 1, 0, {}, 0, {}};
    std::memcpy(algorithm.aligns, preference->aligns, sizeof algorithm.aligns);
    // A null bias promises every alignment.
    uint64_t bias = reinterpret_cast<uint64_t>(product->bias);
    algorithm.bias_align = bias ? bias & -bias : 256;
    // The more columns or inner values, the more cuts: from 65 on at least two.
    uint32_t cuts = static_cast<uint32_t>(2 + b->columns / 40 % 3);
    algorithm.sums = preference->sums & SUMS_IN_OUTPUT_TYPE ? SUMS_IN_OUTPUT_TYPE : preference->sums & SUMS_IN_F32;
    for (; algorithm.sums && cuts > 1; cuts--) {
        algorithm.cuts = cuts;
        if (suits(algorithm, *b) && workspace_of(algorithm, *d) <= preference->workspace) break;
        algorithm.cuts = 1;
    }
    *out = {algorithm, workspace_of(algorithm, *d), Success, 1.0f, {}};
    *found = 1;
    return Success;
}

API cublasLtMatmulAlgoCheck(Handle*, Product* product, Layout* a, Layout* b, Layout* c, Layout* d,
                            const Algorithm* algorithm, Heuristic* out) {
    TOLD;
    Sizes s;
    if (sizes(*product, *a, *b, *c, *d, &s) || algorithm->product != identity(*product, *a, *b, *d, s)) return InvalidValue;
    // As cublasLt.h has it, the result's own algorithm is left as it is.
    out->workspace = workspace_of(*algorithm, *d);
    out->state = suits(*algorithm, *b) && out->workspace <= WORKSPACE_MAX ? Success : NotSupported;
    return out->state;
}

API cublasLtMatmul(Handle*, Product* product, const float* alpha, const void* a_at, Layout* a, const void* b_at, Layout* b,
                   const float* beta, const void* c_at, Layout* c, void* d_at, Layout* d, const Algorithm* algorithm,
                   void* workspace, size_t workspace_bytes, void* stream) {
    TOLD;
    Sizes s;
    if (const char* why = sizes(*product, *a, *b, *c, *d, &s)) return refused(InvalidValue, why);
    if (algorithm->product != identity(*product, *a, *b, *d, s) || !suits(*algorithm, *b)) {
        return refused(NotSupported, "an algorithm of another product");
    }
    uint64_t c_begin = reinterpret_cast<uint64_t>(c_at), d_begin = reinterpret_cast<uint64_t>(d_at);
    bool overlap = c_begin < d_begin + d->bytes() && d_begin < c_begin + c->bytes();
    if (c_begin != d_begin && overlap) return refused(InvalidValue, "C is neither D nor apart from it");
    const void* places[4] = {a_at, b_at, c_at, d_at};
    const Layout* layouts[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        if (!is_aligned(places[i], algorithm->aligns[i])) return refused(InvalidValue, "a matrix is less aligned than promised");
        if (!is_on_the_gpu(places[i], layouts[i]->bytes())) return refused(ExecutionFailed, "a matrix outside of memory");
    }
    if (product->epilogue == EPILOGUE_BIAS) {
        bool is_well = product->bias && is_aligned(product->bias, algorithm->bias_align);
        if (!is_well) return refused(InvalidValue, "a bias that is not there, or less aligned than promised");
        if (!is_on_the_gpu(product->bias, 2 * s.m)) return refused(ExecutionFailed, "a bias outside of memory");
    }
    size_t needed = workspace_of(*algorithm, *d);
    if (workspace_bytes < needed || (needed && !is_aligned(workspace, 256))) return refused(InvalidValue, "the workspace");
    if (needed && !is_on_the_gpu(workspace, workspace_bytes)) return refused(ExecutionFailed, "a workspace outside of memory");
    failing::next(product->transposed[0] ? "forward" : product->transposed[1] ? "weight" : "input");
    if (*beta != 0) failing::next("added");
    if (d->type == F32) failing::next("in_f32");
    // The stream does it when its turn comes; in a graph, at each replay.
    Work* work = new Work{*product, *a, *b, *d, s, a_at, b_at, c_at, d_at, workspace, *alpha, *beta, *algorithm};
    int status = cuLaunchHostFunc(stream, [](void* of) { compute(*static_cast<Work*>(of)); }, work);
    return status ? refused(ExecutionFailed, "the driver takes no work") : static_cast<int>(Success);
}
