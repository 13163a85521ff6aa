// Generalized advantage estimation over packed sequences. arXiv:1506.02438
#include "common.cuh"

// gae_scan  delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lambda A_{t+1}; R_t = A_t + V_t, from the last token
//           to the first; tokens with mask 0 are skipped over, their A and R are 0
// rewards, values, advantages, returns (T) f32; mask (T) u8; cu_seqlens (sequences + 1) u32; last_values (sequences) f32, V
// after the last step. In f64, with the operations of the CPU in their order.
// grid ceil(sequences / 4), block 128: a warp a sequence; lanes load 32 tokens, then all walk them together
// roofline 17 T bytes; the walk is a chain of f64 additions, about 40 cycles a token
KERNEL __launch_bounds__(128) gae_scan(const float* rewards, const float* values, const u8* mask, const u32* cu_seqlens,
                                       const float* last_values, i32 sequences, float gamma, float lambda,
                                       float* advantages, float* returns) {
    int sequence = blockIdx.x * 4 + warp_id(), lane = lane_id();
    if (sequence >= sequences) return;
    u32 start = cu_seqlens[sequence], end = cu_seqlens[sequence + 1];
    double discount = gamma, decay = times((double)gamma, (double)lambda);
    double next_value = last_values[sequence], advantage = 0.0;
    for (u32 tokens = end - start; tokens > 0;) {
        int count = (int)(tokens % WARP ? tokens % WARP : WARP);
        tokens -= count;
        u64 at = (u64)start + tokens + lane;
        bool mine = lane < count;
        float reward = mine ? rewards[at] : 0.0f, value = mine ? values[at] : 0.0f;
        int step = mine ? mask[at] != 0 : 0;
        float a = 0.0f, r = 0.0f;
        for (int j = count - 1; j >= 0; j--) {
            double r_t = shuffle(reward, j), v_t = shuffle(value, j);
            if (!shuffle(step, j)) continue;
            double delta = r_t + times(discount, next_value) - v_t;
            advantage = delta + times(decay, advantage);
            next_value = v_t;
            if (lane == j) a = (float)advantage, r = (float)(advantage + v_t);
        }
        if (mine) advantages[at] = a, returns[at] = r;
    }
}
