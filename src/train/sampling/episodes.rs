//! Responses of several turns: the link between the rollout, whose turns end, and the environment that answers them.

use crate::config::Config;
use crate::config::job::DeviceName;
use crate::error::{Error, Result};
use crate::experience::{Finish, Prompt};
use crate::model::Arch;
use crate::reward::environment::{self, Environment, Feedback, Reply, Turn};
use crate::rollout::Request;
use crate::rollout::turns::{Answer, Turns};
use crate::sys::trace::{self, Category};
use crate::text::Tokenizer;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The longest wait for an answer before ranks synchronize again.
const WAIT: Duration = Duration::from_secs(1);

/// The reason why the environment of a job may not answer with images, if it may not.
pub fn blind(config: &Config, arch: &Arch, tokenizer: &Tokenizer) -> Option<Error> {
    arch.check_images(config.job.device == DeviceName::Gpu).and_then(|()| tokenizer.images().map(drop)).err()
}

/// Whether the environment of a job may answer with images.
pub fn may_show_images(config: &Config, arch: &Arch, tokenizer: &Tokenizer) -> bool {
    !config.reward.environment.is_empty() && blind(config, arch, tokenizer).is_none()
}

/// The responses of one phase, by the numbers of their requests.
pub struct Episodes<'a> {
    environment: &'a mut Environment,
    prompts: &'a [Prompt],
    requests: &'a [Request],
    tokenizer: &'a Tokenizer,
    round: u64,
    /// The environment's error, if it failed. The phase then ends with the finished responses.
    failed: &'a RefCell<Option<Error>>,
    /// The seconds for which the rollout waited for answers.
    waited: &'a Cell<f64>,
    turns: HashMap<usize, Vec<Turn>>,
    /// The request of each turn, by the position of the turn.
    pending_keys: HashMap<usize, usize>,
}

impl<'a> Episodes<'a> {
    /// Episodes of the phase `round`.
    pub fn new(
        environment: &'a mut Environment,
        prompts: &'a [Prompt],
        requests: &'a [Request],
        tokenizer: &'a Tokenizer,
        round: u64,
        failed: &'a RefCell<Option<Error>>,
        waited: &'a Cell<f64>,
    ) -> Self {
        Self {
            environment,
            prompts,
            requests,
            tokenizer,
            round,
            failed,
            waited,
            turns: HashMap::new(),
            pending_keys: HashMap::new(),
        }
    }
}

impl Turns for Episodes<'_> {
    fn ended(&mut self, s: usize, tokens: &[u32], turn: usize, finish: Finish) -> Result<()> {
        let tokens = tokens[turn..].to_vec();
        let text = self.tokenizer.decode(&tokens, true)?;
        let turns = self.turns.entry(s).or_default();
        turns.push(Turn { text, tokens, finish: finish.name(), feedback: None });
        let Request { prompt, sample, .. } = self.requests[s];
        let (turns_max, turns) = (self.environment.turns_max, turns.clone());
        let (round, prompt) = (self.round, self.prompts[prompt].clone());
        let asked = environment::Turns { round, episode: s, prompt, sample, turns, turns_max };
        self.pending_keys.insert(self.environment.push(asked), s);
        Ok(())
    }

    fn answers(&mut self, waits: bool) -> Result<Vec<(usize, Answer)>> {
        if self.failed.borrow().is_some() {
            return Ok(Vec::new());
        }
        let start = Instant::now();
        let arrived = self.environment.arrived(start + if waits { WAIT } else { Duration::ZERO });
        self.waited.set(self.waited.get() + start.elapsed().as_secs_f64());
        if waits {
            trace::since(Category::Wait, || "environment", start);
        }
        let arrived = match arrived {
            Ok(arrived) => arrived,
            Err(error) => {
                *self.failed.borrow_mut() = Some(error);
                return Ok(Vec::new());
            }
        };
        let mut answers = Vec::with_capacity(arrived.len());
        for (place, reply) in arrived {
            let s = self.pending_keys.remove(&place).expect("a pending turn");
            answers.push((s, self.answer(s, reply)));
        }
        // Independent of the order of arrival.
        answers.sort_by_key(|(s, _)| *s);
        Ok(answers)
    }
}

impl Episodes<'_> {
    fn answer(&mut self, s: usize, reply: Reply) -> Answer {
        let turns = self.turns.get_mut(&s).expect("a pending turn");
        let is_over = reply.done || turns.len() >= self.environment.turns_max as usize;
        let (reward, extra) = (reply.reward.unwrap_or(0.0), reply.extra());
        turns.last_mut().expect("a pending turn").feedback = Some(match reply.feedback {
            Feedback::Text(text) => text,
            // Only the last turn's feedback is not tokenized.
            Feedback::Tokens(_) | Feedback::Messages(_) => String::new(),
        });
        Answer { tokens: reply.tokens, images: reply.seen, reward, is_over, extra, failed: reply.failed }
    }
}
