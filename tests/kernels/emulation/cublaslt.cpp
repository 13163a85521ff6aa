// cuBLASLt emulated on the CPU: the functions that src/device/cuda/cublaslt.rs calls, with a naive GEMM of column-major
// matrices. Sums are f64, so their bits differ from those of the exact kernels.
#include <unistd.h>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>
#include "bf16.h"
#include "failing.h"

extern "C" int cuLaunchHostFunc(void* stream, void (*work)(void*), void* data);

namespace {

using std::size_t;

const int F32 = 0, BIAS = 4;

struct Product {
    int transposed[2] = {0, 0}, epilogue = 0;
    const void* bias = nullptr;
};

struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t stride;

    float get(const void* at, uint64_t row, uint64_t column) const {
        uint64_t i = column * stride + row;
        return type == F32 ? static_cast<const float*>(at)[i] : widened(static_cast<const uint16_t*>(at)[i]);
    }

    // All columns, or all rows, one after the other.
    std::vector<float> lines(const void* at, bool are_columns) const {
        std::vector<float> values;
        for (uint64_t i = 0; i < (are_columns ? columns : rows); i++) {
            for (uint64_t l = 0; l < (are_columns ? rows : columns); l++) values.push_back(are_columns ? get(at, l, i) : get(at, i, l));
        }
        return values;
    }
};

// A cublasLtMatmulHeuristicResult_t.
struct Heuristic {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

struct Work {
    Product p;
    Layout a, b, d;
    const void *a_at, *b_at, *c_at;
    void* d_at;
    float beta;
};

// D = op(A) op(B) + beta C + bias.
void compute(const Work& w) {
    // A delay that tests can set.
    if (const char* delay = std::getenv("EMULATED_CUBLASLT_DELAY_MS")) usleep(1000 * std::atoi(delay));
    uint64_t inner = w.p.transposed[0] ? w.a.rows : w.a.columns;
    std::vector<float> a = w.a.lines(w.a_at, w.p.transposed[0]), b = w.b.lines(w.b_at, !w.p.transposed[1]);
    for (uint64_t j = 0; j < w.d.columns; j++) {
        for (uint64_t i = 0; i < w.d.rows; i++) {
            double sum = 0;
            for (uint64_t l = 0; l < inner; l++) sum += a[i * inner + l] * b[j * inner + l];
            if (w.beta != 0) sum += w.beta * w.d.get(w.c_at, i, j);
            if (w.p.epilogue == BIAS) sum += widened(static_cast<const uint16_t*>(w.p.bias)[i]);
            uint64_t at = j * w.d.stride + i;
            if (w.d.type == F32) static_cast<float*>(w.d_at)[at] = static_cast<float>(sum);
            else static_cast<uint16_t*>(w.d_at)[at] = narrowed(static_cast<float>(sum));
        }
    }
}

}  // namespace

#define API extern "C" int
// Counts the call, and returns its requested failure (failing.h).
#define TOLD \
    if (int status = failing::next(__func__).status) return status

// How often a function was called, or a GEMM of a form was requested.
extern "C" uint64_t emulated_calls(const char* name) { return failing::calls().count(name); }

extern "C" size_t cublasLtGetVersion() {
    const char* version = std::getenv("EMULATED_CUBLASLT_VERSION");
    return version ? static_cast<size_t>(std::atoi(version)) : 120803;
}

extern "C" const char* cublasLtGetStatusName(int status) {
    return status == 1 ? "CUBLAS_STATUS_NOT_INITIALIZED" : "CUBLAS_STATUS_INTERNAL_ERROR";
}

extern "C" const char* cublasLtGetStatusString(int) { return "as emulated"; }

API cublasLtCreate(void** handle) {
    TOLD;
    static int gpu;
    return *handle = &gpu, 0;
}

API cublasLtMatmulDescCreate(Product** product, int, int) {
    TOLD;
    return *product = new Product, 0;
}

API cublasLtMatmulDescSetAttribute(Product* product, int attribute, const void* value, size_t bytes) {
    void* to = attribute == 8 ? static_cast<void*>(&product->bias)
             : attribute == 7 ? &product->epilogue : &product->transposed[attribute - 3];
    return std::memcpy(to, value, bytes), 0;
}

API cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    TOLD;
    return *layout = new Layout{type, rows, columns, stride}, 0;
}

API cublasLtMatrixLayoutSetAttribute(Layout* layout, int, const void* columns, size_t bytes) {
    return std::memcpy(&layout->columns, columns, bytes), 0;
}

API cublasLtMatmulPreferenceCreate(void**) { return 0; }
API cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
API cublasLtMatmulPreferenceDestroy(void*) { return 0; }

API cublasLtMatmulAlgoGetHeuristic(void*, Product*, Layout*, Layout*, Layout*, Layout*, void*, int, Heuristic* best, int* found) {
    TOLD;
    return *best = {}, *found = 1, 0;
}

API cublasLtMatmulAlgoCheck(void*, Product*, Layout*, Layout*, Layout*, Layout*, const uint64_t*, Heuristic* result) {
    return *result = {}, 0;
}

API cublasLtMatmul(void*, Product* product, const float*, const void* a_at, Layout* a, const void* b_at, Layout* b,
                   const float* beta, const void* c_at, Layout*, void* d_at, Layout* d, const uint64_t*, void*, size_t, void* stream) {
    TOLD;
    failing::next(product->transposed[0] ? "forward" : product->transposed[1] ? "weight" : "input");
    if (*beta != 0) failing::next("added");
    if (d->type == F32) failing::next("in_f32");
    // Runs in stream order; in a graph, at each replay.
    Work* work = new Work{*product, *a, *b, *d, a_at, b_at, c_at, d_at, *beta};
    return cuLaunchHostFunc(stream, [](void* data) { compute(*static_cast<Work*>(data)); }, work);
}
