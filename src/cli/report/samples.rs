//! Samples: the responses to a prompt side by side, token by token if the tokenizer exists. Jobs that learn from
//! preferences show the two sides of held-out pairs; jobs with labeled steps show each step with its reward.

use super::super::samples::{groups, short_number};
use super::numbers::{short, spread};
use super::source::Source;
use super::text::{escape, put};
use crate::error::Result;
use crate::experience::parts;
use crate::metrics::eval_rows;
use crate::metrics::recorded::{RecordedSample, RecordedStep, RecordedTokens};
use crate::text::Tokenizer;
use crate::text::stream::StreamDecoder;

/// The maximum number of samples of a page, and of tokens of their responses; a token takes about 25 bytes.
const SAMPLES: usize = 200;
const TOKENS: usize = 60_000;
/// The maximum number of steps of all runs; each run has at least two.
const STEPS_MAX: usize = 8;
/// The maximum number of responses to one prompt.
const GROUP_MAX: usize = 8;
/// The number of characters at the end of a prompt that are shown.
const PROMPT_CHARS: usize = 3000;
/// The number of tokens at the start of a response that are shown, or 4 times as many characters.
const RESPONSE_TOKENS: std::ops::RangeInclusive<usize> = 64..=2000;

/// The samples of some recorded steps of a run, within its share of a page with `runs` runs. Without recorded steps,
/// the rows of some evaluations.
pub fn html(source: &mut Source, runs: usize) -> String {
    let evaluated = source.try_read(eval_rows::steps(&source.dir)).unwrap_or_default();
    let has_rollouts = !source.recorded.is_empty();
    let steps = if has_rollouts { source.recorded.clone() } else { evaluated };
    let chosen = spread(steps.len(), (STEPS_MAX / runs).max(2));
    let n = runs * chosen.len().max(1);
    let show = if has_rollouts { show_step } else { show_rows };
    let parts = chosen.into_iter().filter_map(|i| source.try_read(show(source, steps[i], SAMPLES / n, TOKENS / n)));
    parts.collect()
}

/// The samples of a recorded step.
fn show_step(source: &Source, step: u64, samples_max: usize, tokens_max: usize) -> Result<String> {
    let mut out = String::new();
    let recorded = RecordedStep::for_step(&source.dir, step);
    let all = groups(recorded.samples()?);
    let (prompts, samples) = (all.len(), all.iter().map(Vec::len).sum::<usize>());
    let shown = among(all, samples_max, tokens_max);
    let shown_samples: usize = shown.iter().map(Vec::len).sum();
    let each = (tokens_max / shown_samples.max(1)).clamp(*RESPONSE_TOKENS.start(), *RESPONSE_TOKENS.end());
    let name = escape(&source.name);
    put!(out, "<div class=\"step\"><h3>{name}, step {step}</h3>");
    put!(
        out,
        "<p class=\"note\">{shown_samples} of {samples} samples, {} of {prompts} prompts, lowest mean score first.{}</p>",
        shown.len(),
        if shown.iter().flatten().all(|sample| sample.environment.is_empty()) {
            ""
        } else {
            " The text of the environment is <span class=\"env\">underlined</span>."
        }
    );
    let mut tokens = recorded.tokens(shown.iter().flatten().map(|sample| sample.index).collect())?.into_iter();
    for group in shown {
        show(&mut out, source, &group, &mut tokens, each);
    }
    out += "</div>\n";
    Ok(out)
}

/// Groups from the lowest mean score to the highest, with at most `samples` samples and `tokens` tokens, but at least
/// one group. Large groups are shown in part.
fn among(mut all: Vec<Vec<RecordedSample>>, samples: usize, tokens: usize) -> Vec<Vec<RecordedSample>> {
    let mean =
        |group: &[RecordedSample]| group.iter().map(|sample| f64::from(sample.score)).sum::<f64>() / group.len() as f64;
    all.sort_by(|a, b| mean(a).total_cmp(&mean(b)));
    let size = all.iter().map(|group| group.len().min(GROUP_MAX)).max().unwrap_or(1);
    let longest = all.iter().flatten().map(|sample| sample.response_tokens.min(*RESPONSE_TOKENS.end())).max();
    let count = (samples / size).min(tokens / (size * longest.unwrap_or(1).max(1))).max(1);
    let chosen = spread(all.len(), count).into_iter().map(|i| {
        let group = &all[i];
        spread(group.len(), GROUP_MAX).into_iter().map(|at| group[at].clone()).collect()
    });
    chosen.collect()
}

fn show(
    out: &mut String,
    source: &Source,
    group: &[RecordedSample],
    tokens: &mut impl Iterator<Item = RecordedTokens>,
    tokens_max: usize,
) {
    let first = &group[0];
    put!(out, "<article><header><b>prompt {}</b>", first.prompt_id);
    for (name, value) in [("label", &first.label), ("from", &first.source)] {
        if !value.is_empty() {
            put!(out, "<span>{name} <bdi>{}</bdi></span>", escape(value));
        }
    }
    *out += "</header>";
    prompt(out, &first.prompt);
    images(out, &first.images);
    *out += "<div class=\"responses\">";
    for (sample, tokens) in group.iter().zip(tokens) {
        out.push_str("<div class=\"response\"><div class=\"about\">");
        put!(out, "<b>{}</b>", short_number(sample.score));
        for (name, score) in sample.scores.iter().filter(|_| sample.scores.len() > 1) {
            put!(out, "<span>{} {}</span>", escape(name), short_number(*score));
        }
        put!(
            out,
            "<span>{} tokens</span><span>{}</span></div>",
            sample.response_tokens,
            sample.finish.replace('_', " ")
        );
        response(out, source, sample, &tokens, tokens_max);
        images(out, &sample.environment_images);
        *out += "</div>\n";
    }
    *out += "</div></article>\n";
}

/// The rows of the evaluation after `step`, from the lowest margin to the highest, with their responses side by side.
fn show_rows(source: &Source, step: u64, rows_max: usize, tokens_max: usize) -> Result<String> {
    let mut out = String::new();
    let mut rows = eval_rows::read(&source.dir, step)?;
    rows.sort_by(|a, b| a.margin.total_cmp(&b.margin));
    let (shown, correct) = (spread(rows.len(), rows_max), rows.iter().filter(|row| row.correct).count());
    let each = (tokens_max / (2 * shown.len()).max(1)).clamp(*RESPONSE_TOKENS.start(), *RESPONSE_TOKENS.end());
    let (name, n) = (escape(&source.name), rows.len());
    put!(out, "<div class=\"step\"><h3>{name}, step {step}</h3><p class=\"note\">");
    put!(out, "{} of {n} held-out rows ({correct} correct), lowest margin first.</p>", shown.len());
    for row in shown.into_iter().map(|i| &rows[i]) {
        let verdict = if row.correct { "<span>correct</span>" } else { "<span class=\"wrong\">wrong</span>" };
        let margin = short_number(row.margin);
        put!(out, "<article><header><b>prompt {}</b>{verdict}<span>margin {margin}</span></header>", row.row);
        let class = match row.question() {
            Some(question) => {
                prompt(&mut out, question);
                "pair"
            }
            None => "steps",
        };
        put!(out, "<div class=\"responses {class}\">");
        for (name, text, reward) in row.responses.list() {
            let reward = short_number(reward);
            put!(
                out,
                "<div class=\"response\"><div class=\"about\"><b>{reward}</b><span>{}</span></div>",
                escape(&name)
            );
            plain(&mut out, &text, &[], each);
            out += "</div>";
        }
        out += "</div></article>\n";
    }
    out += "</div>\n";
    Ok(out)
}

/// The end of a prompt.
fn prompt(out: &mut String, text: &str) {
    let chars = text.chars().count();
    let from = text.char_indices().nth(chars.saturating_sub(PROMPT_CHARS)).map_or(0, |(at, _)| at);
    let before = if from > 0 { format!("<i>{} earlier characters</i> ", chars - PROMPT_CHARS) } else { String::new() };
    put!(out, "<div class=\"text prompt\">{before}<bdi>{}</bdi></div>", escape(&text[from..]));
}

/// The images of a prompt or of an environment: the small ones that a recorded step has.
fn images(out: &mut String, urls: &[String]) {
    if urls.is_empty() {
        return;
    }
    *out += "<div class=\"images\">";
    for (i, url) in urls.iter().enumerate().filter(|(_, url)| url.starts_with("data:image/jpeg;base64,")) {
        put!(out, "<img src=\"{}\" alt=\"image {}\">", escape(url), i + 1);
    }
    *out += "</div>";
}

/// The beginning of a response.
fn plain(out: &mut String, text: &str, environment: &[(usize, usize)], tokens_max: usize) {
    let shown: String = text.chars().take(4 * tokens_max).collect();
    let more = if shown.len() < text.len() { " <i>...</i>" } else { "" };
    put!(out, "<div class=\"text\"><bdi>{}</bdi>{more}</div>", spoken(&shown, environment));
}

/// A text whose `environment` parts are marked.
fn spoken(text: &str, environment: &[(usize, usize)]) -> String {
    let part = |(part, is_given): (String, bool)| {
        let text = escape(&part);
        if is_given { format!("<span class=\"env\" title=\"environment\">{text}</span>") } else { text }
    };
    parts(text, environment).into_iter().map(part).collect()
}

/// The text of a response, with the UTF-16 lengths of its tokens and their numbers, if they can be determined.
fn response(out: &mut String, source: &Source, sample: &RecordedSample, tokens: &RecordedTokens, tokens_max: usize) {
    let pieces = source.tokenizer.as_ref().and_then(|tokenizer| pieces(tokenizer, &tokens.tokens, &sample.response));
    let Some(pieces) = pieces else {
        plain(out, &sample.response, &sample.environment, tokens_max);
        return;
    };
    let shown = &pieces[..pieces.len().min(tokens_max)];
    let lengths: Vec<String> = shown.iter().map(|piece| piece.encode_utf16().count().to_string()).collect();
    let RecordedTokens { advantages, logprobs, kl, .. } = tokens;
    let numbers = [("a", advantages), ("l", logprobs), ("k", kl)].map(|(name, values)| {
        let values: Vec<String> = values
            .iter()
            .take(shown.len())
            .map(|x| if x.is_finite() { short(f64::from(*x), 3) } else { "x".into() })
            .collect();
        format!(" data-{name}=\"{}\"", values.join(" "))
    });
    let more = match pieces.len() - shown.len() {
        0 => String::new(),
        more => format!(" <i>{more} more tokens</i>"),
    };
    // The page's script cuts the text again. It has special tokens, too, so its parts are found by token. In a response that
    // is not learned from at all, they are not known.
    let has_parts = !sample.environment.is_empty() && tokens.mask.contains(&1);
    let (mut given, mut spans, mut at): (Vec<&str>, Vec<(usize, usize)>, usize) = (Vec::new(), Vec::new(), 0);
    for (piece, mask) in shown.iter().zip(&tokens.mask).filter(|_| has_parts) {
        let end = at + piece.chars().count();
        given.push(if *mask == 0 { "1" } else { "0" });
        match spans.last_mut() {
            Some((_, last)) if *mask == 0 && *last == at => *last = end,
            _ if *mask == 0 => spans.push((at, end)),
            _ => {}
        }
        at = end;
    }
    let given = if given.is_empty() { String::new() } else { format!(" data-env=\"{}\"", given.join(" ")) };
    let numbers = numbers.concat() + &given;
    let (lengths, text) = (lengths.join(" "), spoken(&shown.concat(), &spans));
    put!(out, "<div class=\"text\"><bdi data-cuts=\"{lengths}\"{numbers}>{text}</bdi>{more}</div>");
}

/// The text of each token; a character of several tokens belongs to the last one, and an image has one text. None if the
/// texts do not match the recorded response.
fn pieces(tokenizer: &Tokenizer, tokens: &[u32], text: &str) -> Option<Vec<String>> {
    if tokenizer.decode(tokens, true).ok()?.replace('\0', "␀") != text {
        return None;
    }
    let mut decoder = StreamDecoder::default();
    let image = tokenizer.images().ok().map(|images| images.token);
    let is_repeated = |i: usize| i > 0 && tokens[i - 1] == tokens[i] && image == Some(tokens[i]);
    let piece = |(i, token): (usize, &u32)| {
        let piece = decoder.push(tokenizer, *token)?;
        Ok(if is_repeated(i) { String::new() } else { piece })
    };
    let pieces: Result<Vec<String>> = tokens.iter().enumerate().map(piece).collect();
    let (mut pieces, rest) = (pieces.ok()?, decoder.finish(tokenizer).ok()?);
    pieces.last_mut()?.push_str(&rest);
    Some(pieces)
}
