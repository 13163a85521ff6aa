// Divergence of a student's distribution q from a teacher's p, from their logits (rows, v), a chunk of tokens at a
// time: sums of rows, and the derivatives by the student's logits.
//
// With x = logits / temperature: forward_kl = sum_v p (log p - log q); reverse_kl = sum_v q (log q - log p);
// jsd = (sum_v p log(p / m) + sum_v q log(q / m)) / 2, m = (p + q) / 2.
// Legend: V columns, at rows `stride` apart; `kind` is the divergence in the order above; Stats of whole rows.
#include "eight.cuh"
#include "softmax.cuh"

#define FORWARD_KL 0
#define REVERSE_KL 1
// Columns of a row per block of the derivatives: 256 threads, four times eight each.
#define SLOPE_COLUMNS 8192

struct Token {
    float logprob, probability;
};

// What is constant in a row.
struct Row {
    float inverse_temperature, max, ln_sum, inverse_sum;
};

DEVICE Row row_of(const Stats& stats, float inverse_temperature) {
    return Row{inverse_temperature, stats.max, logf(stats.sum_exp), 1.0f / stats.sum_exp};
}

DEVICE Token token_of(float logit, const Row& row) {
    float power = (times(logit, row.inverse_temperature) - row.max) * LOG2_E;
    power = power < LOWEST_POWER ? LOWEST_POWER : power;
    return Token{fmaf(power, LN_2, -row.ln_sum), exp2_fast(power) * row.inverse_sum};
}

// log(p / m) of d = log p - log q, and log(q / m) of -d: ln 2 - log(1 + exp(-d)).
DEVICE float above_middle(float d) {
    return LN_2 - (logf(1.0f + exp2_fast(-fabsf(d) * LOG2_E)) + fmaxf(-d, 0.0f));
}

// linear_divergence_sums  of each row two sums over its columns, between a max and a target of 0: of forward_kl sum p log(p / q)
// and sum p (-log q), of reverse_kl sum q log(q / p) and 0, else sum p log(p / m) and sum q log(q / m)
// student, teacher (rows, V) f32; of_student, of_teacher, sums (rows, 4) f32
// grid rows, block 256, a column a thread at a time, ascending, then one tree: of nothing but the row
// roofline 8 rows V bytes
KERNEL __launch_bounds__(256) linear_divergence_sums(const float* student, u64 student_stride, const float* teacher,
                                                     u64 teacher_stride, i32 v, i32 kind, float inverse_temperature,
                                                     const Stats* of_student, const Stats* of_teacher, Stats* sums) {
    SHARED float room[33];
    u64 at = blockIdx.x;
    Row own = row_of(of_student[at], inverse_temperature), other = row_of(of_teacher[at], inverse_temperature);
    const float *own_logits = student + at * student_stride, *other_logits = teacher + at * teacher_stride;
    float first = 0.0f, second = 0.0f;
    for (i32 i = threadIdx.x; i < v; i += 256) {
        Token q = token_of(own_logits[i], own), p = token_of(other_logits[i], other);
        float d = p.logprob - q.logprob;
        if (kind == FORWARD_KL) {
            first = fmaf(p.probability, d, first);
            second = fmaf(-p.probability, q.logprob, second);
        } else if (kind == REVERSE_KL) {
            first = fmaf(-q.probability, d, first);
        } else {
            first = fmaf(p.probability, above_middle(d), first);
            second = fmaf(q.probability, above_middle(-d), second);
        }
    }
    first = block_sum(first, room);
    second = block_sum(second, room);
    if (threadIdx.x == 0) sums[at] = Stats{0.0f, first, second, 0.0f};
}

DEVICE float slope_of(i32 kind, Token q, Token p, const Stats& sums) {
    if (kind == FORWARD_KL) return q.probability - p.probability;
    float d = p.logprob - q.logprob;
    if (kind == REVERSE_KL) return q.probability * (-d - sums.sum_exp);
    return 0.5f * q.probability * (above_middle(-d) - sums.dot);
}

// linear_divergence_add  dlogits[v] += scale slope: of forward_kl q - p, of reverse_kl q (log(q / p) - KL), else
// q (log(q / m) - KL(q || m)) / 2
// student, teacher (rows, V) f32; of_student, of_teacher, sums (rows, 4) f32; dlogits (rows, dstride) bf16, columns past V stay
// grid rows x ceil(dstride / 8192), block 256, eight columns a thread at a time; needs dstride % 8 == 0
// roofline rows (8 V + 4 dstride) bytes
KERNEL __launch_bounds__(256) linear_divergence_add(const float* student, u64 student_stride, const float* teacher,
                                                    u64 teacher_stride, i32 v, i32 kind, float inverse_temperature,
                                                    const Stats* of_student, const Stats* of_teacher, const Stats* sums,
                                                    float scale, bf16* dlogits, u64 dstride) {
    u64 at = blockIdx.x;
    Row own = row_of(of_student[at], inverse_temperature), other = row_of(of_teacher[at], inverse_temperature);
    const float *own_logits = student + at * student_stride, *other_logits = teacher + at * teacher_stride;
    bool own_aligned = is_aligned(own_logits), other_aligned = is_aligned(other_logits);
    Stats of_row = sums[at];
    for (int j = 0; j < SLOPE_COLUMNS / 8 / 256; j++) {
        u64 first = (u64)blockIdx.y * SLOPE_COLUMNS + ((u64)j * 256 + threadIdx.x) * 8;
        if (first >= (u64)v) return;
        int count = eight_or_rest(first, v);
        float s[8], t[8], out[8];
        load_up_to(own_logits + first, count, own_aligned, s);
        load_up_to(other_logits + first, count, other_aligned, t);
        load_eight(dlogits + at * dstride + first, out);
        for (int i = 0; i < 8; i++) {
            float slope = slope_of(kind, token_of(s[i], own), token_of(t[i], other), of_row);
            out[i] = i < count ? fmaf(scale, slope, out[i]) : out[i];
        }
        store_eight(dlogits + at * dstride + first, out);
    }
}
