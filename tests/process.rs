//! Programs that tests start, alone and under mpirun, and how they ended.

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The time limit of a process. A process that takes longer is killed, and its test fails.
pub const LIMIT: Duration = Duration::from_secs(480);

/// `program` under mpirun with `ranks` ranks; with 0, alone.
pub fn launched(program: &Path, ranks: usize) -> Command {
    let mut command = Command::new(if ranks > 0 { Path::new("mpirun") } else { program });
    if ranks > 0 {
        if std::fs::metadata("/proc/self").is_ok_and(|me| me.uid() == 0) {
            command.arg("--allow-run-as-root");
        }
        command.args(["--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()]).arg(program);
        // More ranks than cores: a rank that waits must let others run.
        command.env("OMPI_MCA_mpi_yield_when_idle", "1");
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// A running program.
pub struct Running {
    pub child: Child,
    pub since: Instant,
    stdout: JoinHandle<String>,
    stderr: JoinHandle<String>,
}

impl Running {
    pub fn new(mut command: Command) -> Self {
        let mut child = command.spawn().expect("mpirun is on PATH (Debian: openmpi-bin)");
        let (stdout, stderr) = (reader(child.stdout.take()), reader(child.stderr.take()));
        Self { child, since: Instant::now(), stdout, stderr }
    }

    pub fn end(mut self) -> Ended {
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("our own child") {
                break status;
            }
            if self.since.elapsed() > LIMIT {
                let _ = self.child.kill();
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let [stdout, stderr] = [self.stdout, self.stderr].map(|reader| reader.join().expect("a reader does not panic"));
        Ended { code: status.code(), stdout, stderr }
    }
}

fn reader(stream: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut stream) = stream {
            let _ = stream.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
