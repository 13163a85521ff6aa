//! The table of all options of other systems, `options.tsv`, and the options of one of their commands.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::OnceLock;

const TABLE: &str = include_str!("options.tsv");

/// A system whose jobs are converted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum System {
    OpenRlhf,
    Trl,
    Verl,
}

impl System {
    pub const ALL: [Self; 3] = [Self::OpenRlhf, Self::Trl, Self::Verl];

    /// The name in the table and in arguments.
    pub fn word(self) -> &'static str {
        match self {
            Self::OpenRlhf => "openrlhf",
            Self::Trl => "trl",
            Self::Verl => "verl",
        }
    }

    /// The option as users write it.
    pub fn written(self, option: &str) -> String {
        if self == Self::Verl { option.to_owned() } else { format!("--{option}") }
    }
}

impl fmt::Display for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OpenRlhf => "OpenRLHF",
            Self::Trl => "TRL",
            Self::Verl => "verl",
        })
    }
}

/// How well a key of ours replaces an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Exact,
    Computed,
    Approximate,
    /// Nothing is lost without a key.
    Needless,
    /// Something is lost, but the same is learned.
    Lost,
    /// What is learned changes.
    Missing,
}

impl Kind {
    fn parse(word: &str) -> Self {
        match word {
            "exact" => Self::Exact,
            "computed" => Self::Computed,
            "approximate" => Self::Approximate,
            "needless" => Self::Needless,
            "lost" => Self::Lost,
            _ => Self::Missing,
        }
    }

    pub fn word(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Computed => "computed",
            Self::Approximate => "approximate",
            Self::Needless => "not needed",
            Self::Lost => "missing, learns the same",
            Self::Missing => "missing",
        }
    }
}

/// A row of the table: options that are converted alike.
#[derive(Clone, Debug)]
pub struct Row {
    pub system: System,
    /// Pairs of a command and a version.
    pub of: Vec<(&'static str, &'static str)>,
    pub options: Vec<String>,
    pub key: &'static str,
    pub how: &'static str,
    pub kind: Kind,
    pub default: &'static str,
    pub note: &'static str,
}

/// All rows, in the order of the table.
pub fn rows() -> &'static [Row] {
    static ROWS: OnceLock<Vec<Row>> = OnceLock::new();
    ROWS.get_or_init(|| TABLE.lines().filter(|line| !line.starts_with('#')).skip(1).map(row).collect())
}

fn row(line: &'static str) -> Row {
    let cells: Vec<&str> = line.split('\t').collect();
    let [system, of, options, key, how, kind, default, note] = cells[..] else { panic!("options.tsv: {line}") };
    let system = System::ALL.into_iter().find(|known| known.word() == system).expect("a system");
    let pairs = |group: &'static str| {
        let (commands, versions) = group.split_once('@').expect("commands@versions");
        commands.split(',').flat_map(move |command| versions.split(',').map(move |version| (command, version)))
    };
    let of = of.split(' ').flat_map(pairs).collect();
    Row { system, of, options: alternatives(options), key, how, kind: Kind::parse(kind), default, note }
}

/// The names that a pattern such as `a.{b,c.{d,e}}` lists.
fn alternatives(pattern: &str) -> Vec<String> {
    let Some(start) = pattern.find('{') else { return vec![pattern.to_owned()] };
    let (mut depth, mut parts, mut from, mut end) = (0, Vec::new(), start + 1, pattern.len());
    for (i, c) in pattern.char_indices().skip(start) {
        match c {
            '{' => depth += 1,
            ',' if depth == 1 => {
                parts.push(&pattern[from..i]);
                from = i + 1;
            }
            '}' if depth == 1 => {
                parts.push(&pattern[from..i]);
                end = i + 1;
                break;
            }
            '}' => depth -= 1,
            _ => {}
        }
    }
    let rest = alternatives(&pattern[end..]);
    let within = parts.into_iter().flat_map(alternatives);
    within.flat_map(|one| rest.iter().map(move |rest| format!("{}{one}{rest}", &pattern[..start]))).collect()
}

/// A command of a system in one version, such as `train_sft` of OpenRLHF 0.11.2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dialect {
    pub system: System,
    pub command: String,
    pub version: &'static str,
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.system {
            System::OpenRlhf => write!(f, "OpenRLHF {} train_{}", self.version, self.command),
            System::Trl => write!(f, "TRL {} {}", self.version, self.command),
            System::Verl => write!(f, "verl {} {}", self.version, self.command),
        }
    }
}

/// The methods of TRL, and the classes whose fields are their options. A field of an earlier class hides later ones.
const METHODS: &[(&str, &[&str])] = &[
    ("sft", &["SFT"]),
    ("dpo", &["DPO"]),
    ("kto", &["KTO"]),
    ("reward", &["Reward"]),
    ("grpo", &["GRPO", "GRPOTrainer"]),
    ("rloo", &["RLOO", "GRPOTrainer"]),
    ("ppo", &["PPO"]),
    ("prm", &["PRM"]),
    ("orpo", &["ORPO"]),
    ("cpo", &["CPO"]),
    ("gkd", &["GKD", "SFT"]),
    ("distillation", &["Distillation"]),
];

const SHARED: [&str; 4] = ["Base", "TrainingArguments", "Model", "ScriptArguments"];

/// The dialects of a system, or of one command of it, newest first.
pub fn dialects(system: System, command: Option<&str>) -> Vec<Dialect> {
    let mut all: Vec<Dialect> = Vec::new();
    if system == System::Trl {
        let version = |classes: &[&str]| {
            let of = rows()
                .iter()
                .flat_map(|row| &row.of)
                .find(|(class, version)| *class == classes[0] && *version != "older");
            of.map_or("", |(_, version)| *version)
        };
        let dialect = |(name, classes): &(&str, &[&str])| Dialect {
            system,
            command: (*name).to_owned(),
            version: version(classes),
        };
        all.extend(METHODS.iter().map(dialect));
    } else {
        for (name, version) in rows().iter().filter(|row| row.system == system).flat_map(|row| &row.of) {
            let dialect = Dialect { system, command: (*name).to_owned(), version };
            if !all.contains(&dialect) {
                all.push(dialect);
            }
        }
    }
    let number = |version: &str| version.split('.').map(|part| part.parse().unwrap_or(0)).collect::<Vec<u32>>();
    all.sort_by_key(|dialect| std::cmp::Reverse(number(dialect.version)));
    all.retain(|dialect| command.is_none_or(|command| dialect.command == command));
    all
}

/// The options of a dialect, and their rows.
pub fn options(dialect: &Dialect) -> BTreeMap<&'static str, &'static Row> {
    let mut known = BTreeMap::new();
    let mut add = |is_of: &dyn Fn(&(&str, &str)) -> bool| {
        for row in rows().iter().filter(|row| row.system == dialect.system && row.of.iter().any(is_of)) {
            for option in &row.options {
                known.entry(option.as_str()).or_insert(row);
            }
        }
    };
    if dialect.system == System::Trl {
        let own = METHODS.iter().find(|(name, _)| *name == dialect.command).map_or(&[][..], |(_, classes)| classes);
        for class in own.iter().chain(&SHARED) {
            add(&|(other, version)| other == class && *version != "older");
            add(&|(other, _)| other == class);
        }
    } else {
        add(&|(command, version)| *command == dialect.command && *version == dialect.version);
    }
    known
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::reference;

    #[test]
    fn the_table_knows_2904_options_of_the_three_systems() {
        let older = |(_, version): &&(&str, &str)| *version != "older";
        let count = |row: &Row| row.of.iter().filter(older).count() * row.options.len();
        assert_eq!(rows().iter().map(count).sum::<usize>(), 2904);
    }

    #[test]
    fn keys_of_the_table_exist() {
        let known: Vec<String> = reference::all().iter().map(reference::Entry::path).collect();
        for row in rows().iter().filter(|row| !row.key.is_empty()) {
            let keys: Vec<String> = match row.key.strip_prefix("method.") {
                Some(key) => ["sft", "dpo", "kto", "ppo", "distill"].map(|table| format!("{table}.{key}")).into(),
                None => vec![row.key.replace("lora.critic.", "lora.")],
            };
            let is_known = |key: &String| known.contains(key) || key == "reward.models.normalize";
            assert!(keys.iter().any(is_known), "{row:?}");
        }
    }

    #[test]
    fn patterns_list_their_alternatives() {
        assert_eq!(alternatives("a.{b,c.{d,e}}.f"), ["a.b.f", "a.c.d.f", "a.c.e.f"]);
    }

    #[test]
    fn no_dialect_has_an_option_twice() {
        for row in rows() {
            let other = rows().iter().filter(|other| !std::ptr::eq(*other, row) && other.system == row.system);
            for other in other.filter(|other| other.options.iter().any(|option| row.options.contains(option))) {
                let both = row.of.iter().find(|of| other.of.contains(of));
                assert!(both.is_none(), "{both:?}: {row:?} {other:?}");
            }
        }
    }
}
