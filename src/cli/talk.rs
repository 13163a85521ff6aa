//! A model that answers one prompt at a time and streams the text, for `chat` and `generate --prompt`.

use super::device::{self, Options};
use super::model_dirs::ModelDirs;
use super::out;
use super::ranks::Ranks;
use crate::config::rollout::RolloutConfig;
use crate::error::{Error, Result};
use crate::experience::{Image, Prompt, Response};
use crate::launch::inference::InferenceModel;
use crate::model::{Arch, Head};
use crate::rng::{Purpose, Rng};
use crate::rollout::{self, Edits, Engine, Hooks, Model, Stop};
use crate::sys::terminal::{self, Visible};
use crate::text::{StreamDecoder, Tokenizer};
use std::path::Path;
use std::sync::Arc;

pub struct Talk {
    pub dirs: ModelDirs,
    pub tokenizer: Tokenizer,
    ranks: Ranks,
    inference: InferenceModel,
    engine: Engine,
    config: RolloutConfig,
    stop: Arc<Stop>,
    /// The changes to logits.
    pub edits: Arc<Edits>,
    rng: Rng,
    /// The number of answers so far; each uses random numbers of its own.
    answers: u32,
}

impl Talk {
    pub fn open(
        verb: &str,
        (model, adapter): (&Path, Option<&Path>),
        options: Options,
        config: RolloutConfig,
        seed: u64,
    ) -> Result<Self> {
        let ranks = Ranks::start(Path::new(""))?;
        if ranks.world.size > 1 {
            return Err(Error::usage(format!("{verb} runs on a single process (got {} ranks)", ranks.world.size))
                .hint("start it without mpirun"));
        }
        // A run directory has no tokenizer either: its error names the export.
        let dirs = ModelDirs::find(model, adapter, Some(Head::LanguageModel))?;
        dirs.arch()?;
        let tokenizer = Tokenizer::load(&dirs.tokenizer)?;
        let inference = device::open(verb, &dirs, options, Head::LanguageModel, (config.clone(), seed), &ranks)?;
        let stop = Arc::new(Stop::of_model(&config, &inference.transformer.arch.eos_tokens, Some(&tokenizer)));
        let (engine, rng) = (Engine::new(&config, 0), Rng::new(seed, Purpose::Sample));
        Ok(Self { dirs, tokenizer, ranks, inference, engine, config, stop, edits: Arc::default(), rng, answers: 0 })
    }

    pub fn arch(&self) -> &Arch {
        &self.inference.transformer.arch
    }

    /// Generates the response to a prompt. Its text is streamed to standard output, followed by a line end.
    pub fn answer(&mut self, tokens: Vec<u32>, images: Vec<Image>) -> Result<Response> {
        let (arch, tokenizer) = (&self.inference.transformer.arch, &self.tokenizer);
        let prompt = Prompt { tokens, images, source: "standard input".into(), ..Prompt::default() };
        let mut requests = rollout::requests(&[prompt], &self.config, &self.stop, arch.context)?;
        for request in &mut requests {
            request.edits = self.edits.clone();
            if !request.images.is_empty() {
                request.stop = Arc::new(Stop::clone(&request.stop).with_images(tokenizer));
            }
        }
        self.engine.allow(self.inference.cache_bytes(&self.config, &requests, 1));
        let (mut decoder, mut failed) = (StreamDecoder::default(), Ok(()));
        let mut visible = terminal::shows_stdout().then(Visible::default);
        let mut shown = |text: Result<String>| {
            let written = text.and_then(|text| match &mut visible {
                // A line break may come in two pieces, which `out::write` alone would not know.
                Some(visible) => out::write(visible.push(&text).as_bytes()),
                None => out::write(text.as_bytes()),
            });
            failed = std::mem::replace(&mut failed, Ok(())).and(written);
        };
        let mut drawn = |_: usize, token: u32| {
            // Special tokens have no text.
            if tokenizer.decode(&[token], true).is_ok_and(|text| !text.is_empty()) {
                shown(decoder.push(tokenizer, token));
            }
        };
        let mut hooks = Hooks { drawn: Some(&mut drawn), ..Hooks::default() };
        let InferenceModel { transformer, weights, .. } = &self.inference;
        let model = Model { transformer, weights, tokenizer: Some(tokenizer) };
        let outcome = self.engine.generate(model, self.rng, self.answers, &requests, &mut hooks);
        self.answers += 1;
        shown(decoder.finish(tokenizer));
        let rest = visible.as_mut().map_or("", Visible::finish);
        failed = failed.and_then(|()| out::write(format!("{rest}\n").as_bytes()));
        failed?;
        let responses = outcome.map_err(device::with_option_names)?.complete();
        responses.and_then(|mut all| all.pop()).ok_or_else(|| Error::fault("a response did not finish"))
    }

    pub fn finish(self) -> Result<()> {
        self.ranks.finish()
    }
}
