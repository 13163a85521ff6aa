//! Tests of the records of a run: metrics.jsonl, TensorBoard events, rollouts.h5, the terminal.

mod lines;
mod recorder;
mod rollouts;
mod services;
mod tensorboard;
mod terminal;

use std::io::Write;
use std::sync::{Arc, Mutex};

use rlhf_hpc::experience::{Experience, Finish, Prompt, Response};
use rlhf_hpc::metrics::{Screen, Terminal};

/// The output to a terminal.
#[derive(Clone, Default)]
struct Shown(Arc<Mutex<Vec<u8>>>);

impl Write for Shown {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Shown {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// A terminal without colour that writes here.
    fn terminal(&self, is_terminal: bool, columns: usize) -> Terminal {
        Terminal::new(Screen::new(Box::new(self.clone()), columns), is_terminal, false)
    }
}

/// A sample with `n` response tokens whose numbers all differ.
fn sample(id: u64, n: usize) -> Experience {
    let array = |base: f32| (0..n).map(|t| base + id as f32 + t as f32 / 8.0).collect::<Vec<f32>>();
    let prompt_tokens: Vec<u32> = (0..2 + id as u32).collect();
    Experience {
        prompt: Prompt {
            id,
            tokens: prompt_tokens,
            text: format!("prompt {id}"),
            label: "4".into(),
            source: "data/questions".into(),
            images: Vec::new(),
        },
        greedy: None,
        response: Response {
            prompt: id as usize,
            sample: id as u32 % 2,
            tokens: (0..n as u32).map(|t| 100 + t).collect(),
            logprobs: array(-1.0),
            sample_logprobs: array(-2.0),
            weights: Vec::new(),
            finish: if id.is_multiple_of(2) { Finish::Stop } else { Finish::Length },
            text: format!("response {id}"),
            sampling_masks: Vec::new(),
            experts: Vec::new(),
            episode: None,
            score: None,
            top_logprobs: Vec::new(),
        },
        score: id as f32 - 0.5,
        scores: [("style/ü", 0.25 * id as f32), ("number", 1.0)].map(|(name, score)| (name.to_string(), score)).into(),
        ref_logprobs: array(-3.0),
        values: array(10.0),
        last_value: 10.0 + id as f32,
        kl: array(20.0),
        rewards: array(30.0),
        advantages: array(40.0),
        returns: array(50.0),
        mask: (0..n).map(|t| u8::from(t % 3 != 2)).collect(),
    }
}
