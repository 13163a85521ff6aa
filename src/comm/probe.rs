//! A probe on a thread of its own, with a timeout: a driver that hangs may never answer.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// A question, and the thread that answers it.
pub(super) struct Probe<T> {
    requests: Sender<()>,
    answers: Receiver<T>,
    timeout: Duration,
    /// Whether an answer is still to come.
    is_pending: bool,
}

impl<T: Send + 'static> Probe<T> {
    /// Asks `question`, and waits for its answer no longer than `timeout`.
    pub fn new(question: impl Fn() -> T + Send + 'static, timeout: Duration) -> Self {
        let (requests, asked) = channel();
        let (answer, answers) = channel();
        // The thread is never joined: it ends when this value is dropped, or never.
        std::thread::Builder::new()
            .name("probe".to_string())
            .spawn(move || while asked.recv().is_ok() && answer.send(question()).is_ok() {})
            .expect("the system starts a thread");
        Self { requests, answers, timeout, is_pending: false }
    }

    /// The answer now; none where it takes too long. A late answer is dropped when it comes, and until then this neither asks
    /// nor waits.
    pub fn ask(&mut self) -> Option<T> {
        if self.is_pending {
            self.answers.try_recv().ok()?;
        }
        self.is_pending = true;
        self.requests.send(()).ok()?;
        let answer = self.answers.recv_timeout(self.timeout).ok()?;
        self.is_pending = false;
        Some(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};
    use std::time::Instant;

    #[test]
    fn a_question_that_hangs_is_waited_for_once_and_asked_again_when_its_answer_has_come() {
        let (hangs, count) = (Arc::new(Mutex::new(())), Arc::new(Mutex::new(0)));
        let (held, counted) = (hangs.clone(), count.clone());
        let question = move || {
            *counted.lock().unwrap() += 1;
            drop(held.lock().unwrap());
            *counted.lock().unwrap()
        };
        let mut asked = Probe::new(question, Duration::from_millis(300));
        assert_eq!(asked.ask(), Some(1));
        let hanging = hangs.lock().unwrap();
        assert_eq!(asked.ask(), None);
        let since = Instant::now();
        assert!((0..100).all(|_| asked.ask().is_none()));
        assert!(since.elapsed() < Duration::from_millis(300) && *count.lock().unwrap() == 2);
        drop(hanging);
        let until = Instant::now() + Duration::from_secs(60);
        // The late answer is 2.
        let next = std::iter::from_fn(|| (Instant::now() < until).then(|| asked.ask())).flatten().next();
        assert!(next.is_some_and(|answer| answer > 2), "{next:?}");
    }
}
