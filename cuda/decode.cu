// Decoding steps without the host: each prepares a row's inputs of the model and the sampler from the token that the
// previous step has sampled.
#include "paged.cuh"
#include "philox.cuh"
#include "sample.cuh"

// A row of the batch between two steps, the same as `DecodeSlot` in src/device/cuda/decode.rs.
struct alignas(16) DecodeSlot {
    // The key of its next sample: step, prompt, sample, new tokens so far.
    Words counter;
    u32 key0, key1;
    // The token to be fed next, after `past` cached tokens.
    u32 token, past;
    // Remaining samples, and samples for which the stop tokens are still banned.
    u32 left, banned;
    List stops;
    // The start of its pages in the list of all; whether it has ended.
    u32 pages, ended;
    // Seen tokens, each once, if they are penalized, followed by space for all tokens that the row may sample.
    List seen;
};

// The result of a row, the same as Rust's struct; `state` is one of the three.
struct alignas(16) Draw {
    u32 token;
    float logprob, sample_logprob;
    u32 state;
};

#define GOES_ON 0
#define ENDS 1
#define IDLE 2

// The host's change to a row before a step: nothing, its end (in the first cache group), or else the page of the token that
// is fed.
#define UNCHANGED 0xffffffffu
#define ENDED 0xfffffffeu

// decode_begin  the inputs of a step for each row. Rows that have ended are fed token 0 at position 0 after nothing, see
//               the first key of the first page listed, are not kept in the cache and sample nothing.
// decode_slots (rows); changes (rows, groups) u32, then unchanged; pages (groups, pages_max) u32, of all rows; tokens,
// positions (rows) u32; sequences (rows, 4), slots (groups, rows_max) i32 as paged_decode and kv_append read them;
// uniforms (rows) f32; of_banned (rows, 2) u32 and params (rows) as sample_rows reads them
// grid ceil(rows / 128), block 128
// roofline 150 rows bytes
KERNEL decode_begin(DecodeSlot* decode_slots, u32* changes, u32* pages, i32 rows, u32* tokens, u32* positions,
                    Sequence* sequences, i32* slots, float* uniforms, List* of_banned, Params* params, i32 groups,
                    i32 pages_max, i32 rows_max) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    DecodeSlot slot = decode_slots[row];
    changes += row * groups;
    if (changes[0] == ENDED) decode_slots[row].ended = slot.ended = 1;
    for (int group = 0; group < groups; group++) {
        u32 change = changes[group], *page = pages + (u64)group * pages_max + slot.pages + slot.past / PAGE;
        changes[group] = UNCHANGED;
        if (change < ENDED) *page = change;
        slots[group * rows_max + row] = slot.ended ? -1 : (i32)(*page * PAGE + slot.past % PAGE);
    }
    params[row].idle = slot.ended;
    if (slot.ended) {
        tokens[row] = positions[row] = 0;
        sequences[row] = Sequence{0, 1, row, 0};
        uniforms[row] = 0.0f;
        of_banned[row] = List{0, 0};
        return;
    }
    tokens[row] = slot.token;
    positions[row] = slot.past;
    sequences[row] = Sequence{(i32)slot.past, 1, row, (i32)slot.pages};
    uniforms[row] = uniform(philox(slot.key0, slot.key1, slot.counter).at[0]);
    of_banned[row] = slot.banned > 0 ? slot.stops : List{0, 0};
}

// decode_end  feeds each row's sampled token next, unless it is a stop token or the row's last token
// decode_slots (rows); sampled: for each rank that samples a share of the rows, one after the other, its tokens u32, logprobs
// and sample_logprobs f32, where rank r has rows r rows / ranks to (r + 1) rows / ranks; stops u32, of all rows; the
// results (rows), for the host
// grid ceil(rows / 128), block 128
// roofline 150 rows bytes
KERNEL decode_end(DecodeSlot* decode_slots, const u32* sampled, const u32* stops, i32 rows, i32 ranks, Draw* draws) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    DecodeSlot slot = decode_slots[row];
    if (slot.ended) {
        draws[row] = Draw{0, 0.0f, 0.0f, IDLE};
        return;
    }
    // The last rank whose share begins at or before the row.
    int rank = ((row + 1) * ranks - 1) / rows;
    int first = rank * rows / ranks, share = (rank + 1) * rows / ranks - first;
    const u32* drawn = sampled + 3 * first + (row - first);
    slot.token = drawn[0];
    slot.past++;
    slot.left--;
    slot.banned -= slot.banned > 0;
    slot.counter.at[3]++;
    slot.ended = slot.left == 0;
    for (u32 i = slot.stops.start; i < slot.stops.end; i++) slot.ended |= stops[i] == slot.token;
    decode_slots[row] = slot;
    const float* logprobs = (const float*)(drawn + share);
    draws[row] = Draw{slot.token, logprobs[0], logprobs[share], (u32)(slot.ended ? ENDS : GOES_ON)};
}

// decode_seen  adds a row's sampled token to the tokens that it has seen, once
// decode_slots (rows) after decode_end; seen u32, of all rows; of_seen (rows, 2) u32 as sample_rows reads them
// grid rows, block 128
// roofline 4 bytes a token seen
KERNEL __launch_bounds__(128) decode_seen(DecodeSlot* decode_slots, u32* seen, List* of_seen) {
    SHARED u32 found[128 / WARP];
    DecodeSlot* slot = decode_slots + blockIdx.x;
    List own = slot->seen;
    u32 token = slot->token, ended = slot->ended;
    if (ended || own.start >= own.end) return;
    u32 is_known = 0;
    for (u32 i = own.start + threadIdx.x; i < own.end; i += 128) is_known |= seen[i] == token;
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) is_known |= shuffle_xor(is_known, lanes);
    if (lane_id() == 0) found[warp_id()] = is_known;
    SYNC_BLOCK();
    if (threadIdx.x > 0 || (found[0] | found[1] | found[2] | found[3])) return;
    seen[own.end++] = token;
    slot->seen = own;
    of_seen[blockIdx.x] = own;
}
