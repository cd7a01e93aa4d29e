//! Observations on the wire during a try of an operation.
//!
//! object_store says that something failed; whether a request went out, what was answered, and what
//! the answer's headers were is noted here by the transport, for the task that runs the try.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::{HeaderMap, Response, StatusCode};

/// How a request failed without an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Plain HTTP where TLS is demanded. Nothing was sent.
    Plain,
    /// No connection. Nothing was sent.
    Connect(String),
    /// The certificate is not trusted, or TLS failed otherwise. Nothing was sent.
    Tls(String),
    /// Nothing came or went for too long.
    Idle,
    /// The connection broke, or what came was no HTTP.
    Broken(String),
    /// The answer's body has more bytes than were expected.
    TooLarge,
}

/// An answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// The store's own code for an error.
    pub(crate) code: Option<String>,
    /// The store's own words for an error.
    pub(crate) message: Option<String>,
    pub(crate) retry_after: Option<Duration>,
    /// The bucket's region.
    pub(crate) region: Option<String>,
    pub(crate) server: Option<String>,
    pub(crate) crc64: Option<u64>,
    pub(crate) crc32c: Option<u32>,
    /// Bytes of its body, as its head says.
    pub(crate) length: Option<u64>,
}

/// Observations of a try.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// A request to the store went out: it may have been carried out, whatever came back.
    pub(crate) sent: bool,
    /// The last request was for credentials.
    pub(crate) for_credentials: bool,
    pub(crate) fault: Option<Fault>,
    /// The last answer of the store, or of who gives credentials.
    pub(crate) answer: Option<Answer>,
}

/// Notes of one try.
#[derive(Clone, Debug)]
pub(crate) struct Trace {
    seen: Arc<Mutex<Seen>>,
    /// The most bytes of an answer's body that is no error.
    pub(crate) limit: u64,
}

tokio::task_local! {
    static TRACE: Trace;
}

impl Trace {
    pub(crate) fn new(limit: u64) -> Self {
        Self {
            seen: Arc::default(),
            limit,
        }
    }

    /// Runs a try whose requests are noted.
    pub(crate) async fn of<F: Future>(&self, run: F) -> F::Output {
        TRACE.scope(self.clone(), run).await
    }

    /// That of the current task; one of its own for requests of nobody.
    pub(crate) fn current() -> Self {
        TRACE
            .try_with(Clone::clone)
            .unwrap_or_else(|_| Self::new(1 << 20))
    }

    pub(crate) fn note(&self, change: impl FnOnce(&mut Seen)) {
        change(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn seen(&self) -> Seen {
        self.seen
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// The most characters of a store's own words that are repeated.
const MAX_WORDS: usize = 300;

impl Answer {
    pub(crate) fn of_head<B>(response: &Response<B>) -> Self {
        let headers = response.headers();
        let text = |name: &str| text(headers, name);
        Self {
            status: response.status().as_u16(),
            code: text("x-ms-error-code"),
            message: None,
            retry_after: text("retry-after")
                .and_then(|seconds| seconds.parse().ok())
                .map(Duration::from_secs),
            region: text("x-amz-bucket-region"),
            server: text("server"),
            crc64: text("x-amz-checksum-crc64nvme").and_then(|sum| crc64(&sum)),
            crc32c: text("x-goog-hash").and_then(|hash| google_crc32c(&hash)),
            length: text("content-length").and_then(|length| length.parse().ok()),
        }
    }

    /// Reads the body of an error: XML of S3, Azure and Google, or anything.
    pub(crate) fn read_error(&mut self, body: &[u8]) {
        let body = String::from_utf8_lossy(body);
        self.code = element(&body, "Code").or(self.code.take());
        self.message = element(&body, "Message").or_else(|| {
            let words = words(&body);
            (!words.is_empty() && !words.contains('<')).then_some(words)
        });
        self.region = element(&body, "Region").or(self.region.take());
    }

    pub(crate) fn is_success(&self) -> bool {
        StatusCode::from_u16(self.status).is_ok_and(|status| status.is_success())
    }

    /// In a few words, for people.
    pub(crate) fn said(&self) -> String {
        let mut said = format!("HTTP {}", self.status);
        for part in [&self.code, &self.message].into_iter().flatten() {
            said.push_str(", ");
            said.push_str(part);
        }
        said
    }
}

fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    let mut all = headers.get_all(name).iter().filter_map(|v| v.to_str().ok());
    let first = all.next()?.to_owned();
    // Google sends one header for each hash.
    Some(all.fold(first, |sum, next| sum + "," + next))
}

/// The content of the first element of this name.
fn element(xml: &str, name: &str) -> Option<String> {
    let (_, rest) = xml.split_once(&format!("<{name}>"))?;
    let (content, _) = rest.split_once(&format!("</{name}>"))?;
    let content = words(content);
    (!content.is_empty()).then_some(content)
}

/// On one line, without control characters, and not too long.
fn words(text: &str) -> String {
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    let text: String = text.chars().take(4 * MAX_WORDS).map(plain).collect();
    let all: Vec<&str> = text.split_whitespace().collect();
    all.join(" ").chars().take(MAX_WORDS).collect()
}

/// Eight bytes in base64. A checksum of checksums (`…-3`) is none of the whole.
fn crc64(text: &str) -> Option<u64> {
    Some(u64::from_be_bytes(base64(text)?.try_into().ok()?))
}

fn google_crc32c(text: &str) -> Option<u32> {
    let sum = text
        .split(',')
        .find_map(|hash| hash.trim().strip_prefix("crc32c="))?;
    Some(u32::from_be_bytes(base64(sum)?.try_into().ok()?))
}

/// Standard base64 of a few bytes.
fn base64(text: &str) -> Option<Vec<u8>> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let plain = text.trim().trim_end_matches('=');
    if plain.len() > 64 || plain.len() % 4 == 1 {
        return None;
    }
    let (mut bits, mut held, mut bytes) = (0u32, 0, Vec::new());
    for c in plain.bytes() {
        bits = bits << 6 | u32::from(digit(c)?);
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held & 0xff) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_of_the_whole_are_read_and_no_others() {
        // CRC-64/NVME and CRC-32C of `123456789`, as base64 of the big-endian value.
        assert_eq!(crc64("rosUhgp5mIg="), Some(0xae8b_1486_0a79_9888));
        assert_eq!(crc64("rosUhgp5mIg=-3"), None);
        assert_eq!(crc64("rosU"), None);
        let hash = "crc32c=4waSgw==,md5=JfnnlDI7RTiF9RgfG2JNCw==";
        assert_eq!(google_crc32c(hash), Some(0xe306_9283));
        assert_eq!(google_crc32c("md5=JfnnlDI7RTiF9RgfG2JNCw=="), None);
    }

    #[test]
    fn errors_are_read_from_what_stores_say() {
        let mut answer = Answer {
            status: 403,
            ..Answer::default()
        };
        answer.read_error(b"<?xml version=\"1.0\"?><Error><Code>InvalidAccessKeyId</Code><Message>No\n such\x07 key</Message></Error>");
        assert_eq!(answer.said(), "HTTP 403, InvalidAccessKeyId, No such key");
        answer.read_error(b"upstream gone");
        assert_eq!(answer.said(), "HTTP 403, InvalidAccessKeyId, upstream gone");
        answer.read_error(b"<html><body>nothing to see</body></html>");
        assert_eq!(answer.message, None);
        let endless = [b'a'; 100_000];
        answer.read_error(&endless);
        assert_eq!(answer.message.map(|m| m.len()), Some(MAX_WORDS));
    }
}
