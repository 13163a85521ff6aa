//! A question that is asked on a thread of its own: a driver that hangs may never answer.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// A question, and its thread.
pub(super) struct Asked<T> {
    ask: Sender<()>,
    answers: Receiver<T>,
    patience: Duration,
    /// Whether an answer is still to come.
    is_open: bool,
}

impl<T: Send + 'static> Asked<T> {
    /// Whoever asks `question` waits for its answer no longer than `patience`.
    pub fn new(question: impl Fn() -> T + Send + 'static, patience: Duration) -> Self {
        let (ask, asked) = channel();
        let (answer, answers) = channel();
        // Never joined: it ends with its asker, or never.
        std::thread::Builder::new()
            .name("asked".to_string())
            .spawn(move || while asked.recv().is_ok() && answer.send(question()).is_ok() {})
            .expect("the system starts a thread");
        Self { ask, answers, patience, is_open: false }
    }

    /// The answer of now; none where it takes too long. Until the late one has come, which is of another time and
    /// dropped, nothing is asked again and nothing waited for.
    pub fn answer(&mut self) -> Option<T> {
        if self.is_open {
            self.answers.try_recv().ok()?;
        }
        self.is_open = true;
        self.ask.send(()).ok()?;
        let answer = self.answers.recv_timeout(self.patience).ok()?;
        self.is_open = false;
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
        let mut asked = Asked::new(question, Duration::from_millis(300));
        assert_eq!(asked.answer(), Some(1));
        let hanging = hangs.lock().unwrap();
        assert_eq!(asked.answer(), None);
        let since = Instant::now();
        assert!((0..100).all(|_| asked.answer().is_none()));
        assert!(since.elapsed() < Duration::from_millis(300) && *count.lock().unwrap() == 2);
        drop(hanging);
        let until = Instant::now() + Duration::from_secs(60);
        // The late answer is 2.
        let next = std::iter::from_fn(|| (Instant::now() < until).then(|| asked.answer())).flatten().next();
        assert!(next.is_some_and(|answer| answer > 2), "{next:?}");
    }
}
