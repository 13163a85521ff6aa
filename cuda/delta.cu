// The gated delta rule (arXiv:2412.06464), token by token. For each value head, with S (key dim, value dim):
//   S' = a_t S_(t-1), u_t = b_t (v_t - S'^T k_t), S_t = S' + k_t u_t^T, o_t = S_t^T q_t
//
// Columns of S do not depend on each other. Four lanes hold a column in registers: lane p has the rows 16 j + 4 p + 0 .. 3.
// A sum over rows is a chain for each place in the four, then the four in pairs, then the lanes. So each output has one
// order of sums, whether tokens come one at a time or all at once, and training has the bits of decoding.
// States in memory are [value head][column][key dim] f32.
#include "eight.cuh"
#include "states.cuh"

// Tokens whose inputs are in shared memory at a time.
#define CHUNK 16
#define LANES 4
#define FORWARD_THREADS 128
#define FORWARD_COLUMNS (FORWARD_THREADS / LANES)
#define BACKWARD_THREADS 512
#define BACKWARD_WARPS (BACKWARD_THREADS / WARP)

// q, k (t, key heads KEY), v (t, value heads value_dim) bf16; decay, rate (t, value heads) f32
struct Inputs {
    const bf16 *q, *k, *v;
    const float *decay, *rate;
    i32 key_heads, value_heads, value_dim;
};
#define INPUTS                                                                                                      \
    const bf16 *q, const bf16 *k, const bf16 *v, const float *decay, const float *rate, i32 key_heads, i32 value_heads, \
        i32 value_dim
#define GIVEN Inputs{q, k, v, decay, rate, key_heads, value_heads, value_dim}

// The sum over a column's rows, in all four lanes.
DEVICE float column_sum(const float (&x)[4]) {
    float sum = (x[0] + x[1]) + (x[2] + x[3]);
    sum += shuffle_xor(sum, 1);
    return sum + shuffle_xor(sum, 2);
}

// Zeros if there is no such column.
template <int KEY> DEVICE void load_column(float (&s)[KEY / 4], const float* from, bool is_there) {
#pragma unroll
    for (int j = 0; j < KEY / 16; j++) {
        const Four four = is_there ? *(const Four*)(from + 16 * j) : Four{};
#pragma unroll
        for (int e = 0; e < 4; e++) s[4 * j + e] = four.at[e];
    }
}

template <int KEY> DEVICE void store_column(const float (&s)[KEY / 4], float* to) {
#pragma unroll
    for (int j = 0; j < KEY / 16; j++) {
        *(Four*)(to + 16 * j) = Four{{s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]}};
    }
}

// One token: S to S_t; k is at this lane's first row.
template <int KEY> DEVICE void advance(float (&s)[KEY / 4], const float* k, float v, float a, float b) {
    float known[4] = {};
#pragma unroll
    for (int j = 0; j < KEY / 16; j++) {
        const Four key = *(const Four*)(k + 16 * j);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[4 * j + e] = times(a, s[4 * j + e]);
            known[e] = fmaf(s[4 * j + e], key.at[e], known[e]);
        }
    }
    const float u = times(b, v - column_sum(known));
    // The key is read again, so that it need not stay in registers.
    SYNC_WARP();
#pragma unroll
    for (int j = 0; j < KEY / 16; j++) {
        const Four key = *(const Four*)(k + 16 * j);
#pragma unroll
        for (int e = 0; e < 4; e++) s[4 * j + e] = fmaf(key.at[e], u, s[4 * j + e]);
    }
}

// S^T q for this column.
template <int KEY> DEVICE float read_column(const float (&s)[KEY / 4], const float* q) {
    float sum[4] = {};
#pragma unroll
    for (int j = 0; j < KEY / 16; j++) {
        const Four query = *(const Four*)(q + 16 * j);
#pragma unroll
        for (int e = 0; e < 4; e++) sum[e] = fmaf(s[4 * j + e], query.at[e], sum[e]);
    }
    return column_sum(sum);
}

// Rows of a head of x (t, heads WIDTH) to shared memory as f32, `count` tokens from row `first` on.
template <int WIDTH> DEVICE void load_rows(float* to, const bf16* x, u64 first, int count, i32 heads, i32 head) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count * (WIDTH / 8); i += blockDim.x) {
        const int t = i / (WIDTH / 8), at = i % (WIDTH / 8) * 8;
        float values[8];
        load_eight(x + ((first + t) * heads + head) * WIDTH + at, values);
        store_eight(to + t * WIDTH + at, values);
    }
}

// Decay and rate of the tokens of a chunk.
DEVICE void load_gates(float* to, const Inputs& x, u64 first, int count, i32 head) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const u64 at = (first + i) * x.value_heads + head;
        to[2 * i] = x.decay[at], to[2 * i + 1] = x.rate[at];
    }
}

DEVICE int at_most(int count) { return count < CHUNK ? count : CHUNK; }

template <int KEY>
DEVICE void forward(const Inputs& x, const Sequence* sequences, const i32* slots, float* pages, u64 page_len, u64 offset, bf16* o) {
    SHARED float keys[CHUNK * KEY];
    SHARED float queries[CHUNK * KEY];
    SHARED float gates[CHUNK * 2];
    const Sequence sequence = sequences[blockIdx.x];
    const i32 head = blockIdx.y, key_head = head * x.key_heads / x.value_heads;
    const int column = blockIdx.z * FORWARD_COLUMNS + threadIdx.x / LANES, row = threadIdx.x % LANES * 4;
    const bool is_there = column < x.value_dim;
    float* page = page_of(sequence, slots, pages, page_len);
    if (page) page += offset + ((u64)head * x.value_dim + column) * KEY + row;
    float s[KEY / 4];
    load_column<KEY>(s, page, page && is_there && sequence.past > 0);
    for (int start = 0; start < sequence.tokens; start += CHUNK) {
        const int count = at_most(sequence.tokens - start);
        const u64 first = (u64)sequence.row + start;
        SYNC_BLOCK();  // nobody reads the chunk before
        load_rows<KEY>(keys, x.k, first, count, x.key_heads, key_head);
        load_rows<KEY>(queries, x.q, first, count, x.key_heads, key_head);
        load_gates(gates, x, first, count, head);
        SYNC_BLOCK();
        for (int i = 0; i < count; i++) {
            const u64 at = ((first + i) * x.value_heads + head) * x.value_dim + column;
            const float v = is_there ? to_f32(x.v[at]) : 0.0f;
            advance<KEY>(s, keys + i * KEY + row, v, gates[2 * i], gates[2 * i + 1]);
            const float result = read_column<KEY>(s, queries + i * KEY + row);
            if (is_there && row == 0) o[at] = to_bf16(result);
        }
    }
    if (page && is_there && sequence.tokens > 0) store_column<KEY>(s, page);
}

#define FORWARD_PARAMETERS \
    INPUTS, const i32 *sequences, const i32 *slots, float *pages, u64 page_len, u64 offset, bf16 *o
#define FORWARD_ARGUMENTS GIVEN, (const Sequence*)sequences, slots, pages, page_len, offset, o

// delta_forward_KEY  o_t = S_t^T q_t, from S = 0 at the start of a sequence or the state in its page, which then gets the
// last one
// q, k (t, key heads KEY), v, o (t, value heads value_dim) bf16; decay, rate (t, value heads) f32; sequences, slots, pages as
// states.cuh; value head h reads key head h key_heads / value_heads
// grid (sequences, value heads, ceil(value_dim / 32)), block 128: four lanes a column
// roofline 8 KEY flops a token and column, one token after the other; for few tokens 8 KEY bytes of states a column
KERNEL __launch_bounds__(128, 8) delta_forward_32(FORWARD_PARAMETERS) { forward<32>(FORWARD_ARGUMENTS); }
KERNEL __launch_bounds__(128) delta_forward_64(FORWARD_PARAMETERS) { forward<64>(FORWARD_ARGUMENTS); }
KERNEL __launch_bounds__(128) delta_forward_128(FORWARD_PARAMETERS) { forward<128>(FORWARD_ARGUMENTS); }

// Sums eight values over the eight columns of a warp. The lanes of column c return the sum of value `index`, whose bits are
// those of c in reverse order.
DEVICE float sum_of_columns(float (&x)[8], int& index) {
    const int column = lane_id() / LANES;
    index = (column & 1) * 4 + (column & 2) + column / 4;
#pragma unroll
    for (int half = 4, lanes = LANES; half > 0; half /= 2, lanes *= 2) {
        const bool upper = lane_id() & lanes;
#pragma unroll
        for (int i = 0; i < half; i++) {
            const float given = upper ? x[i] : x[half + i], kept = upper ? x[half + i] : x[i];
            x[i] = kept + shuffle_xor(given, lanes);
        }
    }
    return x[0];
}

// Sums over the columns of warps, before they are added: slopes of q and k [warp][KEY], and of decay and rate [warp].
template <int KEY> struct Sums {
    float q[BACKWARD_WARPS][KEY], k[BACKWARD_WARPS][KEY], decay[BACKWARD_WARPS], rate[BACKWARD_WARPS];
};

// The walk of one value head over one sequence.
struct Walk {
    i32 row, tokens, head, key_head;
};

// What a block has in shared memory: its work, to save registers, inputs of a chunk, and sums of two tokens.
template <int KEY> struct Room {
    Walk walk;
    Sums<KEY> sums[2];
    float keys[CHUNK * KEY], queries[CHUNK * KEY], gates[CHUNK * 2];
};

// The column of a thread, and its first row of it.
DEVICE int own_column() { return threadIdx.x / LANES; }
DEVICE int own_row() { return threadIdx.x % LANES * 4; }

// Gradients: q, k (t, value heads KEY) f32, a part for each value head; v as v; decay and rate (t, value heads) f32.
struct Slopes {
    float *q, *k;
    bf16* v;
    float *decay, *rate;
};


template <int KEY> DEVICE void load_chunk(Room<KEY>& room, const Inputs& x, const Walk& walk, int start, int count, bool both) {
    const u64 first = (u64)walk.row + start;
    SYNC_BLOCK();  // nobody reads the chunk before
    load_rows<KEY>(room.keys, x.k, first, count, x.key_heads, walk.key_head);
    if (both) load_rows<KEY>(room.queries, x.q, first, count, x.key_heads, walk.key_head);
    load_gates(room.gates, x, first, count, walk.head);
    SYNC_BLOCK();
}

DEVICE u64 place_of(const Inputs& x, const Walk& walk, int t) {
    return (((u64)walk.row + t) * x.value_heads + walk.head) * x.value_dim + own_column();
}

// Moves s over the tokens start .. end. With `states`, leaves the state before each of them there, `len` values apart.
template <int KEY>
DEVICE void walk_over(Room<KEY>& room, float (&s)[KEY / 4], const Inputs& x, const Walk& walk, int start, int end, float* states, u64 len) {
    for (int at = start; at < end; at += CHUNK) {
        const int count = at_most(end - at);
        load_chunk<KEY>(room, x, walk, at, count, false);
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            if (states && own_column() < x.value_dim) store_column<KEY>(s, states + (at - start + i) * len);
            const float v = own_column() < x.value_dim ? to_f32(x.v[place_of(x, walk, at + i)]) : 0.0f;
            advance<KEY>(s, room.keys + i * KEY + own_row(), v, room.gates[2 * i], room.gates[2 * i + 1]);
        }
    }
}

// The backward of token t of a sequence, `i` of its chunk; ds is dS_t, then a dS' = dS_(t-1):
//   dS_t += q_t do_t^T, dq_t = S_t do_t, du_t = dS_t^T k_t, dv_t = b_t du_t, db_t = du_t . (v_t - S'^T k_t)
//   dk_t = dS_t u_t - S' dv_t, dS' = dS_t - k_t dv_t^T, da_t = dS' : S_(t-1)
template <int KEY>
DEVICE void token_backward(Room<KEY>& room, float (&ds)[KEY / 4], const Inputs& x, const Walk& walk, const float* state, int t, int i,
                           const bf16* d_o, bf16* dv_of) {
    const float *k = room.keys + i * KEY + own_row(), *q = room.queries + i * KEY + own_row();
    const float a = room.gates[2 * i], b = room.gates[2 * i + 1];
    const u64 place = place_of(x, walk, t);
    const float v = own_column() < x.value_dim ? to_f32(x.v[place]) : 0.0f, slope = own_column() < x.value_dim ? to_f32(d_o[place]) : 0.0f;
    float known[4] = {}, du_of[4] = {};
#pragma unroll
    for (int j = 0; j < KEY / 16; j++) {
        const Four key = *(const Four*)(k + 16 * j), query = *(const Four*)(q + 16 * j);
        const Four old = own_column() < x.value_dim ? *(const Four*)(state + 16 * j) : Four{};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            known[e] = fmaf(times(a, old.at[e]), key.at[e], known[e]);
            ds[4 * j + e] = fmaf(query.at[e], slope, ds[4 * j + e]);
            du_of[e] = fmaf(ds[4 * j + e], key.at[e], du_of[e]);
        }
        // Otherwise the compiler would load all at once and spill registers.
        if (j % 2) SYNC_WARP();
    }
    const float rest = v - column_sum(known), du = column_sum(du_of), u = b * rest, dv = b * du;
    Sums<KEY>& sums = room.sums[t % 2];
    float da = 0.0f;
    // The states and keys are read again, so that they need not stay in registers.
    SYNC_WARP();
#pragma unroll
    for (int j = 0; j < KEY / 16; j += 2) {
        float dq[8], dk[8];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const Four key = *(const Four*)(k + 16 * (j + n));
            const Four state_of = own_column() < x.value_dim ? *(const Four*)(state + 16 * (j + n)) : Four{};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float &of_state = ds[4 * (j + n) + e], old = state_of.at[e], decayed = a * old;
                dq[4 * n + e] = fmaf(key.at[e], u, decayed) * slope;
                dk[4 * n + e] = fmaf(of_state, u, -decayed * dv);
                const float before = fmaf(-key.at[e], dv, of_state);
                da = fmaf(before, old, da);
                of_state = a * before;
            }
        }
        int index;
        const float of_q = sum_of_columns(dq, index), of_k = sum_of_columns(dk, index);
        const int row = 16 * (j + index / 4) + own_row() + index % 4;
        sums.q[warp_id()][row] = of_q;
        sums.k[warp_id()][row] = of_k;
        SYNC_WARP();
    }
    da = warp_sum(da);
    const float d_rate = warp_sum(own_row() == 0 ? du * rest : 0.0f);
    if (lane_id() == 0) sums.decay[warp_id()] = da, sums.rate[warp_id()] = d_rate;
    if (own_column() < x.value_dim && own_row() == 0) dv_of[place] = to_bf16(dv);
}

// Adds the sums of all warps for token t, and writes them.
template <int KEY> DEVICE void give(const Room<KEY>& room, const Inputs& x, const Walk& walk, int t, const Slopes& to) {
    const Sums<KEY>& sums = room.sums[t % 2];
    const u64 place = ((u64)walk.row + t) * x.value_heads + walk.head;
    const int warps = blockDim.x / WARP;
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * KEY + 2; i += blockDim.x) {
        float sum = 0.0f;
#pragma unroll 1
        for (int w = 0; w < warps; w++) {
            sum += i < KEY ? sums.q[w][i] : i < 2 * KEY ? sums.k[w][i - KEY] : i == 2 * KEY ? sums.decay[w] : sums.rate[w];
        }
        if (i < KEY) to.q[place * KEY + i] = sum;
        else if (i < 2 * KEY) to.k[place * KEY + i - KEY] = sum;
        else (i == 2 * KEY ? to.decay : to.rate)[place] = sum;
    }
}

// The states before every `every` tokens are kept in a first walk over the sequence. From the last such run on, the states
// before each of its tokens are computed again.
template <int KEY>
DEVICE void backward(const Inputs& x, const Sequence* sequences, i32 tasks, i32 every, i32 marks, float* scratch, const bf16* d_o,
                     const Slopes& to) {
    DYNAMIC_SHARED(shared);
    Room<KEY>& room = *(Room<KEY>*)shared;
    const Walk& walk = room.walk;
    const bool is_there = own_column() < x.value_dim;
    const u64 len = (u64)x.value_dim * KEY;
    float* marked = scratch + (u64)blockIdx.x * (marks + every) * len + own_column() * KEY + own_row();
    float* states = marked + marks * len;
#pragma unroll 1
    for (int task = blockIdx.x; task < tasks; task += gridDim.x) {
        SYNC_BLOCK();  // nobody needs the work before
        if (threadIdx.x == 0) {
            const Sequence sequence = sequences[task / x.value_heads];
            const i32 head = task % x.value_heads;
            room.walk = Walk{sequence.row, sequence.tokens, head, head * x.key_heads / x.value_heads};
        }
        SYNC_BLOCK();
        float s[KEY / 4] = {};
#pragma unroll 1
        for (int at = 0; at < walk.tokens; at += every) {
            if (is_there) store_column<KEY>(s, marked + at / every * len);
            if (at + every < walk.tokens) walk_over<KEY>(room, s, x, walk, at, at + every, nullptr, 0);
        }
        float ds[KEY / 4] = {};
#pragma unroll 1
        for (int at = (walk.tokens - 1) / every * every; at >= 0 && at < walk.tokens; at -= every) {
            const int end = at + every < walk.tokens ? at + every : walk.tokens;
            float* mark = marked + at / every * len;
            load_column<KEY>(s, mark, is_there);
            // The slope waits there meanwhile, so that it needs no registers.
            if (is_there) store_column<KEY>(ds, mark);
            walk_over<KEY>(room, s, x, walk, at, end, states, len);
            load_column<KEY>(ds, mark, is_there);
            for (int start = at + (end - at - 1) / CHUNK * CHUNK; start >= at; start -= CHUNK) {
                const int count = at_most(end - start);
                load_chunk<KEY>(room, x, walk, start, count, true);
#pragma unroll 1
                for (int i = count - 1; i >= 0; i--) {
                    const int t = start + i;
                    token_backward<KEY>(room, ds, x, walk, states + (t - at) * len, t, i, d_o, to.v);
                    SYNC_BLOCK();  // the sums are there, and nobody adds those of the token after the next
                    give<KEY>(room, x, walk, t, to);
                }
            }
        }
    }
}

#define BACKWARD_PARAMETERS                                                                                          \
    INPUTS, const i32 *sequences, i32 tasks, i32 every, i32 marks, float *scratch, const bf16 *d_o, float *dq, float *dk, \
        bf16 *dv, float *d_decay, float *d_rate
#define BACKWARD_ARGUMENTS \
    GIVEN, (const Sequence*)sequences, tasks, every, marks, scratch, d_o, Slopes{dq, dk, dv, d_decay, d_rate}

// delta_backward_KEY  the gradients of delta_forward_KEY over whole sequences, for d_o as o
// inputs as there; dq, dk (t, value heads KEY) f32: a part for each value head, which delta_sum_heads adds; dv as v; d_decay,
// d_rate (t, value heads) f32; tasks: sequences times value heads, heads first; scratch (blocks, marks + every, value_dim, KEY)
// f32, marks: the most runs of `every` tokens (a multiple of 16) of a sequence
// grid up to tasks, block 4 value_dim, at most 512: four lanes a column; shared memory as Room<KEY>; needs value_dim % 8 == 0
// roofline 8 KEY bytes of states a token and column, and 30 KEY flops, one token after the other
KERNEL __launch_bounds__(512, 1) delta_backward_32(BACKWARD_PARAMETERS) { backward<32>(BACKWARD_ARGUMENTS); }
KERNEL __launch_bounds__(512, 1) delta_backward_64(BACKWARD_PARAMETERS) { backward<64>(BACKWARD_ARGUMENTS); }
KERNEL __launch_bounds__(512, 1) delta_backward_128(BACKWARD_PARAMETERS) { backward<128>(BACKWARD_ARGUMENTS); }

// delta_sum_heads  to[t][g] = the sum of the parts of the value heads that read key head g, ascending, rounded once
// parts (t, key heads, group, width) f32; to (t, key heads, width) bf16; eights = key heads width / 8
// grid ceil(t eights / 256), block 256, eight values a thread; needs width % 8 == 0
// roofline (4 group + 2) t key heads width bytes
KERNEL __launch_bounds__(256) delta_sum_heads(const float* parts, bf16* to, u32 t, u32 eights, u32 group, u32 width) {
    const u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= t * eights) return;
    const u64 head = index / (width / 8), at = index % (width / 8) * 8;
    float sum[8] = {};
    for (u32 i = 0; i < group; i++) {
        float part[8];
        load_eight(parts + (head * group + i) * width + at, part);
#pragma unroll
        for (int e = 0; e < 8; e++) sum[e] += part[e];
    }
    store_eight(to + head * width + at, sum);
}
