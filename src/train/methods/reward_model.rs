//! A reward model on one page: pairs -> scores -> loss -> gradient -> step (arXiv:2203.02155).

use super::pairs;
use crate::config::Config;
use crate::data::PairRow;
use crate::error::Result;
use crate::launch::run::Run;
use crate::learn::packed::PackedRow;
use crate::learn::{Learner, Role};
use crate::loss::preference::pair_loss;
use crate::metrics::eval_rows::EvalResponses;
use crate::metrics::keys;
use crate::model::Head;
use crate::text::Tokenizer;
use crate::train::models::ModelSpec;
use crate::train::supervised::{self, ExampleLoss, ExampleSums, LossInput, Method, Minibatch, Numbers};

pub struct RewardModel;

impl Method for RewardModel {
    type Row = PairRow;
    type Precomputed = ();

    fn models(config: &Config) -> Vec<ModelSpec> {
        vec![ModelSpec::actor(config, Head::Value)]
    }

    fn shape(Config { reward_model, .. }: &Config) -> [usize; 3] {
        [reward_model.minibatch_samples, reward_model.microbatch_tokens_max, 0]
    }

    fn new(_config: &Config, _frozen: Vec<Role>, _tokenizer: &Tokenizer) -> Result<Self> {
        Ok(Self)
    }

    fn update(&mut self, run: &Run, learner: &mut Learner, batch: &Minibatch<Self>) -> Result<Numbers> {
        let sums = supervised::update(self, run, learner, batch, 1.0 / batch.rows.len() as f64)?;
        Ok(sums.means(pairs::REPORTED))
    }

    /// Loss, accuracy and margin on held-out pairs, and the distribution of the scores there, which is later used to
    /// normalize them.
    fn evaluate(&mut self, run: &mut Run, learner: &mut Learner, batch: &Minibatch<Self>) -> Result<Numbers> {
        let (examples, sums) = supervised::evaluate_examples(self, run, &learner.role, batch, 1.0)?;
        let of_pair = [keys::CHOSEN_REWARD_MEAN, keys::REJECTED_REWARD_MEAN];
        let scores = || examples.iter().flat_map(|(.., pair)| of_pair.map(|key| pair.get(key)));
        let n = 2.0 * batch.rows.len() as f64;
        let mean = scores().sum::<f64>() / n;
        let std = (scores().map(|score| (score - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt();
        learner.role.transformer.arch.reward_mean_std = Some((mean as f32, std as f32));
        Ok(pairs::evaluated(&sums, batch.rows.len()))
    }
}

impl ExampleLoss for RewardModel {
    /// Packs both sides of each pair. The last token of each side is scored.
    fn pack(&self, batch: &Minibatch<Self>, chosen: &[usize]) -> PackedRow {
        let mut packed = PackedRow::new();
        for row in chosen.iter().map(|&i| &batch.rows[i]) {
            for side in [&row.chosen, &row.rejected] {
                packed.push(side, side.len());
                packed.push_last_state();
                packed.see(&row.images);
            }
        }
        packed
    }

    fn loss(&self, packed: &LossInput<Self>) -> (Vec<ExampleSums>, Vec<f32>) {
        packed.rows(|i, sides| {
            let [better, worse] = sides.map(|scores| f64::from(scores[0]));
            let (loss, margin) = (packed.run.config.reward_model.loss, f64::from(packed.batch.rows[i].margin));
            let (pair, by_score) = pair_loss(loss, better, worse, margin);
            (pairs::counted(&pair, packed.weight), by_score)
        })
    }

    fn read(batch: &Minibatch<Self>, examples: &[&ExampleSums]) -> Result<(u64, String, EvalResponses)> {
        pairs::read(batch, examples)
    }
}
