//! The words of a shell script's commands, without running any of them.
//!
//! Quotes, continuations, comments, here-documents, variables, arrays and arithmetic have a value that the text alone gives.
//! A word whose value depends on more, such as a command substitution, is unknown, with the reason.

use super::variables::{Value, Variables};
use super::words::{Word, is_name};
use crate::error::{Error, Result};

const SCRIPT_BYTES_MAX: usize = 1 << 20;

/// A command: its words, and the line of the first one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    pub words: Vec<Word>,
    pub line: usize,
}

/// The commands of a script, in order, whichever of them would run.
///
/// # Errors
/// `Usage`, with the line of a quote, an expansion or a here-document that is not closed.
pub fn commands(text: &str) -> Result<Vec<Command>> {
    Error::need(text.len() <= SCRIPT_BYTES_MAX, format!("a script has at most {SCRIPT_BYTES_MAX} bytes"))?;
    let mut variables = Variables::new();
    Reader::new(text, 1, &mut variables).commands()
}

/// A here-document whose text follows the line.
struct Pending {
    end: String,
    is_literal: bool,
    strips_tabs: bool,
    line: usize,
}

pub(super) struct Reader<'a> {
    chars: Vec<char>,
    /// The positions of the ends of lines.
    ends: Vec<usize>,
    at: usize,
    first_line: usize,
    pub(super) variables: &'a mut Variables,
    words: Vec<Word>,
    pending: Vec<Pending>,
    commands: Vec<Command>,
    line: usize,
    /// The number of `if`, `for` and other compounds around a command.
    depth: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(text: &str, first_line: usize, variables: &'a mut Variables) -> Self {
        let chars: Vec<char> = text.chars().collect();
        let ends = (0..chars.len()).filter(|i| chars[*i] == '\n').collect();
        let (words, pending, commands) = (Vec::new(), Vec::new(), Vec::new());
        Self { chars, ends, at: 0, first_line, variables, words, pending, commands, line: first_line, depth: 0 }
    }

    fn commands(mut self) -> Result<Vec<Command>> {
        loop {
            while self.peek(0).is_some_and(|c| c == ' ' || c == '\t' || c == '\r') || self.skip("\\\n") {
                self.at += usize::from(self.peek(0).is_some_and(|c| c == ' ' || c == '\t' || c == '\r'));
            }
            let Some(c) = self.peek(0) else { break };
            match c {
                '#' => {
                    while self.peek(0).is_some_and(|c| c != '\n') {
                        self.at += 1;
                    }
                }
                '\n' => {
                    self.at += 1;
                    self.here_documents()?;
                    self.end_command()?;
                }
                '&' if self.peek(1) == Some('>') => self.redirect()?,
                '<' if self.peek(1) == Some('(') => {
                    self.at += 1;
                    self.substitution("process substitution `<(...)`")?;
                    self.words.push(Word::unknown("process substitution `<(...)`"));
                }
                '<' | '>' => self.redirect()?,
                ';' | '&' | '|' | '(' | ')' => {
                    self.at += 1;
                    if c == '(' && self.words.len() == 1 && self.peek(0) == Some(')') {
                        // The definition of a function.
                        self.words.clear();
                    }
                    self.end_command()?;
                }
                _ => self.word()?,
            }
        }
        self.here_documents()?;
        self.end_command()?;
        Ok(self.commands)
    }

    pub(super) fn peek(&self, ahead: usize) -> Option<char> {
        self.chars.get(self.at + ahead).copied()
    }

    pub(super) fn skip(&mut self, text: &str) -> bool {
        let is_next = text.chars().enumerate().all(|(i, c)| self.peek(i) == Some(c));
        self.at += if is_next { text.chars().count() } else { 0 };
        is_next
    }

    pub(super) fn line(&self) -> usize {
        self.first_line + self.ends.partition_point(|end| *end < self.at)
    }

    pub(super) fn unclosed(line: usize, what: &str) -> Error {
        Error::usage(format!("line {line}: {what} is not closed"))
    }

    fn redirect(&mut self) -> Result<()> {
        if self.skip("<<<") {
            return self.ignored_word();
        }
        if self.skip("<<") {
            let strips_tabs = self.skip("-");
            self.blanks();
            let (line, mut end, mut is_literal) = (self.line(), String::new(), false);
            while let Some(c) = self.peek(0).filter(|c| !c.is_whitespace() && !";&|<>)".contains(*c)) {
                is_literal |= "'\"\\".contains(c);
                end.extend(Some(c).filter(|c| !"'\"\\".contains(*c)));
                self.at += 1;
            }
            self.pending.push(Pending { end, is_literal, strips_tabs, line });
            return Ok(());
        }
        while self.peek(0).is_some_and(|c| "<>&|".contains(c)) {
            self.at += 1;
        }
        // The number before a redirection, as in 2>&1.
        if self.words.last().is_some_and(|word| word.text == "2" || word.text == "1") {
            self.words.pop();
        }
        self.ignored_word()
    }

    fn blanks(&mut self) {
        while self.peek(0).is_some_and(|c| c == ' ' || c == '\t') || self.skip("\\\n") {
            self.at += usize::from(self.peek(0).is_some_and(|c| c == ' ' || c == '\t'));
        }
    }

    fn ignored_word(&mut self) -> Result<()> {
        self.blanks();
        let before = self.words.len();
        if self.peek(0).is_some_and(|c| !c.is_whitespace() && !";&|<>()".contains(c)) {
            self.word()?;
        }
        self.words.truncate(before);
        Ok(())
    }

    fn here_documents(&mut self) -> Result<()> {
        for pending in std::mem::take(&mut self.pending) {
            let body = self.here_document(&pending)?;
            let names: Vec<&str> = self.words.iter().map(|word| word.text.as_str()).collect();
            // `read -r -d '' NAME <<EOF` sets a variable.
            if names.first() == Some(&"read")
                && let Some(name) = names.iter().skip(1).rev().find(|name| is_name(name))
            {
                let name = (*name).to_owned();
                self.variables.set(&name, Value::Text(body));
            }
        }
        Ok(())
    }

    fn here_document(&mut self, Pending { end, is_literal, strips_tabs, line }: &Pending) -> Result<Word> {
        let (mut body, first) = (String::new(), self.line());
        loop {
            if self.at >= self.chars.len() {
                return Err(Self::unclosed(*line, &format!("the here-document {end:?}")));
            }
            let mut text = String::new();
            while let Some(c) = self.peek(0).filter(|c| *c != '\n') {
                text.push(c);
                self.at += 1;
            }
            self.at += 1;
            let text = if *strips_tabs { text.trim_start_matches('\t') } else { &text };
            if text.trim_end_matches('\r') == end {
                break;
            }
            body.push_str(text);
            body.push('\n');
        }
        if *is_literal {
            return Ok(Word::of(body));
        }
        Reader::new(&body, first, self.variables).quoted(None)
    }

    /// Reads a word, which unquoted expansions may turn into several or none.
    fn word(&mut self) -> Result<()> {
        if self.assignment()? {
            return Ok(());
        }
        let mut word: Option<Word> = None;
        while let Some(c) = self.peek(0) {
            match c {
                ' ' | '\t' | '\r' | '\n' | ';' | '&' | '|' | '<' | '>' | '(' | ')' => break,
                '$' if self.is_whole_array() => {
                    self.words.extend(word.take());
                    let all = self.array();
                    self.words.extend(all);
                }
                '$' if self.peek(1) == Some('\'') => {
                    let value = self.expansion()?;
                    word.get_or_insert_default().push(&value);
                }
                '$' | '`' => {
                    let value = self.expansion()?;
                    self.split(&value, &mut word);
                }
                '{' if self.is_brace_list() => {
                    self.at += 1;
                    word.get_or_insert_default().push(&Word::unknown("a list in braces, such as `{a,b}`"));
                }
                _ => {
                    let part = self.part()?;
                    if let Some(part) = part {
                        word.get_or_insert_default().push(&part);
                    }
                }
            }
        }
        self.words.extend(word);
        Ok(())
    }

    /// A quoted part, an escaped character, or a plain one.
    fn part(&mut self) -> Result<Option<Word>> {
        if self.skip("\\\n") {
            return Ok(None);
        }
        let line = self.line();
        let c = self.peek(0).unwrap_or_default();
        self.at += 1;
        match c {
            '\\' => {
                let escaped = self.peek(0).map(String::from).unwrap_or_default();
                self.at += 1;
                Ok(Some(Word::of(escaped)))
            }
            '\'' => {
                let mut text = String::new();
                loop {
                    let c = self.peek(0).ok_or_else(|| Self::unclosed(line, "a quote '"))?;
                    self.at += 1;
                    match c {
                        '\'' => return Ok(Some(Word::of(text))),
                        c => text.push(c),
                    }
                }
            }
            '"' => self.quoted(Some(line)).map(Some),
            c => Ok(Some(Word::of(c))),
        }
    }

    /// Text in double quotes that begin in `line`, or without it a text up to the end of the input.
    pub(super) fn quoted(&mut self, line: Option<usize>) -> Result<Word> {
        let mut word = Word::default();
        loop {
            let Some(c) = self.peek(0) else {
                return line.map_or(Ok(word), |line| Err(Self::unclosed(line, "a quote \"")));
            };
            match c {
                '"' if line.is_some() => {
                    self.at += 1;
                    return Ok(word);
                }
                '\\' if self.skip("\\\n") => {}
                '\\' if self.peek(1).is_some_and(|c| "$`\\".contains(c) || c == '"' && line.is_some()) => {
                    word.text.extend(self.peek(1));
                    self.at += 2;
                }
                '$' if self.is_whole_array() && line.is_some() => {
                    let mut all = self.array().into_iter();
                    if let Some(first) = all.next() {
                        word.push(&first);
                    }
                    for next in all {
                        self.words.push(std::mem::replace(&mut word, next));
                    }
                }
                '$' | '`' => word.push(&self.expansion()?),
                c => {
                    word.text.push(c);
                    self.at += 1;
                }
            }
        }
    }

    /// Appends the unquoted value of a variable to `word`, and begins new words at its spaces.
    fn split(&mut self, value: &Word, word: &mut Option<Word>) {
        if value.unknown.is_some() {
            word.get_or_insert_default().push(value);
            return;
        }
        let mut pieces = value.text.split_whitespace().filter(|piece| *piece != "\\");
        if value.text.starts_with(char::is_whitespace) {
            self.words.extend(word.take());
        }
        if let Some(first) = pieces.next() {
            word.get_or_insert_default().push(&Word::of(first));
        }
        for piece in pieces {
            self.words.extend(word.replace(Word::of(piece)));
        }
        if value.text.ends_with(char::is_whitespace) {
            self.words.extend(word.take());
        }
    }

    fn is_brace_list(&self) -> bool {
        let rest: String = self.chars[self.at..].iter().take_while(|c| !c.is_whitespace()).collect();
        let inside = rest[1..].split('}').next().unwrap_or_default();
        let is_plain = inside.chars().all(|c| c.is_alphanumeric() || ",._-".contains(c));
        rest.contains('}') && is_plain && (inside.contains(',') || inside.contains(".."))
    }

    /// Reads `NAME=VALUE`, `NAME+=VALUE` or `NAME=(WORDS)` if a command begins with it, or if a command declares names.
    fn assignment(&mut self) -> Result<bool> {
        let declares = ["export", "declare", "local", "readonly", "typeset"];
        let is_place = self.words.iter().all(|word| is_keyword(&word.text))
            || self.words.first().is_some_and(|first| declares.contains(&first.text.as_str()));
        let name: String = self.chars[self.at..].iter().take_while(|c| c.is_alphanumeric() || **c == '_').collect();
        let length = name.chars().count();
        let appends = self.peek(length) == Some('+') && self.peek(length + 1) == Some('=');
        if !is_place || !is_name(&name) || !(appends || self.peek(length) == Some('=')) {
            return Ok(false);
        }
        let line = self.line();
        self.at += length + 1 + usize::from(appends);
        let value = if self.skip("(") { Value::Array(self.list(line)?) } else { Value::Text(self.whole()?) };
        let within = |value: Value| match value {
            value if self.depth == 0 => value,
            _ => Value::Text(Word::unknown(format!(
                "the variable `{name}`, which line {line} sets only under a condition or in a loop"
            ))),
        };
        if self.variables.get(&name) != Some(&value) || appends {
            let value = within(value);
            if appends { self.variables.append(&name, value) } else { self.variables.set(&name, value) }
        }
        Ok(true)
    }

    /// The words up to `)`.
    fn list(&mut self, line: usize) -> Result<Vec<Word>> {
        let before = std::mem::take(&mut self.words);
        // Words of a list are no assignments.
        self.words.push(Word::of("("));
        loop {
            match self.peek(0) {
                None => return Err(Self::unclosed(line, "a list (")),
                Some(')') => break,
                Some('#') => {
                    while self.peek(0).is_some_and(|c| c != '\n') {
                        self.at += 1;
                    }
                }
                Some(c) if c.is_whitespace() => self.at += 1,
                Some('\\') if self.skip("\\\n") => {}
                Some(c) if "(;&|<>".contains(c) => self.at += 1,
                Some(_) => self.word()?,
            }
        }
        self.at += 1;
        Ok(std::mem::replace(&mut self.words, before).split_off(1))
    }

    /// The value of an assignment, which spaces in expansions do not split.
    fn whole(&mut self) -> Result<Word> {
        let mut word = Word::default();
        while let Some(c) = self.peek(0).filter(|c| !c.is_whitespace() && !";&|<>()".contains(*c)) {
            if c == '$' || c == '`' {
                word.push(&self.expansion()?);
            } else if let Some(part) = self.part()? {
                word.push(&part);
            }
        }
        Ok(word)
    }

    fn end_command(&mut self) -> Result<()> {
        let mut words = std::mem::take(&mut self.words);
        let next = self.line();
        let line = std::mem::replace(&mut self.line, next);
        loop {
            let first = words.first().map_or("", |word| word.text.as_str());
            match first {
                "if" | "while" | "until" | "case" | "for" | "select" | "{" => self.depth += 1,
                "fi" | "done" | "esac" | "}" => self.depth = self.depth.saturating_sub(1),
                _ if is_keyword(first) => {}
                _ => break,
            }
            if ["for", "select"].contains(&first)
                && let Some(name) = words.get(1)
            {
                let why = format!("the variable `{}` of a loop", name.text);
                self.variables.set(&name.text, Value::Text(Word::unknown(why)));
            }
            if ["for", "select", "case"].contains(&first) {
                return Ok(());
            }
            words.remove(0);
        }
        if words.is_empty() {
            return Ok(());
        }
        if let Some(text) = nested(&words) {
            self.variables.enter(line)?;
            // The text is expanded already.
            let inner = Reader::new(&text, line, self.variables).commands()?;
            self.variables.leave();
            self.commands.extend(inner.into_iter().map(|command| Command { line, ..command }));
            return Ok(());
        }
        self.commands.push(Command { words, line });
        Ok(())
    }
}

/// The text of `eval TEXT` or `bash -c TEXT`, which is a script again.
fn nested(words: &[Word]) -> Option<String> {
    let text = |word: &Word| word.unknown.is_none().then(|| word.text.clone());
    if words[0].text == "eval" {
        return words[1..].iter().map(text).collect::<Option<Vec<_>>>().map(|all| all.join(" "));
    }
    let shell = |word: &Word| ["bash", "sh", "/bin/bash", "/bin/sh"].contains(&word.text.as_str());
    let at = words.windows(2).position(|pair| shell(&pair[0]) && ["-c", "-lc"].contains(&pair[1].text.as_str()))?;
    text(words.get(at + 2)?)
}

fn is_keyword(word: &str) -> bool {
    let all = "if then else elif fi for while until do done case esac select { } ! time";
    all.split(' ').any(|keyword| keyword == word)
}
