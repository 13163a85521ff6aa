//! A reward service of this machine (`server.py`).

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

pub struct Server {
    child: Child,
    port: u16,
}

impl Server {
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// A server with arguments of `server.py`.
    pub fn with(arguments: &[&Path]) -> Self {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reward/server.py");
        let mut python = Command::new("python3");
        let mut child = python
            .arg(file)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 is on PATH");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("its port");
        Self { child, port: line.trim().parse().expect("a port") }
    }

    pub fn url(&self, behaviour: &str) -> String {
        format!("http://127.0.0.1:{}/{behaviour}", self.port)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
