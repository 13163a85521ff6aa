//! Completion of command lines: what the program proposes, and what bash makes of it.

use super::fixture::Fixture;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Types lines into an interactive bash, each with a tab at its end, and prints the completed lines.
const TYPIST: &str = r#"
import os, pty, select, sys, time
script, lines = sys.argv[1], sys.argv[2:]
pid, fd = pty.fork()
if pid == 0:
    os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
# The first quote begins the line, the second ends it.
keys = "".join(line + "\t\x01echo '<\x05>'\n" for line in lines)
os.write(fd, f"bind 'set enable-bracketed-paste off'; source {script}; complete -p rlhf-hpc\n{keys}exit\n".encode())
text, end = b"", time.time() + 60
while time.time() < end:
    if select.select([fd], [], [], 1)[0]:
        try:
            more = os.read(fd, 65536)
        except OSError:
            break
        if not more:
            break
        text += more
for line in text.decode(errors="replace").replace("\r", "").split("\n"):
    if line.startswith("<") or line.startswith("complete "):
        print(line)
"#;

fn proposed(fixture: &Fixture, words: &[&str]) -> Vec<String> {
    let ended = fixture.run(&[&["completion", "words", "--"], words].concat()).well();
    ended.stdout.lines().map(|line| line.split('\t').next().unwrap_or_default().to_owned()).collect()
}

#[test]
fn every_verb_and_option_is_proposed_from_its_definition() {
    let fixture = Fixture::new();
    let verbs = proposed(&fixture, &[""]);
    let overview = fixture.run(&["--help"]).well().stdout;
    for verb in &verbs {
        assert!(overview.contains(&format!("\n  {verb} ")), "{verb}");
    }
    assert!(verbs.len() > 18, "{verbs:?}");
    for verb in verbs.iter().filter(|verb| *verb != "help") {
        let help = fixture.run(&[verb, "--help"]).well().stdout;
        // `  --force   replace ...`, `  -o, --out  the ...`, `  --help, help  display ...`
        let of_line = |line: &'static str| -> Option<&'static str> {
            let option = line.strip_prefix("  -")?;
            let option =
                option.split_once(", --").filter(|(short, _)| short.len() == 1).map_or(option, |(_, long)| long);
            Some(option.trim_start_matches('-').split([' ', ',']).next().unwrap_or_default())
        };
        let listed: BTreeSet<&str> =
            help.leak().lines().filter_map(of_line).filter(|option| !option.is_empty()).collect();
        let given = proposed(&fixture, &[verb, "--"]);
        let given: BTreeSet<&str> = given.iter().filter_map(|word| word.strip_prefix("--")).collect();
        assert_eq!(given, listed, "{verb}");
    }
}

#[test]
fn keys_and_values_of_a_job_are_proposed_from_the_schema() {
    let fixture = Fixture::new();
    for (words, first) in [
        (&["job.toml", "op"][..], &["optim."][..]),
        (&["run", "job.toml", "optim."], &["optim.actor.", "optim.critic."]),
        (&["plan", "job.toml", "ppo.clip_"], &["ppo.clip_high=", "ppo.clip_low="]),
        (
            &["run", "--dry-run", "job.toml", "ppo.advantage=rein"],
            &["ppo.advantage=reinforce++", "ppo.advantage=reinforce++-baseline"],
        ),
        (&["run", "job.toml", "job.seed=1", "job.export="], &["job.export=true", "job.export=false"]),
        (&["run", "job.toml", "mesh.zero=a"], &["mesh.zero=auto"]),
        (&["run", "job.toml", "model.actor=mo"], &[]),
        (&["generate", "--model", ""], &[]),
        (&["generate", "--model", "m", "--in"], &["--input"]),
        (&["jobs", ""], &["copy"]),
        (&["jobs", "copy", "gs"], &["gsm8k"]),
        (&["help", "reprod"], &["reproducibility"]),
        (&["help", "ppo.kl_co"], &["ppo.kl_coef"]),
        (&["completion", "b"], &["bash"]),
        (&["ru"], &["run"]),
    ] {
        assert_eq!(proposed(&fixture, words), first, "{words:?}");
    }
    fixture.run(&["completion", "tcsh"]).refused(2, &["bash, zsh, fish"]);
    for shell in ["zsh", "fish"] {
        assert!(fixture.run(&["completion", shell]).well().stdout.contains("completion words --"), "{shell}");
    }
}

#[test]
fn an_interactive_bash_completes_verbs_options_keys_values_and_files() {
    let fixture = Fixture::new();
    fixture.write("complete.bash", fixture.run(&["completion", "bash"]).well().stdout);
    let typed = [
        ("rlhf-hpc migr", "rlhf-hpc migrate "),
        ("rlhf-hpc generate --chat-template-a", "rlhf-hpc generate --chat-template-args "),
        ("rlhf-hpc run job.toml optim.act", "rlhf-hpc run job.toml optim.actor."),
        ("rlhf-hpc job.toml ppo.clip_h", "rlhf-hpc job.toml ppo.clip_high="),
        ("rlhf-hpc job.toml ppo.advantage=rlo", "rlhf-hpc job.toml ppo.advantage=rloo "),
        ("rlhf-hpc run job.to", "rlhf-hpc run job.toml "),
        ("rlhf-hpc run job.toml model.actor=mod", "rlhf-hpc run job.toml model.actor=model/"),
        ("A=1 rlhf-hpc inf", "A=1 rlhf-hpc info "),
    ];
    let program = Path::new(env!("CARGO_BIN_EXE_rlhf-hpc"));
    let path = format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("python3");
    command.args(["-c", TYPIST, "complete.bash"]).args(typed.map(|(line, _)| line)).current_dir(fixture.root());
    let output = command.env("PATH", path).env("TERM", "dumb").output().expect("python3 is on PATH");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "complete -o default -F _rlhf_hpc rlhf-hpc", "{text}");
    let found: Vec<&str> = lines[1..].iter().filter_map(|line| line.strip_prefix('<')?.strip_suffix('>')).collect();
    assert_eq!(found, typed.map(|(_, whole)| whole), "{text}");
}
