//! A child process that answers lines with lines, and that cannot hold its parent up: every exchange has a deadline and
//! a size. A child that is dismissed is asked by SIGTERM to end its descendants, then killed with its process group.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Bytes of standard error that are kept for messages.
const STDERR_BYTES_MAX: usize = 8192;
/// How long a dead or dismissed child's last words are waited for.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Why an exchange gave no line.
#[derive(Debug)]
pub enum Broken {
    /// The child closed its standard output; its status where it ended by itself.
    Ended(Option<ExitStatus>),
    /// The deadline passed.
    Deadline,
    /// More bytes than allowed came without an end of line.
    TooLong,
    Io(io::Error),
}

/// A child with pipes on all three standard streams, in a process group of its own.
#[derive(Debug)]
pub struct LineChild {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: ChildStdout,
    stderr: Option<ChildStderr>,
    unread: Vec<u8>,
    stderr_tail: VecDeque<u8>,
    /// Whether its status was taken, after which its id may be another's.
    reaped: bool,
}

impl LineChild {
    /// Starts `command` with pipes and as leader of a new process group. (A group by `posix_spawn` needs no code
    /// between fork and exec, which a process with MPI and GPU memory should not run; limits are the child's own
    /// first act.)
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn()?;
        let missing = || io::Error::other("a piped stream is missing");
        let stdin = child.stdin.take().ok_or_else(missing)?;
        let stdout = child.stdout.take().ok_or_else(missing)?;
        let stderr = child.stderr.take().ok_or_else(missing)?;
        for fd in [stdin.as_raw_fd(), stdout.as_raw_fd(), stderr.as_raw_fd()] {
            set_nonblocking(fd)?;
        }
        Ok(Self {
            child,
            stdin: Some(stdin),
            stdout,
            stderr: Some(stderr),
            unread: Vec::new(),
            stderr_tail: VecDeque::new(),
            reaped: false,
        })
    }

    /// Sends `request` (which brings its own end of line; empty to only listen) and returns the next line, without its
    /// end. Reading and writing go on together, so that neither side can block the other. A child that gave no line is
    /// killed with its group: an answer that comes late could be taken for another.
    pub fn exchange(&mut self, request: &[u8], deadline: Instant, line_bytes_max: usize) -> Result<Vec<u8>, Broken> {
        let line = self.exchange_until(request, deadline, line_bytes_max);
        if line.is_err() {
            self.drain_stderr();
            self.kill();
        }
        line
    }

    fn exchange_until(&mut self, request: &[u8], deadline: Instant, line_bytes_max: usize) -> Result<Vec<u8>, Broken> {
        let mut sent = 0;
        let mut searched = 0;
        loop {
            if let Some(end) = self.unread[searched..].iter().position(|&b| b == b'\n') {
                let rest = self.unread.split_off(searched + end + 1);
                let mut line = std::mem::replace(&mut self.unread, rest);
                line.pop();
                return Ok(line);
            }
            searched = self.unread.len();
            if searched > line_bytes_max {
                return Err(Broken::TooLong);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Broken::Deadline);
            }
            let [can_write, can_read, can_read_stderr] = self.wait_ready(sent < request.len(), left)?;
            if can_read_stderr {
                self.read_stderr();
            }
            if can_write {
                sent += self.write(&request[sent..])?;
            }
            if can_read && self.read_stdout()? == 0 {
                return Err(Broken::Ended(self.last_words()));
            }
        }
    }

    fn wait_ready(&self, writing: bool, left: Duration) -> Result<[bool; 3], Broken> {
        let fd_or = |fd: Option<RawFd>| fd.unwrap_or(-1);
        let stdin = if writing { self.stdin.as_ref().map(AsRawFd::as_raw_fd) } else { None };
        let entry = |fd, events| libc::pollfd { fd, events, revents: 0 };
        let mut fds = [
            entry(fd_or(stdin), libc::POLLOUT),
            entry(self.stdout.as_raw_fd(), libc::POLLIN),
            entry(fd_or(self.stderr.as_ref().map(AsRawFd::as_raw_fd)), libc::POLLIN),
        ];
        // At least 1 ms, so that the last fraction of a millisecond does not spin.
        let timeout_ms = left.as_millis().clamp(1, 60_000) as libc::c_int;
        // SAFETY: `fds` is a live array of three entries for the whole call; entries with fd -1 are ignored by poll.
        let ready = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout_ms) };
        if ready < 0 {
            let error = io::Error::last_os_error();
            // A signal (a scheduler's notice, say) is no reason to stop waiting.
            return if error.kind() == io::ErrorKind::Interrupted { Ok([false; 3]) } else { Err(Broken::Io(error)) };
        }
        Ok(fds.map(|fd| fd.revents != 0))
    }

    /// Bytes taken by the pipe. A closed pipe takes all: what the child's end means is said by its output.
    fn write(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        let Some(stdin) = self.stdin.as_mut() else { return Ok(bytes.len()) };
        match stdin.write(bytes) {
            Ok(n) => Ok(n),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(0),
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(bytes.len()),
            Err(e) => Err(Broken::Io(e)),
        }
    }

    /// Bytes read; 0 at the end. Nothing to read for now counts as 1, so that only the end is 0.
    fn read_stdout(&mut self) -> Result<usize, Broken> {
        let mut chunk = [0; 16_384];
        match self.stdout.read(&mut chunk) {
            Ok(n) => {
                self.unread.extend_from_slice(&chunk[..n]);
                Ok(n)
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(1),
            Err(e) => Err(Broken::Io(e)),
        }
    }

    /// Keeps the last bytes; returns whether more may come.
    fn read_stderr(&mut self) -> bool {
        let mut chunk = [0; 16_384];
        let Some(stderr) = self.stderr.as_mut() else { return false };
        match stderr.read(&mut chunk) {
            Ok(n) if n > 0 => {
                self.stderr_tail.extend(&chunk[..n]);
                let surplus = self.stderr_tail.len().saturating_sub(STDERR_BYTES_MAX);
                self.stderr_tail.drain(..surplus);
                true
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => true,
            Ok(_) | Err(_) => {
                self.stderr = None;
                false
            }
        }
    }

    /// After the end of standard output: reads standard error on, and the status where the child ends by itself.
    fn last_words(&mut self) -> Option<ExitStatus> {
        self.wait_for_exit();
        let exited = self.has_exited();
        self.kill();
        // Reaped by `kill`: the status is remembered.
        if exited { self.child.try_wait().ok().flatten() } else { None }
    }

    /// Reads what standard error holds now. A pipe holds far less than these reads, so that only a flood is cut.
    fn drain_stderr(&mut self) {
        for _ in 0..256 {
            if !self.pending_stderr() || !self.read_stderr() {
                return;
            }
        }
    }

    fn pending_stderr(&self) -> bool {
        let Some(stderr) = &self.stderr else { return false };
        let mut fd = libc::pollfd { fd: stderr.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one live entry, no waiting.
        unsafe { libc::poll(&raw mut fd, 1, 0) > 0 && fd.revents & libc::POLLIN != 0 }
    }

    /// Whether the child has ended, without reaping it: until it is reaped its process group cannot become another's.
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

    /// Returns when the child has ended, or after a moment; what it says on standard error does not hold it up.
    fn wait_for_exit(&mut self) {
        let until = Instant::now() + LAST_WORDS;
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

    /// The process id, which is also that of its group.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Ends the child and its whole group, and reaps it. The second call does nothing.
    pub fn kill(&mut self) {
        if self.reaped {
            return;
        }
        // Only the child finds those of its descendants that have left its group.
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
    /// Closes standard input, which asks the child to end, waits a moment, then kills what is left of the group.
    fn drop(&mut self) {
        self.stdin = None;
        self.wait_for_exit();
        self.kill();
    }
}

fn set_nonblocking(fd: RawFd) -> io::Result<()> {
    // SAFETY: `fd` belongs to a pipe that the caller holds open; F_GETFL and F_SETFL touch no memory.
    unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        if flags < 0 || libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
