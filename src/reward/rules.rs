//! Rules on a response's text.

use regex::{Regex, RegexBuilder};

use crate::config;
use crate::config::reward::{RuleConfig, RuleKind};
use crate::error::{Error, Result};
use crate::experience::{Prompt, Response};
use crate::reward::RewardOutput;

/// A rule with its patterns compiled.
#[derive(Debug)]
pub struct Rule {
    config: RuleConfig,
    extract: Option<Regex>,
    /// `None` if the pattern contains `{label}` and is compiled per prompt, or if the rule has no pattern.
    pattern: Option<Regex>,
    numbers: Regex,
}

const LABEL: &str = "{label}";

impl Rule {
    pub fn new(config: &RuleConfig) -> Result<Self> {
        let needs_pattern = matches!(config.kind, RuleKind::Regex | RuleKind::Format);
        let kind = config::name(&config.kind);
        if needs_pattern && config.pattern.is_empty() {
            return Err(Error::usage(format!("reward.rule \"{kind}\" needs a pattern"))
                .hint(format!("set reward.rule = {{ kind = \"{kind}\", pattern = '...' }}")));
        }
        if !needs_pattern && !config.pattern.is_empty() {
            return Err(Error::usage(format!("reward.rule \"{kind}\" does not use a pattern"))
                .hint("set kind = \"regex\" or \"format\", or extract instead of pattern"));
        }
        for (key, x) in [("right", config.right), ("wrong", config.wrong), ("tolerance", config.tolerance as f32)] {
            if !x.is_finite() {
                return Err(Error::usage(format!("reward.rule.{key} must be a finite number (got {x})")));
            }
        }
        if config.tolerance < 0.0 || config.tokens_min > config.tokens_max {
            return Err(Error::usage("reward.rule needs tolerance >= 0 and tokens_min <= tokens_max"));
        }
        let extract = if config.extract.is_empty() { None } else { Some(compile("extract", &config.extract, false)?) };
        let pattern = if needs_pattern {
            // Also checks that a pattern with a label compiles.
            let compiled = compile_pattern(config, "label")?;
            if config.pattern.contains(LABEL) { None } else { Some(compiled) }
        } else {
            None
        };
        let numbers =
            compile("number", r"[0-9][0-9,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?", false)?;
        Ok(Self { config: config.clone(), extract, pattern, numbers })
    }

    /// Scores each response: `right` if the rule holds, `wrong` if not.
    pub fn score(&self, prompts: &[&Prompt], responses: &[&Response]) -> Result<Vec<RewardOutput>> {
        let score = |(prompt, response): (&&Prompt, &&Response)| {
            let score = Some(self.score_one(prompt, response)?);
            Ok(RewardOutput { score, ..RewardOutput::default() })
        };
        prompts.iter().zip(responses).map(score).collect()
    }

    fn score_one(&self, prompt: &Prompt, response: &Response) -> Result<f32> {
        let config = &self.config;
        if config.kind == RuleKind::Length {
            return Ok(self.length(response.tokens.len()));
        }
        let Some(answer) = self.answer(&response.text) else { return Ok(config.wrong) };
        let holds = match config.kind {
            RuleKind::Exact => {
                let label = self.stripped(label(prompt)?);
                if config.ignore_case { answer.to_lowercase() == label.to_lowercase() } else { answer == label }
            }
            RuleKind::Number => {
                let text = label(prompt)?;
                let want = self.last_number(text).ok_or_else(|| {
                    Error::data(format!("prompt {} of {}: its label {text:?} has no number", prompt.id, prompt.source))
                })?;
                let close = |x: f64| (x - want).abs() <= config.tolerance * want.abs().max(1.0);
                self.last_number(answer).is_some_and(close)
            }
            RuleKind::Regex | RuleKind::Format => match &self.pattern {
                Some(pattern) => pattern.is_match(answer),
                None => compile_pattern(config, label(prompt)?)?.is_match(answer),
            },
            RuleKind::Length => unreachable!("scored above"),
        };
        Ok(if holds { config.right } else { config.wrong })
    }

    /// Whether the rule of `config` needs a prompt's label.
    pub fn needs_label(config: &RuleConfig) -> bool {
        match config.kind {
            RuleKind::Exact | RuleKind::Number => true,
            RuleKind::Regex | RuleKind::Format => config.pattern.contains(LABEL),
            RuleKind::Length => false,
        }
    }

    /// Whether the rule compares a text or a number of the response with the label.
    pub fn has_answer(&self) -> bool {
        matches!(self.config.kind, RuleKind::Exact | RuleKind::Number)
    }

    /// The compared text, or the number in its shortest form. `None` if there is none.
    pub fn compared(&self, text: &str) -> Option<String> {
        let answer = self.answer(text)?;
        match self.config.kind {
            // Avoids -0.
            RuleKind::Number => self.last_number(answer).map(|x| (x + 0.0).to_string()),
            _ if self.config.ignore_case => Some(answer.to_lowercase()),
            _ => Some(answer.to_string()),
        }
    }

    /// The part of the text that is compared; `None` if `extract` does not match.
    fn answer<'a>(&self, text: &'a str) -> Option<&'a str> {
        let cut = match &self.extract {
            None => text,
            Some(extract) => {
                let last = extract.captures_iter(text).last()?;
                last.get(1).or_else(|| last.get(0))?.as_str()
            }
        };
        Some(self.stripped(cut))
    }

    fn stripped<'a>(&self, text: &'a str) -> &'a str {
        if self.config.strip { text.trim() } else { text }
    }

    /// The last number in a text: `72`, `-3.5`, `1,234`, `.5`, `2e-3`. A minus counts as a sign unless it follows
    /// something that can be subtracted from (`7-5` ends in 5). Commas count only between groups of three digits.
    fn last_number(&self, text: &str) -> Option<f64> {
        let found = self.numbers.find_iter(text).last()?;
        let (grouped, fraction) = match found.as_str().find(['.', 'e', 'E']) {
            Some(dot) => found.as_str().split_at(dot),
            None => (found.as_str(), ""),
        };
        let groups: Vec<&str> = grouped.split(',').filter(|g| !g.is_empty()).collect();
        let thousands = groups.len() > 1 && groups[0].len() <= 3 && groups[1..].iter().all(|g| g.len() == 3);
        let whole = if thousands { groups.concat() } else { (*groups.last().unwrap_or(&"0")).to_string() };
        let magnitude: f64 = format!("{whole}{fraction}").parse().ok()?;
        // "1,2": the comma separates two numbers, and the sign belongs to the first.
        let alone = thousands || groups.len() <= 1;
        let mut before = text[..found.start()].chars().rev();
        let minus = alone && matches!(before.next(), Some('-' | '\u{2212}'));
        let subtracts = before.next().is_some_and(|c| c.is_alphanumeric() || matches!(c, ')' | ']' | '}'));
        Some(if minus && !subtracts { -magnitude } else { magnitude })
    }

    /// A score for the length: `right` within the range, falling linearly from its border to `wrong` at `tokens_slack`
    /// tokens outside it.
    fn length(&self, tokens: usize) -> f32 {
        let config = &self.config;
        let outside = config.tokens_min.saturating_sub(tokens).max(tokens.saturating_sub(config.tokens_max));
        if outside == 0 {
            config.right
        } else if outside >= config.tokens_slack {
            config.wrong
        } else {
            let share = outside as f64 / config.tokens_slack as f64;
            (f64::from(config.right) + share * f64::from(config.wrong - config.right)) as f32
        }
    }
}

fn label(prompt: &Prompt) -> Result<&str> {
    if prompt.label.is_empty() {
        return Err(Error::data(format!("prompt {} of {} has no label to compare with", prompt.id, prompt.source))
            .hint("set data.label_key to the field that holds the answer"));
    }
    Ok(&prompt.label)
}

/// Compiles the pattern. `regex` is searched for; `format` must match from end to end, and its `.` also matches line
/// ends.
fn compile_pattern(config: &RuleConfig, label: &str) -> Result<Regex> {
    let pattern = config.pattern.replace(LABEL, &regex::escape(label));
    let pattern = match config.kind {
        RuleKind::Format => format!(r"\A(?s:{pattern})\z"),
        _ => pattern,
    };
    compile("pattern", &pattern, config.ignore_case)
}

fn compile(key: &str, pattern: &str, ignore_case: bool) -> Result<Regex> {
    RegexBuilder::new(pattern).case_insensitive(ignore_case).build().map_err(|e| {
        Error::usage(format!("reward.rule.{key} is not a valid regular expression: {e}"))
            .hint("avoid look-around and back-references, or use Python's re in reward.python")
    })
}
