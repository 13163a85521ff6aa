//! The server of the Hub: the list of a repository's files, and their contents.

use crate::error::{Error, Result};
use crate::hub::{self, Kind, Repository};
use crate::reward::tls::Trusted;
use crate::url::redacted;
use serde::Deserialize;
use std::env;
use std::io::{Read, Write};
use std::time::Duration;
use ureq::config::RedirectAuthHeaders;
use ureq::http::{Response, StatusCode};
use ureq::{Agent, Body};

const ENDPOINT: &str = "https://huggingface.co";
/// The time to connect, and the time without a byte after which a transfer counts as broken.
const WAIT: Duration = Duration::from_secs(30);
/// Attempts in a row without a new byte.
const ATTEMPTS: u32 = 5;
const LISTING_BYTES_MAX: u64 = 256 << 20;
const REDIRECTS_MAX: u32 = 10;

/// A file of a repository.
#[derive(Debug)]
pub struct RemoteFile {
    pub path: String,
    pub bytes: u64,
    pub hash: Hash,
}

/// The hash of a file's contents, in hexadecimal digits. It is the name of the file's blob.
#[derive(Debug, PartialEq, Eq)]
pub enum Hash {
    /// SHA-256 of the contents, for large files.
    Sha256(String),
    /// The name of the blob in git: SHA-1 of `blob SIZE\0` and the contents.
    Git(String),
}

impl Hash {
    pub fn name(&self) -> &str {
        match self {
            Self::Sha256(name) | Self::Git(name) => name,
        }
    }
}

/// The files of a repository at a commit.
pub struct Listing {
    pub commit: String,
    pub files: Vec<RemoteFile>,
}

/// The fields of the server's answer that are used.
#[derive(Deserialize)]
struct Answer {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
    size: u64,
}

/// A failed request, and whether another attempt makes sense.
pub struct Failure {
    pub error: Error,
    pub again: bool,
}

pub struct Server {
    agent: Agent,
    endpoint: String,
    /// The value of the header `Authorization`.
    authorization: Option<String>,
}

impl Server {
    /// The server of `HF_ENDPOINT`, with the user's token and the proxy of the environment.
    ///
    /// # Errors
    /// `Usage` if the system has no trusted certificates.
    pub fn open() -> Result<Self> {
        let given = env::var("HF_ENDPOINT").ok().filter(|url| !url.is_empty());
        let endpoint = given.unwrap_or_else(|| ENDPOINT.to_owned()).trim_end_matches('/').to_owned();
        if !endpoint.starts_with("https://") && !endpoint.starts_with("http://") {
            return Err(Error::usage(format!("HF_ENDPOINT must be an http or https URL (got {endpoint})")));
        }
        let trusted = Trusted::load();
        // A mirror without TLS may serve a machine without certificates.
        let trusted = if endpoint.starts_with("https") { Some(trusted?) } else { trusted.ok() };
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(REDIRECTS_MAX)
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_connect(Some(WAIT))
            .timeout_recv_response(Some(WAIT))
            .timeout_per_read(Some(WAIT))
            .tls_config(trusted.map(|all| all.for_requests()).unwrap_or_default())
            .user_agent("rlhf-hpc")
            .build()
            .into();
        Ok(Self { agent, endpoint, authorization: token().map(|token| format!("Bearer {token}")) })
    }

    /// The commit of a revision, and its files.
    ///
    /// # Errors
    /// `Data` if there is no such repository or revision, or if the token does not open it; `Service`.
    pub fn listing(&self, repository: &Repository) -> Result<Listing> {
        let (kind, id, revision) = (repository.kind.plural(), &repository.id, encoded(repository.revision(), ""));
        let url = format!("{}/api/{kind}/{id}/revision/{revision}?blobs=true", self.endpoint);
        let get = || -> std::result::Result<Vec<u8>, Failure> {
            let mut response = self.get(&url, None, repository)?;
            let read = response.body_mut().with_config().limit(LISTING_BYTES_MAX).read_to_vec();
            read.map_err(|e| self.broken(&e.to_string()))
        };
        let wrong =
            |why: String| Error::service(format!("{} sent no list of files for {repository}: {why}", self.endpoint));
        let answer: Answer = serde_json::from_slice(&again(get)?).map_err(|e| wrong(e.to_string()))?;
        if !hub::is_commit(&answer.sha) {
            return Err(wrong(format!("{:?} is not a commit", answer.sha)));
        }
        let files = answer.siblings.into_iter().map(|file| checked(file).map_err(wrong)).collect::<Result<_>>()?;
        Ok(Listing { commit: answer.sha, files })
    }

    /// Appends the contents of a file to `out`, which has its first `from` bytes. If the server sends the whole file
    /// instead of the rest, `restart` empties `out` first.
    pub fn append(
        &self,
        repository: &Repository,
        (commit, file): (&str, &RemoteFile),
        from: u64,
        out: &mut impl Write,
        restart: impl FnOnce() -> std::io::Result<()>,
        mut progress: impl FnMut(u64),
    ) -> std::result::Result<(), Failure> {
        let folder = if repository.kind == Kind::Dataset { "datasets/" } else { "" };
        let url = format!("{}/{folder}{}/resolve/{commit}/{}", self.endpoint, repository.id, encoded(&file.path, "/"));
        let mut response = self.get(&url, (from > 0).then(|| format!("bytes={from}-")), repository)?;
        let failed = |e: std::io::Error| Failure { error: Error::io("write", &file.path, &e), again: false };
        let begins = response.headers().get("content-range").and_then(|range| range.to_str().ok());
        let is_partial = from > 0 && response.status() == StatusCode::PARTIAL_CONTENT;
        if is_partial {
            let is_rest = begins.is_some_and(|range| range.starts_with(&format!("bytes {from}-")));
            if !is_rest {
                return Err(self.broken(&format!("the range {begins:?} is not the rest from byte {from}")));
            }
        } else if from > 0 {
            restart().map_err(failed)?;
        }
        let most = if is_partial { file.bytes - from } else { file.bytes };
        let (mut body, mut buffer) = (response.body_mut().as_reader().take(most), vec![0; 1 << 18]);
        loop {
            match body.read(&mut buffer).map_err(|e| self.broken(&e.to_string()))? {
                0 => return Ok(()),
                n => {
                    out.write_all(&buffer[..n]).map_err(failed)?;
                    progress(n as u64);
                }
            }
        }
    }

    fn get(
        &self,
        url: &str,
        range: Option<String>,
        repository: &Repository,
    ) -> std::result::Result<Response<Body>, Failure> {
        let request = self.agent.get(url);
        let headers = [("authorization", self.authorization.clone()), ("range", range)];
        let add = |request: ureq::RequestBuilder<_>, (name, value): (&str, Option<String>)| match value {
            Some(value) => request.header(name, value),
            None => request,
        };
        let request = headers.into_iter().fold(request, add);
        let response = request.call().map_err(|e| self.broken(&e.to_string()))?;
        match response.status() {
            status if status.is_success() => Ok(response),
            StatusCode::NOT_FOUND | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Err(Failure { error: self.refused(repository, response.status()), again: false })
            }
            status => Err(Failure {
                error: self.broken(&format!("it answered {status}")).error,
                again: status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS,
            }),
        }
    }

    /// The error for a repository or revision that the server does not show.
    fn refused(&self, repository: &Repository, status: StatusCode) -> Error {
        let kind = if repository.kind == Kind::Dataset { "data set" } else { "model" };
        let revision = repository.revision();
        let what = format!("{} shows no {kind} {} at revision {revision} ({status})", self.endpoint, repository.id);
        let login = if self.authorization.is_some() { "check that the token may read it" } else { "export HF_TOKEN" };
        let folder = if repository.kind == Kind::Dataset { "datasets/" } else { "" };
        let page = format!("{}/{folder}{}", self.endpoint, repository.id);
        Error::data(what)
            .hint(format!("check the name; for a gated or private one, accept its terms at {page} and {login}"))
    }

    fn broken(&self, why: &str) -> Failure {
        let error = Error::service(format!("{}: {}", self.endpoint, redacted(why)));
        let hint = "run the command again to resume; HF_ENDPOINT names a mirror, HTTPS_PROXY a proxy";
        Failure { error: error.hint(hint), again: true }
    }
}

/// Repeats `attempt` after failures that may pass.
pub fn again<T>(mut attempt: impl FnMut() -> std::result::Result<T, Failure>) -> Result<T> {
    let mut failures = 0;
    loop {
        match attempt() {
            Ok(found) => return Ok(found),
            Err(Failure { error, again }) => {
                failures += 1;
                if !again || failures == ATTEMPTS {
                    return Err(error);
                }
                pause(failures);
            }
        }
    }
}

/// Whether another attempt follows `failures` in a row; waits before it.
pub fn pauses(failures: u32) -> bool {
    let is_left = failures < ATTEMPTS;
    if is_left {
        pause(failures);
    }
    is_left
}

/// Waits before the next attempt: 0.2 s, 0.4 s, 0.8 s ...
fn pause(failures: u32) {
    std::thread::sleep(Duration::from_millis(100 << failures));
}

/// A file with a path that stays in its folder, a size, and a hash.
fn checked(file: Sibling) -> std::result::Result<RemoteFile, String> {
    let Sibling { rfilename: path, size, blob, lfs } = file;
    if !hub::is_relative(&path) {
        return Err(format!("{path:?} is not a path within the repository"));
    }
    let is_hex = |text: &str, digits: usize| text.len() == digits && text.bytes().all(|b| b.is_ascii_hexdigit());
    let (hash, bytes) = match (lfs, blob, size) {
        (Some(Lfs { sha256, size }), ..) if is_hex(&sha256, 64) => (Hash::Sha256(sha256), size),
        (None, Some(blob), Some(size)) if is_hex(&blob, 40) => (Hash::Git(blob), size),
        _ => return Err(format!("{path} has no size or no hash")),
    };
    Ok(RemoteFile { path, bytes, hash })
}

/// A text in a URL; characters in `kept` separate its parts.
fn encoded(text: &str, kept: &str) -> String {
    let one = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        _ if kept.as_bytes().contains(&byte) => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(one).collect()
}

/// The user's token, from the environment or from `hf auth login`.
fn token() -> Option<String> {
    let of_file = || {
        let given = env::var_os("HF_TOKEN_PATH").map(std::path::PathBuf::from);
        std::fs::read_to_string(given.or_else(|| Some(hub::home()?.join("token")))?).ok()
    };
    let is_set = |text: &String| !text.trim().is_empty();
    let found = env::var("HF_TOKEN").ok().filter(is_set).or_else(of_file).filter(is_set);
    found.map(|token| token.trim().to_owned())
}
