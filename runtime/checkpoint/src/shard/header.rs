//! Reading a safetensors header: everything is checked, and nothing is believed.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Slot;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use crate::Dtype;
use crate::shard::PAD;
use crate::slice::{SliceError, dims, elements};

/// The most bytes of a header; the reference implementation has the same limit.
pub const MAX_HEADER: u64 = 100_000_000;

const METADATA: &str = "__metadata__";

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    /// Where it begins, from the beginning of the file.
    pub at: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// Contents of a file, by its own account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// In the order of their bytes, padding left out.
    pub tensors: Vec<Entry>,
    /// Strings by name.
    pub metadata: BTreeMap<String, String>,
}

/// Why bytes are not a safetensors file. The file is to be restored from a copy, or left alone.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    #[error("cannot be read")]
    Io(#[source] io::Error),
    #[error("{0} bytes are too few for a safetensors file")]
    Short(u64),
    #[error("its header has {0} bytes, the limit is {MAX_HEADER}")]
    TooLong(u64),
    #[error("its header of {header} bytes does not fit into the file's {file}: it was cut short")]
    Cut { header: u64, file: u64 },
    #[error("its header is not a JSON object of this form: {0}")]
    Json(#[source] serde_json::Error),
    #[error("tensor `{name}`: {why}")]
    Shape {
        name: String,
        #[source]
        why: SliceError,
    },
    #[error("tensor `{name}` has {range} bytes, its shape and type make {shape}")]
    Size {
        name: String,
        range: u64,
        shape: u64,
    },
    #[error(
        "tensor `{name}` begins at byte {found} of the data, after the one before it comes {expected}"
    )]
    Hole {
        name: String,
        found: u64,
        expected: u64,
    },
    #[error(
        "its tensors have {tensors} bytes, the file has {file} for them: it was cut short or appended to"
    )]
    Length { tensors: u64, file: u64 },
}

impl Header {
    /// Bytes of the JSON, from the first 8 bytes of a file of this length.
    ///
    /// # Errors
    /// Too long, or longer than the file.
    pub fn json_bytes(first: [u8; 8], file: u64) -> Result<u64, HeaderError> {
        let header = u64::from_le_bytes(first);
        if header > MAX_HEADER {
            return Err(HeaderError::TooLong(header));
        }
        if file < 8 || header > file - 8 {
            return Err(HeaderError::Cut { header, file });
        }
        Ok(header)
    }

    /// From the JSON, and the number of bytes that follow it in the file.
    ///
    /// # Errors
    /// Anything that the format forbids, and fields that it does not know.
    pub fn decode(json: &[u8], data: u64) -> Result<Self, HeaderError> {
        let Raw {
            mut tensors,
            metadata,
        } = match json.first() {
            // The format wants the first character to be this one.
            Some(b'{') => serde_json::from_slice(json).map_err(HeaderError::Json)?,
            _ => {
                return Err(HeaderError::Json(serde_json::Error::custom(
                    "no `{` at its start",
                )));
            }
        };
        tensors.sort_by_key(|(_, raw)| raw.data_offsets);
        let begin = 8 + json.len() as u64;
        let mut end = 0;
        let mut entries = Vec::with_capacity(tensors.len());
        for (name, raw) in tensors {
            let [from, to] = raw.data_offsets;
            if from != end || to < from {
                let (found, expected) = (from, end);
                return Err(HeaderError::Hole {
                    name,
                    found,
                    expected,
                });
            }
            let shape = match elements(&raw.shape) {
                Ok(count) => count * raw.dtype.size(),
                Err(why) => return Err(HeaderError::Shape { name, why }),
            };
            let range = to - from;
            if range != shape {
                return Err(HeaderError::Size { name, range, shape });
            }
            end = to;
            if end > data {
                break;
            }
            if !name.starts_with(PAD) {
                entries.push(Entry {
                    name,
                    dtype: raw.dtype,
                    shape: raw.shape,
                    at: begin + from,
                    bytes: range,
                });
            }
        }
        if end != data {
            let (tensors, file) = (end, data);
            return Err(HeaderError::Length { tensors, file });
        }
        Ok(Self {
            tensors: entries,
            metadata,
        })
    }

    /// Of a file; its data is not read.
    ///
    /// # Errors
    /// It cannot be read, or is not a safetensors file.
    pub fn read(file: &File) -> Result<Self, HeaderError> {
        let len = file.metadata().map_err(HeaderError::Io)?.len();
        if len < 8 {
            return Err(HeaderError::Short(len));
        }
        let mut first = [0; 8];
        file.read_exact_at(&mut first, 0).map_err(HeaderError::Io)?;
        let header = Self::json_bytes(first, len)?;
        // At most MAX_HEADER, and no longer than the file.
        let mut json = vec![0; usize::try_from(header).unwrap_or(usize::MAX)];
        file.read_exact_at(&mut json, 8).map_err(HeaderError::Io)?;
        Self::decode(&json, len - 8 - header)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    dtype: Dtype,
    #[serde(deserialize_with = "dims")]
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

struct Raw {
    tensors: Vec<(String, RawEntry)>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Raw;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("tensors by name")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw, A::Error> {
                let mut tensors = BTreeMap::new();
                let mut metadata = None;
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        if metadata.replace(map.next_value()?).is_some() {
                            return Err(A::Error::duplicate_field(METADATA));
                        }
                    } else {
                        match tensors.entry(name) {
                            Slot::Vacant(slot) => {
                                slot.insert(map.next_value()?);
                            }
                            Slot::Occupied(slot) => {
                                let name = slot.key();
                                return Err(A::Error::custom(format_args!("`{name}` comes twice")));
                            }
                        }
                    }
                }
                Ok(Raw {
                    tensors: tensors.into_iter().collect(),
                    metadata: metadata.unwrap_or_default(),
                })
            }
        }
        deserializer.deserialize_map(Object)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(json: &str, data: u64) -> Result<Header, HeaderError> {
        Header::decode(json.as_bytes(), data)
    }

    #[test]
    fn what_the_format_forbids_is_refused() {
        let one = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
        let header = decode(one, 8).unwrap();
        assert_eq!(
            (header.tensors[0].at, header.tensors[0].bytes),
            (8 + one.len() as u64, 8)
        );
        assert!(matches!(
            decode(one, 9),
            Err(HeaderError::Length {
                tensors: 8,
                file: 9
            })
        ));
        assert!(matches!(
            decode(one, 7),
            Err(HeaderError::Length {
                tensors: 8,
                file: 7
            })
        ));
        assert!(matches!(decode("", 0), Err(HeaderError::Json(_))));
        assert!(matches!(decode(" {}", 0), Err(HeaderError::Json(_))));
        assert!(decode("{}  ", 0).unwrap().tensors.is_empty());
        let entry = |text: &str| {
            format!("{{\"a\":{{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}},{text}}}")
        };
        let bad = |text: &str, data: u64| decode(&entry(text), data).unwrap_err();
        let at = |name: &str, from: u64, to: u64| {
            format!("\"{name}\":{{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[{from},{to}]}}")
        };
        assert!(decode(&entry(&at("b", 1, 2)), 2).is_ok());
        assert!(
            matches!(bad(&at("a", 1, 2), 2), HeaderError::Json(_)),
            "twice the same name"
        );
        assert!(matches!(
            bad(&at("b", 2, 3), 3),
            HeaderError::Hole {
                found: 2,
                expected: 1,
                ..
            }
        ));
        assert!(
            matches!(bad(&at("b", 0, 1), 1), HeaderError::Hole { .. }),
            "overlap"
        );
        assert!(
            matches!(bad(&at("b", 1, 0), 1), HeaderError::Hole { .. }),
            "backwards"
        );
        assert!(matches!(
            bad(&at("b", 1, 3), 3),
            HeaderError::Size {
                range: 2,
                shape: 1,
                ..
            }
        ));
        assert!(matches!(
            bad(
                "\"b\":{\"dtype\":\"F4\",\"shape\":[],\"data_offsets\":[1,2]}",
                2
            ),
            HeaderError::Json(_)
        ));
        let huge =
            "\"b\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[1,2]}";
        assert!(matches!(bad(huge, 2), HeaderError::Shape { .. }));
        assert!(matches!(
            bad("\"__metadata__\":{\"x\":1}", 1),
            HeaderError::Json(_)
        ));
        assert!(matches!(
            Header::json_bytes([0xff; 8], 100),
            Err(HeaderError::TooLong(_))
        ));
        assert!(matches!(
            Header::json_bytes([100, 0, 0, 0, 0, 0, 0, 0], 100),
            Err(HeaderError::Cut {
                header: 100,
                file: 100
            })
        ));
    }

    proptest! {
        #[test]
        fn no_bytes_are_too_much(bytes in proptest::collection::vec(any::<u8>(), 0..400), data: u64) {
            drop(Header::decode(&bytes, data));
        }

        #[test]
        fn a_damaged_header_is_an_answer(at in 0usize..120, byte: u8, cut in 0usize..120, data in 0u64..40) {
            let json = br#"{"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2,4],"data_offsets":[0,32]}}  "#;
            let mut json = json.to_vec();
            let len = json.len();
            json[at % len] = byte;
            json.truncate(len - cut % len);
            if let Ok(header) = Header::decode(&json, data) {
                prop_assert!(header.tensors.iter().all(|t| t.at + t.bytes <= 8 + json.len() as u64 + data));
            }
        }
    }
}
