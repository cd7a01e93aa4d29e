//! A small S3 in memory: as the real one answers, or with faults that real stores have.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Duration;

use super::http::{Request, Response};

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    /// `If-None-Match` is ignored.
    pub(crate) unconditional: bool,
    /// Looks first and creates later: safe for one creator at a time only.
    pub(crate) racy: bool,
    /// Ranges are ignored.
    pub(crate) rangeless: bool,
    /// Keeps no checksums.
    pub(crate) sumless: bool,
    /// Lists its objects backwards.
    pub(crate) disorderly: bool,
    /// A byte of what parts are joined to is wrong.
    pub(crate) corrupting: bool,
    /// Objects of a page at most.
    pub(crate) page: Option<usize>,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) objects: BTreeMap<String, Vec<u8>>,
    /// Parts of uploads that were neither completed nor given up.
    pub(crate) uploads: BTreeMap<String, BTreeMap<usize, Vec<u8>>>,
    begun: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Fake {
    pub(crate) faults: Faults,
    pub(crate) state: Mutex<State>,
}

pub(crate) const BUCKET: &str = "bucket";

fn error(status: u16, code: &str) -> Response {
    Response::new(status).body(format!(
        "<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>{code} it is</Message></Error>"
    ))
}

impl Fake {
    pub(crate) fn new(faults: Faults) -> Self {
        Self {
            faults,
            state: Mutex::default(),
        }
    }

    pub(crate) fn answer(&self, request: &Request) -> Response {
        let path = request.path().trim_start_matches('/');
        let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
        let answer = match (bucket, key, request.method.as_str()) {
            (bucket, ..) if bucket != BUCKET => error(404, "NoSuchBucket"),
            (_, "", "GET") => self.list(request),
            (_, key, "PUT") if request.query("uploadId").is_some() => self.part(key, request),
            (_, key, "PUT") => self.put(key, request),
            (_, key, "POST") if request.query("uploads").is_some() => self.begin(key),
            (_, key, "POST") => self.complete(key, request),
            (_, key, "DELETE") => self.delete(key, request),
            (_, key, "GET" | "HEAD") => self.get(key, request),
            _ => error(405, "MethodNotAllowed"),
        };
        let answer = answer.with("server", "Fake/1");
        if request.method != "HEAD" {
            return answer;
        }
        let length = answer.body.len();
        match answer.status {
            200 => answer.with("content-length", length).body(""),
            _ => answer.with("content-length", 0).body(""),
        }
    }

    fn put(&self, key: &str, request: &Request) -> Response {
        let wanted = request.header("if-none-match") == Some("*") && !self.faults.unconditional;
        let mut state = self.state.lock().unwrap();
        if wanted && state.objects.contains_key(key) {
            return error(412, "PreconditionFailed");
        }
        if self.faults.racy {
            drop(state);
            std::thread::sleep(Duration::from_millis(100));
            state = self.state.lock().unwrap();
        }
        if let Some(sum) = request.header("x-amz-checksum-crc64nvme")
            && sum != sum_of(&request.body)
        {
            return error(400, "BadDigest");
        }
        state.objects.insert(key.to_owned(), request.body.clone());
        Response::new(200).with("etag", "\"e\"")
    }

    fn get(&self, key: &str, request: &Request) -> Response {
        let state = self.state.lock().unwrap();
        let Some(bytes) = state.objects.get(key) else {
            return error(404, "NoSuchKey");
        };
        let mut answer = Response::new(200).with("etag", "\"e\"");
        let range = request.header("range").filter(|_| !self.faults.rangeless);
        if let Some(range) = range.and_then(|range| range.strip_prefix("bytes=")) {
            let (begin, end) = range.split_once('-').unwrap();
            let begin: usize = begin.parse().unwrap();
            let end = bytes.len().min(end.parse::<usize>().unwrap() + 1);
            if begin >= end {
                return error(416, "InvalidRange");
            }
            answer.status = 206;
            let length = bytes.len();
            return answer
                .with(
                    "content-range",
                    format!("bytes {begin}-{}/{length}", end - 1),
                )
                .body(&bytes[begin..end]);
        }
        if request.header("x-amz-checksum-mode") == Some("ENABLED") && !self.faults.sumless {
            answer = answer.with("x-amz-checksum-crc64nvme", sum_of(bytes));
        }
        answer.body(bytes.clone())
    }

    fn delete(&self, key: &str, request: &Request) -> Response {
        let mut state = self.state.lock().unwrap();
        match request.query("uploadId") {
            Some(id) => state.uploads.remove(&id).map(|_| ()),
            None => state.objects.remove(key).map(|_| ()),
        };
        Response::new(204)
    }

    fn list(&self, request: &Request) -> Response {
        let state = self.state.lock().unwrap();
        let prefix = request.query("prefix").unwrap_or_default();
        let delimiter = request.query("delimiter");
        let after = request.query("continuation-token").unwrap_or_default();
        let (mut contents, mut folders) = (Vec::new(), BTreeSet::new());
        let mut next = None;
        for (key, bytes) in &state.objects {
            let Some(rest) = key.strip_prefix(&prefix).filter(|_| *key > after) else {
                continue;
            };
            if let (Some(_), Some((folder, _))) = (&delimiter, rest.split_once('/')) {
                folders.insert(format!("{prefix}{folder}/"));
                continue;
            }
            if self.faults.page == Some(contents.len()) {
                break;
            }
            next = Some(key.clone());
            contents.push(format!(
                "<Contents><Key>{key}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified><ETag>e</ETag><Size>{}</Size></Contents>",
                bytes.len()
            ));
        }
        let more = state.objects.keys().next_back() != next.as_ref() && next.is_some();
        if self.faults.disorderly {
            contents.reverse();
        }
        let folders: String = folders
            .iter()
            .map(|folder| format!("<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>"))
            .collect();
        let token = match (more && self.faults.page.is_some(), next) {
            (true, Some(next)) => format!("<NextContinuationToken>{next}</NextContinuationToken>"),
            _ => String::new(),
        };
        Response::new(200).body(format!(
            "<ListBucketResult>{}{folders}{token}</ListBucketResult>",
            contents.concat()
        ))
    }

    fn begin(&self, key: &str) -> Response {
        let mut state = self.state.lock().unwrap();
        state.begun += 1;
        let id = format!("{}-{}", key.replace('/', "-"), state.begun);
        state.uploads.insert(id.clone(), BTreeMap::new());
        Response::new(200).body(format!(
            "<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
        ))
    }

    fn part(&self, _key: &str, request: &Request) -> Response {
        let sum = sum_of(&request.body);
        if request.header("x-amz-checksum-crc64nvme") != Some(&sum) {
            return error(400, "BadDigest");
        }
        let number = request.query("partNumber").unwrap().parse().unwrap();
        let mut state = self.state.lock().unwrap();
        let Some(parts) = state.uploads.get_mut(&request.query("uploadId").unwrap()) else {
            return error(404, "NoSuchUpload");
        };
        parts.insert(number, request.body.clone());
        Response::new(200)
            .with("etag", format!("\"{number}\""))
            .with("x-amz-checksum-crc64nvme", sum)
    }

    fn complete(&self, key: &str, request: &Request) -> Response {
        let mut state = self.state.lock().unwrap();
        let Some(parts) = state.uploads.remove(&request.query("uploadId").unwrap()) else {
            return error(404, "NoSuchUpload");
        };
        let mut bytes = parts.into_values().collect::<Vec<_>>().concat();
        if self.faults.corrupting {
            bytes[1] ^= 1;
        }
        state.objects.insert(key.to_owned(), bytes);
        Response::new(200).body(
            "<CompleteMultipartUploadResult><ETag>\"e\"</ETag></CompleteMultipartUploadResult>",
        )
    }
}

fn sum_of(bytes: &[u8]) -> String {
    base64(&muster_checkpoint::sum::crc(bytes).to_be_bytes())
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let mut bits = [0; 4];
        bits[1..=chunk.len()].copy_from_slice(chunk);
        let bits = u32::from_be_bytes(bits);
        for at in 0..4 {
            match at <= chunk.len() {
                true => text.push(DIGITS[(bits >> (18 - 6 * at) & 63) as usize].into()),
                false => text.push('='),
            }
        }
    }
    text
}
