//! Templates rewritten for the engine. Jinja 2 has the rules of Python, and the engine differs for some operators. Each
//! of these becomes a filter of `operators`: `a % b` is written `((a)|_mod(b))`. A block that this parser does not
//! understand is unchanged, so that the engine reports it.

use super::methods::OF_DICTS;

/// The text of a template for the engine: line ends are LF, as in Jinja, and operators are filters.
pub fn translate(template: &str) -> String {
    let text = template.replace("\r\n", "\n").replace('\r', "\n");
    let (mut out, mut at, mut is_raw) = (String::with_capacity(text.len()), 0, false);
    while let Some(start) = next_block(&text, at) {
        out.push_str(&text[at..start]);
        if text[start..].starts_with("{#") && !is_raw {
            at = text[start..].find("#}").map_or(text.len(), |end| start + end + 2);
            out.push_str(&text[start..at]);
            continue;
        }
        let Some(mut block) = Block::new(&text, start) else {
            // Within raw text, braces may be anything.
            at = start + if is_raw { 2 } else { text.len() - start };
            out.push_str(&text[start..at]);
            continue;
        };
        let name = if block.is_statement { block.text(0) } else { "" };
        if is_raw && name != "endraw" {
            at = start + 2;
            out.push_str(&text[start..at]);
            continue;
        }
        is_raw = name == "raw";
        at = block.end;
        match block.parse() {
            Some(()) => block.write(start, &mut out),
            None => out.push_str(&text[start..at]),
        }
    }
    out.push_str(&text[at..]);
    out
}

fn next_block(text: &str, from: usize) -> Option<usize> {
    let begins = |(at, _): &(usize, &str)| matches!(text.as_bytes().get(from + at + 1), Some(b'{' | b'%' | b'#'));
    text[from..].match_indices('{').find(begins).map(|(at, _)| from + at)
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Name,
    Number,
    Text,
    Sign,
}

struct Token {
    kind: Kind,
    start: usize,
    end: usize,
}

/// A `{{ ... }}` or `{% ... %}`, and the changes to its text.
struct Block<'a> {
    source: &'a str,
    is_statement: bool,
    tokens: Vec<Token>,
    /// The index of the next token.
    at: usize,
    /// The levels of groups and conditions at the next token.
    depth: usize,
    /// The position after the block.
    end: usize,
    /// Ranges of the source and what replaces them. An empty range is an insertion.
    edits: Vec<(usize, usize, String)>,
}

const LONG_SIGNS: [&str; 6] = ["**", "//", "==", "!=", "<=", ">="];

/// Levels of groups and conditions. The engine rejects templates with more.
const DEPTH_MAX: usize = 200;

/// Words that end an expression.
const WORDS: [&str; 7] = ["if", "else", "and", "or", "in", "is", "not"];

impl<'a> Block<'a> {
    /// Splits the block at `start` into tokens. None if it does not end.
    fn new(source: &'a str, start: usize) -> Option<Self> {
        let is_statement = source[start..].starts_with("{%");
        let end_sign = if is_statement { "%}" } else { "}}" };
        let bytes = source.as_bytes();
        let mut at = start + 2 + usize::from(matches!(bytes.get(start + 2), Some(b'-' | b'+')));
        let (mut tokens, mut depth): (Vec<Token>, usize) = (Vec::new(), 0);
        loop {
            let rest = &source[at..];
            let first = rest.chars().next()?;
            if first.is_whitespace() {
                at += first.len_utf8();
                continue;
            }
            let marked = usize::from(rest.starts_with(['-', '+']));
            if depth == 0 && rest[marked..].starts_with(end_sign) {
                let end = at + marked + end_sign.len();
                return Some(Self { source, is_statement, tokens, at: 0, depth: 0, end, edits: Vec::new() });
            }
            let after_dot = tokens.last().is_some_and(|token| &source[token.start..token.end] == ".");
            let (kind, length) = match first {
                '\'' | '"' => (Kind::Text, text_length(rest, first)?),
                _ if first.is_alphabetic() || first == '_' => (Kind::Name, name_length(rest)),
                _ if first.is_ascii_digit() => (Kind::Number, number_length(rest, after_dot)),
                _ => {
                    match first {
                        '(' | '[' | '{' => depth += 1,
                        ')' | ']' | '}' => depth = depth.checked_sub(1)?,
                        _ => {}
                    }
                    let long = LONG_SIGNS.iter().any(|sign| rest.starts_with(sign));
                    (Kind::Sign, if long { 2 } else { first.len_utf8() })
                }
            };
            tokens.push(Token { kind, start: at, end: at + length });
            at += length;
        }
    }

    fn text(&self, at: usize) -> &'a str {
        self.tokens.get(at).map_or("", |token| &self.source[token.start..token.end])
    }

    fn is_kind(&self, at: usize, kind: Kind) -> bool {
        self.tokens.get(at).is_some_and(|token| token.kind == kind)
    }

    /// Whether the next token is `text`, and not a string.
    fn is_next(&self, text: &str) -> bool {
        self.text(self.at) == text && !self.is_kind(self.at, Kind::Text)
    }

    fn eat(&mut self, text: &str) -> bool {
        let found = self.is_next(text);
        self.at += usize::from(found);
        found
    }

    /// The position at which the next token starts.
    fn start(&self) -> Option<usize> {
        self.tokens.get(self.at).map(|token| token.start)
    }

    /// The position at which the last token ended.
    fn last_end(&self) -> usize {
        self.tokens[self.at - 1].end
    }

    fn insert(&mut self, at: usize, text: &str) {
        self.edits.push((at, at, text.to_owned()));
    }

    fn replace(&mut self, token: usize, text: &str) {
        let Token { start, end, .. } = self.tokens[token];
        self.edits.push((start, end, text.to_owned()));
    }

    /// Turns `left op right` into a filter. `left` starts at `start`, and `right` ended with the last token.
    fn filter(&mut self, start: usize, op: std::ops::Range<usize>, name: &str) {
        self.insert(start, "((");
        self.replace(op.start, &format!(")|{name}("));
        for token in op.skip(1) {
            self.replace(token, " ");
        }
        self.insert(self.last_end(), "))");
    }

    fn write(mut self, start: usize, out: &mut String) {
        // Insertions after a token precede the replacement of the next one.
        self.edits.sort_by_key(|(from, to, _)| (*from, from != to));
        let mut at = start;
        for (from, to, text) in &self.edits {
            out.push_str(&self.source[at..*from]);
            out.push_str(text);
            at = *to;
        }
        out.push_str(&self.source[at..self.end]);
    }

    fn parse(&mut self) -> Option<()> {
        if !self.is_statement {
            return self.tuple(true).and_then(|()| (self.at == self.tokens.len()).then_some(()));
        }
        let name = self.text(0);
        self.at = 1;
        match name {
            // Both have a scope of their own.
            "generation" => self.replace(0, "with"),
            "endgeneration" => self.replace(0, "endwith"),
            "for" => {
                while !self.eat("in") {
                    self.start()?;
                    self.at += 1;
                }
                let start = self.start()?;
                self.tuple(false)?;
                self.insert(start, "(");
                self.insert(self.last_end(), ")|_each");
            }
            "set" => {
                while self.start().is_some() && !self.eat("=") {
                    self.at += 1;
                }
            }
            _ => {}
        }
        self.expressions()
    }

    /// Expressions with anything between them, to the end.
    fn expressions(&mut self) -> Option<()> {
        while self.start().is_some() {
            if self.begins_expression() { self.ternary(true)? } else { self.at += 1 }
        }
        Some(())
    }

    fn begins_expression(&self) -> bool {
        match self.tokens.get(self.at).map(|token| token.kind) {
            Some(Kind::Name) => self.is_next("not") || !WORDS.contains(&self.text(self.at)),
            Some(Kind::Sign) => matches!(self.text(self.at), "(" | "[" | "{" | "-" | "+"),
            other => other.is_some(),
        }
    }

    fn tuple(&mut self, with_if: bool) -> Option<()> {
        let start = self.start()?;
        self.ternary(with_if)?;
        let is_tuple = self.is_next(",");
        while self.eat(",") && self.begins_expression() {
            self.ternary(with_if)?;
        }
        if is_tuple {
            self.insert(start, "(");
            self.insert(self.last_end(), ")");
        }
        Some(())
    }

    fn ternary(&mut self, with_if: bool) -> Option<()> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return None;
        }
        self.logic()?;
        while with_if && self.eat("if") {
            self.logic()?;
            if self.eat("else") {
                self.ternary(true)?;
            }
        }
        self.depth -= 1;
        Some(())
    }

    /// `or`, `and` and `not`, which the engine evaluates as Jinja does.
    fn logic(&mut self) -> Option<()> {
        loop {
            while self.eat("not") {}
            self.comparison()?;
            if !self.eat("or") && !self.eat("and") {
                return Some(());
            }
        }
    }

    fn comparison(&mut self) -> Option<()> {
        let start = self.start()?;
        self.sum()?;
        let mut found = Vec::new();
        loop {
            let op = self.at;
            let name = match self.text(op) {
                "<" => "_lt",
                "<=" => "_le",
                ">" => "_gt",
                ">=" => "_ge",
                "in" => "_in",
                "not" if self.text(op + 1) == "in" => "_notin",
                "==" | "!=" => "",
                _ => break,
            };
            self.at += 1 + usize::from(name == "_notin");
            found.push((op..self.at, name));
            self.sum()?;
        }
        // A chain (`a < b < c`) evaluates `b` once, as the engine does.
        if let [(op, name)] = &found[..]
            && !name.is_empty()
        {
            self.filter(start, op.clone(), name);
        }
        Some(())
    }

    fn sum(&mut self) -> Option<()> {
        self.concatenation()?;
        while self.eat("+") || self.eat("-") {
            self.concatenation()?;
        }
        Some(())
    }

    fn concatenation(&mut self) -> Option<()> {
        let start = self.start()?;
        self.product()?;
        let first = self.at;
        while self.eat("~") {
            let op = self.at - 1;
            self.replace(op, if op == first { ")|_cat(" } else { "," });
            self.product()?;
        }
        if self.at > first {
            self.insert(start, "((");
            self.insert(self.last_end(), "))");
        }
        Some(())
    }

    fn product(&mut self) -> Option<()> {
        let start = self.start()?;
        self.power()?;
        loop {
            let op = self.at;
            if self.eat("%") {
                self.power()?;
                self.filter(start, op..op + 1, "_mod");
            } else if self.eat("*") || self.eat("/") || self.eat("//") {
                self.power()?;
            } else {
                return Some(());
            }
        }
    }

    fn power(&mut self) -> Option<()> {
        self.unary()?;
        while self.eat("**") {
            self.unary()?;
        }
        Some(())
    }

    fn unary(&mut self) -> Option<()> {
        while self.is_next("-") || self.is_next("+") {
            if self.is_next("+") {
                self.replace(self.at, " ");
            }
            self.at += 1;
        }
        self.postfix()?;
        self.filters()
    }

    /// A name, a literal or a group, with attributes, subscripts and calls.
    fn postfix(&mut self) -> Option<()> {
        let start = self.start()?;
        if !self.begins_expression() || self.is_next("-") || self.is_next("+") {
            return None;
        }
        match self.text(self.at) {
            "(" | "[" | "{" if self.is_kind(self.at, Kind::Sign) => self.group()?,
            _ => self.at += 1,
        }
        while self.is_kind(self.at, Kind::Text) && self.is_kind(self.at - 1, Kind::Text) {
            self.at += 1;
        }
        loop {
            let op = self.at;
            if self.eat(".") {
                let name = self.text(self.at);
                self.at += 1;
                if OF_DICTS.contains(&name) && !self.is_next("(") {
                    // As in Python, an attribute of a dict is its method, even if it has such a key.
                    self.insert(start, "((");
                    self.replace(op, ")|");
                    self.replace(op + 1, &format!("_attr('{name}'))"));
                }
            } else if self.is_next("(") {
                self.group()?;
            } else if self.is_next("[") {
                if self.has_slice() { self.slice(start)? } else { self.group()? }
            } else {
                return Some(());
            }
        }
    }

    /// Everything to the bracket that closes the one at the next token.
    fn group(&mut self) -> Option<()> {
        self.at += 1;
        loop {
            if self.eat(")") || self.eat("]") || self.eat("}") {
                return Some(());
            }
            self.start()?;
            if self.begins_expression() { self.ternary(true)? } else { self.at += 1 }
        }
    }

    fn has_slice(&self) -> bool {
        let mut depth = 0;
        for at in self.at..self.tokens.len() {
            match self.text(at) {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => depth -= 1,
                ":" if depth == 1 => return true,
                _ => {}
            }
            if depth == 0 {
                return false;
            }
        }
        false
    }

    fn slice(&mut self, start: usize) -> Option<()> {
        self.insert(start, "((");
        self.replace(self.at, ")|_slice(");
        self.at += 1;
        let mut is_given = false;
        loop {
            let at = self.start()?;
            if self.is_next(":") || self.is_next("]") {
                if !is_given {
                    self.insert(at, "none");
                }
                is_given = false;
                let is_end = self.is_next("]");
                self.replace(self.at, if is_end { "))" } else { "," });
                self.at += 1;
                if is_end {
                    return Some(());
                }
            } else {
                self.ternary(true)?;
                is_given = true;
            }
        }
    }

    /// Filters and tests.
    fn filters(&mut self) -> Option<()> {
        loop {
            if self.eat("|") {
                self.at += 1;
                while self.eat(".") {
                    self.at += 1;
                }
                if self.is_next("(") {
                    self.group()?;
                }
            } else if self.eat("is") {
                self.eat("not");
                self.at += 1;
                let is_word = self.is_kind(self.at, Kind::Name) && WORDS.contains(&self.text(self.at));
                let is_sign = self.is_next("-") || self.is_next("+");
                if self.is_next("(") {
                    self.group()?;
                } else if self.begins_expression() && !is_word && !is_sign {
                    self.postfix()?;
                }
            } else {
                return Some(());
            }
        }
    }
}

fn text_length(rest: &str, quote: char) -> Option<usize> {
    let mut is_escaped = false;
    let end = rest[1..].char_indices().find(|(_, c)| {
        let ends = *c == quote && !is_escaped;
        is_escaped = *c == '\\' && !is_escaped;
        ends
    });
    end.map(|(at, _)| at + 2)
}

fn name_length(rest: &str) -> usize {
    rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len())
}

/// The length of a number. After a dot it is an index, as in `list.0.1`.
fn number_length(rest: &str, is_index: bool) -> usize {
    let mut length = name_length(rest);
    let bytes = rest.as_bytes();
    if !is_index && bytes.get(length) == Some(&b'.') && bytes.get(length + 1).is_some_and(u8::is_ascii_digit) {
        length += 1 + name_length(&rest[length + 1..]);
    }
    let is_exponent = rest[..length].ends_with(['e', 'E']) && !rest.starts_with("0x");
    if is_exponent && matches!(bytes.get(length), Some(b'-' | b'+')) {
        length += 1 + name_length(&rest[length + 1..]);
    }
    length
}
