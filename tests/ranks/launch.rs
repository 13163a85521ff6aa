//! Starts this program again under mpirun.

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How a job under mpirun ended.
pub struct Job {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    pub seconds: f64,
}

const LIMIT: Duration = Duration::from_secs(120);

/// mpirun of this program with `ranks` ranks, to its end; killed after two minutes.
pub fn mpirun(ranks: usize, environment: &[(&str, &str)]) -> Job {
    started(ranks, environment).finish()
}

/// A job that is running.
pub struct Running {
    child: Child,
    readers: [std::thread::JoinHandle<String>; 2],
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
    let readers = [reader(child.stdout.take().expect("piped")), reader(child.stderr.take().expect("piped"))];
    Running { child, readers, since: Instant::now() }
}

fn reader(mut stream: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

impl Running {
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
        let [stdout, stderr] = self.readers.map(|r| r.join().expect("a reader does not panic"));
        Job { code, stdout, stderr, seconds }
    }
}
