//! Requests to stop: SIGUSR1 (Slurm's notice before the time limit), SIGTERM, and SIGINT (Ctrl-C).

use std::sync::atomic::{AtomicI32, Ordering};

static RECEIVED: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: libc::c_int) {
    RECEIVED.store(signal, Ordering::SeqCst);
    if signal == libc::SIGINT {
        let text = b"\nstopping with a checkpoint after this update; press Ctrl-C again to stop at once\n";
        // SAFETY: a call that a handler may make, of bytes that live for ever.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
    }
}

/// Installs the handlers. SIGUSR1 and the first SIGTERM or SIGINT only set the flag; a second one ends the process as
/// usual. Call it first in `main`, because an earlier signal kills. A write beyond the limit on file sizes (SIGXFSZ)
/// then fails like a write to a full disk, with an error that names the file.
pub fn install() {
    set(libc::SIGUSR1, note as *const () as usize, libc::SA_RESTART);
    for signal in [libc::SIGTERM, libc::SIGINT] {
        set(signal, note as *const () as usize, libc::SA_RESTART | libc::SA_RESETHAND);
    }
    set(libc::SIGXFSZ, libc::SIG_IGN, 0);
}

/// Restores the default actions: SIGUSR1, SIGTERM and SIGINT end the process again, and so does a signal that arrived
/// since `install`. This is for work without a checkpoint.
pub fn release() {
    for signal in [libc::SIGUSR1, libc::SIGTERM, libc::SIGINT] {
        set(signal, libc::SIG_DFL, 0);
    }
    let received = RECEIVED.swap(0, Ordering::SeqCst);
    if received != 0 {
        // SAFETY: sends this thread a signal, whose action is the default.
        unsafe { libc::raise(received) };
    }
}

/// Sets the action of a signal. Returns the previous one.
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

/// Whether this rank was asked to stop. Ranks get the signal at different times, so agree on it (a maximum over the
/// world) before acting.
pub fn stop_requested() -> bool {
    RECEIVED.load(Ordering::SeqCst) != 0
}

/// `SIGUSR1`, `SIGTERM` or `Ctrl-C`, once received.
pub fn received() -> Option<&'static str> {
    match RECEIVED.load(Ordering::SeqCst) {
        0 => None,
        libc::SIGUSR1 => Some("SIGUSR1"),
        libc::SIGINT => Some("Ctrl-C"),
        _ => Some("SIGTERM"),
    }
}
