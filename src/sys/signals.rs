//! Requests to stop: SIGTERM, SIGINT (Ctrl-C), and the notices that batch systems and terminals send before they end a
//! process.

use std::sync::atomic::{AtomicI32, Ordering};

/// The signals that only ask to stop, even if they arrive several times: Slurm's notice before the time limit, that of
/// other batch systems, a closed terminal, and the limit on CPU time, which repeats every second.
const NOTICES: [libc::c_int; 4] = [libc::SIGUSR1, libc::SIGUSR2, libc::SIGHUP, libc::SIGXCPU];
/// The signals whose second one ends the process.
const REQUESTS: [libc::c_int; 2] = [libc::SIGTERM, libc::SIGINT];

static RECEIVED: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: libc::c_int) {
    RECEIVED.store(signal, Ordering::SeqCst);
    if signal == libc::SIGINT {
        let text = b"\nstopping with a checkpoint after this update; press Ctrl-C again to stop at once\n";
        // SAFETY: a call that a handler may make, with bytes that live forever.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
    }
}

/// Installs the handlers. Notices and the first SIGTERM or SIGINT only set the flag; a second of these two ends the
/// process as usual. A hangup that is ignored already, as under nohup, stays ignored. Call it first in `main`, because
/// an earlier signal kills. A write beyond the limit on file sizes (SIGXFSZ) then fails like a write to a full disk,
/// with an error that names the file.
pub fn install() {
    for signal in NOTICES {
        let before = set(signal, note as *const () as usize, libc::SA_RESTART);
        if signal == libc::SIGHUP && before.sa_sigaction == libc::SIG_IGN {
            set(signal, libc::SIG_IGN, 0);
        }
    }
    for signal in REQUESTS {
        set(signal, note as *const () as usize, libc::SA_RESTART | libc::SA_RESETHAND);
    }
    set(libc::SIGXFSZ, libc::SIG_IGN, 0);
}

/// Restores the actions before `install`: notices and requests end the process again, and so does one that arrived
/// since. This is for work without a checkpoint.
pub fn release() {
    for signal in NOTICES.into_iter().chain(REQUESTS) {
        if set(signal, libc::SIG_DFL, 0).sa_sigaction == libc::SIG_IGN {
            set(signal, libc::SIG_IGN, 0);
        }
    }
    let received = RECEIVED.swap(0, Ordering::SeqCst);
    if received != 0 {
        // SAFETY: sends this thread a signal, whose action is the default.
        unsafe { libc::raise(received) };
    }
}

/// Sets the action of a signal. Returns the previous one.
pub(super) fn set(signal: libc::c_int, handler: usize, flags: libc::c_int) -> libc::sigaction {
    // SAFETY: the structures are zeroed and then filled as sigaction(2) requires. Callers pass handlers that make only
    // async-signal-safe calls.
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

/// The name of the received signal, such as `SIGUSR1` or `Ctrl-C`.
pub fn received() -> Option<&'static str> {
    match RECEIVED.load(Ordering::SeqCst) {
        0 => None,
        libc::SIGUSR1 => Some("SIGUSR1"),
        libc::SIGUSR2 => Some("SIGUSR2"),
        libc::SIGHUP => Some("SIGHUP, such as a closed terminal"),
        libc::SIGXCPU => Some("SIGXCPU, the limit on CPU time"),
        libc::SIGINT => Some("Ctrl-C"),
        _ => Some("SIGTERM"),
    }
}
