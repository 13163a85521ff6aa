//! Limits for the regular expressions of tokenizers, which Oniguruma runs by backtracking.

use std::sync::Once;

/// The number of backtracking steps that one search may take: about a tenth of a second. A run of this many spaces
/// takes as many steps in the patterns of GPT-4 and Llama 3. A pattern whose time doubles with each character exceeds
/// it at once.
const STEPS_BACK_MAX: u64 = 1 << 22;

/// Makes searches beyond the limit fail, in the whole process. Without the limit a text of a kilobyte may take
/// minutes, because Oniguruma limits each position of the text, but not their sum.
pub fn limit_backtracking() {
    static ONCE: Once = Once::new();
    // SAFETY: stores two numbers, which every later search reads.
    ONCE.call_once(|| unsafe {
        onig_sys::onig_set_retry_limit_in_match(STEPS_BACK_MAX);
        onig_sys::onig_set_retry_limit_in_search(STEPS_BACK_MAX);
    });
}
