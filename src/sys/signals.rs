//! Requests to stop: SIGUSR1 (Slurm's notice before the time limit) and SIGTERM.

use std::sync::atomic::{AtomicI32, Ordering};

static RECEIVED: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: libc::c_int) {
    RECEIVED.store(signal, Ordering::SeqCst);
}

/// From now on SIGUSR1 and the first SIGTERM only set the flag; a second SIGTERM ends the process as usual.
pub fn install() {
    for (signal, flags) in [(libc::SIGUSR1, libc::SA_RESTART), (libc::SIGTERM, libc::SA_RESTART | libc::SA_RESETHAND)] {
        // SAFETY: the handler only stores to an atomic; the structure is zeroed and then filled as sigaction(2) asks.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = note as *const () as usize;
            action.sa_flags = flags;
            libc::sigemptyset(&raw mut action.sa_mask);
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
}

/// Whether this rank was asked to stop. Ranks learn of it at different times: agree on it (a maximum over the world)
/// before acting.
pub fn stop_requested() -> bool {
    RECEIVED.load(Ordering::SeqCst) != 0
}

/// `SIGUSR1` or `SIGTERM`, once received.
pub fn received() -> Option<&'static str> {
    match RECEIVED.load(Ordering::SeqCst) {
        0 => None,
        libc::SIGUSR1 => Some("SIGUSR1"),
        _ => Some("SIGTERM"),
    }
}
