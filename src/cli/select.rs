//! `rlhf-hpc select`: turns scored responses into training rows.

use super::out::{self, note};
use super::rows::{self, Row, text, tokens};
use crate::data::rows::required;
use crate::error::{Error, Result};
use crate::text::kind_of;
use argh::{ArgsInfo, FromArgs};
use serde_json::{Value, json};
use std::path::PathBuf;

/// Select scored responses as training data: rows for SFT, or pairs for reward models and DPO.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "select")]
#[argh(
    note = "Rows are the output of `generate --samples N | reward`, or have prompt (or messages), response and reward. A result \
            has prompt (or messages) and response, or chosen and rejected, and the other fields of the row. Empty or truncated \
            responses are left out, except as the rejected side of a pair."
)]
pub struct Args {
    /// rows as JSON lines; - is standard input (default: -)
    #[argh(option, default = "PathBuf::from(\"-\")")]
    pub input: PathBuf,

    /// keep the best N different responses to each prompt, best first (default: all responses)
    #[argh(option)]
    pub best: Option<usize>,

    /// write one pair per prompt instead: its best and its worst response, with the difference as margin
    #[argh(switch)]
    pub pairs: bool,

    /// keep only rows with at least this reward; for pairs, at least this margin
    #[argh(option)]
    pub min: Option<f64>,

    /// text that replaces the prompt for conditional SFT; {input} and {reward} in it are filled in
    #[argh(option)]
    pub template: Option<String>,

    /// field with the score (default: reward)
    #[argh(option, default = "\"reward\".to_string()")]
    pub by: String,
}

/// A response to a prompt, and its row.
struct Scored {
    /// The prompt, by which rows are grouped.
    prompt: String,
    reward: f64,
    /// Whether the response is useless for training, because it is empty or truncated.
    is_useless: bool,
    row: Row,
}

pub fn run(args: &Args) -> Result<()> {
    if args.pairs && (args.best.is_some() || args.template.is_some()) {
        return Err(Error::usage("--pairs excludes --best and --template").hint("leave out --pairs, or the other two"));
    }
    if args.best == Some(0) {
        return Err(Error::usage("--best must be at least 1 (got 0)"));
    }
    let all = rows::read(&args.input, |row| scored(row, &args.by))?;
    let (total, useless) = (all.len(), all.iter().filter(|one| one.is_useless).count());
    let groups = rows::groups(all, |one| one.prompt.clone());
    let prompts = groups.len();
    let mut selected = Vec::new();
    for mut group in groups {
        // Equal rewards keep their order.
        if args.pairs || args.best.is_some() {
            group.sort_by(|a, b| b.reward.total_cmp(&a.reward));
        }
        if args.pairs { selected.extend(pair(group, args)) } else { selected.extend(best(group, args)?) }
    }
    let lines: Vec<String> = selected.iter().map(|row| Value::Object(row.clone()).to_string() + "\n").collect();
    out::write(lines.concat().as_bytes())?;
    let what = if args.pairs { "pairs" } else { "rows" };
    let without = if useless > 0 { format!("; empty or truncated responses: {useless}") } else { String::new() };
    note!("select: {} {what} of {total} responses to {prompts} prompts{without}", selected.len());
    if selected.is_empty() {
        return Err(Error::data("no row is selected").hint(if useless == total && total > 0 {
            "all responses are empty or truncated: allow longer ones with `generate --max-new-tokens` (TOKENS in jobs/compose)"
        } else if args.pairs {
            "sample more responses, or lower --min: a pair needs two responses to a prompt with different rewards"
        } else {
            "lower --min, or allow longer responses with `generate --max-new-tokens`"
        }));
    }
    Ok(())
}

/// Converts a row of any form into one with `prompt` or `messages`, and `response`.
fn scored(row: &Row, by: &str) -> Result<Scored> {
    let value = required(row, by)?;
    let reward = value.as_f64().filter(|reward| reward.is_finite());
    let reward =
        reward.ok_or_else(|| Error::data(format!("field {by:?} must be a number (got {})", kind_of(value))))?;
    let is_cut = row.get("finish").is_some_and(|finish| finish == "length");
    let mut row = row.clone();
    let asked = ["messages", "prompt"].into_iter().find(|key| row.contains_key(*key));
    let (key, response) = match asked {
        // The input of `generate` may have had a demonstration as `response`.
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

/// The training rows from the responses to one prompt, in order.
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

/// A row for SFT. The response is the last message, or a field next to the prompt.
fn demonstration(Scored { mut row, reward, .. }: Scored, template: Option<&str>) -> Result<Row> {
    let conditioned = |text: &Value| {
        let Some(template) = template else { return Ok(text.clone()) };
        let input = text.as_str().ok_or_else(|| Error::usage("--template needs prompts that are strings"))?;
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

/// The best and the worst response to a prompt as a pair; none if their rewards or their texts are equal.
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
