//! URLs of services, which are shown without their secrets.

use regex::{Captures, Regex};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt;
use std::sync::LazyLock;

/// The text in place of a secret.
pub const HIDDEN: &str = "***";

/// A scheme, user and password, host and path, query, fragment.
static PARTS: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(
        r#"(?i)\b([a-z][a-z0-9+.-]*://)(?:([^\s/?#"'<>`]*)@)?([^\s?#"'<>`]*)(?:\?([^\s#"'<>`]*))?(?:#[^\s"'<>`]*)?"#,
    )
    .expect("it compiles")
});

/// A URL as a job gives it. Display, Debug and serde show `***` in place of user, password and the values of the query.
#[derive(Clone, PartialEq, Eq, schemars::JsonSchema)]
pub struct Url(String);

impl Url {
    pub fn new(url: impl Into<String>) -> Self {
        Self(url.into())
    }

    /// The whole URL, for requests only.
    pub fn with_secrets(&self) -> &str {
        &self.0
    }

    pub fn is_https(&self) -> bool {
        self.0.get(..6).is_some_and(|scheme| scheme.eq_ignore_ascii_case("https:"))
    }

    /// Whether it was copied from a text that hides its secrets.
    pub fn is_redacted(&self) -> bool {
        self.0.contains(HIDDEN)
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        // The parts of a malformed URL are uncertain.
        let malformed = is_malformed(&self.0).then(|| self.0.rsplit_once('@')).flatten();
        match malformed {
            Some((_, host)) => write!(f, "{HIDDEN}@{}", redacted(host)),
            None => f.write_str(&redacted(&self.0)),
        }
    }
}

impl fmt::Debug for Url {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

impl Serialize for Url {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Url {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from).map(Self)
    }
}

/// Whether `url` has no parts, or a port that is not a number, such as a part of a password with a slash.
fn is_malformed(url: &str) -> bool {
    let Ok(uri) = url.parse::<ureq::http::Uri>() else { return true };
    let host = uri.authority().and_then(|all| all.as_str().rsplit('@').next()).unwrap_or_default();
    host.contains(':') && !host.ends_with(']') && uri.port_u16().is_none()
}

/// `text` with `***` in place of the secrets of all URLs in it.
pub fn redacted(text: &str) -> Cow<'_, str> {
    if !text.contains("://") {
        return Cow::Borrowed(text);
    }
    PARTS.replace_all(text, |parts: &Captures| {
        let user = match parts.get(2).map(|user| user.as_str().contains(':')) {
            None => String::new(),
            Some(false) => format!("{HIDDEN}@"),
            Some(true) => format!("{HIDDEN}:{HIDDEN}@"),
        };
        let value = |pair: &str| match pair.split_once('=') {
            Some((name, _)) => format!("{name}={HIDDEN}"),
            None => HIDDEN.to_string(),
        };
        // Punctuation of the sentence may follow the URL.
        let query = parts.get(4).map(|query| {
            let query = query.as_str();
            let own = query.trim_end_matches([':', ',', ';', ')']);
            let hidden = own.split('&').map(value).collect::<Vec<_>>().join("&");
            format!("?{hidden}{}", &query[own.len()..])
        });
        let query = query.unwrap_or_default();
        format!("{}{user}{}{query}", &parts[1], &parts[3])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_password_and_query_of_a_url_are_hidden_wherever_it_is_shown() {
        for (url, shown) in [
            ("http://host:80/r", "http://host:80/r"),
            ("http://u:p@host:80/r?token=T&x=1", "http://***:***@host:80/r?token=***&x=***"),
            ("http://u@[::1]/r?T", "http://***@[::1]/r?***"),
            ("http://u:p:q@host/a@b#secret", "http://***:***@host/a@b"),
            ("http://u:p/q@host/r", "***@host/r"),
        ] {
            assert_eq!(Url::new(url).to_string(), shown);
            assert_eq!(format!("{:?}", [Url::new(url)]), format!("[\"{shown}\"]"));
            assert_eq!(serde_json::to_value(Url::new(url)).unwrap(), shown);
            assert_eq!(Url::new(url).with_secrets(), url);
        }
        let text = "line 3: `url = [\"http://u:p@a/r?k=v\", 'x://b?c=d']` (see file.toml, a@b.org, 3/4?)";
        assert_eq!(
            redacted(text),
            "line 3: `url = [\"http://***:***@a/r?k=***\", 'x://b?c=***']` (see file.toml, a@b.org, 3/4?)"
        );
        assert_eq!(redacted("no URL"), "no URL");
        let said = "(http://a/r?k=v): http://a/r?k=v: it failed";
        assert_eq!(redacted(said), "(http://a/r?k=***): http://a/r?k=***: it failed");
    }
}
