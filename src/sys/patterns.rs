//! Regular expressions that tokenizers bring along, which Oniguruma runs by backtracking.

use std::sync::Once;

/// Steps back that one search of a text may take: about a tenth of a second. A run of this many spaces takes as many
/// in the patterns of GPT-4 and Llama 3; a pattern whose time doubles with each character is over it at once.
const STEPS_BACK_MAX: u64 = 1 << 22;

/// From now on a search that goes beyond the limit fails, in the whole process. Without it a text of a kilobyte may take
/// minutes, for Oniguruma limits each place of the text, and not all of them together.
pub fn limit_backtracking() {
    static ONCE: Once = Once::new();
    // SAFETY: stores two numbers, which every later search reads.
    ONCE.call_once(|| unsafe {
        onig_sys::onig_set_retry_limit_in_match(STEPS_BACK_MAX);
        onig_sys::onig_set_retry_limit_in_search(STEPS_BACK_MAX);
    });
}
