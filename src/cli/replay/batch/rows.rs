//! The rows of a batch in the order of their groups, and the quantities that the other system computed.

use super::file::File;
use crate::error::{Error, Result};
use crate::experience::{Experience, Response};
use std::collections::BTreeMap;

/// A quantity that both systems compute, in the order of computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Quantity {
    Logprobs,
    RefLogprobs,
    Values,
    Kl,
    Rewards,
    Returns,
    Advantages,
    PolicyLoss,
    KlLoss,
    EntropyLoss,
    Loss,
    GradNorm,
    ValueLoss,
    CriticGradNorm,
}

impl Quantity {
    pub fn name(self) -> &'static str {
        match self {
            Self::Logprobs => "logprobs",
            Self::RefLogprobs => "ref_logprobs",
            Self::Values => "values",
            Self::Kl => "kl",
            Self::Rewards => "rewards",
            Self::Returns => "returns",
            Self::Advantages => "advantages",
            Self::PolicyLoss => "policy_loss",
            Self::KlLoss => "kl_loss",
            Self::EntropyLoss => "entropy_loss",
            Self::Loss => "loss",
            Self::GradNorm => "grad_norm",
            Self::ValueLoss => "value_loss",
            Self::CriticGradNorm => "critic_grad_norm",
        }
    }

    /// Whether a model computes it.
    pub fn is_of_model(self) -> bool {
        matches!(self, Self::Logprobs | Self::RefLogprobs | Self::Values | Self::GradNorm | Self::CriticGradNorm)
    }
}

/// One number, or one for each column of each row.
#[derive(Clone, Debug)]
pub enum Numbers {
    One(f64),
    Tokens(Vec<Vec<f32>>),
}

/// The tokens of a row that the model reads.
#[derive(Clone, Debug)]
pub struct Line {
    pub tokens: Vec<u32>,
    /// The number of tokens before the first column.
    pub prompt_tokens: usize,
    /// The column of each token after the prompt.
    pub columns: Vec<usize>,
}

/// The rows of a batch. Each has all columns of the response, padding included, whose mask is 0.
#[derive(Clone)]
pub struct Rows {
    /// Log-probabilities at rollout are in `response.logprobs`, those under the filters in `response.sample_logprobs`.
    pub samples: Vec<Experience>,
    pub has_scores: bool,
    pub has_groups: bool,
    /// Log-probabilities under the policy that is updated; empty if the file has none.
    pub logprobs: Vec<Vec<f32>>,
    pub entropy: Vec<Vec<f32>>,
    /// Values of the critic that is updated.
    pub new_values: Vec<Vec<f32>>,
    /// The micro-batch of each row.
    pub microbatch: Vec<usize>,
    /// Empty without `input_ids`.
    pub lines: Vec<Line>,
    /// The row of the file that each row was.
    pub numbers: Vec<usize>,
}

/// The quantities of the other system.
pub type Theirs = BTreeMap<Quantity, Numbers>;

/// Reads the tensors of a file.
///
/// # Errors
/// `Data`: no mask of the response, a tensor of another shape, or a number of a learned token that is not finite.
pub fn read(file: &mut File) -> Result<(Rows, Theirs)> {
    let [n, columns] = shape(file)?;
    let ids = |values: Option<Vec<f64>>| values.map(|all| all.into_iter().map(|x| x as usize).collect::<Vec<_>>());
    let group = ids(file.take("group", &[n])?);
    let mut order: Vec<usize> = (0..n).collect();
    if let Some(group) = &group {
        order.sort_by_key(|row| group[*row]);
    }
    let reader = Reader { n, columns, order };
    let mask: Vec<Vec<u8>> = reader.split(&file.take("response_mask", &[n, columns])?.expect("it has a shape"));
    let lines = reader.lines(file, &mask)?;
    let mut tokens = |name: &str| reader.tokens(file, name, &mask);
    let [logprobs, old, reference, sampled] =
        ["logprobs", "old_logprobs", "ref_logprobs", "sample_logprobs"].map(&mut tokens);
    let [entropy, values, new_values, kl] = ["entropy", "values", "new_values", "kl"].map(&mut tokens);
    let [rewards, returns, advantages] = ["rewards", "returns", "advantages"].map(tokens);
    let (logprobs, old, reference, values) = (logprobs?, old?, reference?, values?);
    let (kl, rewards, returns, advantages) = (kl?, rewards?, returns?, advantages?);
    let (sampled, new_values) = (sampled?, new_values?);
    let scores = file.take("scores", &[n])?;
    let row = |all: &Vec<Vec<f32>>, i: usize| all.get(i).cloned().unwrap_or_default();
    let samples = reader.order.iter().enumerate().map(|(i, &from)| Experience {
        response: Response {
            prompt: group.as_ref().map_or(i, |group| group[from]),
            sample: i as u32,
            tokens: vec![0; columns],
            logprobs: row(&old, i),
            sample_logprobs: row(&sampled, i),
            ..Response::default()
        },
        score: scores.as_ref().map_or(0.0, |scores| scores[from] as f32),
        ref_logprobs: row(&reference, i),
        values: row(&values, i),
        kl: row(&kl, i),
        rewards: row(&rewards, i),
        advantages: row(&advantages, i),
        returns: row(&returns, i),
        mask: mask[i].clone(),
        ..Experience::default()
    });
    let microbatch = ids(file.take("microbatch", &[n])?).unwrap_or_else(|| vec![0; n]);
    let rows = Rows {
        samples: samples.collect(),
        has_scores: scores.is_some(),
        has_groups: group.is_some(),
        entropy: entropy?,
        new_values: new_values.clone(),
        microbatch: reader.order.iter().map(|from| microbatch[*from]).collect(),
        lines,
        numbers: reader.order.clone(),
        logprobs: logprobs.clone(),
    };
    // A model that is given is the one that is updated.
    let measured = if logprobs.is_empty() { old } else { logprobs };
    let valued = if new_values.is_empty() { values } else { new_values };
    let of_tokens = [
        (Quantity::Logprobs, measured),
        (Quantity::RefLogprobs, reference),
        (Quantity::Values, valued),
        (Quantity::Kl, kl),
        (Quantity::Rewards, rewards),
        (Quantity::Returns, returns),
        (Quantity::Advantages, advantages),
    ];
    Ok((rows, quantities(file, of_tokens)?))
}

/// The rows and columns of a batch.
fn shape(file: &File) -> Result<[usize; 2]> {
    let shape = file.shape("response_mask").and_then(|shape| <[usize; 2]>::try_from(shape).ok());
    let shape = shape.ok_or_else(|| Error::data("the batch needs a tensor response_mask of [rows, columns]"))?;
    Error::need(shape.iter().all(|size| *size > 0), format!("response_mask is empty, {shape:?}"))?;
    Ok(shape)
}

/// The quantities that a file has.
fn quantities(file: &mut File, of_tokens: [(Quantity, Vec<Vec<f32>>); 7]) -> Result<Theirs> {
    let given = of_tokens.into_iter().filter(|(_, numbers)| !numbers.is_empty());
    let mut theirs: Theirs = given.map(|(quantity, numbers)| (quantity, Numbers::Tokens(numbers))).collect();
    for quantity in SCALARS {
        if let Some(number) = file.scalar(quantity.name())? {
            theirs.insert(quantity, Numbers::One(number));
        }
    }
    Ok(theirs)
}

const SCALARS: [Quantity; 7] = [
    Quantity::PolicyLoss,
    Quantity::KlLoss,
    Quantity::EntropyLoss,
    Quantity::Loss,
    Quantity::GradNorm,
    Quantity::ValueLoss,
    Quantity::CriticGradNorm,
];

struct Reader {
    n: usize,
    columns: usize,
    /// The row of the file for each row of the batch.
    order: Vec<usize>,
}

impl Reader {
    /// The rows of a mask in their new order.
    fn split(&self, values: &[f64]) -> Vec<Vec<u8>> {
        let row =
            |from: &usize| values[from * self.columns..][..self.columns].iter().map(|x| u8::from(*x != 0.0)).collect();
        self.order.iter().map(row).collect()
    }

    /// A tensor of the columns, or one number a row, which all its columns then have. Numbers of masked columns that
    /// are not finite become 0.
    fn tokens(&self, file: &mut File, name: &str, mask: &[Vec<u8>]) -> Result<Vec<Vec<f32>>> {
        let Self { n, columns, order } = self;
        let is_row = file.shape(name).is_some_and(|shape| shape.len() == 1);
        let shape = [*n, *columns];
        let Some(values) = file.take(name, &shape[..if is_row { 1 } else { 2 }])? else {
            return Ok(Vec::new());
        };
        let mut all = Vec::with_capacity(*n);
        for (from, mask) in order.iter().zip(mask) {
            let number = |column: usize| {
                let value = if is_row { values[*from] } else { values[from * columns + column] } as f32;
                if value.is_finite() || mask[column] != 0 { value } else { 0.0 }
            };
            let row: Vec<f32> = (0..*columns).map(number).collect();
            if let Some(column) = row.iter().position(|x| !x.is_finite()) {
                let found = row[column];
                return Err(Error::data(format!("{name} of row {from}, column {column} is not finite (got {found})")));
            }
            all.push(row);
        }
        Ok(all)
    }

    /// The tokens of each row. Column j of C columns is about token T - C + j of the T tokens of a row of `input_ids`.
    fn lines(&self, file: &mut File, mask: &[Vec<u8>]) -> Result<Vec<Line>> {
        let width = file.shape("input_ids").and_then(|shape| shape.get(1).copied()).unwrap_or(0);
        let shape = [self.n, width];
        let attention = file.take("attention_mask", &shape)?;
        let Some(ids) = file.take("input_ids", &shape)? else { return Ok(Vec::new()) };
        let Some(attention) = attention else {
            return Err(Error::data("a batch with input_ids needs a tensor attention_mask of the same shape"));
        };
        let columns = self.columns;
        Error::need(columns <= width, format!("response_mask has {columns} columns, input_ids only {width}"))?;
        let line = |(&from, mask): (&usize, &Vec<u8>)| {
            let mut line = Line { tokens: Vec::new(), prompt_tokens: 0, columns: Vec::new() };
            for at in (0..width).filter(|at| attention[from * width + at] != 0.0) {
                let column = at.checked_sub(width - columns);
                // Nothing predicts the first token.
                if let Some(column) = column.filter(|_| !line.tokens.is_empty()) {
                    line.columns.push(column);
                } else {
                    line.prompt_tokens += 1;
                }
                line.tokens.push(ids[from * width + at] as u32);
            }
            let outside = (0..columns).find(|column| mask[*column] != 0 && line.columns.binary_search(column).is_err());
            match outside {
                None => Ok(line),
                Some(column) => Err(Error::data(format!(
                    "response_mask of row {from}, column {column} is 1, but attention_mask is 0 there: a learned token \
                     is padding, or the masks are shifted"
                ))),
            }
        };
        self.order.iter().zip(mask).map(line).collect()
    }
}
