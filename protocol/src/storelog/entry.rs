//! One entry of the log as bytes: JSON that people can read, and that says everything once more in
//! the canonical encoding where a digest depends on it.
//!
//! ```json
//! {"v":2,"seq":2,"prev":"5a…","writer":"a7…","nonce":"00000000000004d2",
//!  "body":{"commit":{"generation":"…","number":1,"step":400,"manifest":"…"}},"sum":"90c2…"}
//! ```
//!
//! `prev` finds damage to any entry but the last, which nobody follows yet; `sum` finds it there, too: a
//! flipped bit of the newest COMMIT would make it another's, and the job would go on from an older one.
//! It is the first 16 hexadecimal digits of the BLAKE3 of the bytes before it. Version 1 had none.
//!
//! An entry has the lowest version whose readers understand it: an older build on the same store reads on until it
//! meets one that it cannot, and then names the version. Version 3 is that of `unpin`, of `rules`, and of a `retire`
//! that names what is `good`.
//!
//! A claim carries its record as the hexadecimal of its canonical encoding. The fields beside it
//! are for people; a reader refuses the entry when they say something else than the record.

use serde::{Deserialize, Serialize};

use super::rules::{MAX_METRIC, Rules};
use super::snapshot::{Snapshot, Standing};
use crate::codec;
use crate::ids::{Digest, NodeId};
use crate::record::{CommitRef, Record};

/// The highest version of an entry that this build writes, and reads. It reads those before as well.
pub const ENTRY_VERSION: u32 = 4;

/// Since when there is a checksum.
const SUMMED: u32 = 2;
/// Since when a RETIRE names what is good, and rules are in the log.
const RULED: u32 = 3;

/// The most bytes of one entry: a record with 1,024 members, in hexadecimal, with room to spare.
pub const MAX_ENTRY: usize = 512 * 1024;

/// The most bytes of a REJECT's reason; a longer one is cut when it is written.
pub const MAX_REASON: usize = 512;

/// Writer of an entry for a person with rights to the store: a PIN or its end, a REJECT or a RETIRE. No node has
/// this identity.
pub const OPERATOR: NodeId = NodeId([0; 32]);

/// Hexadecimal digits of a checksum, and bytes of what ends an entry.
const SUM: usize = 16;
const TAIL: usize = r#","sum":"""#.len() + SUM + "}\n".len();

/// One object `<job>/log/<seq>.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The slot that the entry stands in, from 1.
    pub seq: u64,
    /// Digest of the entry before; zero in the first.
    pub prev: Digest,
    pub writer: NodeId,
    /// Drawn once per append, so that a writer knows its own entry again.
    pub nonce: u64,
    pub body: Body,
}

/// Content of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// Decides a generation.
    Claim(Box<Record>),
    /// A checkpoint is durable.
    Commit(CommitRef),
    /// The data of the COMMIT at `seq` will be deleted. `good` are the slots of two others that its writer knows to be
    /// good: it is valid only while these are in force, so that two writers who count on each other's leave two. None
    /// for a COMMIT that was rejected, which nobody counts on.
    Retire { seq: u64, good: Option<[u64; 2]> },
    /// The COMMIT at `seq` does not verify.
    Reject { seq: u64, reason: String },
    /// The COMMIT at `seq` is not to be retired.
    Pin { seq: u64 },
    /// It may be retired again.
    Unpin { seq: u64 },
    /// The rules on what the job keeps from now on.
    Rules(Rules),
    /// All that the slots below say and that still matters: a reader may begin here.
    Snapshot(Box<Snapshot>),
}

/// Why bytes are not an entry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    #[error("{len} bytes, the limit is {MAX_ENTRY}")]
    TooLong { len: usize },
    #[error(
        "version {0}, this build reads versions 1 to {ENTRY_VERSION}: run the same Muster version on every node"
    )]
    Version(u32),
    #[error("its bytes are not those that its checksum is of: it was damaged, or edited")]
    Sum,
    #[error("not JSON of this form: {0}")]
    Json(String),
    #[error("`{0}` is not hexadecimal of the right length")]
    Hex(&'static str),
    #[error("the record in it cannot be decoded: {0}")]
    Record(codec::CodecError),
    #[error("the name of its metric has {0} bytes, the limit is {MAX_METRIC}")]
    Metric(usize),
    #[error("`{0}` says something else than the record beside it")]
    Disagrees(&'static str),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireEntry {
    v: u32,
    seq: u64,
    prev: String,
    writer: String,
    nonce: String,
    body: WireBody,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum WireBody {
    Claim(WireClaim),
    Commit(WireCommit),
    Retire(WireRetire),
    Reject(WireReject),
    Pin(WireSeq),
    Unpin(WireSeq),
    Rules(Rules),
    Snapshot(Box<WireSnapshot>),
}

#[derive(Serialize, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct WireClaim {
    number: u64,
    kind: String,
    cause: String,
    digest: String,
    parent: String,
    members: Vec<String>,
    restore: Option<WireCommit>,
    record: String,
}

#[derive(Serialize, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct WireCommit {
    generation: String,
    number: u64,
    step: u64,
    manifest: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireSeq {
    seq: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireRetire {
    seq: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    good: Option<[u64; 2]>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireReject {
    seq: u64,
    reason: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireSnapshot {
    claim: WireClaim,
    /// Slots and digests of the newest generations, that claim's last.
    claims: Vec<(u64, String)>,
    last_number: u64,
    commits: Vec<WireStanding>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rules: Option<Rules>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireStanding {
    seq: u64,
    commit: WireCommit,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pinned: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    retired: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rejected: Option<String>,
}

/// Only the version, to name it before anything else is asked of the bytes.
#[derive(Deserialize)]
struct WireVersion {
    v: u32,
}

impl WireCommit {
    fn of(commit: &CommitRef) -> WireCommit {
        WireCommit {
            generation: commit.generation.hex(),
            number: commit.number,
            step: commit.step,
            manifest: commit.manifest.hex(),
        }
    }

    fn read(&self) -> Result<CommitRef, EntryError> {
        Ok(CommitRef {
            generation: Digest::from_hex(&self.generation).ok_or(EntryError::Hex("generation"))?,
            number: self.number,
            step: self.step,
            manifest: Digest::from_hex(&self.manifest).ok_or(EntryError::Hex("manifest"))?,
        })
    }
}

impl WireClaim {
    fn of(record: &Record) -> Result<WireClaim, codec::CodecError> {
        Ok(WireClaim {
            number: record.number,
            kind: kind_word(record).to_owned(),
            cause: record.cause.word().to_owned(),
            digest: record.digest().hex(),
            parent: record.parent.hex(),
            members: record.members.iter().map(|m| m.node.to_string()).collect(),
            restore: record.restore.as_ref().map(WireCommit::of),
            record: hex(&codec::encode_body(record)?),
        })
    }

    fn read(&self) -> Result<Record, EntryError> {
        let bytes = unhex(&self.record).ok_or(EntryError::Hex("record"))?;
        let record: Record = codec::decode_body(&bytes).map_err(EntryError::Record)?;
        let again = WireClaim::of(&record).map_err(EntryError::Record)?;
        let fields = [
            ("number", self.number == again.number),
            ("kind", self.kind == again.kind),
            ("cause", self.cause == again.cause),
            ("digest", self.digest == again.digest),
            ("parent", self.parent == again.parent),
            ("members", self.members == again.members),
            ("restore", self.restore == again.restore),
            ("record", self.record == again.record),
        ];
        match fields.iter().find(|(_, same)| !same) {
            Some((field, _)) => Err(EntryError::Disagrees(field)),
            None => Ok(record),
        }
    }
}

impl WireSnapshot {
    fn of(snapshot: &Snapshot) -> Result<WireSnapshot, codec::CodecError> {
        let claims = snapshot.claims.iter();
        let commits = snapshot.commits.iter().map(|c| WireStanding {
            seq: c.seq,
            commit: WireCommit::of(&c.commit),
            pinned: c.pinned,
            retired: c.retired,
            rejected: c.rejected.clone(),
        });
        Ok(WireSnapshot {
            claim: WireClaim::of(&snapshot.claim)?,
            claims: claims.map(|(seq, digest)| (*seq, digest.hex())).collect(),
            last_number: snapshot.last_number,
            commits: commits.collect(),
            rules: snapshot.rules.clone(),
        })
    }

    fn read(self) -> Result<Snapshot, EntryError> {
        let claim = self.claim.read()?;
        let hex = |(seq, hex): &(u64, String)| Some((*seq, Digest::from_hex(hex)?));
        let claims = self.claims.iter().map(hex).collect::<Option<Vec<_>>>();
        let claims = claims.ok_or(EntryError::Hex("claims"))?;
        if claims.last().map(|(_, digest)| *digest) != Some(claim.digest()) {
            return Err(EntryError::Disagrees("claims"));
        }
        let commits = self.commits.into_iter().map(|c| {
            Ok(Standing {
                seq: c.seq,
                commit: c.commit.read()?,
                pinned: c.pinned,
                retired: c.retired,
                rejected: c.rejected.map(|reason| cut(&reason).to_owned()),
            })
        });
        Ok(Snapshot {
            claim,
            claims,
            last_number: self.last_number,
            commits: commits.collect::<Result<_, EntryError>>()?,
            rules: self.rules.map(named).transpose()?,
        })
    }
}

fn kind_word(record: &Record) -> &'static str {
    use crate::record::Kind;
    match record.kind {
        Kind::Next => "next",
        Kind::End { .. } => "end",
        Kind::Failed { .. } => "failed",
        Kind::Dormant => "dormant",
        Kind::Tombstone { .. } => "tombstone",
        Kind::Voters { .. } => "voters",
    }
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut out = String::with_capacity(2 * bytes.len());
    for b in bytes {
        out.push(char::from(DIGITS[usize::from(b >> 4)]));
        out.push(char::from(DIGITS[usize::from(b & 15)]));
    }
    out
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let nibble = |c: u8| match c {
        b'0'..=b'9' => Some(c - b'0'),
        b'a'..=b'f' => Some(c - b'a' + 10),
        _ => None,
    };
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if !rest.is_empty() {
        return None;
    }
    pairs
        .iter()
        .map(|[high, low]| Some(nibble(*high)? << 4 | nibble(*low)?))
        .collect()
}

impl Body {
    /// The version since which readers understand it.
    fn version(&self) -> u32 {
        match self {
            Body::Claim(_) | Body::Commit(_) | Body::Reject { .. } | Body::Pin { .. } => SUMMED,
            Body::Retire { good: None, .. } => SUMMED,
            Body::Retire { good: Some(_), .. } | Body::Unpin { .. } | Body::Rules(_) => RULED,
            Body::Snapshot(_) => ENTRY_VERSION,
        }
    }
}

impl Entry {
    /// The bytes to store. Fails only for a record beyond a frame's limit.
    pub fn encode(&self) -> Result<Vec<u8>, EntryError> {
        let body = match &self.body {
            Body::Claim(record) => {
                WireBody::Claim(WireClaim::of(record).map_err(EntryError::Record)?)
            }
            Body::Commit(commit) => WireBody::Commit(WireCommit::of(commit)),
            Body::Retire { seq, good } => WireBody::Retire(WireRetire {
                seq: *seq,
                good: *good,
            }),
            Body::Reject { seq, reason } => WireBody::Reject(WireReject {
                seq: *seq,
                reason: cut(reason).to_owned(),
            }),
            Body::Pin { seq } => WireBody::Pin(WireSeq { seq: *seq }),
            Body::Unpin { seq } => WireBody::Unpin(WireSeq { seq: *seq }),
            Body::Rules(rules) => WireBody::Rules(rules.clone()),
            Body::Snapshot(snapshot) => {
                let wire = WireSnapshot::of(snapshot).map_err(EntryError::Record)?;
                WireBody::Snapshot(Box::new(wire))
            }
        };
        let wire = WireEntry {
            v: self.body.version(),
            seq: self.seq,
            prev: self.prev.hex(),
            writer: self.writer.hex(),
            nonce: format!("{:016x}", self.nonce),
            body,
        };
        let mut bytes = serde_json::to_vec(&wire).map_err(|e| EntryError::Json(e.to_string()))?;
        // The last brace closes what follows.
        bytes.pop();
        let tail = tail(&bytes);
        bytes.extend_from_slice(tail.as_bytes());
        if bytes.len() > MAX_ENTRY {
            return Err(EntryError::TooLong { len: bytes.len() });
        }
        Ok(bytes)
    }

    /// The inverse of [`encode`](Self::encode). Total: no bytes panic.
    pub fn decode(bytes: &[u8]) -> Result<Entry, EntryError> {
        if bytes.len() > MAX_ENTRY {
            return Err(EntryError::TooLong { len: bytes.len() });
        }
        let json = |e: serde_json::Error| EntryError::Json(e.to_string());
        let version: WireVersion = serde_json::from_slice(bytes).map_err(json)?;
        let wire: WireEntry = match version.v {
            1 => serde_json::from_slice(bytes),
            // Builds between wrote all that there is as version 2.
            SUMMED..=ENTRY_VERSION => serde_json::from_slice(&without_tail(bytes)?),
            other => return Err(EntryError::Version(other)),
        }
        .map_err(json)?;
        let nonce = match wire.nonce.len() {
            16 => u64::from_str_radix(&wire.nonce, 16).map_err(|_| EntryError::Hex("nonce"))?,
            _ => return Err(EntryError::Hex("nonce")),
        };
        let body = match wire.body {
            WireBody::Claim(claim) => Body::Claim(Box::new(claim.read()?)),
            WireBody::Commit(commit) => Body::Commit(commit.read()?),
            WireBody::Retire(of) => Body::Retire {
                seq: of.seq,
                good: of.good,
            },
            WireBody::Reject(of) => Body::Reject {
                seq: of.seq,
                // As it is when it is written: what was read encodes to itself again.
                reason: cut(&of.reason).to_owned(),
            },
            WireBody::Pin(of) => Body::Pin { seq: of.seq },
            WireBody::Unpin(of) => Body::Unpin { seq: of.seq },
            WireBody::Rules(rules) => Body::Rules(named(rules)?),
            WireBody::Snapshot(snapshot) => Body::Snapshot(Box::new(snapshot.read()?)),
        };
        Ok(Entry {
            seq: wire.seq,
            prev: Digest::from_hex(&wire.prev).ok_or(EntryError::Hex("prev"))?,
            writer: NodeId::from_hex(&wire.writer).ok_or(EntryError::Hex("writer"))?,
            nonce,
            body,
        })
    }

    /// The digest of an entry: BLAKE3 of the bytes as they are stored.
    pub fn digest(bytes: &[u8]) -> Digest {
        Digest(*blake3::hash(bytes).as_bytes())
    }
}

/// The end of an entry that begins like this: its checksum.
fn tail(begin: &[u8]) -> String {
    let sum = blake3::hash(begin).to_hex();
    format!(",\"sum\":\"{}\"}}\n", sum.get(..SUM).unwrap_or_default())
}

/// An entry without its checksum, which holds.
fn without_tail(bytes: &[u8]) -> Result<Vec<u8>, EntryError> {
    let begin = bytes.len().checked_sub(TAIL).ok_or(EntryError::Sum)?;
    let (begin, end) = bytes.split_at(begin);
    if tail(begin).as_bytes() != end {
        return Err(EntryError::Sum);
    }
    Ok([begin, b"}"].concat())
}

fn named(rules: Rules) -> Result<Rules, EntryError> {
    match rules.metric.len() {
        0..=MAX_METRIC => Ok(rules),
        len => Err(EntryError::Metric(len)),
    }
}

/// A reason as it is stored.
pub(super) fn cut(reason: &str) -> &str {
    let mut end = reason.len().min(MAX_REASON);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    &reason[..end]
}
