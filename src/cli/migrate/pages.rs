//! The options of a system as text: all of them, and the lists of its page in the manual.

use super::table::{self, Kind, Row, System};
use std::fmt::Write as _;

/// Commands of OpenRLHF that are verbs here.
const VERBS: [&str; 4] = ["batch_inference", "interactive_chat", "serve_rm", "lora_combiner"];

/// A line for each option: our key, how well it replaces the option, a note, and the commands.
pub fn all(system: System) -> String {
    let mut text = String::from("# option\tour key\tkind\tnote\tcommands\n");
    for row in table::rows().iter().filter(|row| row.system == system) {
        let of: Vec<String> = row.of.iter().map(|(command, version)| format!("{command}@{version}")).collect();
        for option in &row.options {
            let key = if row.key.is_empty() { "-" } else { row.key };
            let written = system.written(option);
            let _ = writeln!(text, "{written}\t{key}\t{}\t{}\t{}", row.kind.word(), row.note, of.join(","));
        }
    }
    text
}

/// The page with the lists of its sections. The body of a heading "Keys of `TABLE`" is made from the options in this table
/// of verl, that of "Options for `A`, `B`" from the options whose key is in these tables of ours, and that of "Options
/// without a key" from the others.
pub fn filled(system: &str, page: &str) -> String {
    let system = System::ALL.into_iter().find(|known| known.word() == system).expect("a system");
    let mut text = String::new();
    let mut is_made = false;
    for line in page.lines() {
        if line.starts_with("## ") {
            is_made = false;
        }
        if is_made {
            continue;
        }
        text.push_str(line);
        text.push('\n');
        if let Some(body) = section(system, line) {
            is_made = true;
            text.push('\n');
            text.push_str(&body);
            text.push('\n');
        }
    }
    text.trim_end().to_owned() + "\n"
}

fn section(system: System, heading: &str) -> Option<String> {
    let names: Vec<&str> = heading.split('`').skip(1).step_by(2).collect();
    if heading.starts_with("## Keys of ") {
        return Some(keys(
            system,
            &|row, option| is_shown(row) && option.strip_prefix(names[0]).is_some_and(|rest| rest.starts_with('.')),
            names[0],
        ));
    }
    if heading.starts_with("## Options for ") {
        return Some(keys(
            system,
            &|row, _| is_shown(row) && names.contains(&row.key.split('.').next().unwrap_or_default()),
            "",
        ));
    }
    heading.starts_with("## Options without a key").then(|| others(system))
}

fn is_shown(row: &Row) -> bool {
    !row.key.is_empty() && row.kind <= Kind::Approximate && !row.key.starts_with("optim.critic.")
}

/// A line for each key and note: the options, the key, the note. A table would have no column for so long names. Options
/// with a dot in their names follow, because a job file cannot have them as keys.
fn keys(system: System, is_in: &dyn Fn(&Row, &str) -> bool, within: &str) -> String {
    let mut lines: Vec<(&Row, Vec<String>)> = Vec::new();
    for row in table::rows().iter().filter(|row| row.system == system) {
        for option in row.options.iter().filter(|option| is_in(row, option)) {
            let option = option.strip_prefix(within).unwrap_or(option).trim_start_matches('.').to_owned();
            let same = lines.iter_mut().find(|(known, _)| known.key == row.key && known.note == row.note);
            match same {
                Some((_, options)) if options.contains(&option) => {}
                Some((_, options)) => options.push(option),
                None => lines.push((row, vec![option])),
            }
        }
    }
    let written = |options: &[&String]| {
        let all: Vec<String> = options.iter().take(4).map(|option| format!("`{}`", system.written(option))).collect();
        all.join(", ") + if options.len() > 4 { " and others" } else { "" }
    };
    let (mut text, mut newer) = (String::new(), String::new());
    for (row, options) in &lines {
        let is_flat = |option: &&String| system == System::Verl || !option.contains('.');
        let flat: Vec<&String> = options.iter().filter(is_flat).collect();
        let dotted: Vec<&String> = options.iter().filter(|option| !is_flat(option)).collect();
        let method = if system == System::Trl { "sft." } else { "ppo." };
        let key = row.key.replace("method.beta", "dpo.beta").replace("method.", method);
        let note = if row.note.is_empty() { String::new() } else { format!(": {}", row.note) };
        let (list, shown) = if flat.is_empty() { (&mut newer, &dotted) } else { (&mut text, &flat) };
        let _ = writeln!(list, "- {}: `{key}`{note}", written(shown));
    }
    if !newer.is_empty() {
        let _ = write!(text, "\nOnly in newer versions:\n\n{newer}");
    }
    text
}

/// A line for each reason: the options that need no key, or have none. Options of profilers and engines are left out.
fn others(system: System) -> String {
    let mut lines: Vec<(Kind, &str, Vec<&str>)> = Vec::new();
    for row in table::rows().iter().filter(|row| row.system == system && !row.note.is_empty()) {
        let is_of_job = row.of.iter().any(|(command, _)| !VERBS.contains(command));
        // verl has hundreds of options of engines and profilers.
        let is_of_job = is_of_job && (system != System::Verl || row.kind >= Kind::Lost);
        if is_of_job && row.key.is_empty() && !["not needed here", "always so here"].contains(&row.note) {
            let flat =
                row.options.iter().map(String::as_str).filter(|option| system == System::Verl || !option.contains('.'));
            match lines.iter_mut().find(|(_, note, _)| *note == row.note) {
                Some((.., options)) => options.extend(flat),
                None => lines.push((row.kind, row.note, flat.collect())),
            }
        }
    }
    let mut text = String::new();
    for (_, note, mut options) in lines {
        options.dedup();
        let shown: Vec<String> = options.iter().take(3).map(|option| format!("`{}`", system.written(option))).collect();
        let more = if options.len() > 3 { " and others" } else { "" };
        if !shown.is_empty() {
            let _ = writeln!(text, "- {}{more}: {note}", shown.join(", "));
        }
    }
    text
}
