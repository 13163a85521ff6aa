// Losses that are local to a token: derivatives of the actor's and the critic's loss, with the operations of the host's
// (`src/loss/policy.rs`, `src/loss/value.rs`) in their order, in f64: what a host would have told the GPU, without asking it.
//
// A token of weight 0 is not learned from: its derivatives are 0, and its numbers may be anything, infinities included.
#include "common.cuh"

// ---- log-ratios and estimates of the divergence ----

// exp(clamp(d, -20, 20)), and its derivative by d, which is 0 where the clamp acts.
struct Ratio {
    double value, slope;
};

DEVICE Ratio ratio_of(double d) {
    double r = exp(d < -20.0 ? -20.0 : d > 20.0 ? 20.0 : d);
    return Ratio{r, fabs(d) > 20.0 ? 0.0 : r};
}

// The derivative of the estimate k1 (0), k2 (1) or k3 (2) by d = logprob - reference logprob; 0 beyond +-10.
DEVICE double kl_slope(i32 estimator, double d) {
    double kl = d, slope = 1.0;
    if (estimator == 1) kl = 0.5 * d * d, slope = d;
    if (estimator == 2) kl = expm1(-d) + d, slope = -expm1(-d);
    return fabs(kl) > 10.0 ? 0.0 : slope;
}

// What the terms beside the surrogate add: the divergence from the reference to dlogprob, the bonus to dentropy.
DEVICE float kl_term(float ref, double logprob, double weight, float beta, i32 estimator) {
    return (float)((double)beta * weight * kl_slope(estimator, logprob - (double)ref));
}

DEVICE float entropy_term(float coefficient, double weight) { return (float)-((double)coefficient * weight); }

DEVICE double factor_of(const float* factors, u64 t) { return factors ? (double)factors[t] : 1.0; }

// token_loss_clip  dlogprob = -w f dL/dr dr/dl + beta w dkl/dl, L = min(r A, clamp(r, 1 - low, 1 + high) A), for A < 0 and
//                  dual > 0 the max of that and dual A, r = exp(clamp(l - o, -20, 20)); dentropy = -coefficient w
// logprobs l, old o, advantages A, weights w, refs, factors f (n) f32, of which the last two may be null (no divergence; 1);
// dlogprobs, dentropy (n) f32, overwritten; estimator 0, 1, 2: k1, k2, k3
// grid ceil(n / 128), block 128
// roofline 32 n bytes
KERNEL __launch_bounds__(128) token_loss_clip(
    const float* logprobs, const float* old, const float* advantages, const float* weights, const float* refs,
    const float* factors, u64 n, float low, float high, float dual, float beta, i32 estimator, float coefficient,
    float* dlogprobs, float* dentropy) {
    u64 t = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= n) return;
    float dlogprob = 0.0f, dh = 0.0f;
    double weight = weights[t];
    if (weight != 0.0) {
        double logprob = logprobs[t], advantage = advantages[t];
        Ratio r = ratio_of(logprob - (double)old[t]);
        double least = 1.0 - (double)low, most = 1.0 + (double)high;
        double clamped = r.value < least ? least : r.value > most ? most : r.value;
        double plain = r.value * advantage, clipped = clamped * advantage;
        double value = plain, slope = advantage;
        if (clipped < plain) value = clipped, slope = 0.0;
        if (dual > 0.0f && advantage < 0.0 && (double)dual * advantage > value) slope = 0.0;
        dlogprob = (float)(-(weight * factor_of(factors, t)) * slope * r.slope);
        if (refs) dlogprob += kl_term(refs[t], logprob, weight, beta, estimator);
        dh = entropy_term(coefficient, weight);
    }
    dlogprobs[t] = dlogprob;
    dentropy[t] = dh;
}

// token_loss_cispo  dlogprob = -w f min(r, 1 + high) A + beta w dkl/dl, the ratio r without a gradient; dentropy as above
// shapes, grid and block as token_loss_clip
// roofline 32 n bytes
KERNEL __launch_bounds__(128) token_loss_cispo(
    const float* logprobs, const float* old, const float* advantages, const float* weights, const float* refs,
    const float* factors, u64 n, float high, float beta, i32 estimator, float coefficient, float* dlogprobs,
    float* dentropy) {
    u64 t = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= n) return;
    float dlogprob = 0.0f, dh = 0.0f;
    double weight = weights[t];
    if (weight != 0.0) {
        double logprob = logprobs[t], r = ratio_of(logprob - (double)old[t]).value;
        double clipped = fmin(r, 1.0 + (double)high);
        dlogprob = (float)(-(weight * factor_of(factors, t)) * clipped * (double)advantages[t]);
        if (refs) dlogprob += kl_term(refs[t], logprob, weight, beta, estimator);
        dh = entropy_term(coefficient, weight);
    }
    dlogprobs[t] = dlogprob;
    dentropy[t] = dh;
}

// token_loss_value  dvalue = w (V - R), or 0 where clip > 0, |V - O| > clip and the square of O + clamp(V - O, -clip, clip) - R
//                   is the larger
// values V, old O, returns R, weights w, dvalues (n) f32
// grid ceil(n / 128), block 128
// roofline 20 n bytes
KERNEL __launch_bounds__(128) token_loss_value(const float* values, const float* old, const float* returns,
                                               const float* weights, u64 n, float clip, float* dvalues) {
    u64 t = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= n) return;
    float dvalue = 0.0f;
    double weight = weights[t];
    if (weight != 0.0) {
        double v = values[t], o = old[t], r = returns[t], most = clip;
        double error = v - r, step = v - o;
        double clipped = o + (step < -most ? -most : step > most ? most : step) - r;
        bool flat = most > 0.0 && fabs(step) > most && clipped * clipped > error * error;
        if (!flat) dvalue = (float)(weight * error);
    }
    dvalues[t] = dvalue;
}
