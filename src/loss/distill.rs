//! The loss of a student from the teachers' log-probabilities of its own samples.

/// The reverse KL from tokens that the student sampled. An estimate of each token's KL(student || teacher) is l - l_T.
/// Its gradient is the gradient of l times the constant (l - l_T), an advantage of l_T - l (arXiv:2306.13649). Fills
/// dl_t = `weight` (l_t - l_T,t) and returns the sum of the estimates.
///
/// # Panics
/// If the lengths differ.
pub fn sampled_reverse_kl(logprobs: &[f32], of_teacher: &[f32], weight: f32, dlogprobs: &mut [f32]) -> f64 {
    assert!(of_teacher.len() == logprobs.len() && dlogprobs.len() == logprobs.len(), "one length for all slices");
    let mut sum = 0.0;
    for ((&l, &teacher), dl) in logprobs.iter().zip(of_teacher).zip(dlogprobs) {
        let kl = l - teacher;
        *dl = weight * kl;
        sum += f64::from(kl);
    }
    sum
}
