//! README and the manual's pages name only keys, verbs and options that there are.

use super::none;
use super::source::{File, files, root};
use regex::Regex;
use rlhf_hpc::cli::migrate;
use rlhf_hpc::config::{self, Config, reference};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;

/// Options of other programs.
const FOREIGN: &str = "--bind-to --map-by --mpi --cpus-per-task --gpus-per-node --gpus-per-task --gpu-bind --exclusive --mem --nodes \
                       --ntasks-per-node --requeue --signal --open-mode --nv --sharens --bind --release --locked --version --array --dependency --parsable";

fn pages() -> Vec<File> {
    files("src/cli/help", &[".md"])
}

fn topic(page: &File) -> &str {
    page.name.trim_start_matches("src/cli/help/").trim_end_matches(".md")
}

fn texts() -> Vec<File> {
    let readme = File { name: "README.md".to_owned(), text: fs::read_to_string(root().join("README.md")).unwrap() };
    std::iter::once(readme).chain(pages()).collect()
}

fn printed(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_rlhf-hpc")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn found<'a>(pattern: &str, text: &'a str) -> Vec<&'a str> {
    Regex::new(pattern).unwrap().captures_iter(text).map(|found| found.get(1).unwrap().as_str()).collect()
}

#[test]
fn help_lists_every_page_and_prints_it() {
    let listed = printed(&["help"]);
    for page in pages() {
        let topic = topic(&page);
        let title = page.text.lines().next().unwrap().trim_start_matches("# ");
        assert!(
            listed.lines().any(|line| line.trim().starts_with(topic) && line.ends_with(title)),
            "{topic} in\n{listed}"
        );
        assert_eq!(printed(&["help", topic]).trim(), page.text.trim());
        // Tables of options are longer.
        let most = if topic.starts_with("from-") { 250 } else { 200 };
        assert!(page.text.contains("\n## Read next\n") && page.lines().len() <= most, "{topic}");
    }
}

#[test]
fn the_pages_name_only_existing_keys() {
    let reference = fs::read_to_string(root().join("jobs/reference.toml")).unwrap();
    let (mut table, mut keys, mut tables) = (String::new(), BTreeSet::new(), BTreeSet::new());
    let name_of = Regex::new(r"^\[+([a-z_.]+)\]+$").unwrap();
    for line in reference.lines().map(|line| line.trim_start_matches("# ")) {
        // Comments may begin with brackets, too.
        if let Some(name) = name_of.captures(line) {
            table = name[1].to_owned();
            keys.insert(table.clone());
            tables.insert(table.split('.').next().unwrap().to_owned());
        } else if let Some((key, _)) = line.split_once(" = ") {
            keys.insert(format!("{table}.{key}"));
        }
    }
    let tables = Vec::from_iter(tables).join("|");
    let named = format!(r"(?:^|[^\w./-])((?:{tables})(?:\.[a-z_]+)+)");
    let is_file = |key: &str| key.split('.').any(|part| ["py", "jsonl", "json", "toml"].contains(&part));
    // The page for users of verl has its names, also without the table of their section, and a column of its rows.
    let verl = printed(&["migrate", "--options", "verl"]);
    let is_option = |key: &str| {
        let mut names = verl.lines().filter_map(|line| line.split('\t').next());
        names.any(|name| name == key || name.ends_with(&format!(".{key}")))
    };
    let is_of_verl = |name: &str, key: &str| {
        let is_known = || key == "reward_model.ground_truth" || is_option(key) || !reference::find(key).is_empty();
        name.ends_with("from-verl.md") && is_known()
    };
    none(texts().into_iter().flat_map(|File { name, text }| {
        let is_known = |key: &str| keys.contains(key) || is_file(key) || is_of_verl(&name, key);
        let unknown = found(&named, &text).into_iter().filter(|key| !is_known(key));
        unknown.map(|key| format!("{name}: {key} is not a key")).collect::<Vec<_>>()
    }));
}

#[test]
fn the_jobs_of_the_pages_are_toml_of_known_keys() {
    for File { name, text } in texts() {
        for job in found("(?s)```toml\n(.*?)```", &text) {
            // The base is not there.
            let own: String = job
                .lines()
                .filter(|line| !line.starts_with("base = "))
                .fold(String::new(), |text, line| text + line + "\n");
            toml::from_str::<Config>(&own).unwrap_or_else(|error| panic!("{name}: {error}\n{job}"));
        }
    }
}

#[test]
fn the_pages_name_only_existing_verbs_options_and_pages() {
    let help = printed(&["--help"]);
    let verbs = found(r"(?m)^  ([a-z]+) ", help.split("Examples:").next().unwrap());
    let options = |text: &str| found(r"(--[a-z][a-z-]*)", text).into_iter().map(str::to_owned).collect::<BTreeSet<_>>();
    let of_verb = |verb: &&str| options(&printed(&[verb, "--help"]));
    let known: Vec<BTreeSet<String>> = verbs.iter().filter(|verb| **verb != "help").map(of_verb).collect();
    let topics: Vec<String> = pages().iter().map(|page| topic(page).to_owned()).collect();
    let mut faults = Vec::new();
    for File { name, text } in texts() {
        let text = text.replace("\\\n", " ");
        // Between backticks, or an indented line of its own.
        for call in found(r"(?m)(?:`|^    .*?)rlhf-hpc ([a-z]+(?: [^`|>\n]*)?)[`|>\n]", &text) {
            let (verb, rest) = call.split_once(' ').unwrap_or((call, ""));
            match verbs.iter().filter(|verb| **verb != "help").position(|known| *known == verb) {
                Some(i) => {
                    faults.extend(options(rest).difference(&known[i]).map(|o| format!("{name}: {verb} has no {o}")));
                }
                None if verb == "help"
                    && (topics.iter().any(|topic| topic == rest) || ["TOPIC", ""].contains(&rest)) => {}
                None => faults.push(format!("{name}: no {call}")),
            }
        }
        let is_known = |option: &String| {
            known.iter().any(|of| of.contains(option)) || FOREIGN.split_whitespace().any(|other| other == option)
        };
        let named = if name.contains("/from-") { BTreeSet::new() } else { options(&text) };
        faults.extend(named.iter().filter(|option| !is_known(option)).map(|option| format!("{name}: no {option}")));
    }
    none(faults);
}

/// A line of the pages for users of other systems: a word of theirs in a job is an error that names our key, or one of our keys
/// if the word has several meanings. A heading "Keys of TABLE" names the table of the words below it.
#[test]
fn a_key_of_another_system_leads_to_a_key_that_the_page_names() {
    let (mut faults, mut rows) = (Vec::new(), 0);
    for page in pages().iter().filter(|page| page.name.contains("/from-")) {
        let (mut table, mut meanings) = (String::new(), BTreeMap::<String, Vec<&str>>::new());
        // Options that a job file cannot have, or that have no key.
        let mut is_apart = false;
        for line in page.lines() {
            let begins = line.starts_with("Only in newer") || line.starts_with("## Options without a key");
            is_apart = begins || (is_apart && !line.starts_with("## "));
            if line.starts_with("## ") {
                table = found("^## Keys of `(.*)`", line).first().map_or_else(String::new, |table| format!("{table}."));
            }
            let Some((words, key)) = line.split_once(": `").filter(|_| line.starts_with("- `") && !is_apart) else {
                continue;
            };
            let keys = found(r"^([a-z]+\.[a-z_.]+)`", key);
            for word in found("`-*([A-Za-z_0-9.]+)`", words).into_iter().filter(|_| !keys.is_empty()) {
                rows += 1;
                meanings.entry(format!("{table}{word}")).or_default().extend(&keys);
            }
        }
        for (word, keys) in meanings {
            let error = config::parse(&format!("{word} = 1\n"), &[]).unwrap_err();
            let message = format!("{} {}", error.message, error.hint.unwrap_or_default());
            if !keys.iter().any(|key| *key == word || message.contains(&format!("`{key}`"))) {
                faults.push(format!("{}: {word} is not {keys:?}: {message}", page.name));
            }
        }
    }
    none(faults);
    assert!(rows > 200, "only {rows} words");
}

/// `RLHF_WRITE_PAGES=1` writes them.
#[test]
fn the_tables_of_the_pages_for_other_systems_are_made_from_the_table_of_options() {
    let mut faults = Vec::new();
    for page in pages().iter().filter(|page| page.name.contains("/from-")) {
        let filled = migrate::pages::filled(topic(page).trim_start_matches("from-"), &page.text);
        if std::env::var_os("RLHF_WRITE_PAGES").is_some() {
            fs::write(root().join(&page.name), filled).unwrap();
        } else if filled != page.text {
            faults.push(format!("{}: run this test with RLHF_WRITE_PAGES=1", page.name));
        }
    }
    none(faults);
}
