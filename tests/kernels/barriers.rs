//! Barriers and waits of the kernels, each taken away alone: a fact must notice.
//!
//! Each site costs a build and a run of the facts about its file, so only one is taken unless others are asked for:
//!
//! `BARRIERS=matmul cargo test --release --test kernels -- --nocapture barriers::`
//!
//! takes the sites whose `file:line` holds that text; `BARRIERS=` all.

use crate::emulation::{self, Fault, LIBRARY, sources};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Calls that are sites, as far as they are written alike.
const CALLS: [&str; 4] = ["SYNC_BLOCK();", "SYNC_WARP();", "copy_commit();", "copy_wait<"];
/// What stands before a call that stays although no fact can miss it; the source says why.
const NOT_NEEDED: [(&str, &str); 1] = [("select.cuh", "without it registers are spilled")];
/// How long the facts about a site may take before they count as noticing it.
const PATIENCE: Duration = Duration::from_secs(300);

/// A call in a source.
#[derive(Debug)]
struct Site {
    file: String,
    line: usize,
    /// Text that the source holds once and that ends with the call.
    from: String,
    /// The same without the call.
    to: String,
}

/// Facts that run a file's kernels: parts of their names.
fn facts_about(file: &str) -> Vec<String> {
    let rooms: &[&str] = match file {
        "attention.cuh" | "flash.cuh" => &["attention::", "ring::"],
        "attention_backward.cu" => &["attention::"],
        "common.cuh" => &["probes::", "norm::", "adamw::", "value_head::", "loss::"],
        "matmul.cuh" | "matmul_backward.cu" | "tile.cuh" => &["matmul::"],
        "column_sums.cu" => &["rmsnorm::", "value_head::", "norm::"],
        "paged.cuh" | "paged_prefill.cu" | "paged_split.cu" => &["paged_attention::"],
        "sample.cu" | "select.cuh" => &["sample::", "decode::"],
        "softmax.cuh" => &["linear_logprob::", "linear_logprob_fused::", "sample::"],
        _ => return vec![format!("{}::", file.split('.').next().unwrap_or_default())],
    };
    rooms.iter().map(|room| (*room).to_owned()).collect()
}

/// The sites of a source.
fn sites(file: &str, text: &str) -> Vec<Site> {
    let mut found = Vec::new();
    for call in CALLS {
        for (at, _) in text.match_indices(call) {
            let code_begins = text[..at].rfind('\n').map_or(0, |end| end + 1);
            let before = &text[code_begins..at];
            if ["//", "::", "#define", "DEVICE"].iter().any(|sign| before.contains(sign)) {
                continue;
            }
            let end = at + text[at..].find(';').expect("a call ends") + 1;
            let mut from = code_begins;
            while text.matches(&text[from..end]).count() > 1 {
                from = text[..from - 1].rfind('\n').map_or(0, |end| end + 1);
            }
            found.push(Site {
                file: file.to_owned(),
                line: text[..at].matches('\n').count() + 1,
                from: text[from..end].to_owned(),
                to: format!("{};", &text[from..at]),
            });
        }
    }
    found.sort_by_key(|site| site.line);
    found
}

/// The first fact about a file that fails on kernels with a fault; none where all pass.
fn noticed_by(file: &str, faults: &[Fault]) -> Option<String> {
    let own = std::env::current_exe().expect("the path of this target");
    let mut child = Command::new(own)
        .args(facts_about(file))
        // Facts that plant faults of their own say nothing about this one.
        .args(["--skip", "noticed", "--test-threads=1"])
        .env(LIBRARY, emulation::library(faults))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("this target starts once more");
    let begun = Instant::now();
    let mut ran = 0;
    let mut failed = None;
    for line in BufReader::new(child.stdout.take().expect("a pipe")).lines().map_while(Result::ok) {
        ran += usize::from(line.starts_with("test ") && !line.starts_with("test result"));
        if line.ends_with("FAILED") || begun.elapsed() > PATIENCE {
            failed = Some(line.trim_end_matches(" ... FAILED").trim_start_matches("test ").to_owned());
            let _ = child.kill();
            break;
        }
    }
    let status = child.wait().expect("a child of this process");
    assert!(ran > 0, "no facts about {file}");
    failed.or_else(|| (!status.success()).then(|| status.to_string()))
}

#[test]
fn each_is_missed_by_a_fact() {
    if crate::on_a_real_gpu() {
        return;
    }
    let wanted = std::env::var("BARRIERS").unwrap_or_else(|_| "rmsnorm.cu".into());
    let cuda = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
    let all = sources(&cuda, &["cu", "cuh"]);
    let all = all.iter().flat_map(|(file, text)| sites(file, text));
    let (mut unnoticed, mut count, mut sound) = (Vec::new(), 0, String::new());
    for site in all.filter(|site| format!("{}:{}", site.file, site.line).contains(&wanted)) {
        if sound != site.file {
            sound.clone_from(&site.file);
            assert_eq!(noticed_by(&sound, &[]), None, "a fact about {sound} fails as it is");
        }
        count += 1;
        let name = format!("{}:{} {}", site.file, site.line, site.from.trim_start().lines().last().unwrap_or_default());
        // Texts that live as long as the process: there are as many as sites.
        let fault = [&site.file, &site.from, &site.to].map(|text| -> &str { Box::leak(text.clone().into_boxed_str()) });
        let noticed = noticed_by(&site.file, &[fault.into()]);
        eprintln!("{name}: {}", noticed.as_deref().unwrap_or("NOBODY NOTICES"));
        let known = NOT_NEEDED.iter().any(|(file, words)| site.file == *file && site.from.contains(words));
        if noticed.is_none() && !known {
            unnoticed.push(name);
        }
    }
    assert!(count > 0, "no site holds {wanted:?}");
    assert!(unnoticed.is_empty(), "{} of {count} sites that nobody notices: {unnoticed:#?}", unnoticed.len());
}

#[test]
fn sites_are_found_and_told_apart() {
    let text = "#define SYNC_BLOCK() x\nKERNEL a() {\n    SYNC_BLOCK();\n    y = 1;\n    SYNC_BLOCK();  // z\n    copy_wait<2>();\n}\n";
    let found = sites("a.cu", text);
    assert_eq!(found.iter().map(|site| site.line).collect::<Vec<_>>(), [3, 5, 6]);
    for site in &found {
        assert_eq!(text.matches(&site.from[..]).count(), 1, "{site:?}");
        assert_eq!(text.replace(&site.from, &site.to).len() + site.from.len() - site.to.len(), text.len());
    }
    assert!(found[1].to.ends_with("y = 1;\n    ;") && found[2].to.ends_with("    ;"), "{found:?}");
}
