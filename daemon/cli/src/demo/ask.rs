//! Questions to an agent's socket, asked and answered within a bound.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use muster_protocol::codec::{self, Deframer};
use muster_protocol::local::{Answer, Query, ToAgent};
use serde_json::Value;

/// The longest that an agent may take for an answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Asks one question.
///
/// # Errors
/// Nobody listens there, or the answer is late, or it is an error.
pub(super) fn ask(socket: &Path, query: Query) -> io::Result<Value> {
    let deadline = Instant::now() + PATIENCE;
    let mut stream = UnixStream::connect(socket)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let frame = codec::encode_frame(&ToAgent::Query(query)).map_err(io::Error::other)?;
    stream.write_all(&codec::with_length(&frame))?;
    let mut deframer = Deframer::default();
    let mut buffer = vec![0; 16 * 1024];
    // A long list comes in parts.
    let mut parts = Vec::new();
    loop {
        if let Some(frame) = deframer.next_frame().map_err(io::Error::other)? {
            let (text, last) = match codec::decode_frame(frame).map_err(io::Error::other)? {
                Answer::Json(text) => (text, true),
                Answer::Part(text) => (text, false),
                Answer::Error(text) => return Err(io::Error::other(text)),
            };
            let value: Value = serde_json::from_str(&text).map_err(io::Error::other)?;
            match (value, last) {
                (Value::Array(rows), false) => parts.extend(rows),
                (Value::Array(rows), true) => {
                    parts.extend(rows);
                    return Ok(Value::Array(parts));
                }
                (value, _) => return Ok(value),
            }
            continue;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => deframer.push(buffer.get(..read).unwrap_or_default()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}
