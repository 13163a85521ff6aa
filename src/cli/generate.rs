//! `rlhf-hpc generate`: responses of a model to rows of prompts.

mod args;
mod asked;

pub use self::args::{Args, checked};
use self::asked::{Asked, Asker};
use super::device::{self, Options};
use super::model_dirs::ModelDirs;
use super::out::{note, progress};
use super::ranks::Ranks;
use super::rows::{self, Row, Stream};
use super::talk::Talk;
use super::texts::Texts;
use crate::config::rollout::RolloutConfig;
use crate::error::{Error, Result};
use crate::experience::Response;
use crate::launch::inference::InferenceModel;
use crate::model::Head;
use crate::rng::{Purpose, Rng};
use crate::rollout::{Beams, Engine, Hooks, Model, Request};
use crate::text::Tokenizer;
use indicatif::ProgressBar;
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Tokens of prompts and responses of the rows that a rank processes together. This bounds the memory. It is large, so
/// that the partly filled batches at the end take a small share of the time.
const TOKENS_AT_ONCE: usize = 16 << 20;

#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    row: &'a Row,
    prompt_tokens: &'a [u32],
    tokens: &'a [u32],
    /// Null if the directory has no tokenizer.
    text: Option<&'a str>,
    logprobs: &'a [f32],
    finish: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    score: Option<f32>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    top_logprobs: &'a [Vec<(u32, f32)>],
}

pub fn run(args: &Args) -> Result<()> {
    let beams = args.search()?;
    let config = args.config()?;
    args.check(&config)?;
    let options = Options { device: args.device, dtype: args.dtype, check: !args.no_check };
    let input = match (&args.input, &args.prompt) {
        (Some(input), None) => input,
        (None, Some(prompt)) => return show(args, config, options, prompt),
        _ => return Err(Error::usage("generate needs either --input or --prompt")),
    };
    Error::need(args.image.is_empty(), "--image needs --prompt; rows of --input have their own images")?;
    let ranks = Ranks::start(input)?;
    let dirs = ranks.agree(ModelDirs::find(&args.model, args.adapter.as_deref(), Some(Head::LanguageModel)))?;
    let asker = ranks.agree(Asker::new(args, &config, &dirs))?;
    let sizes = ranks.agree(sizes(&asker, input))?;
    let head = Head::LanguageModel;
    let inference = device::open("generate", &dirs, options, head, (config.clone(), args.seed), &ranks)?;
    let responses = |sizes: &Vec<[usize; 2]>| sizes.iter().map(|[responses, _]| responses).sum::<usize>();
    let bar = progress("generate", sizes.as_ref().map(|sizes| responses(sizes).div_ceil(ranks.world.size)));
    let (engine, rng) = (Engine::new(&config, 0), Rng::new(args.seed, Purpose::Sample));
    let answering = Answering {
        inference: &inference,
        tokenizer: asker.texts.tokenizer.as_ref(),
        config,
        beams,
        rng,
        engine,
        bar,
        done: [0; 2],
    };
    let sizes = sizes.map(|sizes| sizes.into_iter().map(|[_, size]| size).collect());
    answering.run(&asker, (input, sizes), ranks)
}

/// Streams the responses to one prompt.
fn show(args: &Args, config: RolloutConfig, options: Options, prompt: &str) -> Result<()> {
    let of_lines = [("--beams", args.beams > 1), ("--top-logprobs", args.top_logprobs > 0)];
    if let Some((option, _)) = of_lines.iter().find(|(_, given)| *given) {
        return Err(Error::usage(format!("{option} needs --input: --prompt prints plain text only"))
            .hint("give the prompt as a row of --input"));
    }
    let config = RolloutConfig { samples_per_prompt: 1, ..config };
    let mut talk = Talk::open("generate", (&args.model, args.adapter.as_deref()), options, config, args.seed)?;
    talk.edits = Arc::new(asked::edits(args, Some(&talk.tokenizer), talk.arch().vocabulary)?);
    let texts = Texts::open(&talk.dirs.tokenizer, talk.arch(), &args.template())?;
    let mut row = Row::from_iter([("prompt".to_owned(), prompt.into())]);
    if !args.image.is_empty() {
        row.insert("images".to_owned(), args.image.clone().into());
    }
    let (tokens, images) = texts.prompt(&row)?;
    for _ in 0..args.samples {
        talk.answer(tokens.clone(), images.clone())?;
    }
    talk.finish()
}

/// Checks all rows of a file. Returns the number of responses of each, and its size; none for standard input.
fn sizes(asker: &Asker, input: &Path) -> Result<Option<Vec<[usize; 2]>>> {
    if input.as_os_str() == "-" {
        return Ok(None);
    }
    let of_row = |row: &Row| asker.row(0, row).map(|asked| [asked.requests.len(), asked.size]);
    rows::read(input, of_row).map(Some)
}

/// Generates the responses, and writes them in the order of the rows.
struct Answering<'a> {
    inference: &'a InferenceModel,
    tokenizer: Option<&'a Tokenizer>,
    config: RolloutConfig,
    beams: Option<Beams>,
    rng: Rng,
    engine: Engine,
    bar: ProgressBar,
    /// The numbers of responses of this rank, and of their tokens.
    done: [usize; 2],
}

impl Answering<'_> {
    /// Processes as many rows of a file at a time as memory allows, a share on each rank. Rows of standard input are
    /// processed as they arrive.
    fn run(mut self, asker: &Asker, (input, sizes): (&Path, Option<Vec<usize>>), mut ranks: Ranks) -> Result<()> {
        let start = Instant::now();
        let mut stream = Stream::open(input);
        let ask = |id, row: &Row| asker.row(id, row);
        if let Some(sizes) = sizes {
            for range in rows::batches(sizes.iter().copied(), TOKENS_AT_ONCE * ranks.world.size) {
                let own = ranks.share(&sizes[range.clone()]);
                let next = stream.skip(own.start).and_then(|()| stream.next(own.len(), ask));
                let next = next.and_then(|rows| stream.skip(range.len() - own.end).map(|()| rows));
                self.answer(&ranks.agree(next)?, &mut ranks)?;
                ranks.flush()?;
            }
        } else {
            loop {
                let rows = stream.next(rows::AHEAD, ask)?;
                if rows.is_empty() {
                    break;
                }
                self.answer(&rows, &mut ranks)?;
            }
        }
        self.bar.finish_and_clear();
        if let Some(why) = self.engine.refused() {
            note!("generate: decoding without CUDA graphs, because {why}");
        }
        let [responses, tokens] = ranks.sums(self.done.map(|count| count as f64));
        let (seconds, memory) = (start.elapsed().as_secs_f64(), self.inference.describe_memory());
        let rate = tokens / seconds.max(1e-9);
        ranks.say(&format!(
            "generate: {responses} responses, {tokens} new tokens in {seconds:.2} s ({rate:.0} tokens/s){memory}"
        ));
        ranks.finish()
    }

    /// Generates the responses to rows of this rank.
    fn answer(&mut self, rows: &[Asked], ranks: &mut Ranks) -> Result<()> {
        let of_row = |(i, asked): (usize, &Asked)| {
            asked.requests.iter().map(move |request| Request { prompt: i, ..request.clone() }).collect::<Vec<_>>()
        };
        let requests: Vec<Request> = rows.iter().enumerate().flat_map(of_row).collect();
        let Self { inference, tokenizer, config, beams, rng, engine, bar, done } = self;
        let model = Model { transformer: &inference.transformer, weights: &inference.weights, tokenizer: *tokenizer };
        engine.allow(inference.cache_bytes(config, &requests, beams.map_or(1, |beams| beams.count)));
        let mut waiting: Vec<Option<Response>> = requests.iter().map(|_| None).collect();
        let (mut next, before) = (0, done[0]);
        let mut finished = |i: usize, response: &Response| -> Result<()> {
            *done = [done[0] + 1, done[1] + response.tokens.len()];
            waiting[i] = Some(response.clone());
            while let Some(response) = waiting.get_mut(next).and_then(Option::take) {
                ranks.write(&Line {
                    row: &rows[requests[next].prompt].row,
                    prompt_tokens: &requests[next].tokens,
                    tokens: &response.tokens,
                    text: tokenizer.is_some().then_some(&response.text),
                    logprobs: &response.logprobs,
                    finish: response.finish.name(),
                    score: response.score,
                    top_logprobs: &response.top_logprobs,
                })?;
                next += 1;
            }
            Ok(())
        };
        let mut hooks = Hooks {
            progress: Some(&mut |now| bar.set_position((before + now.finished) as u64)),
            finished: Some(&mut finished),
            ..Hooks::default()
        };
        let outcome = match *beams {
            Some(beams) => engine.beam_search(model, beams, &requests, &mut hooks),
            None => engine.generate(model, *rng, 0, &requests, &mut hooks),
        };
        ranks.agree(outcome.map_err(device::with_option_names)).map(drop)
    }
}
