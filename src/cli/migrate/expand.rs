//! Expansions of a shell, which begin with `$` or with a backquote.

use super::shell::Reader;
use super::variables::{Value, arithmetic};
use super::words::{Word, is_name};
use crate::error::Result;

impl Reader<'_> {
    /// Whether `${NAME[@]}`, `$@` or the like follows.
    pub(super) fn is_whole_array(&self) -> bool {
        let rest: String = (0..64).map_while(|i| self.peek(i)).collect();
        if rest.starts_with("$@") || rest.starts_with("$*") || rest.starts_with("${@}") {
            return true;
        }
        let name = rest.strip_prefix("${").unwrap_or_default();
        let index = name.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_');
        index.len() < name.len() && (index.starts_with("[@]}") || index.starts_with("[*]}"))
    }

    /// The words of an array. The arguments of the script are none.
    pub(super) fn array(&mut self) -> Vec<Word> {
        if self.skip("$@") || self.skip("$*") || self.skip("${@}") {
            return Vec::new();
        }
        self.skip("${");
        let name = self.name();
        let _ = self.skip("[@]}") || self.skip("[*]}");
        self.variables.get(&name).map_or_else(|| vec![unset(&name)], Value::words)
    }

    fn name(&mut self) -> String {
        let mut name = String::new();
        while let Some(c) = self.peek(0).filter(|c| c.is_alphanumeric() || *c == '_') {
            name.push(c);
            self.skip(&c.to_string());
        }
        name
    }

    /// The value of an expansion with `$` or of a command substitution with `` ` ``.
    pub(super) fn expansion(&mut self) -> Result<Word> {
        let line = self.line();
        if self.skip("$((") {
            let text = self.until("))", line, "$((")?;
            return Ok(arithmetic(&text, self.variables).map_or_else(
                || Word::unknown(format!("the arithmetic `$(({}))`", text.trim())),
                |value| Word::of(value.to_string()),
            ));
        }
        if self.skip("$(") {
            return self.cat().map_or_else(|| self.substitution_text(line), Ok);
        }
        if self.skip("`") {
            let text = self.until("`", line, "`")?;
            return Ok(Word::unknown(format!("the command substitution `{}`", text.trim())));
        }
        if self.skip("${") {
            let text = self.braces(line)?;
            return self.parameter(&text, line);
        }
        if self.skip("$'") {
            let text = self.until("'", line, "a quote '")?;
            return Ok(Word::of(text.replace("\\n", "\n").replace("\\t", "\t").replace("\\\\", "\\")));
        }
        self.skip("$");
        match self.peek(0) {
            Some(c) if c.is_ascii_digit() || "?#$!-".contains(c) => {
                self.skip(&c.to_string());
                Ok(Word::unknown(format!("the parameter `${c}`")))
            }
            Some(c) if c.is_alphabetic() || c == '_' => {
                let name = self.name();
                Ok(self.variables.get(&name).map_or_else(|| unset(&name), |value| join(&value.words())))
            }
            _ => Ok(Word::of("$")),
        }
    }

    /// `$(cat <<EOF ... EOF)`, whose value is in the text.
    fn cat(&mut self) -> Option<Word> {
        let rest: String = (0..).map_while(|i| self.peek(i)).collect();
        let after = rest.trim_start().strip_prefix("cat")?.trim_start().strip_prefix("<<")?.trim_start_matches('-');
        let (mark, body) = after.split_once('\n')?;
        let mark = mark.trim();
        let end = mark.trim_matches(['\'', '"']);
        let stop = body.lines().position(|line| line.trim() == end)?;
        let inside = body.lines().take(stop).collect::<Vec<_>>().join("\n");
        let used = rest.len() - body.len() + body.lines().take(stop + 1).map(|line| line.len() + 1).sum::<usize>();
        let close = rest.get(used..)?.find(')')?;
        let first = self.line() + 1;
        let consumed: String = rest[..=used + close].to_owned();
        self.skip(&consumed);
        let text = inside.trim_end_matches('\n');
        if mark == end { Reader::new(text, first, self.variables).quoted(None).ok() } else { Some(Word::of(text)) }
    }

    fn substitution_text(&mut self, line: usize) -> Result<Word> {
        let text = self.parentheses(line)?;
        let short: String = text.trim().chars().take(60).collect();
        Ok(Word::unknown(format!("the command substitution `$({short})`")))
    }

    pub(super) fn substitution(&mut self, _what: &str) -> Result<()> {
        let line = self.line();
        self.skip("(");
        self.parentheses(line).map(drop)
    }

    /// The text up to the closing parenthesis.
    fn parentheses(&mut self, line: usize) -> Result<String> {
        let (mut depth, mut text, mut quote) = (1, String::new(), None);
        loop {
            let c = self.peek(0).ok_or_else(|| Self::unclosed(line, "$("))?;
            self.skip(&c.to_string());
            match (quote, c) {
                (None, '\'' | '"') => quote = Some(c),
                (Some(open), c) if open == c => quote = None,
                (None, '(') => depth += 1,
                (None, ')') => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return Ok(text);
            }
            text.push(c);
        }
    }

    fn until(&mut self, end: &str, line: usize, what: &str) -> Result<String> {
        let mut text = String::new();
        while !self.skip(end) {
            let c = self.peek(0).ok_or_else(|| Self::unclosed(line, what))?;
            self.skip(&c.to_string());
            text.push(c);
        }
        Ok(text)
    }

    /// The text up to the closing brace, with braces inside.
    fn braces(&mut self, line: usize) -> Result<String> {
        let (mut depth, mut text) = (1, String::new());
        loop {
            let c = self.peek(0).ok_or_else(|| Self::unclosed(line, "${"))?;
            self.skip(&c.to_string());
            depth += match c {
                '{' => 1,
                '}' => -1,
                _ => 0,
            };
            if depth == 0 {
                return Ok(text);
            }
            text.push(c);
        }
    }

    /// The value of `${TEXT}`: a name, perhaps with a default.
    fn parameter(&mut self, text: &str, line: usize) -> Result<Word> {
        let name: String = text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        let rest = &text[name.len()..];
        let value = self.variables.get(&name).map(|value| join(&value.words()));
        let is_empty = value.as_ref().is_none_or(|word| word.text.is_empty() && word.unknown.is_none());
        let operator = [":-", ":=", ":+", ":?", "-", "=", "+"].into_iter().find(|operator| rest.starts_with(operator));
        self.variables.enter(line)?;
        let mut default = |operator: &str| Reader::new(&rest[operator.len()..], line, self.variables).quoted(None);
        let made = match (rest, operator) {
            ("", _) if is_name(&name) => Ok(value.unwrap_or_else(|| unset(&name))),
            ("", _) => Ok(Word::unknown(format!("the parameter `${{{name}}}`"))),
            (_, Some(operator @ (":-" | ":=" | "-" | "="))) => {
                let is_unset = if operator.starts_with(':') { is_empty } else { value.is_none() };
                let word = if is_unset { default(operator)? } else { value.unwrap_or_default() };
                let unquoted = word.text.trim_matches(['"', '\'']);
                Ok(Word { text: unquoted.to_owned(), ..word })
            }
            (_, Some(operator @ (":+" | "+"))) => {
                if is_empty {
                    Ok(Word::default())
                } else {
                    default(operator)
                }
            }
            (_, Some(":?")) => Ok(value.unwrap_or_else(|| unset(&name))),
            ("##*/", _) if !is_empty => {
                let word = value.unwrap_or_default();
                Ok(Word { text: word.text.rsplit('/').next().unwrap_or_default().to_owned(), ..word })
            }
            _ => Ok(Word::unknown(format!("the expansion `${{{text}}}`"))),
        };
        self.variables.leave();
        made
    }
}

fn unset(name: &str) -> Word {
    Word::unknown(format!("the variable `{name}`, which the script does not set"))
}

fn join(words: &[Word]) -> Word {
    let text = words.iter().map(|word| word.text.as_str()).collect::<Vec<_>>().join(" ");
    Word { text, unknown: words.iter().find_map(|word| word.unknown.clone()) }
}

#[cfg(test)]
mod tests {
    use super::super::shell::{Command, commands};

    /// The words of the last command, without a mistake.
    fn words(script: &str) -> Vec<String> {
        let all = commands(script).unwrap();
        let Command { words, .. } = all.last().unwrap();
        words.iter().map(|word| word.unknown.clone().map_or(word.text.clone(), |why| format!("?{why}"))).collect()
    }

    #[test]
    fn quotes_continuations_and_comments_separate_words_as_a_shell_does() {
        assert_eq!(words("run 'a b' \"c d\"\\ e \\\n  f # g\n"), ["run", "a b", "c d e", "f"]);
        assert_eq!(words("run --x='{\"a\": 1}' $'q\\nr'"), ["run", "--x={\"a\": 1}", "q\nr"]);
        assert_eq!(words("a; b && c | run d > log 2>&1 &"), ["run", "d"]);
        assert_eq!(words("A=1 run x"), ["run", "x"]);
    }

    #[test]
    fn variables_arrays_and_arithmetic_have_the_values_that_the_script_sets() {
        assert_eq!(words("A='x y'\nrun $A \"$A\" ${A}z"), ["run", "x", "y", "x y", "x", "yz"]);
        assert_eq!(words("export N=4 M=2\nrun $((N * (M + 1) - 2)) ${K:-$N} ${N:-7}"), ["run", "10", "4", "4"]);
        assert_eq!(words("A=(a \"b c\" # d\n e)\nA+=(f)\nrun \"${A[@]}\""), ["run", "a", "b c", "e", "f"]);
        assert_eq!(words("P=/a/b.c\nS=x\nS+=y\nrun ${P##*/} $S $@"), ["run", "b.c", "xy"]);
    }

    #[test]
    fn here_documents_are_values_of_variables() {
        assert_eq!(words("B=2\nread -r -d '' X <<EOF\n a \\\n $B\nEOF\nrun $X"), ["run", "a", "2"]);
        assert_eq!(words("X=$(cat <<'EOF'\nb $C\nEOF\n)\nrun \"$X\""), ["run", "b $C"]);
        assert_eq!(words("C='run \"a b\" c'\neval \"$C\""), ["run", "a b", "c"]);
        assert_eq!(words("srun -N 2 bash -c \"run x\""), ["run", "x"]);
    }

    #[test]
    fn parts_whose_value_the_text_does_not_give_are_unknown() {
        let why = |script: &str| words(script).into_iter().find(|word| word.starts_with('?')).unwrap_or_default();
        assert!(why("run $(date +%s)").contains("`$(date +%s)`"));
        assert!(why("run $NONE").contains("`NONE`"));
        assert!(why("run ${1}").contains("parameter"));
        assert!(why("run ${A%.x}").contains("expansion"));
        assert!(why("if a; then X=1; fi\nrun $X").contains("condition"));
        assert!(why("run $((RANDOM % 3))").contains("arithmetic"));
        assert!(commands(&"${A:-".repeat(100)).is_err());
    }
}
