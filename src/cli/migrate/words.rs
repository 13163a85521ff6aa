//! A word of a shell command, whose value may be unknown.

/// A word of a command. `unknown` names the part whose value the text does not give.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Word {
    pub text: String,
    pub unknown: Option<String>,
}

impl Word {
    pub fn of(text: impl Into<String>) -> Self {
        Self { text: text.into(), unknown: None }
    }

    pub fn unknown(why: impl Into<String>) -> Self {
        Self { text: String::new(), unknown: Some(why.into()) }
    }

    pub fn push(&mut self, other: &Self) {
        self.text.push_str(&other.text);
        self.unknown = self.unknown.take().or_else(|| other.unknown.clone());
    }
}

/// Whether a word can be the name of a variable.
pub fn is_name(word: &str) -> bool {
    let starts = word.chars().next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
    starts && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}
