//! Models and data sets of the Hub: `download` from a server of this machine, and their names in jobs and verbs.

use super::command::program;
use super::fixture::Fixture;
use crate::process::{Ended, Running};
use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

const COMMIT: &str = "c1899de289a04d12100db370d81485cdf75e47ca";
/// The file that is in LFS: it has a hash of its own, and another host has its contents.
const LARGE: &str = "model.safetensors";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}

/// A server of the Hub with one repository.
struct Hub {
    port: u16,
    /// The requests: their paths, with their headers `authorization` and `range`.
    log: Arc<Mutex<Vec<String>>>,
}

impl Hub {
    /// A server with these files of `repository` (`models/org/tiny`). Large files break off after half their bytes, once.
    fn start(repository: &str, files: BTreeMap<String, Vec<u8>>, edit: impl Fn(&mut Value)) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let mut listing = json!({ "sha": COMMIT, "siblings": [] });
        for (path, bytes) in &files {
            let git = hex(&Sha1::new().chain_update(format!("blob {}\0", bytes.len())).chain_update(bytes).finalize());
            let mut file = json!({ "rfilename": path, "size": bytes.len(), "blobId": git });
            if path == LARGE {
                file["lfs"] = json!({ "sha256": hex(&Sha256::digest(bytes)), "size": bytes.len(), "pointerSize": 134 });
            }
            listing["siblings"].as_array_mut().unwrap().push(file);
        }
        edit(&mut listing);
        let (log, repository) = (Arc::new(Mutex::new(Vec::new())), repository.to_owned());
        let hub = Self { port, log: Arc::clone(&log) };
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let _ = answer(&stream, &repository, &files, &listing, port, &log);
            }
        });
        hub
    }

    fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.log.lock().unwrap())
    }
}

fn answer(
    mut stream: &TcpStream,
    repository: &str,
    files: &BTreeMap<String, Vec<u8>>,
    listing: &Value,
    port: u16,
    log: &Mutex<Vec<String>>,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok).take_while(|line| !line.is_empty());
    let first = lines.next().unwrap_or_default();
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let headers: Vec<String> = lines.map(|line| line.to_lowercase()).collect();
    let header =
        |name: &str| headers.iter().find_map(|line| line.strip_prefix(&format!("{name}: ")).map(str::to_owned));
    let (key, range) = (header("authorization"), header("range"));
    let said = [Some(path.clone()), key.clone(), range.clone()].into_iter().flatten().collect::<Vec<_>>().join(" ");
    let is_first = !log.lock().unwrap().iter().any(|other| other.starts_with(&path));
    log.lock().unwrap().push(said);
    let folder = repository.strip_prefix("models/").unwrap_or(repository);
    let mut reply = |status: &str, more: &str, bytes: &[u8], sent: usize| {
        let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n{more}\r\n", bytes.len());
        stream.write_all(head.as_bytes())?;
        stream.write_all(&bytes[..sent])
    };
    if path == format!("/api/{repository}/revision/main?blobs=true") || path.contains(COMMIT) && path.contains("/api/")
    {
        let text = listing.to_string();
        return reply("200 OK", "", text.as_bytes(), text.len());
    }
    if path.starts_with("/api/") {
        return reply(if key.is_some() { "404 Not Found" } else { "401 Unauthorized" }, "", b"", 0);
    }
    let file = path.strip_prefix(&format!("/{folder}/resolve/{COMMIT}/"));
    if file == Some(LARGE) {
        // Another host of the same machine.
        return reply("302 Found", &format!("location: http://localhost:{port}/cdn/{LARGE}\r\n"), b"", 0);
    }
    let Some(bytes) = file.or_else(|| path.strip_prefix("/cdn/")).and_then(|file| files.get(file)) else {
        return reply("404 Not Found", "", b"", 0);
    };
    let from = range.and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
    let rest = &bytes[from.unwrap_or(0)..];
    let sent = if is_first && path.starts_with("/cdn/") { rest.len() / 2 } else { rest.len() };
    match from {
        Some(from) => {
            let more = format!("content-range: bytes {from}-{}/{}\r\n", bytes.len() - 1, bytes.len());
            reply("206 Partial Content", &more, rest, sent)
        }
        None => reply("200 OK", "", rest, sent),
    }
}

/// The program with the fixture's folder `hf` as HF_HOME.
fn with_cache(fixture: &Fixture, ranks: usize, port: u16, arguments: &[&str]) -> Ended {
    let mut command = program(fixture.root(), ranks);
    for name in ["HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy"] {
        command.env_remove(name);
    }
    command.args(arguments).env("HF_HOME", fixture.path("hf")).env("HF_ENDPOINT", format!("http://127.0.0.1:{port}/"));
    Running::new(command).end()
}

fn snapshot(fixture: &Fixture, folder: &str) -> PathBuf {
    fixture.path(&format!("hf/hub/{folder}/snapshots/{COMMIT}"))
}

fn model_files(fixture: &Fixture) -> BTreeMap<String, Vec<u8>> {
    let files = fixture.files("model").into_iter();
    let mut files: BTreeMap<String, Vec<u8>> =
        files.map(|(path, bytes)| (path.strip_prefix("model").unwrap().display().to_string(), bytes)).collect();
    files.insert("pytorch_model.bin".into(), b"a pickle".to_vec());
    files
}

#[test]
fn a_downloaded_model_is_used_by_its_name_without_a_network() {
    let fixture = Fixture::new();
    let files = model_files(&fixture);
    let hub = Hub::start("models/org/tiny", files.clone(), |_| ());
    fixture.write("hf/token", "hf_secret\n");
    let ended = with_cache(&fixture, 0, hub.port, &["download", "org/tiny"]).well();
    let place = snapshot(&fixture, "models--org--tiny");
    assert_eq!(ended.stdout.trim(), place.display().to_string());
    assert!(ended.stderr.contains("left out") && ended.stderr.contains("pytorch_model.bin"), "{}", ended.stderr);
    for (name, bytes) in files.iter().filter(|(name, _)| *name != "pytorch_model.bin") {
        assert!(place.join(name).is_symlink() && std::fs::read(place.join(name)).unwrap() == *bytes, "{name}");
    }
    assert_eq!(fixture.text("hf/hub/models--org--tiny/refs/main"), COMMIT);
    // The broken transfer continued where it ended, and only the Hub itself got the token.
    let asked = hub.requests();
    let half = format!("bytes={}-", files[LARGE].len() / 2);
    let of_large: Vec<&String> = asked.iter().filter(|request| request.contains(LARGE)).collect();
    let [first, cdn, again, rest] = of_large[..] else { panic!("{asked:?}") };
    assert!(first.ends_with("bearer hf_secret") && cdn == &format!("/cdn/{LARGE}"), "{of_large:?}");
    assert!(
        again.ends_with(&format!("bearer hf_secret {half}")) && rest == &format!("/cdn/{LARGE} {half}"),
        "{of_large:?}"
    );
    // A second call asks only for the list.
    let ended = with_cache(&fixture, 0, hub.port, &["download", "org/tiny@main"]).well();
    assert!(ended.stderr.contains("(0 bytes downloaded now)"), "{}", ended.stderr);
    assert_eq!(hub.requests().len(), 1);

    let at_commit = format!("hf://org/tiny@{COMMIT}");
    std::fs::rename(fixture.path("model"), fixture.path("moved")).unwrap();
    for name in ["org/tiny", "org/tiny@main", &at_commit] {
        let ended = with_cache(&fixture, 0, hub.port, &["info", name]).well();
        assert!(ended.stdout.contains(COMMIT), "{}", ended.stdout);
        let actor = format!("model.actor={name}");
        let ended = with_cache(&fixture, 0, hub.port, &["run", "job.toml", &actor, "--dry-run"]).well();
        assert!(ended.stderr.contains("org/tiny, commit c1899de289a0, "), "{}", ended.stderr);
    }
    with_cache(&fixture, 0, hub.port, &["plan", "job.toml", "model.actor=org/tiny"]).well();
    let generate = ["generate", "--model", "org/tiny", "--prompt", "1+1=", "--max-new-tokens", "2"];
    with_cache(&fixture, 0, hub.port, &generate).well();
    let ended = with_cache(&fixture, 2, hub.port, &["run", "job.toml", "model.actor=org/tiny", "--dry-run"]).well();
    assert!(ended.stderr.contains("org/tiny, commit"), "{}", ended.stderr);
    // An adapter names its base model by its name on the Hub.
    let adapter = r#"{"base_model_name_or_path": "org/tiny", "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}"#;
    fixture.write("adapter/adapter_config.json", adapter);
    let ended = with_cache(&fixture, 0, hub.port, &["chat", "--model", "adapter"]);
    assert!(ended.stderr.contains("its base model is ") && ended.stderr.contains(COMMIT), "{}", ended.stderr);

    // A directory of that name comes first, and a line says so.
    fixture.copy("moved", "org/tiny");
    let ended = with_cache(&fixture, 0, hub.port, &["run", "job.toml", "model.actor=org/tiny", "--dry-run"]).well();
    assert!(
        ended.stderr.contains("note: org/tiny is the directory ") && !ended.stderr.contains("commit c18"),
        "{}",
        ended.stderr
    );
    let ended = with_cache(&fixture, 0, hub.port, &["info", "org/tiny"]).well();
    assert!(ended.stderr.contains("not the model of this name in the cache"), "{}", ended.stderr);
    assert_eq!(hub.requests(), [""; 0], "only download uses the network");
}

#[test]
fn a_downloaded_data_set_is_read_by_its_name_and_folder() {
    let fixture = Fixture::new();
    let rows: Vec<&str> = fixture.text("rows.jsonl").lines().map(|line| &*line.to_owned().leak()).collect();
    let (held, trained) = rows.split_at(8);
    let files = BTreeMap::from([
        ("main/train.jsonl".to_owned(), trained.join("\n").into_bytes()),
        ("main/test-00000-of-00001.jsonl".to_owned(), held.join("\n").into_bytes()),
        ("other/train.jsonl".to_owned(), b"{}".to_vec()),
        ("README.md".to_owned(), b"# Rows".to_vec()),
    ]);
    let hub = Hub::start("datasets/org/rows", files, |_| ());
    with_cache(&fixture, 0, hub.port, &["download", "--data", "org/rows/main"]).well();
    let place = snapshot(&fixture, "datasets--org--rows");
    assert!(
        place.join("main/train.jsonl").exists() && !place.join("other").exists() && !place.join("README.md").exists()
    );
    let job = ["run", "job.toml", "data.prompts=hf://org/rows/main", "data.eval_split=test", "--dry-run"];
    let ended = with_cache(&fixture, 0, hub.port, &job).well();
    assert!(ended.stderr.contains("org/rows, commit c1899de289a0, "), "{}", ended.stderr);
    assert!(ended.stderr.contains("8 held out"), "{}", ended.stderr);
    // The same in a job file, and for a verb.
    let text = fixture.text("job.toml").replace("\"questions\"", "\"hf://org/rows/main/train.jsonl\"");
    fixture.write("hub.toml", text.replace("eval_split = \"eval\"", "").replace("prompt_split = \"train\"", ""));
    with_cache(&fixture, 0, hub.port, &["run", "hub.toml", "eval.every_steps=0", "--dry-run"]).well();
    let shard = ["shard", "hf://org/rows/main", "--tokenizer", "model", "--out", "new", "--label-key", "answer"];
    with_cache(&fixture, 0, hub.port, &shard).well();
    with_cache(&fixture, 0, hub.port, &["run", "job.toml", "data.prompts=hf://org/none", "--dry-run"])
        .refused(65, &["hf://org/none is not in the Hugging Face cache", "has no data set org/none"])
        .hinted("rlhf-hpc download --data org/none");
    with_cache(&fixture, 0, hub.port, &["run", "job.toml", "data.prompts=hf://org/rows/more.jsonl", "--dry-run"])
        .refused(65, &["more.jsonl does not exist"])
        .hinted(&format!("rlhf-hpc download --data org/rows@{COMMIT}"));
}

#[test]
fn a_wrong_download_is_an_error_and_leaves_no_model() {
    let fixture = Fixture::new();
    let files = || model_files(&fixture);
    let run = |port: u16, arguments: &[&str]| with_cache(&fixture, 0, port, &[&["download"], arguments].concat());
    let hub = Hub::start("models/org/tiny", files(), |_| ());
    run(hub.port, &["org/none"]).refused(65, &["shows no model org/none", "401"]).hinted("export HF_TOKEN");
    for (arguments, words) in [
        (&["tiny"][..], "ID must be ORG/NAME"),
        (&["org/tiny@a", "--revision", "b"], "two revisions"),
        (&["org/tiny", "--revision", "../b"], "not the name of a revision"),
    ] {
        run(hub.port, arguments).refused(2, &[words]);
    }
    let first = |listing: &mut Value, key: &str, value: Value| listing["siblings"][0][key] = value;
    let cases: [(&str, &str, Value); 4] = [
        ("hash", "blobId", "0".repeat(40).into()),
        ("no size or no hash", "blobId", Value::Null),
        ("not a path within", "rfilename", "../x.json".into()),
        ("not a path within", "rfilename", "/etc/x.json".into()),
    ];
    for (words, key, value) in cases {
        let hub = Hub::start("models/org/tiny", files(), |listing| first(listing, key, value.clone()));
        run(hub.port, &["org/tiny"]).refused(75, &[words]);
        assert!(!fixture.path("hf/hub/models--org--tiny/refs/main").exists(), "{words}");
    }
    let hub = Hub::start("models/org/tiny", files(), |listing| listing["sha"] = "main".into());
    run(hub.port, &["org/tiny"]).refused(75, &["is not a commit"]);
    with_cache(&fixture, 0, hub.port, &["run", "job.toml", "model.actor=org/tiny"])
        .refused(65, &["org/tiny does not exist", "only as org/tiny@"])
        .hinted("rlhf-hpc download org/tiny");
}

#[test]
fn ranks_with_other_snapshots_are_rejected() {
    let fixture = Fixture::new();
    for (home, commit) in [("hf0", "0"), ("hf1", "1")] {
        let folder = format!("{home}/hub/models--org--tiny");
        fixture.write(&format!("{folder}/refs/main"), commit.repeat(40));
        fixture.copy("model", &format!("{folder}/snapshots/{}", commit.repeat(40)));
    }
    let mut command = std::process::Command::new("sh");
    let program = env!("CARGO_BIN_EXE_rlhf-hpc");
    let script =
        format!("HF_HOME=$PWD/hf$OMPI_COMM_WORLD_RANK exec {program} run job.toml model.actor=org/tiny --dry-run");
    fixture.write("each.sh", script);
    command.args(["-c", "exec mpirun --allow-run-as-root --oversubscribe --bind-to none -n 2 sh each.sh"]);
    command.current_dir(fixture.root()).env_remove("HF_HUB_CACHE").env("OMPI_MCA_mpi_yield_when_idle", "1");
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let words = ["all ranks must have the same snapshots", &format!("org/tiny@{}", "0".repeat(40)), "on rank 1"];
    Running::new(command).end().refused(2, &words).hinted("HF_HOME");
}
