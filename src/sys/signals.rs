//! Requests to stop: SIGUSR1 (Slurm's notice before the time limit) and SIGTERM.

use std::sync::atomic::{AtomicI32, Ordering};

static RECEIVED: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: libc::c_int) {
    RECEIVED.store(signal, Ordering::SeqCst);
}

/// From now on SIGUSR1 and the first SIGTERM only set the flag; a second SIGTERM ends the process as usual. Call it first in
/// `main`: a signal that comes before kills. A write beyond a limit on the size of files (SIGXFSZ) fails from now on as
/// one to a full disk does, with an error that names the file.
pub fn install() {
    set(libc::SIGUSR1, note as *const () as usize, libc::SA_RESTART);
    set(libc::SIGTERM, note as *const () as usize, libc::SA_RESTART | libc::SA_RESETHAND);
    set(libc::SIGXFSZ, libc::SIG_IGN, 0);
}

/// SIGUSR1 and SIGTERM end the process as usual again, also one that came since `install`: for work that has no
/// checkpoint to stop with.
pub fn release() {
    set(libc::SIGUSR1, libc::SIG_DFL, 0);
    set(libc::SIGTERM, libc::SIG_DFL, 0);
    let received = RECEIVED.swap(0, Ordering::SeqCst);
    if received != 0 {
        // SAFETY: sends this thread a signal, whose action is the default.
        unsafe { libc::raise(received) };
    }
}

/// The action of a signal from now on; the one before.
pub(super) fn set(signal: libc::c_int, handler: usize, flags: libc::c_int) -> libc::sigaction {
    // SAFETY: the structures are zeroed and then filled as sigaction(2) asks; what handlers may do is their authors' care.
    unsafe {
        let (mut action, mut before): (libc::sigaction, libc::sigaction) = (std::mem::zeroed(), std::mem::zeroed());
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(signal, &raw const action, &raw mut before);
        before
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
