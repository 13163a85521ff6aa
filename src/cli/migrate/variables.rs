//! Variables of a shell script, and arithmetic on them.

use super::words::Word;
use crate::error::{Error, Result};
use std::collections::BTreeMap;

/// The value of a variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Text(Word),
    Array(Vec<Word>),
}

impl Value {
    pub fn words(&self) -> Vec<Word> {
        match self {
            Self::Text(word) => vec![word.clone()],
            Self::Array(words) => words.clone(),
        }
    }
}

/// The variables that the script has set so far.
#[derive(Debug, Default)]
pub struct Variables {
    values: BTreeMap<String, Value>,
    /// The number of texts inside each other that are read.
    nesting: usize,
}

const NESTING_MAX: usize = 32;
const ARITHMETIC_BYTES_MAX: usize = 256;

impl Variables {
    pub fn new() -> Self {
        let known = ["HOME", "PWD"]
            .into_iter()
            .filter_map(|name| Some((name.to_owned(), Value::Text(Word::of(std::env::var(name).ok()?)))));
        Self { values: known.collect(), nesting: 0 }
    }

    /// Begins to read a text inside another one.
    ///
    /// # Errors
    /// `Usage`, if there are too many.
    pub fn enter(&mut self, line: usize) -> Result<()> {
        self.nesting += 1;
        Error::need(self.nesting <= NESTING_MAX, format!("line {line}: more than {NESTING_MAX} expansions are nested"))
    }

    pub fn leave(&mut self) {
        self.nesting -= 1;
    }

    pub fn get(&self, name: &str) -> Option<&Value> {
        self.values.get(name)
    }

    pub fn set(&mut self, name: &str, value: Value) {
        self.values.insert(name.to_owned(), value);
    }

    pub fn append(&mut self, name: &str, value: Value) {
        let joined = match (self.values.remove(name), value) {
            (None, value) => value,
            (Some(Value::Text(before)), Value::Text(after)) => {
                Value::Text(Word { text: before.text + &after.text, unknown: before.unknown.or(after.unknown) })
            }
            (Some(before), after) => Value::Array([before.words(), after.words()].concat()),
        };
        self.set(name, joined);
    }
}

/// The value of an expression of whole numbers, variables, `+ - * / %` and parentheses.
pub fn arithmetic(text: &str, variables: &Variables) -> Option<i64> {
    let mut tokens = Vec::new();
    if text.len() > ARITHMETIC_BYTES_MAX {
        return None;
    }
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            c if c.is_whitespace() || c == '$' || c == '{' || c == '}' => {}
            c if c.is_alphanumeric() || c == '_' => {
                let mut word = c.to_string();
                while let Some(c) = chars.next_if(|c| c.is_alphanumeric() || *c == '_') {
                    word.push(c);
                }
                let number = word.parse().ok().or_else(|| match variables.get(&word)? {
                    Value::Text(Word { text, unknown: None }) => text.trim().parse().ok(),
                    _ => None,
                });
                tokens.push(Err(number?));
            }
            c if "+-*/%()".contains(c) => tokens.push(Ok(c)),
            _ => return None,
        }
    }
    let mut at = 0;
    let value = sum(&tokens, &mut at)?;
    (at == tokens.len()).then_some(value)
}

type Token = std::result::Result<char, i64>;

fn sum(tokens: &[Token], at: &mut usize) -> Option<i64> {
    let mut value = product(tokens, at)?;
    while let Some(Ok(sign @ ('+' | '-'))) = tokens.get(*at) {
        *at += 1;
        let next = product(tokens, at)?;
        value = if *sign == '+' { value.checked_add(next)? } else { value.checked_sub(next)? };
    }
    Some(value)
}

fn product(tokens: &[Token], at: &mut usize) -> Option<i64> {
    let mut value = factor(tokens, at)?;
    while let Some(Ok(sign @ ('*' | '/' | '%'))) = tokens.get(*at) {
        *at += 1;
        let next = factor(tokens, at)?;
        value = match sign {
            '*' => value.checked_mul(next)?,
            '/' => value.checked_div(next)?,
            _ => value.checked_rem(next)?,
        };
    }
    Some(value)
}

fn factor(tokens: &[Token], at: &mut usize) -> Option<i64> {
    let token = tokens.get(*at)?;
    *at += 1;
    match token {
        Err(number) => Some(*number),
        Ok('-') => factor(tokens, at)?.checked_neg(),
        Ok('(') => {
            let value = sum(tokens, at)?;
            *at += 1;
            (tokens.get(*at - 1) == Some(&Ok(')'))).then_some(value)
        }
        Ok(_) => None,
    }
}
