//! A rollout that runs ahead of the updates, on its own ranks (`mesh.async_updates_max` = k). Those ranks sample
//! responses for the next steps while the others learn from the samples of this step. So a step takes as long as the
//! slower of the two (arXiv:2410.18252).
//!
//! With k above 1, a response is sampled in up to k phases. Phase i ends at i * ceil(L / k) tokens, where L is
//! `rollout.response_tokens_max`. A longer response continues in the next phase, with newer weights. One phase samples
//! the first tokens of one batch together with the last tokens of another, and does not wait for the longest response.
//! Which weights sample a token depends only on its position, not on time. So the same job gives the same samples on
//! any number of ranks and after any interruption.

use super::experience_maker::{StagedBatch, draw_ahead};
use super::models_of_rank::{Sampling, Work};
use super::online::{Online, OnlineMethod};
use super::shares::StepSlice;
use crate::comm::records;
use crate::error::Result;
use crate::launch::run::Run;
use crate::metrics::keys::Metrics;
use crate::train::job::{Ended, Step};

impl<M: OnlineMethod> Online<M> {
    /// One step while the rollout runs ahead: the rollout ranks sample with the weights of the last step, and the other
    /// ranks learn from the samples that are ready.
    pub(super) fn step_ahead(&mut self, run: &mut Run, step: &mut Step) -> std::result::Result<Metrics, Ended> {
        // A resumed step has its samples, and so have the next ones.
        let goes_on = matches!(self.sampling.work, Some(Work::Update(_)));
        if !goes_on {
            self.sampling.fill(run, step)?;
        }
        let (mut learned, mut drawn) = (Ok(Metrics::new()), Ok(Vec::new()));
        if !run.ranks.samples() {
            learned = self.learn_step(run, step);
        } else if !goes_on {
            self.sampling.staged.pop_front();
            let taken = self.sampling.collector.source.next(run.config.rollout.prompts_per_step);
            drawn = taken.and_then(|_| self.sampling.draw(run, step, step.number));
        }
        self.sampling.work = None;
        let failed = if let Err(Ended::Failed(error)) = &learned { Err(error.clone()) } else { Ok(()) };
        run.ranks.all.agree(failed)?;
        if !goes_on {
            self.sampling.share(run, drawn)?;
        }
        // Rank 0 learns.
        let took =
            |ended: &Ended| if let Ended::Unfinished { took_rows, .. } = ended { Some(*took_rows) } else { None };
        let unfinished = records::of_first(&run.ranks.all, || learned.as_ref().err().and_then(took));
        let Some(took_rows) = unfinished else { return learned };
        let (rest, error) = match learned {
            Err(Ended::Unfinished { work, error, .. }) => (work, error),
            _ => (Vec::new(), None),
        };
        let error = run.ranks.all.agree(error.map_or(Ok(()), Err)).err();
        Err(Ended::Unfinished {
            work: records::encode(&Work::Staged(self.sampling.staged.clone(), Some(rest))),
            took_rows,
            error,
        })
    }
}

impl Sampling {
    /// Samples and scores a step whose samples are missing after a start or a failed reward. All ranks wait for it.
    fn fill(&mut self, run: &mut Run, step: &mut Step) -> std::result::Result<(), Ended> {
        if let Some(Work::Rollout(responses)) = self.work.take() {
            self.staged.push_front(StagedBatch::from_responses(responses));
        }
        self.send_weights(run, step.number - 1, &mut step.phases);
        let first = self.staged.front();
        if first.is_none_or(|first| !first.is_scored() && first.error.is_none()) {
            let drawn = if run.ranks.samples() { self.draw(run, step, step.number - 1) } else { Ok(Vec::new()) };
            self.share(run, drawn)?;
        }
        match self.staged.front_mut().and_then(|first| first.error.take()) {
            None => Ok(()),
            Some(error) => {
                let work = records::encode(&Work::Staged(self.staged.clone(), None));
                Err(Ended::Unfinished { work, took_rows: false, error: Some(error) })
            }
        }
    }

    /// The phase after step `before`, on rollout ranks: returns the samples of the following steps so far.
    fn draw(&mut self, run: &Run, step: &mut Step, before: u64) -> Result<Vec<StagedBatch>> {
        let (ahead, rows) = (run.config.mesh.async_updates_max as u64, run.config.rollout.prompts_per_step);
        let each = run.config.rollout.response_tokens_max.div_ceil(ahead as usize);
        let of = |i: u64| StepSlice {
            step: (before + 1 + i) as u32,
            prompts: i as usize * rows..(i as usize + 1) * rows,
            tokens_max: if i == 0 { usize::MAX } else { (ahead - i) as usize * each },
        };
        let pieces: Vec<StepSlice> = (0..ahead.min(run.config.job.steps - before)).map(of).collect();
        if pieces.is_empty() {
            return Ok(Vec::new());
        }
        let source = &mut self.collector.source;
        let (cursor, ledger) = (source.cursor().clone(), source.ledger().clone());
        let prompts = source.next(pieces.len() * rows)?;
        source.restore(&cursor, &ledger)?;
        // `share` brings them back.
        let partial = std::mem::take(&mut self.staged);
        let (mut models, collector) = self.models_of_rank();
        let asked = (&pieces[..], &prompts[..]);
        draw_ahead(run, &mut models, collector, step.number - 1, asked, partial, &mut step.phases)
    }

    /// Copies the samples of the rollout ranks (`drawn`) to all ranks. All ranks call this.
    fn share(&mut self, run: &Run, drawn: Result<Vec<StagedBatch>>) -> Result<()> {
        let all = &run.ranks.all;
        let mut drawn = all.agree(drawn)?;
        let error = drawn.first_mut().and_then(|first| first.error.take());
        let error = all.agree(error.map_or(Ok(()), Err)).err();
        let is_first = run.ranks.samples() && run.ranks.axes.all.rank() == 0;
        self.staged = records::gather(all, &if is_first { drawn } else { Vec::new() })?.into();
        if let Some(first) = self.staged.front_mut() {
            first.error = error;
        }
        Ok(())
    }
}
