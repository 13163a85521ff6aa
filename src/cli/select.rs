//! `rlhf-hpc select`: scored responses to rows to train on.

use super::out::{self, note};
use super::rows::{self, Row, text, tokens};
use crate::data::rows::required;
use crate::error::{Error, Result};
use crate::text::kind_of;
use argh::FromArgs;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Select among scored responses: rows for SFT, or pairs for reward models and DPO.
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "select")]
#[argh(
    note = "Rows are what `generate --samples N | reward` writes, or have prompt (or messages), response and reward. A result
has prompt (or messages) and response, or chosen and rejected, and the other fields of the row. A response that is
empty, or was cut off by its length, is nothing to learn from: it is left out, but for the rejected side of a pair."
)]
pub struct Args {
    /// rows as JSON lines; - is standard input (default: -)
    #[argh(option, default = "PathBuf::from(\"-\")")]
    pub input: PathBuf,

    /// the best N different responses to a prompt, best first (default: all responses)
    #[argh(option)]
    pub best: Option<usize>,

    /// instead: a pair for each prompt, its best and its worst response, with the difference as margin
    #[argh(switch)]
    pub pairs: bool,

    /// only rows of at least this reward; of a pair, the least margin
    #[argh(option)]
    pub min: Option<f64>,

    /// what takes the place of the prompt, with {{input}} and {{reward}} in it, for conditional SFT
    #[argh(option)]
    pub template: Option<String>,

    /// field that holds the score (default: reward)
    #[argh(option, default = "\"reward\".to_string()")]
    pub by: String,
}

/// A response to a prompt, and its row.
struct Scored {
    /// The prompt, by which rows are grouped.
    prompt: String,
    reward: f64,
    /// Whether there is nothing to learn from it: it is empty, or was cut off by its length.
    is_useless: bool,
    row: Row,
}

pub fn run(args: &Args) -> Result<()> {
    if args.pairs && (args.best.is_some() || args.template.is_some()) {
        return Err(Error::usage("--pairs takes the best and the worst response: leave out --best and --template"));
    }
    if args.best == Some(0) {
        return Err(Error::usage("--best is 0, needed at least 1"));
    }
    let all = rows::read(&args.input, |row| scored(row, &args.by))?;
    let (total, useless) = (all.len(), all.iter().filter(|one| one.is_useless).count());
    let groups = rows::groups(all, |one| one.prompt.clone());
    let prompts = groups.len();
    let mut selected = Vec::new();
    for mut group in groups {
        // The earlier of equals comes first.
        if args.pairs || args.best.is_some() {
            group.sort_by(|a, b| b.reward.total_cmp(&a.reward));
        }
        if args.pairs { selected.extend(pair(group, args)) } else { selected.extend(best(group, args)?) }
    }
    let lines: Vec<String> = selected.iter().map(|row| Value::Object(row.clone()).to_string() + "\n").collect();
    out::write(lines.concat().as_bytes())?;
    let what = if args.pairs { "pairs" } else { "rows" };
    let without = if useless > 0 { format!("; {useless} responses are empty or cut off") } else { String::new() };
    note!("select: {} {what} of {total} responses to {prompts} prompts{without}", selected.len());
    if selected.is_empty() {
        return Err(Error::data("nothing is selected").hint(if args.pairs {
            "a pair needs two responses of different rewards to one prompt: sample more, or lower --min"
        } else {
            "lower --min, or let responses be longer: `generate --max-new-tokens`"
        }));
    }
    Ok(())
}

/// A row as it is selected by: with `prompt` or `messages`, and `response`, whatever it came with.
fn scored(row: &Row, by: &str) -> Result<Scored> {
    let value = required(row, by)?;
    let reward = value.as_f64().filter(|reward| reward.is_finite());
    let reward = reward.ok_or_else(|| Error::data(format!("field {by:?} is {}, needed a number", kind_of(value))))?;
    let is_cut = row.get("finish").is_some_and(|finish| finish == "length");
    let mut row = row.clone();
    let asked = ["messages", "prompt"].into_iter().find(|key| row.contains_key(*key));
    let (key, response) = match asked {
        // A row that was answered may have come with a demonstration of its own.
        Some(key) if row.contains_key("response") && !row.contains_key("tokens") => {
            (key, required(&row, "response")?.clone())
        }
        Some(key) => (key, text(&row, "text")?.into()),
        // A model without a tokenizer, or rows of token ids.
        None => {
            let (prompt, response) = (tokens(&row, "prompt_tokens")?, tokens(&row, "tokens")?);
            row.insert("prompt".into(), json!(prompt));
            ("prompt", json!(response))
        }
    };
    let is_useless = is_cut || is_empty(&response);
    row.retain(|key, _| !["prompt_tokens", "tokens", "text", "logprobs", "finish"].contains(&key.as_str()));
    row.insert("response".into(), response);
    Ok(Scored { prompt: row[key].to_string(), reward, is_useless, row })
}

fn is_empty(response: &Value) -> bool {
    response.as_str() == Some("") || response.as_array().is_some_and(Vec::is_empty)
}

/// The rows to learn from, of responses to one prompt in order.
fn best(group: Vec<Scored>, args: &Args) -> Result<Vec<Row>> {
    let mut chosen: Vec<Scored> = Vec::new();
    for one in group.into_iter().filter(|one| !one.is_useless && args.min.is_none_or(|min| one.reward >= min)) {
        let is_new = args.best.is_none() || chosen.iter().all(|before| before.row["response"] != one.row["response"]);
        if is_new && args.best.is_none_or(|best| chosen.len() < best) {
            chosen.push(one);
        }
    }
    chosen.into_iter().map(|one| demonstration(one, args.template.as_deref())).collect()
}

/// A row for SFT: messages end with the response, or it is a field beside the prompt.
fn demonstration(Scored { mut row, reward, .. }: Scored, template: Option<&str>) -> Result<Row> {
    let conditioned = |text: &Value| {
        let Some(template) = template else { return Ok(text.clone()) };
        let input = text.as_str().ok_or_else(|| Error::usage("--template needs prompts that are texts"))?;
        Ok(Value::from(template.replace("{reward}", &format!("{reward:.2}")).replace("{input}", input)))
    };
    if let Some(Value::Array(messages)) = row.get_mut("messages") {
        if let Some(content) = messages.last_mut().and_then(|last| last.get_mut("content")) {
            *content = conditioned(content)?;
        }
        let response = row.remove("response").unwrap_or_default();
        if let Some(Value::Array(messages)) = row.get_mut("messages") {
            messages.push(json!({"role": "assistant", "content": response}));
        }
    } else {
        row["prompt"] = conditioned(&row["prompt"])?;
    }
    Ok(row)
}

/// The best response to a prompt beside the worst; none where they are equally good, or alike.
fn pair(group: Vec<Scored>, args: &Args) -> Option<Row> {
    let worst = group.iter().rev().find(|one| !is_empty(&one.row["response"]))?;
    let worst = (worst.reward, worst.row["response"].clone());
    let Scored { mut row, reward, .. } = group.into_iter().find(|one| !one.is_useless)?;
    let margin = reward - worst.0;
    let chosen = row.remove("response")?;
    let is_pair = margin > 0.0 && chosen != worst.1 && args.min.is_none_or(|min| margin >= min);
    row.remove(&args.by);
    row.extend([("chosen".to_string(), chosen), ("rejected".into(), worst.1), ("margin".into(), margin.into())]);
    is_pair.then_some(row)
}
