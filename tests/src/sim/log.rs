//! A case in a file: its setup in the first line, then one JSON object per step, then what came of
//! it. The `bytes` of a step are what is carried out again; its `text` is for people.

use std::fmt::Write as _;

use muster_protocol::codec;
use serde::{Deserialize, Serialize};

use super::setup::Setup;
use super::step::Step;

/// A setup and the steps that were taken.
#[derive(Clone, Debug)]
pub struct Case {
    pub setup: Setup,
    pub steps: Vec<(u64, Step)>,
}

#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error("line {line} is not a step of this version of the simulation: {why}")]
    Line { line: usize, why: String },
    #[error("the log has no setup in its first line")]
    NoSetup,
}

#[derive(Serialize, Deserialize)]
struct Line {
    /// Microseconds, for people; `at` counts.
    us: u64,
    at: u64,
    text: String,
    bytes: String,
}

impl Case {
    /// The file's text, with the verdict in its last line.
    pub fn write(&self, verdict: &str) -> Result<String, LogError> {
        let bad = |line: usize, why: String| LogError::Line { line, why };
        let mut out = serde_json::to_string(&self.setup).map_err(|e| bad(1, e.to_string()))?;
        out.push('\n');
        for (i, (at, step)) in self.steps.iter().enumerate() {
            let bytes = codec::encode_body(step).map_err(|e| bad(i + 2, e.to_string()))?;
            let line = Line {
                us: at / 1000,
                at: *at,
                text: describe(step),
                bytes: hex(&bytes),
            };
            out.push_str(&serde_json::to_string(&line).map_err(|e| bad(i + 2, e.to_string()))?);
            out.push('\n');
        }
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{}", serde_json::json!({ "verdict": verdict }));
        Ok(out)
    }

    pub fn read(text: &str) -> Result<Case, LogError> {
        let mut lines = text.lines().enumerate();
        let first = lines.next().ok_or(LogError::NoSetup)?.1;
        let setup = serde_json::from_str(first).map_err(|_| LogError::NoSetup)?;
        let mut steps = Vec::new();
        for (i, text) in lines {
            let bad = |why: String| LogError::Line { line: i + 1, why };
            if text.starts_with("{\"verdict\"") {
                break;
            }
            let line: Line = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
            let bytes = unhex(&line.bytes).ok_or_else(|| bad("bytes are not hex".into()))?;
            let step = codec::decode_body(&bytes).map_err(|e| bad(e.to_string()))?;
            steps.push((line.at, step));
        }
        Ok(Case { setup, steps })
    }
}

/// A step for people: a message as what it says, not as its bytes.
pub fn describe(step: &Step) -> String {
    match step {
        Step::Deliver { to, from, frame } => match muster_protocol::wire::Message::decode(frame) {
            Ok(muster_protocol::wire::Message::Job { body, .. }) => {
                format!("{from} -> {to} {body:?}")
            }
            Ok(message) => format!("{from} -> {to} {message:?}"),
            Err(error) => format!("{from} -> {to} undecodable: {error}"),
        },
        Step::StorePut {
            node,
            slot,
            bytes,
            answer,
            ..
        } => {
            let entry = muster_protocol::storelog::Entry::decode(bytes);
            format!("store: put of node {node} at slot {slot}, answered {answer}: {entry:?}")
        }
        Step::StoreAnswer {
            node, slot, answer, ..
        } => match answer {
            super::step::StoreAnswer::Found(_) => format!("store: node {node} reads slot {slot}"),
            other => format!("store: node {node} slot {slot}: {other:?}"),
        },
        other => format!("{other:?}"),
    }
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let bytes = text.as_bytes();
    if !bytes.len().is_multiple_of(2) {
        return None;
    }
    let nibble = |c: u8| {
        char::from(c)
            .to_digit(16)
            .and_then(|d| u8::try_from(d).ok())
    };
    bytes
        .chunks_exact(2)
        .map(|p| Some(nibble(p[0])? << 4 | nibble(p[1])?))
        .collect()
}
