// Selective log-softmax over logits (rows, v) = h W^T, a chunk of tokens at a time: statistics, values computed from
// them, and the gradient.
//
// With z = logits / temperature, s = softmax(z): logprob = z[target] - lse, entropy = lse - sum_v s_v z_v.
// Cross-entropy is a logprob whose gradient is -weight: it needs no kernel of its own.
// Legend: V columns, rows `stride` apart; a place is the target's column, outside 0..V if another part has it.
#include "softmax.cuh"

template <class T>
DEVICE void stats_of_row(const T* logits, u64 stride, i32 v, float inverse_temperature, const i32* places, Stats* stats,
                         Part* spans) {
    u64 row = blockIdx.x;
    const T* x = logits + row * stride;
    Stats found = row_stats(x, v, inverse_temperature, spans);
    if (threadIdx.x == 0) {
        i32 place = places[row];
        found.target = place >= 0 && place < v ? load(x + place) : 0.0f;
        stats[row] = found;
    }
}

// linear_logprob_stats_f32  max z, sum exp(z - max), sum exp(z - max) (z - max), and the target's logit, of each row
// logits (rows, V) f32; places (rows) i32; stats (rows, 4) f32
// grid rows, block 32 to 256 (a warp a span), shared 16 ceil(V / 2048) bytes; 16-byte loads where rows are aligned so
// roofline 4 rows V bytes
KERNEL __launch_bounds__(256) linear_logprob_stats_f32(const float* logits, u64 stride, i32 v, float inverse_temperature,
                                                       const i32* places, Stats* stats) {
    DYNAMIC_SHARED(room);
    stats_of_row(logits, stride, v, inverse_temperature, places, stats, (Part*)room);
}

// linear_logprob_stats_bf16  the same of bf16 logits
// grid rows, block 32 to 256, shared 16 ceil(V / 2048) bytes; 8-byte loads where rows are aligned to 16
// roofline 2 rows V bytes
KERNEL __launch_bounds__(256) linear_logprob_stats_bf16(const bf16* logits, u64 stride, i32 v, float inverse_temperature,
                                                        const i32* places, Stats* stats) {
    DYNAMIC_SHARED(room);
    stats_of_row(logits, stride, v, inverse_temperature, places, stats, (Part*)room);
}

// linear_logprob_combine  a row's statistics from those of its P parts, in their order
// parts (P, rows, 4) f32; stats (rows, 4) f32, may be the first part
// grid ceil(rows / 128), block 128
// roofline 16 (P + 1) rows bytes
KERNEL linear_logprob_combine(const Stats* parts, i32 count, u64 rows, Stats* stats) {
    u64 row = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows) stats[row] = combined(parts + row, count, rows);
}

// linear_logprob_read  logprob = (z[target] - max) - ln sum_exp; entropy = ln sum_exp - dot / sum_exp
// stats (rows, 4) f32; logprobs, entropy (rows) f32, of which the last may be null
// grid ceil(rows / 128), block 128
// roofline 24 rows bytes
KERNEL linear_logprob_read(const Stats* stats, u64 rows, float inverse_temperature, float* logprobs, float* entropy) {
    u64 row = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    Stats of = stats[row];
    logprobs[row] = logprob_of(of.target, inverse_temperature, of);
    if (entropy) entropy[row] = entropy_of(of);
}

// linear_logprob_top  1 if no column is likelier than the target, else 0
// stats (rows, 4), top (rows) f32
// grid ceil(rows / 128), block 128
// roofline 20 rows bytes
KERNEL linear_logprob_top(const Stats* stats, u64 rows, float inverse_temperature, float* top) {
    u64 row = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    Stats of = stats[row];
    top[row] = times(of.target, inverse_temperature) >= of.max ? 1.0f : 0.0f;
}

// Columns of a row per block of the gradient: 256 threads, four times eight each.
#define GRADIENT_COLUMNS 8192

// s (dlogprob + dentropy (log s + entropy)) = exp(d) / sum_exp (base + dentropy d), d = z - max.
struct RowGradient {
    float inverse_temperature, max, scale, base, dentropy;
};

DEVICE float gradient_at(float logit, const RowGradient& of) {
    float power = (times(logit, of.inverse_temperature) - of.max) * LOG2_E;
    power = power < LOWEST_POWER ? LOWEST_POWER : power;
    return exp2_fast(power) * of.scale * fmaf(of.dentropy, power * LN_2, of.base);
}

template <class T>
DEVICE void gradient_of_row(const T* logits, u64 stride, i32 v, float inverse_temperature, const Stats* stats,
                            const i32* places, const float* dlogprobs, const float* dentropy, bf16* dlogits, u64 dstride) {
    u64 row = blockIdx.x;
    const T* logits_row = logits + row * stride;
    bf16* dlogits_row = dlogits + row * dstride;
    Stats of = stats[row];
    i32 place = places[row];
    float dlogprob = dlogprobs[row];
    float base = fmaf(dentropy[row], entropy_of(of) - logf(of.sum_exp), dlogprob);
    RowGradient gradient{inverse_temperature, of.max, -inverse_temperature / of.sum_exp, base, dentropy[row]};
    bool aligned = aligned_to_16(logits_row);
    float at_target = dlogprob * inverse_temperature;
    u64 start = (u64)blockIdx.y * GRADIENT_COLUMNS;
    for (int j = 0; j < GRADIENT_COLUMNS / 8 / 256; j++) {
        u64 at = start + ((u64)j * 256 + threadIdx.x) * 8;
        if (at >= dstride) return;
        float x[2][4], out[8];
        int first = (int)at;
        if (aligned && first + 8 <= v) {
            load_four(x[0], logits_row + first);
            load_four(x[1], logits_row + first + 4);
        } else {
            load_four(x[0], logits_row, first, v, aligned);
            load_four(x[1], logits_row, first + 4, v, aligned);
        }
        for (int i = 0; i < 8; i++) {
            out[i] = gradient_at(x[i / 4][i % 4], gradient);
            if (first + i == place) out[i] += at_target;
        }
        if (first + 8 > v) {
            for (int i = 0; i < 8; i++) out[i] = first + i < v ? out[i] : 0.0f;
        }
        Eight eight;
        for (int i = 0; i < 4; i++) eight.pair[i] = pack(out[2 * i], out[2 * i + 1]);
        store(dlogits_row + at, eight);
    }
}

// linear_logprob_gradient_f32  dlogits[v] = (dlogprob (1[v = target] - s_v) - dentropy s_v (log s_v + entropy)) / temperature
// logits (rows, V) f32; stats (rows, 4), dlogprobs, dentropy (rows) f32; places (rows) i32; dlogits (rows, dstride) bf16,
// columns past V are 0
// grid rows x ceil(dstride / 8192), block 256, eight columns a thread at a time; needs dstride % 8 == 0
// roofline rows (4 V + 2 dstride) bytes
KERNEL __launch_bounds__(256) linear_logprob_gradient_f32(
    const float* logits, u64 stride, i32 v, float inverse_temperature, const Stats* stats, const i32* places,
    const float* dlogprobs, const float* dentropy, bf16* dlogits, u64 dstride) {
    gradient_of_row(logits, stride, v, inverse_temperature, stats, places, dlogprobs, dentropy, dlogits, dstride);
}

// linear_logprob_gradient_bf16  the same of bf16 logits; in place where dlogits are the logits
// grid rows x ceil(dstride / 8192), block 256; needs dstride % 8 == 0
// roofline rows (2 V + 2 dstride) bytes
KERNEL __launch_bounds__(256) linear_logprob_gradient_bf16(
    const bf16* logits, u64 stride, i32 v, float inverse_temperature, const Stats* stats, const i32* places,
    const float* dlogprobs, const float* dentropy, bf16* dlogits, u64 dstride) {
    gradient_of_row(logits, stride, v, inverse_temperature, stats, places, dlogprobs, dentropy, dlogits, dstride);
}
