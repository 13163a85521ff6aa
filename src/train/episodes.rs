//! Responses of several turns: the link between the rollout, whose turns end, and the environment that answers them.

use crate::error::{Error, Result};
use crate::experience::{Finish, Prompt};
use crate::reward::environment::{self, Environment, Feedback, Reply, Turn};
use crate::rollout::Request;
use crate::rollout::turns::{Answer, Turns};
use crate::text::Tokenizer;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The longest wait for an answer before ranks synchronize again.
const WAIT: Duration = Duration::from_secs(1);

/// The responses of one phase, by the numbers of their requests.
pub struct Episodes<'a> {
    environment: &'a mut Environment,
    prompts: &'a [Prompt],
    requests: &'a [Request],
    texts: Texts<'a>,
    round: u64,
    /// The environment's error, if it failed. The phase then ends with the finished responses.
    failed: &'a RefCell<Option<Error>>,
    turns: HashMap<usize, Vec<Turn>>,
    /// The request of each turn, by the position of the turn.
    asked: HashMap<usize, usize>,
}

/// Everything needed to tokenize an answer.
#[derive(Clone, Copy)]
pub struct Texts<'a> {
    pub tokenizer: &'a Tokenizer,
    /// Variables of the chat template.
    pub template: &'a Map<String, Value>,
    pub vocabulary: usize,
}

impl<'a> Episodes<'a> {
    /// Episodes of the phase `round`.
    pub fn new(
        environment: &'a mut Environment,
        prompts: &'a [Prompt],
        requests: &'a [Request],
        texts: Texts<'a>,
        round: u64,
        failed: &'a RefCell<Option<Error>>,
    ) -> Self {
        Self { environment, prompts, requests, texts, round, failed, turns: HashMap::new(), asked: HashMap::new() }
    }
}

impl Turns for Episodes<'_> {
    fn ended(&mut self, s: usize, tokens: &[u32], turn: usize, finish: Finish) -> Result<()> {
        let tokens = tokens[turn..].to_vec();
        let text = self.texts.tokenizer.decode(&tokens, true)?;
        let turns = self.turns.entry(s).or_default();
        turns.push(Turn { text, tokens, finish: finish.name(), feedback: None });
        let Request { prompt, sample, .. } = self.requests[s];
        let (turns_max, turns) = (self.environment.turns_max, turns.clone());
        let (round, prompt) = (self.round, self.prompts[prompt].clone());
        let asked = environment::Turns { round, episode: s, prompt, sample, turns, turns_max };
        self.asked.insert(self.environment.push(asked), s);
        Ok(())
    }

    fn answers(&mut self, waits: bool) -> Result<Vec<(usize, Answer)>> {
        if self.failed.borrow().is_some() {
            return Ok(Vec::new());
        }
        let until = Instant::now() + if waits { WAIT } else { Duration::ZERO };
        let arrived = match self.environment.arrived(until) {
            Ok(arrived) => arrived,
            Err(error) => {
                *self.failed.borrow_mut() = Some(error);
                return Ok(Vec::new());
            }
        };
        let mut answers = Vec::with_capacity(arrived.len());
        for (place, reply) in arrived {
            let s = self.asked.remove(&place).expect("a turn that was asked");
            answers.push((s, self.answer(s, reply)?));
        }
        // Independent of the order of arrival.
        answers.sort_by_key(|(s, _)| *s);
        Ok(answers)
    }
}

impl Episodes<'_> {
    fn answer(&mut self, s: usize, reply: Reply) -> Result<Answer> {
        let turns = self.turns.get_mut(&s).expect("a turn that was asked");
        let is_over = reply.done || turns.len() >= self.environment.turns_max as usize;
        let last = turns.last_mut().expect("a turn that was asked");
        let (reward, extra) = (reply.reward.unwrap_or(0.0), reply.extra());
        let tokens = match &reply.feedback {
            _ if is_over || reply.failed.is_some() => Vec::new(),
            Feedback::Text(text) => self.texts.tokenizer.encode(text, false)?,
            Feedback::Tokens(tokens) => tokens.clone(),
            Feedback::Messages(messages) => {
                self.texts.tokenizer.encode_chat_turn(&last.tokens, messages, self.texts.template)?
            }
        };
        if let Some(token) = tokens.iter().find(|token| **token as usize >= self.texts.vocabulary) {
            return Err(Error::data(format!(
                "reward.environment returned the token {token}, but the model's vocabulary has only {} tokens",
                self.texts.vocabulary
            )));
        }
        last.feedback = Some(match reply.feedback {
            Feedback::Text(text) => text,
            _ => self.texts.tokenizer.decode(&tokens, false)?,
        });
        Ok(Answer { tokens, reward, is_over, extra, failed: reply.failed })
    }
}
