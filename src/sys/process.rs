//! A child process that answers lines with lines. It cannot block its parent: every exchange has a deadline and
//! a size limit. To end a child, the parent sends SIGTERM, so that the child ends its descendants, and then kills the
//! process group.

use super::bounded_log::BoundedLog;
use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

/// The bytes of standard error that are kept for messages.
const STDERR_BYTES_MAX: usize = 8192;
/// The largest line, in bytes, before the first exchange.
const LINE_BYTES_MAX: usize = 1 << 20;
/// The time that the parent waits for the end of a dead or dismissed child.
const EXIT: Duration = Duration::from_secs(2);
/// The interval at which standard error is read meanwhile, so that no child blocks on it.
const TICK: Duration = Duration::from_millis(5);

/// The reason that an exchange returned no line.
#[derive(Debug)]
pub enum Broken {
    /// The child closed its standard output. Has its status if it exited by itself.
    Ended(Option<ExitStatus>),
    /// The deadline passed.
    Deadline,
    /// A line was longer than allowed.
    TooLong,
    Io(io::Error),
}

/// A child with pipes on all three standard streams, in a process group of its own. One thread writes its input and
/// another one reads its output, so that neither side can block the other.
#[derive(Debug)]
pub struct LineChild {
    child: Child,
    requests: Option<Sender<Vec<u8>>>,
    lines: Receiver<Result<Vec<u8>, Broken>>,
    /// The largest line, in bytes, in this exchange.
    line_bytes_max: Arc<AtomicUsize>,
    stderr: ChildStderr,
    stderr_tail: VecDeque<u8>,
    /// The log of the standard error.
    log: Option<BoundedLog>,
    /// Whether the child was reaped. Its id may belong to another process then.
    reaped: bool,
}

impl LineChild {
    /// Starts `command` with pipes and as leader of a new process group. Its standard error is also appended to `log`.
    /// (A group by `posix_spawn` needs no code between fork and exec, which a process with MPI and GPU memory should
    /// not run. The child sets its limits itself.)
    pub fn spawn(command: &mut Command, log: Option<BoundedLog>) -> io::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn()?;
        let missing = || io::Error::other("a piped stream is missing");
        let mut stdin = child.stdin.take().ok_or_else(missing)?;
        let stdout = child.stdout.take().ok_or_else(missing)?;
        let stderr = child.stderr.take().ok_or_else(missing)?;
        set_nonblocking(&stderr)?;
        let (requests, to_write) = mpsc::channel::<Vec<u8>>();
        // The output of the child shows what a closed input means.
        let write = move || to_write.iter().try_for_each(|request| stdin.write_all(&request));
        thread::Builder::new().name("reward input".into()).spawn(write)?;
        let (found, lines) = mpsc::sync_channel(1);
        let line_bytes_max = Arc::new(AtomicUsize::new(LINE_BYTES_MAX));
        let most = Arc::clone(&line_bytes_max);
        thread::Builder::new().name("reward output".into()).spawn(move || read_lines(stdout, &most, &found))?;
        let (requests, stderr_tail) = (Some(requests), VecDeque::new());
        Ok(Self { child, requests, lines, line_bytes_max, stderr, stderr_tail, log, reaped: false })
    }

    /// Sends `request` (which has its own line end; empty to only listen) and returns the next line, without its end. A
    /// child that returned no line is killed with its group, because a late answer could be mistaken for another. If
    /// `given_up` is set meanwhile, the deadline has passed.
    pub fn exchange(
        &mut self,
        request: &[u8],
        deadline: Instant,
        line_bytes_max: usize,
        given_up: &AtomicBool,
    ) -> Result<Vec<u8>, Broken> {
        self.line_bytes_max.store(line_bytes_max, Ordering::SeqCst);
        if let Some(requests) = self.requests.as_ref().filter(|_| !request.is_empty()) {
            let _ = requests.send(request.to_vec());
        }
        let line = self.next_line(deadline, given_up);
        if line.is_err() {
            self.drain_stderr();
            self.kill();
        }
        line
    }

    fn next_line(&mut self, deadline: Instant, given_up: &AtomicBool) -> Result<Vec<u8>, Broken> {
        loop {
            let is_over = given_up.load(Ordering::SeqCst);
            let left = if is_over { Duration::ZERO } else { deadline.saturating_duration_since(Instant::now()) };
            match self.lines.recv_timeout(left.min(TICK)) {
                Ok(line) => return line,
                Err(RecvTimeoutError::Disconnected) => return Err(Broken::Ended(self.last_words())),
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return Err(Broken::Deadline),
                Err(RecvTimeoutError::Timeout) => self.drain_stderr(),
            }
        }
    }

    /// Reads, after the end of standard output, the rest of standard error, and the status if the child exits by
    /// itself.
    fn last_words(&mut self) -> Option<ExitStatus> {
        self.wait_for_exit();
        let exited = self.has_exited();
        self.kill();
        // Reaped by `kill`: the status is remembered.
        if exited { self.child.try_wait().ok().flatten() } else { None }
    }

    /// Reads the available standard error. A pipe holds far less than these reads, so only a flood is cut off.
    fn drain_stderr(&mut self) {
        let mut chunk = [0; 16_384];
        for _ in 0..256 {
            let Ok(n @ 1..) = self.stderr.read(&mut chunk) else { return };
            if let Some(log) = &self.log {
                // A full disk under a log ends no reward.
                let _ = log.append(&chunk[..n]);
            }
            self.stderr_tail.extend(&chunk[..n]);
            let surplus = self.stderr_tail.len().saturating_sub(STDERR_BYTES_MAX);
            self.stderr_tail.drain(..surplus);
        }
    }

    /// Whether the child has ended, without reaping it. Until it is reaped, its process group id cannot be reused.
    fn has_exited(&self) -> bool {
        if self.reaped {
            return true;
        }
        // SAFETY: `info` is plain data that may be zero, and is live for the call; WNOWAIT leaves the child's status.
        unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            let waited = libc::waitid(libc::P_PID, self.child.id(), &raw mut info, flags);
            waited != 0 || info.si_pid() != 0
        }
    }

    /// Returns when the child has ended, or after a moment. Reads its standard error meanwhile, so that it does not
    /// block.
    fn wait_for_exit(&mut self) {
        let until = Instant::now() + EXIT;
        while !self.has_exited() && Instant::now() < until {
            self.drain_stderr();
            std::thread::sleep(Duration::from_millis(2));
        }
        self.drain_stderr();
    }

    /// The last lines of standard error, at most `lines_max`, without control characters.
    pub fn stderr_lines(&mut self, lines_max: usize) -> Vec<String> {
        self.drain_stderr();
        let bytes: Vec<u8> = self.stderr_tail.iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        let clean = |line: &str| line.chars().filter(|c| !c.is_control() || *c == '\t').collect::<String>();
        let lines: Vec<String> = text.lines().map(clean).filter(|line| !line.trim().is_empty()).collect();
        lines[lines.len().saturating_sub(lines_max)..].to_vec()
    }

    /// Ends the child and its whole group, and reaps it. A second call does nothing.
    pub fn kill(&mut self) {
        if self.reaped {
            return;
        }
        // Only the child can find descendants that have left its group.
        // SAFETY: plain system call; the child is not reaped yet, so its id is still its own.
        unsafe {
            libc::kill(self.child.id() as libc::pid_t, libc::SIGTERM);
        }
        self.wait_for_exit();
        // SAFETY: plain system call; the child is not reaped yet, so the group of its id is still its own.
        unsafe {
            libc::killpg(self.child.id() as libc::pid_t, libc::SIGKILL);
        }
        // A killed process ends in bounded time.
        let _ = self.child.wait();
        self.reaped = true;
    }
}

impl Drop for LineChild {
    /// Closes standard input, which asks the child to end, waits a moment, then kills the rest of the group.
    fn drop(&mut self) {
        self.requests = None;
        self.wait_for_exit();
        self.kill();
    }
}

/// Reads lines from `stdout`. Each may have at most the number of bytes allowed when it arrives.
fn read_lines(stdout: ChildStdout, bytes_max: &AtomicUsize, found: &SyncSender<Result<Vec<u8>, Broken>>) {
    let (mut stdout, mut line) = (BufReader::with_capacity(16_384, stdout), Vec::new());
    loop {
        let chunk = match stdout.fill_buf() {
            Ok([]) => return,
            Ok(chunk) => chunk,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return drop(found.send(Err(Broken::Io(e)))),
        };
        let end = chunk.iter().position(|&b| b == b'\n');
        line.extend_from_slice(&chunk[..end.unwrap_or(chunk.len())]);
        let read = end.map_or(chunk.len(), |end| end + 1);
        stdout.consume(read);
        let is_too_long = end.is_none() && line.len() > bytes_max.load(Ordering::SeqCst);
        let sent = match end {
            Some(_) => found.send(Ok(std::mem::take(&mut line))),
            None if is_too_long => return drop(found.send(Err(Broken::TooLong))),
            None => Ok(()),
        };
        if sent.is_err() {
            return;
        }
    }
}

fn set_nonblocking(pipe: &impl AsRawFd) -> io::Result<()> {
    // SAFETY: the caller holds the pipe open; F_GETFL and F_SETFL touch no memory.
    unsafe {
        let flags = libc::fcntl(pipe.as_raw_fd(), libc::F_GETFL);
        if flags < 0 || libc::fcntl(pipe.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
