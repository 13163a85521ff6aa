// Samples one token per row of logits like `src/device/cpu/sample.rs`.
#include "sample.cuh"
#include "select.cuh"

// The row with the repetition penalty on seen tokens and minus infinity on banned ones, in `edited`; or the row itself.
DEVICE const float* edit(const float* x, int v, float penalty, const u32* seen, List of_seen, const u32* banned,
                         List of_banned, float* edited) {
    bool penalised = penalty != 1.0f && of_seen.start < of_seen.end;
    if (!penalised && of_banned.start >= of_banned.end) return x;
    PASS (int i = threadIdx.x; i < v; i += SAMPLE_THREADS) edited[i] = x[i];
    SYNC_BLOCK();
    for (u32 i = of_seen.start + threadIdx.x; penalised && i < of_seen.end; i += SAMPLE_THREADS) {
        u32 token = seen[i];
        if (token >= (u32)v) continue;
        // From the unedited logit: a token that occurred twice is penalised once.
        float logit = x[token];
        edited[token] = logit < 0.0f ? logit * penalty : logit / penalty;
    }
    SYNC_BLOCK();
    for (u32 i = of_banned.start + threadIdx.x; i < of_banned.end; i += SAMPLE_THREADS) {
        if (banned[i] < (u32)v) edited[banned[i]] = -infinity();
    }
    SYNC_BLOCK();
    return edited;
}

// Applies the filters and samples. Returns the token, and its probability in `probability`.
DEVICE int filter_and_draw(Kept& row, const Params& params, float uniform, const SampleRoom& room, double* probability) {
    int tiles = (row.v + TILE - 1) / TILE;
    if (params.top_k > 0 && params.top_k < (u32)row.v) row.least = kth_largest(row.x, row.v, params.top_k, room);
    sum_tiles(row, room.tiles);
    if (params.top_p < 1.0f || params.min_p > 0.0f) {
        Cut cut{params.min_p, row.v};
        if (params.top_p < 1.0f) {
            Cut other = nucleus(row, times((double)params.top_p, total_of(room.tiles, tiles)), room);
            if (!(cut.e > other.e)) cut = other;
        }
        row.cut = cut.e;
        row.last = cut.last;
        // All reads of the tiles are before a barrier in `nucleus`.
        sum_tiles(row, room.tiles);
    }
    double total = total_of(room.tiles, tiles);
    int token = draw(row, times((double)uniform, total), room);
    *probability = (double)e_at(row, token) / total;
    return token;
}

// sample_rows  repetition penalty, temperature, top-k, top-p, min-p; the first token whose cumulative probability exceeds
//              the row's uniform; its logprob = (z - max) - ln sum_exp of the unedited row, and its logprob after filters
// logits (rows, V) f32; ends (parts) i32, where the parts of the vocabulary end; params (rows), idle rows sample nothing;
// uniforms (rows) f32;
// seen, banned u32 tokens with a list (rows, 2) u32 each; edited (rows, V) f32, scratch of rows with edits;
// tokens (rows) u32; logprobs, sample_logprobs (rows) f32
// grid rows, block 512, shared 16 ceil(V / 2048) + 4 ceil(V / 256) bytes and 11 KB; at most 64 parts
// roofline 4 rows V bytes; a row is read once for its statistics and once for each step of its filters, then from L2
KERNEL __launch_bounds__(SAMPLE_THREADS) sample_rows(
    const float* logits, u64 stride, i32 v, const i32* ends, i32 parts, const Params* params, const float* uniforms,
    const u32* seen, const List* of_seen, const u32* banned, const List* of_banned, float* edited, u32* tokens,
    float* logprobs, float* sample_logprobs) {
    SHARED u64 candidates[CANDIDATES];
    SHARED double warps[SAMPLE_THREADS / WARP];
    SHARED Counts counts[SAMPLE_THREADS / 4];
    SHARED u32 found[1];
    SHARED Stats of_parts[64];
    DYNAMIC_SHARED(dynamic);
    Part* spans = (Part*)dynamic;
    SampleRoom room{(float*)(spans + (v + SPAN - 1) / SPAN), candidates, warps, counts, found};
    u64 at = blockIdx.x;
    const float* logits_row = logits + at * stride;
    Params mine = params[at];
    if (mine.idle) return;
    bool greedy = mine.temperature == 0.0f;
    float inverse_temperature = 1.0f / (greedy ? 1.0f : mine.temperature);
    for (int p = 0, start = 0; p < parts; start = ends[p++]) {
        Stats stats = row_stats(logits_row + start, ends[p] - start, inverse_temperature, spans);
        if (threadIdx.x == 0) of_parts[p] = stats;
        SYNC_BLOCK();
    }
    const float* x = edit(logits_row, v, mine.repetition_penalty, seen, of_seen[at], banned, of_banned[at],
                          edited + at * (u64)v);
    float max = row_max(x, v, warps);
    int token;
    double probability = 1.0;
    if (greedy) {
        token = first_of(x, v, max, warps);
    } else {
        Kept row{x, v, max, inverse_temperature, -infinity(), 0.0f, v};
        token = filter_and_draw(row, mine, uniforms[at], room, &probability);
    }
    if (threadIdx.x > 0) return;
    float logprob = logprob_of(logits_row[token], inverse_temperature, combined(of_parts, parts, 1));
    bool plain = mine.top_k == 0 && mine.top_p >= 1.0f && mine.min_p <= 0.0f && mine.repetition_penalty == 1.0f &&
                 of_banned[at].start >= of_banned[at].end;
    tokens[at] = token;
    logprobs[at] = logprob;
    sample_logprobs[at] = greedy ? 0.0f : plain ? logprob : (float)log(probability);
}
