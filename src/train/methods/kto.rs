//! KTO on one page: labeled responses, KL of mismatched pairs -> log-probabilities -> loss -> gradient -> step
//! (arXiv:2402.01306).

use super::pairs::TIES;
use super::reference::{self, Reference};
use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::config::method::labelled::{DESIRABLE_REWARD_MEAN, UNDESIRABLE_REWARD_MEAN};
use crate::data::{LabelledRow, RowSource};
use crate::error::{Error, Result};
use crate::launch::run::Run;
use crate::learn::packed::{PackedRow, Tokens};
use crate::learn::sums::Sums;
use crate::learn::{Learner, Role};
use crate::loss::labelled::kto_loss;
use crate::metrics::eval_rows::EvalResponses;
use crate::metrics::{Phase, Phases, keys};
use crate::model::Head;
use crate::text::Tokenizer;
use crate::train::models::ModelSpec;
use crate::train::supervised::{self, ExampleLoss, ExampleSums, LossInput, Method, Minibatch, Numbers};

/// The counts of responses of each label.
const DESIRABLE: &str = "desirable";
const UNDESIRABLE: &str = "undesirable";

/// Minibatch size below which the KL is mostly noise.
const SAMPLES_FEW: usize = 8;

pub struct Kto {
    reference: Reference<1>,
}

/// The values that the policy's log-probabilities of a minibatch are compared with.
#[derive(Default)]
pub struct Precomputed {
    /// Sums of the reference model's log-probabilities of each response.
    reference: Vec<[f64; 1]>,
    kl: f64,
}

impl Method for Kto {
    type Row = LabelledRow;
    type Precomputed = Precomputed;
    const SCORES: bool = true;

    fn models(config: &Config) -> Vec<ModelSpec> {
        let reference = ModelSpec::frozen(RoleName::Reference, config.model.reference_dir());
        vec![ModelSpec::actor(config, Head::LanguageModel), reference]
    }

    fn shape(Config { kto, .. }: &Config) -> [usize; 3] {
        // Both models score mismatched pairs. The reference also scores each row.
        [kto.minibatch_samples, kto.microbatch_tokens_max, 3]
    }

    /// Rejects rows that all have one label. Usually the labels are in another field.
    fn check_rows(_config: &Config, source: &RowSource<LabelledRow>, _tokenizer: &Tokenizer) -> Result<()> {
        let mut found = [false; 2];
        source.check_each(|row| {
            found[usize::from(row.is_desirable)] = true;
            Ok(())
        })?;
        let only = match found {
            [true, false] => "false",
            [false, true] => "true",
            _ => return Ok(()),
        };
        Err(Error::data(format!("a kto job needs desirable and undesirable rows, but every row is labeled {only}"))
            .hint("check data.label_key; for responses that are all good, use job.kind = \"sft\""))
    }

    fn warning_of_start(Config { kto, .. }: &Config) -> Option<String> {
        let samples = kto.minibatch_samples;
        (samples < SAMPLES_FEW).then(|| {
            format!(
                "kto.minibatch_samples = {samples} is small: the KL of the loss is a mean over these samples and is noisy"
            )
        })
    }

    fn new(_config: &Config, mut frozen: Vec<Role>, _tokenizer: &Tokenizer) -> Result<Self> {
        let reference = frozen.pop().expect("a job without a placement has all models on each rank");
        Ok(Self { reference: Reference::new(reference) })
    }

    /// Returns the reference model's sums, and KL = max(0, mean of sum_t (l - l_ref)) over mismatched pairs. A pair is
    /// a prompt with the response of the next row, or for the last row with that of the first. No gradient flows
    /// through them.
    fn precompute(
        &mut self,
        run: &Run,
        role: &Role,
        rows: &mut [LabelledRow],
        phases: &mut Phases,
    ) -> Result<Precomputed> {
        let (rows, tokens_max) = (&*rows, run.config.kto.microbatch_tokens_max);
        let reference = self.reference.of_rows(run, rows, |row| (row.id, [tokens(row)]), tokens_max, phases);
        let others = rows.iter().cycle().skip(1);
        let mismatched: Vec<Tokens> =
            rows.iter().zip(others).map(|(row, other)| mismatch(row, other, role.arch().context)).collect();
        let theirs = self.reference.sums(run, &mismatched, tokens_max, phases);
        let own = phases.time(Phase::Score, || reference::sums(role, run, &mismatched, tokens_max));
        let sum: f64 = own.iter().zip(theirs).map(|(own, theirs)| own - theirs).sum();
        // A single row has no other row.
        let kl = if rows.len() > 1 { (sum / rows.len() as f64).max(0.0) } else { 0.0 };
        Ok(Precomputed { reference, kl })
    }

    fn update(&mut self, run: &Run, learner: &mut Learner, batch: &Minibatch<Self>) -> Result<Numbers> {
        let count = batch.rows.len() as f64;
        let sums = supervised::update(self, run, learner, batch, 1.0 / count)?;
        let mut numbers = sums.means(&[(DESIRABLE_REWARD_MEAN, DESIRABLE), (UNDESIRABLE_REWARD_MEAN, UNDESIRABLE)]);
        let (loss, accuracy) = (sums.get(keys::LOSS), sums.get(keys::ACCURACY) / count);
        numbers.extend([(keys::LOSS, loss), (keys::ACCURACY, accuracy), (keys::KL_MEAN, batch.precomputed.kl)]);
        Ok(numbers)
    }

    /// Loss on held-out rows, and the share of rows whose reward is above the KL if desirable, or below it if not.
    fn evaluate(&mut self, run: &mut Run, learner: &mut Learner, batch: &Minibatch<Self>) -> Result<Numbers> {
        let count = batch.rows.len() as f64;
        let (_, sums) = supervised::evaluate_examples(self, run, &learner.role, batch, 1.0 / count)?;
        let accuracy = sums.get(keys::ACCURACY) / count;
        let accuracy = (sums.get(TIES) < count).then_some((keys::EVAL_ACCURACY, accuracy));
        Ok([Some((keys::EVAL_LOSS, sums.get(keys::LOSS))), accuracy].into_iter().flatten().collect())
    }
}

impl ExampleLoss for Kto {
    /// The tokens of the responses are predicted.
    fn pack(&self, batch: &Minibatch<Self>, chosen: &[usize]) -> PackedRow {
        chosen.iter().map(|&i| tokens(&batch.rows[i])).collect()
    }

    fn loss(&self, packed: &LossInput<Self>) -> (Vec<ExampleSums>, Vec<f32>) {
        let (config, Minibatch { rows, precomputed, .. }) = (&packed.run.config.kto, packed.batch);
        packed.rows(|i, [logprobs]| {
            let is_desirable = rows[i].is_desirable;
            let h = logprobs.iter().map(|l| f64::from(*l)).sum::<f64>() - precomputed.reference[i][0];
            let (loss, slope) = kto_loss(config, is_desirable, h, precomputed.kl);
            let (beta, sign) = (config.beta, if is_desirable { 1.0 } else { -1.0 });
            let (margin, [count, reward]) = (sign * beta * (h - precomputed.kl), of_label(is_desirable));
            let of_row = [
                (keys::LOSS, packed.weight * loss),
                (keys::ACCURACY, f64::from(u8::from(margin > 0.0))),
                (TIES, f64::from(u8::from(margin == 0.0))),
                (keys::MARGIN_MEAN, margin),
                (count, 1.0),
                (reward, beta * h),
            ];
            (Sums::from_list(of_row), [slope])
        })
    }

    fn read(batch: &Minibatch<Self>, examples: &[&ExampleSums]) -> Result<(u64, String, EvalResponses)> {
        let (Minibatch { rows, tokenizer, .. }, (i, _, of_row)) = (batch, examples[0]);
        let LabelledRow { id, tokens, prompt_tokens, is_desirable, .. } = &rows[*i];
        let (prompt, response) = tokens.split_at(*prompt_tokens);
        let (response, [_, reward]) = (tokenizer.decode(response, true)?, of_label(*is_desirable));
        let responses = EvalResponses::Labelled { response, label: *is_desirable, reward: of_row.get(reward) };
        Ok((*id, tokenizer.decode_prompt(prompt)?, responses))
    }
}

/// Keys of the number of responses of a label, and of their rewards: beta times the log-ratio to the reference.
fn of_label(is_desirable: bool) -> [&'static str; 2] {
    if is_desirable { [DESIRABLE, DESIRABLE_REWARD_MEAN] } else { [UNDESIRABLE, UNDESIRABLE_REWARD_MEAN] }
}

fn tokens(row: &LabelledRow) -> Tokens<'_> {
    Tokens { tokens: (&row.tokens).into(), prompt_tokens: row.prompt_tokens, masks: &[], images: (&row.images).into() }
}

/// The prompt of a row with the response of another one, cut to the model's context.
fn mismatch<'a>(row: &'a LabelledRow, other: &LabelledRow, context: usize) -> Tokens<'a> {
    let mut tokens = [&row.tokens[..row.prompt_tokens], &other.tokens[other.prompt_tokens..]].concat();
    tokens.truncate(context);
    Tokens { tokens: tokens.into(), prompt_tokens: row.prompt_tokens, masks: &[], images: (&row.images).into() }
}
