//! Starts this program again under mpirun.

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How a job under mpirun ended.
pub struct Job {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    pub seconds: f64,
}

const LIMIT: Duration = Duration::from_secs(480);

/// mpirun of this program with `ranks` ranks, to its end; killed after two minutes.
pub fn mpirun(ranks: usize, environment: &[(&str, &str)]) -> Job {
    started(ranks, environment).finish()
}

/// A job that is running.
pub struct Running {
    child: Child,
    /// What standard output and standard error brought so far.
    said: [Arc<Mutex<Vec<u8>>>; 2],
    readers: Vec<std::thread::JoinHandle<()>>,
    since: Instant,
}

pub fn started(ranks: usize, environment: &[(&str, &str)]) -> Running {
    let mut command = Command::new("mpirun");
    if std::fs::metadata("/proc/self").is_ok_and(|me| me.uid() == 0) {
        command.arg("--allow-run-as-root");
    }
    command
        .args(["--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()])
        .arg(std::env::current_exe().expect("this program has a path"))
        // More ranks than cores: a rank that waits must let others run.
        .env("OMPI_MCA_mpi_yield_when_idle", "1")
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("mpirun is on PATH (Debian: openmpi-bin)");
    let said: [Arc<Mutex<Vec<u8>>>; 2] = Default::default();
    let readers = vec![
        reader(child.stdout.take().expect("piped"), said[0].clone()),
        reader(child.stderr.take().expect("piped"), said[1].clone()),
    ];
    Running { child, said, readers, since: Instant::now() }
}

fn reader(mut stream: impl Read + Send + 'static, said: Arc<Mutex<Vec<u8>>>) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(n @ 1..) = stream.read(&mut bytes) {
            said.lock().expect("no reader panics").extend_from_slice(&bytes[..n]);
        }
    })
}

impl Running {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns when standard output has had `text`, or the job has taken too long.
    pub fn wait_for(&self, text: &str) {
        while self.since.elapsed() < LIMIT && !self.text(0).contains(text) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn text(&self, stream: usize) -> String {
        String::from_utf8_lossy(&self.said[stream].lock().expect("no reader panics")).into_owned()
    }

    pub fn finish(mut self) -> Job {
        let code = loop {
            if let Some(status) = self.child.try_wait().expect("our own child") {
                break status.code();
            }
            if self.since.elapsed() > LIMIT {
                let _ = self.child.kill();
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let seconds = self.since.elapsed().as_secs_f64();
        while let Some(reader) = self.readers.pop() {
            reader.join().expect("a reader does not panic");
        }
        Job { code, stdout: self.text(0), stderr: self.text(1), seconds }
    }
}
