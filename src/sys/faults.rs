//! Memory faults with a known cause: a stack overflow of a sandboxed thread, or a mapped file that was truncated.

use super::signals;
use std::sync::OnceLock;

/// The previous handlers of SIGSEGV and SIGBUS.
static BEFORE: OnceLock<[libc::sigaction; 2]> = OnceLock::new();
const SIGNALS: [libc::c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// The cause of a fault.
#[derive(Clone, Copy, Debug)]
pub enum Cause {
    StackEnds,
    FileShrank,
}

/// The handler of a cause. It does not return if its cause explains the fault at an address. It allocates nothing and
/// takes no lock.
pub type Answer = fn(usize);

static ANSWERS: [OnceLock<Answer>; 2] = [OnceLock::new(), OnceLock::new()];

/// Installs the handler of a cause. Other faults go to the previous handler. A second call for a cause does
/// nothing.
pub fn install(cause: Cause, answer_one: Answer) {
    ANSWERS[cause as usize].get_or_init(|| answer_one);
    // The handler runs on the alternate stack that Rust gives every thread, because the stack may be used up.
    let replaced = |signal| signals::set(signal, answer as *const () as usize, libc::SA_SIGINFO | libc::SA_ONSTACK);
    BEFORE.get_or_init(|| SIGNALS.map(replaced));
}

extern "C" fn answer(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO a whole record.
    let address = unsafe { (*info).si_addr() } as usize;
    ANSWERS.iter().filter_map(OnceLock::get).for_each(|answer_one| answer_one(address));
    let index = usize::from(signal == libc::SIGBUS);
    // If another thread faults before `BEFORE` is set, the default action applies.
    let before = BEFORE.get().map(|all| all[index]).filter(|before| before.sa_sigaction > libc::SIG_IGN);
    // SAFETY: the previous handler, called as its flags require. Otherwise the default action applies when the fault
    // repeats on return.
    unsafe {
        match before {
            Some(action) if action.sa_flags & libc::SA_SIGINFO != 0 => {
                let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                    std::mem::transmute(action.sa_sigaction);
                handler(signal, info, context);
            }
            Some(action) => {
                let handler: extern "C" fn(libc::c_int) = std::mem::transmute(action.sa_sigaction);
                handler(signal);
            }
            None => drop(libc::signal(signal, libc::SIG_DFL)),
        }
    }
}
