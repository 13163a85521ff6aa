//! DPO and its relatives on one page: pairs -> log-probabilities of both sides -> loss -> gradient -> step
//! (arXiv:2305.18290).

use super::pairs;
use super::reference::Reference;
use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::data::PairRow;
use crate::error::Result;
use crate::launch::run::Run;
use crate::learn::packed::{PackedRow, Tokens};
use crate::learn::{Learner, Role};
use crate::loss::preference::{PairLogprobs, preference_loss};
use crate::metrics::Phases;
use crate::metrics::eval_rows::EvalResponses;
use crate::metrics::keys::{self, Metrics};
use crate::model::Head;
use crate::text::Tokenizer;
use crate::train::models::ModelSpec;
use crate::train::supervised::{self, ExampleLoss, ExampleSums, LossInput, Method, Minibatch, Numbers};
use crate::train::warnings::{Warning, value};

/// Fall of the chosen responses' log-probability, in nats per response, above which a run warns.
const CHOSEN_FALL: f64 = 10.0;

pub struct Preference {
    /// `None` if the loss has no reference.
    reference: Option<Reference<2>>,
}

impl Method for Preference {
    type Row = PairRow;
    /// Sums of the reference model's log-probabilities of both sides of each pair; 0 without a reference.
    type Precomputed = Vec<[f64; 2]>;
    const SCORES: bool = true;

    fn models(config: &Config) -> Vec<ModelSpec> {
        let reference = || ModelSpec::frozen(RoleName::Reference, config.model.reference_dir());
        let actor = ModelSpec::actor(config, Head::LanguageModel);
        [Some(actor), config.dpo.has_reference().then(reference)].into_iter().flatten().collect()
    }

    fn shape(Config { dpo, .. }: &Config) -> [usize; 3] {
        [dpo.minibatch_samples, dpo.microbatch_tokens_max, usize::from(dpo.has_reference())]
    }

    fn warning_of_step(Config { dpo, .. }: &Config, values: &Metrics) -> Option<Warning> {
        let fall = -value(values, keys::CHOSEN_REWARD_MEAN) / dpo.beta;
        (dpo.has_reference() && fall > CHOSEN_FALL).then(|| {
            let text = format!(
                "the log-probability of the chosen responses has also fallen, by {fall:.0} nats, so the policy may end up \
                 writing neither response: raise dpo.nll_coef"
            );
            ("chosen_fall", text)
        })
    }

    fn new(_config: &Config, mut frozen: Vec<Role>, _tokenizer: &Tokenizer) -> Result<Self> {
        Ok(Self { reference: frozen.pop().map(Reference::new) })
    }

    fn precompute(&mut self, run: &Run, _: &Role, rows: &mut [PairRow], phases: &mut Phases) -> Result<Vec<[f64; 2]>> {
        let tokens_max = run.config.dpo.microbatch_tokens_max;
        Ok(match &mut self.reference {
            Some(reference) => reference.of_rows(run, rows, |row| (row.id, sides(row)), tokens_max, phases),
            None => vec![[0.0; 2]; rows.len()],
        })
    }

    fn update(&mut self, run: &Run, learner: &mut Learner, batch: &Minibatch<Self>) -> Result<Numbers> {
        let sums = supervised::update(self, run, learner, batch, 1.0 / batch.rows.len() as f64)?;
        Ok(sums.means(pairs::REPORTED))
    }

    /// Loss, accuracy and margin on held-out pairs.
    fn evaluate(&mut self, run: &mut Run, learner: &mut Learner, batch: &Minibatch<Self>) -> Result<Numbers> {
        let (_, sums) = supervised::evaluate_examples(self, run, &learner.role, batch, 1.0)?;
        Ok(pairs::evaluated(&sums, batch.rows.len()))
    }
}

impl ExampleLoss for Preference {
    /// Packs both sides of each pair. The tokens of the responses are predicted.
    fn pack(&self, batch: &Minibatch<Self>, chosen: &[usize]) -> PackedRow {
        chosen.iter().flat_map(|&i| sides(&batch.rows[i])).collect()
    }

    fn loss(&self, packed: &LossInput<Self>) -> (Vec<ExampleSums>, Vec<f32>) {
        packed.rows(|i, [chosen, rejected]| {
            let of_pair = PairLogprobs { chosen, rejected, reference: packed.batch.precomputed[i] };
            let (pair, by_token) = preference_loss(&packed.run.config.dpo, of_pair);
            (pairs::counted(&pair, packed.weight), by_token)
        })
    }

    fn read(batch: &Minibatch<Self>, examples: &[&ExampleSums]) -> Result<(u64, String, EvalResponses)> {
        pairs::read(batch, examples)
    }
}

fn sides(row: &PairRow) -> [Tokens<'_>; 2] {
    [&row.chosen, &row.rejected].map(|side| Tokens {
        tokens: side.into(),
        prompt_tokens: row.prompt_tokens,
        masks: &[],
        images: (&row.images).into(),
    })
}
