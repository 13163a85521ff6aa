//! A service as a reward, by OpenRLHF's protocol: POST `{"query", "prompts", "labels"}`, each with one entry per
//! response, and the fields of the rows under their names. The reply is `{"rewards"}`, with optional `scores` and
//! `extra_logs` for the logs.

use super::pool::{Answer, Asked, Failure, Lookup, RewardContext, Worker, reply_bytes_max, retried, rows_of};
use super::reply::{self, printable};
use super::tls::{self, Trusted};
use crate::config::reward::RewardConfig;
use crate::error::{Error, Result};
use crate::experience::RowFields;
use crate::reward::RewardOutput;
use crate::url::{Url, redacted};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use ureq::Agent;
use ureq::http::{HeaderName, HeaderValue, StatusCode, Uri};

/// Names of the protocol. Fields of rows with these names are not sent.
const OWN: [&str; 3] = ["query", "prompts", "labels"];
/// The maximum time to connect to a server at the start.
const CONNECT: Duration = Duration::from_secs(10);
/// The maximum length of an error answer in a message.
const TEXT_CHARS_MAX: usize = 400;

/// A worker with one connection at a time. After each failed attempt it uses the reward's next server.
pub struct HttpWorker {
    agent: Agent,
    urls: Arc<[Url]>,
    /// Headers from the environment.
    headers: Arc<[Header]>,
    next: usize,
    timeout: Duration,
    pub(super) rows: Option<Lookup>,
    columns: Vec<String>,
    /// Whether requests have the log-probabilities of tokens.
    pub(super) logprobs: bool,
}

type Header = (HeaderName, HeaderValue);

/// `reward.workers` workers for each URL of the reward `key`.
///
/// # Errors
/// `Service` if a server does not accept connections. `Usage` if it is not trusted, or if an environment variable in
/// `header_env` holds no header.
pub fn workers(
    config: &RewardConfig,
    key: &str,
    urls: &[Url],
    header_env: &[String],
    context: &RewardContext,
) -> Result<Vec<HttpWorker>> {
    let headers: Arc<[Header]> = header_env.iter().map(|name| header(key, name)).collect::<Result<_>>()?;
    let trusted = urls.iter().any(Url::is_https).then(Trusted::load).transpose()?;
    urls.iter().try_for_each(|url| connect(config, key, url, trusted.as_ref()))?;
    let timeout = Duration::from_secs_f64(config.timeout_s);
    // A server may close idle connections, so each request has its own connection.
    let agent: Agent = Agent::config_builder()
        .timeout_global(Some(timeout))
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .max_idle_connections(0)
        .proxy(None)
        .tls_config(trusted.map(|all| all.for_requests()).unwrap_or_default())
        .user_agent("rlhf-hpc")
        .build()
        .into();
    let urls: Arc<[Url]> = urls.into();
    let worker = |i| HttpWorker {
        agent: agent.clone(),
        urls: Arc::clone(&urls),
        headers: Arc::clone(&headers),
        next: i % urls.len(),
        timeout,
        rows: context.rows.clone(),
        columns: context.columns.clone(),
        logprobs: false,
    };
    Ok((0..config.workers * urls.len()).map(worker).collect())
}

/// Parses the header in an environment variable, such as `Authorization: Bearer ...`.
fn header(key: &str, variable: &str) -> Result<Header> {
    let wrong = |what: &str| {
        Error::usage(format!("{key}.header_env: the environment variable {variable} {what}"))
            .hint(format!("export {variable}='Authorization: Bearer ...', and pass it to all ranks"))
    };
    let value = std::env::var(variable).map_err(|_| wrong("is not set"))?;
    let parsed = value.split_once(':').and_then(|(name, value)| {
        let mut value = HeaderValue::from_str(value.trim()).ok()?;
        value.set_sensitive(true);
        Some((name.trim().parse().ok()?, value))
    });
    parsed.ok_or_else(|| wrong("must hold a header, as NAME: VALUE"))
}

/// Opens and closes a connection, so that a server that is unreachable or not trusted is reported before work starts.
fn connect(config: &RewardConfig, key: &str, url: &Url, trusted: Option<&Trusted>) -> Result<()> {
    let parsed = url.with_secrets().parse();
    let uri: Uri = parsed.map_err(|e| Error::usage(format!("{key} = \"{url}\" is not a URL: {e}")))?;
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let trusted = trusted.filter(|_| url.is_https());
    let port = uri.port_u16().unwrap_or(if trusted.is_some() { 443 } else { 80 });
    let open = |address| {
        let stream = TcpStream::connect_timeout(&address, CONNECT).map_err(|e| e.to_string())?;
        stream.set_read_timeout(Some(CONNECT)).map_err(|e| e.to_string())?;
        trusted.map_or(Ok(()), |trusted| trusted.check(host, stream))
    };
    let attempt = || {
        let mut failure = Failure::from("its host name has no address".to_string());
        for address in (host, port).to_socket_addrs().map_err(|e| e.to_string())? {
            match open(address) {
                Ok(()) => return Ok(()),
                Err(e) => failure = e,
            }
        }
        Err(failure)
    };
    retried(config.retries, attempt).map_err(|(Failure { why, again, .. }, times)| {
        if !again {
            return Error::usage(format!("{key} = \"{url}\" is not trusted: {why}")).hint(tls::HINT);
        }
        Error::service(format!("{key} = \"{url}\" does not accept connections ({times}): {why}"))
            .hint("start the server before the job, and use an address that the nodes of the job can reach")
    })
}

impl Worker for HttpWorker {
    type Asked = Asked;
    type Output = RewardOutput;

    fn ask(&mut self, asked: &[Arc<Asked>], _: &AtomicBool) -> Answer<RewardOutput> {
        let rows = rows_of(self.rows.as_ref(), asked.iter().map(|one| &one.prompt))?;
        let count = asked.len();
        self.exchange(&body(asked, &rows, &self.columns, self.logprobs), reply_bytes_max(count), |bytes| {
            outputs(bytes, count)
        })
    }
}

impl HttpWorker {
    /// Sends `body` to the current server and returns the result of `read` on its answer. After a failure the next
    /// server is used.
    pub(super) fn exchange<T>(
        &mut self,
        body: &[u8],
        bytes_max: usize,
        read: impl FnOnce(&[u8]) -> std::result::Result<T, String>,
    ) -> std::result::Result<T, Failure> {
        let url = &self.urls[self.next];
        let found = self.post(url, body, bytes_max).and_then(|bytes| Ok(read(&bytes)?));
        found.map_err(|failure| {
            let why = format!("{url}: {}", failure.why);
            self.next = (self.next + 1) % self.urls.len();
            Failure { why, ..failure }
        })
    }

    fn post(&self, url: &Url, body: &[u8], bytes_max: usize) -> std::result::Result<Vec<u8>, Failure> {
        let request = self.agent.post(url.with_secrets()).content_type("application/json");
        let request = self.headers.iter().fold(request, |request, (name, value)| request.header(name, value));
        let mut answer = request.send(body).map_err(|e| self.failure(&e))?;
        let status = answer.status();
        let location = answer.headers().get("location").map(|to| printable(&String::from_utf8_lossy(to.as_bytes())));
        let read = answer.body_mut().with_config().limit(bytes_max as u64).read_to_vec();
        let bytes = match read {
            Ok(bytes) => bytes,
            Err(e) if status.is_success() => return Err(self.failure(&e)),
            Err(_) => Vec::new(),
        };
        if status.is_success() {
            return Ok(bytes);
        }
        let text: String = printable(&String::from_utf8_lossy(&bytes)).chars().take(TEXT_CHARS_MAX).collect();
        let why = match location {
            Some(to) => format!("it answered {status} with a redirect to {to}, but redirects are not followed"),
            None if text.is_empty() => format!("it answered {status}"),
            None => format!("it answered {status}: {text}"),
        };
        let why = redacted(&why).into_owned();
        // A request that was rejected as invalid would be rejected again.
        let waits = matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS);
        Err(Failure { why, again: status.is_server_error() || waits, late: false })
    }

    fn failure(&self, error: &ureq::Error) -> Failure {
        let late = matches!(error, ureq::Error::Timeout(_));
        let why = match error {
            ureq::Error::Timeout(_) => format!("no answer within {} s", self.timeout.as_secs_f64()),
            ureq::Error::BodyExceedsLimit(_) => "its answer exceeds the maximum size".to_string(),
            other => redacted(&printable(&other.to_string())).into_owned(),
        };
        Failure { why, again: true, late }
    }
}

/// The request body. A field that a row lacks is null.
fn body(asked: &[Arc<Asked>], rows: &[RowFields], columns: &[String], logprobs: bool) -> Vec<u8> {
    let list = |of: &dyn Fn(&Asked) -> String| Value::from(asked.iter().map(|one| of(one)).collect::<Vec<_>>());
    let mut body = Map::new();
    body.insert("query".into(), list(&|one| format!("{}{}", one.prompt.text, one.response.text)));
    body.insert("prompts".into(), list(&|one| one.prompt.text.clone()));
    body.insert("labels".into(), list(&|one| one.prompt.label.clone()));
    if logprobs {
        body.insert("logprobs".into(), asked.iter().map(|one| Value::from(one.response.logprobs.clone())).collect());
    }
    let names = columns.iter().chain(rows.iter().flat_map(|row| row.columns.keys()));
    for name in names.filter(|name| !OWN.contains(&name.as_str())) {
        if !body.contains_key(name) {
            let values = rows.iter().map(|row| row.columns.get(name).cloned().unwrap_or_default()).collect();
            body.insert(name.clone(), Value::Array(values));
        }
    }
    Value::from(body).to_string().into_bytes()
}

fn outputs(bytes: &[u8], count: usize) -> std::result::Result<Vec<RewardOutput>, String> {
    let reply: Map<String, Value> = reply::parse(bytes)?;
    let Some(found) = reply.get("rewards") else {
        let has: Vec<&String> = reply.keys().take(8).collect();
        return Err(format!("its answer has no \"rewards\", only {has:?}"));
    };
    let shown = |value: &Value| value.to_string().chars().take(80).collect::<String>();
    if !found.is_array() && count != 1 {
        return Err(format!("rewards must be a list of {count} numbers (got {})", shown(found)));
    }
    let mut rewards = Vec::with_capacity(count);
    for (i, value) in listed(found, count).into_iter().enumerate() {
        rewards.push(Some(number(value).ok_or_else(|| format!("reward {i} must be a number (got {})", shown(value)))?));
    }
    let logs = reply.get("extra_logs").and_then(Value::as_object).into_iter().flatten();
    let logs = logs.map(|(name, values)| (name.clone(), values));
    let scores = reply.get("scores").filter(|scores| !scores.is_null()).map(|scores| ("scores".to_string(), scores));
    let extra: BTreeMap<_, _> = logs
        .chain(scores)
        .map(|(name, values)| (name, listed(values, count).into_iter().map(number).collect()))
        .collect();
    reply::outputs(rewards, extra, count)
}

/// The entries of a list. A single value counts for all responses.
fn listed(value: &Value, count: usize) -> Vec<&Value> {
    value.as_array().map_or_else(|| vec![value; count], |all| all.iter().collect())
}

/// Accepts a list of one number, like the rows of a tensor, and true and false.
fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Array(one) if one.len() == 1 => number(&one[0]),
        Value::Bool(is) => Some(f64::from(u8::from(*is))),
        other => other.as_f64(),
    }
}
