//! Where each tensor goes in a file, and the file's header.

use std::collections::{BTreeMap, BTreeSet};

use crate::shard::{MAX_HEADER, PAD};
use crate::slice::{Slice, SliceError};
use crate::{Dtype, PAGE};

/// The most bytes of a tensor's or a blob's name.
pub const MAX_NAME: usize = 1024;

/// From this size on, in bytes, a tensor begins at a page.
const LARGE: u64 = 64 << 10;

/// Alignment of smaller tensors, in bytes.
const SMALL_ALIGN: u64 = 64;

/// A slice of a tensor that is to be in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The tensor's name.
    pub name: String,
    pub dtype: Dtype,
    pub slice: Slice,
}

/// A file before it has data. That of a rank is the same at every save, so it is made once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The file's beginning; a multiple of 4 KiB long, with padding.
    pub header: Vec<u8>,
    /// Where each part begins in the file, in the order in which they were given.
    pub at: Vec<u64>,
    /// Length of the file; a multiple of 4 KiB, with padding. Bytes outside all parts are zeros.
    pub bytes: u64,
}

/// Why parts cannot be a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    #[error(
        "the name `{0}` is empty, longer than {MAX_NAME} bytes, or reserved (`{PAD}…`, `__metadata__`): rename the tensor"
    )]
    Name(String),
    #[error("two tensors would both be `{0}` in one file: rename one")]
    Twice(String),
    #[error("slice {slice} of `{name}`: {why}")]
    Slice {
        name: String,
        slice: Slice,
        #[source]
        why: SliceError,
    },
    #[error(
        "the header would have {0} bytes, the limit is {MAX_HEADER}: use more files, or fewer tensors"
    )]
    Header(u64),
    #[error("the file would be larger than 2^63 bytes")]
    TooLarge,
}

/// That a tensor may have this name.
///
/// # Errors
/// [`LayoutError::Name`].
pub fn check_name(name: &str) -> Result<(), LayoutError> {
    if name.is_empty() || name.len() > MAX_NAME || name.starts_with(PAD) || name == "__metadata__" {
        let shown = name.chars().take(100).collect();
        return Err(LayoutError::Name(shown));
    }
    Ok(())
}

/// Whether gaps are filled with tensors that nobody asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pads {
    /// Tensors begin where they are read and written fastest.
    Yes,
    /// None: readers that want to know all names find no others.
    No,
}

impl Layout {
    /// The same without padding, for other programs: the largest elements come first, so that each tensor begins at a
    /// multiple of its element's size, as the safetensors package lays them out.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn tight(parts: &[Part]) -> Result<Self, LayoutError> {
        Self::of(parts, Pads::No)
    }

    /// Lays the parts out. A part that is the only one of its tensor in the file has the tensor's
    /// name there; of several each is named `tensor@0,128` by its offset.
    ///
    /// # Errors
    /// A name, a size, or a header that the format does not allow.
    pub fn new(parts: &[Part]) -> Result<Self, LayoutError> {
        Self::of(parts, Pads::Yes)
    }

    fn of(parts: &[Part], pads: Pads) -> Result<Self, LayoutError> {
        let keys = keys(parts)?;
        let sizes = parts
            .iter()
            .map(bytes_of)
            .collect::<Result<Vec<u64>, _>>()?;
        let mut order: Vec<usize> = (0..parts.len()).collect();
        order.sort_by_key(|part| {
            let rank = match pads {
                Pads::Yes => u64::from(sizes[*part] < LARGE),
                Pads::No => u64::MAX - parts[*part].dtype.size(),
            };
            (rank, &keys[*part])
        });

        let mut file = Draft {
            json: String::from(r#"{"__metadata__":{"format":"pt","muster":"1"}"#),
            end: 0,
            pads: 0,
        };
        let mut at = vec![0; parts.len()];
        for part in order {
            if pads == Pads::Yes {
                file.pad_to(match sizes[part] {
                    0 => 1,
                    LARGE.. => PAGE as u64,
                    _ => SMALL_ALIGN,
                })?;
            }
            at[part] = file.end;
            let (dtype, shape) = (parts[part].dtype, &parts[part].slice.extent);
            file.append(&keys[part], dtype, shape, sizes[part])?;
        }
        let unit = match pads {
            Pads::Yes => PAGE,
            // The safetensors package's.
            Pads::No => 8,
        };
        if pads == Pads::Yes {
            file.pad_to(PAGE as u64)?;
        }
        file.json.push('}');

        let header_bytes = (file.json.len() + 8).next_multiple_of(unit);
        let json_bytes = (header_bytes - 8) as u64;
        if json_bytes > MAX_HEADER {
            return Err(LayoutError::Header(json_bytes));
        }
        let mut header = Vec::with_capacity(header_bytes);
        header.extend_from_slice(&json_bytes.to_le_bytes());
        header.extend_from_slice(file.json.as_bytes());
        header.resize(header_bytes, b' ');
        for part in &mut at {
            *part += header_bytes as u64;
        }
        Ok(Self {
            header,
            at,
            bytes: header_bytes as u64 + file.end,
        })
    }
}

/// A file's header as it grows.
struct Draft {
    json: String,
    /// Bytes of data so far.
    end: u64,
    pads: u64,
}

impl Draft {
    fn append(
        &mut self,
        key: &str,
        dtype: Dtype,
        shape: &[u64],
        bytes: u64,
    ) -> Result<(), LayoutError> {
        let from = self.end;
        let to = from
            .checked_add(bytes)
            .filter(|to| *to < 1 << 62)
            .ok_or(LayoutError::TooLarge)?;
        self.json.push(',');
        self.json
            .push_str(&serde_json::Value::from(key).to_string());
        self.json.push_str(&format!(
            r#":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{from},{to}]}}"#
        ));
        self.end = to;
        Ok(())
    }

    fn pad_to(&mut self, align: u64) -> Result<(), LayoutError> {
        // The end is below 2^62.
        let bytes = self.end.next_multiple_of(align) - self.end;
        if bytes > 0 {
            self.append(&format!("{PAD}{}", self.pads), Dtype::U8, &[bytes], bytes)?;
            self.pads += 1;
        }
        Ok(())
    }
}

fn bytes_of(part: &Part) -> Result<u64, LayoutError> {
    // Fewer than 2^60 elements of at most 8 bytes.
    match part.slice.elements() {
        Ok(elements) => Ok(elements * part.dtype.size()),
        Err(why) => Err(LayoutError::Slice {
            name: part.name.clone(),
            slice: part.slice.clone(),
            why,
        }),
    }
}

/// The parts' names in the file.
fn keys(parts: &[Part]) -> Result<Vec<String>, LayoutError> {
    let mut count = BTreeMap::new();
    for part in parts {
        check_name(&part.name)?;
        *count.entry(&part.name).or_insert(0u32) += 1;
    }
    let mut taken = BTreeSet::new();
    let mut keys = Vec::with_capacity(parts.len());
    for part in parts {
        let key = match count.get(&part.name) {
            Some(1) => part.name.clone(),
            _ => {
                let offset: Vec<String> = part.slice.offset.iter().map(u64::to_string).collect();
                format!("{}@{}", part.name, offset.join(","))
            }
        };
        if !taken.insert(key.clone()) {
            return Err(LayoutError::Twice(key));
        }
        keys.push(key);
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::shard::Header;

    fn part(name: &str, dtype: Dtype, shape: &[u64]) -> Part {
        Part {
            name: name.to_owned(),
            dtype,
            slice: Slice::whole(shape),
        }
    }

    /// The header reads back, and says where the parts are.
    fn check(parts: &[Part]) -> Header {
        let layout = Layout::new(parts).unwrap();
        let page = PAGE as u64;
        assert_eq!(
            (layout.header.len() as u64 % page, layout.bytes % page),
            (0, 0)
        );
        let first = layout.header[..8].try_into().unwrap();
        assert_eq!(
            Header::json_bytes(first, layout.bytes).unwrap(),
            layout.header.len() as u64 - 8
        );
        let data = layout.bytes - layout.header.len() as u64;
        let header = Header::decode(&layout.header[8..], data).unwrap();
        assert_eq!(header.tensors.len(), parts.len());
        let keys = keys(parts).unwrap();
        for ((part, at), key) in parts.iter().zip(&layout.at).zip(&keys) {
            let entry = header
                .tensors
                .iter()
                .find(|entry| entry.name == *key)
                .unwrap();
            assert_eq!(
                (entry.at, entry.dtype, &entry.shape),
                (*at, part.dtype, &part.slice.extent)
            );
            assert!(entry.bytes < LARGE || at % page == 0);
            assert!(entry.bytes == 0 || at % SMALL_ALIGN == 0);
        }
        header
    }

    #[test]
    fn names_and_places() {
        let mut second = part("w", Dtype::F16, &[8, 4]);
        second.slice.offset = vec![8, 0];
        let header = check(&[
            part("b", Dtype::F32, &[3]),
            part("w", Dtype::F16, &[8, 4]),
            second.clone(),
            part("big", Dtype::F64, &[100, 100]),
            part("none", Dtype::I64, &[0, 5]),
            part("scalar \"ü\"\n", Dtype::BF16, &[]),
        ]);
        let names: Vec<&str> = header
            .tensors
            .iter()
            .map(|entry| entry.name.as_str())
            .collect();
        assert_eq!(
            names,
            ["big", "b", "none", "scalar \"ü\"\n", "w@0,0", "w@8,0"]
        );
        assert_eq!(header.metadata["format"], "pt");
        check(&[]);

        for name in ["", "__pad_0", "__metadata__", &"x".repeat(MAX_NAME + 1)] {
            let refused = Layout::new(&[part(name, Dtype::U8, &[])]);
            assert!(matches!(refused, Err(LayoutError::Name(_))), "{name}");
        }
        let odd = part("w@8,0", Dtype::U8, &[]);
        assert_eq!(
            Layout::new(&[part("w", Dtype::F16, &[8, 4]), second, odd]),
            Err(LayoutError::Twice("w@8,0".to_owned()))
        );
        let huge = part("w", Dtype::F64, &[1 << 40, 1 << 40]);
        assert!(matches!(
            Layout::new(&[huge]),
            Err(LayoutError::Slice { .. })
        ));
        let large: Vec<Part> = (0..5)
            .map(|at| part(&at.to_string(), Dtype::F64, &[(1 << 60) - 1]))
            .collect();
        assert_eq!(Layout::new(&large), Err(LayoutError::TooLarge));
    }

    proptest! {
        #[test]
        fn any_parts_are_a_file(
            parts in proptest::collection::btree_map("[a-z.]{1,12}", (0usize..17, proptest::collection::vec(0u64..300, 0..3)), 0..20)
        ) {
            let parts: Vec<Part> = parts
                .iter()
                .map(|(name, (dtype, shape))| part(name, Dtype::ALL[*dtype], shape))
                .collect();
            check(&parts);
        }
    }
}
