//! A file that `torch.load` reads, also with `weights_only=True`: a dictionary of tensors by name.
//!
//! It is what `torch.save` writes (PyTorch, `torch/serialization.py` and `caffe2/serialize/inline_container.cc`):
//! a zip archive without compression, with a pickle of protocol 2 that names each tensor's storage, the
//! storages, and two words about the format. The pickle has no code: it calls `_rebuild_tensor_v2`
//! alone, as PyTorch's own do.

use crc_fast::{CrcAlgorithm, checksum};

use super::ExportError;
use crate::Dtype;
use crate::manifest::Tensor;

/// The archive's one folder.
const FOLDER: &str = "archive";

/// Alignment of storages, in bytes, as in PyTorch.
const ALIGN: u64 = 64;

/// Of a length or an offset in a zip archive that stands in its extra field (APPNOTE.TXT 4.5.3).
const ELSEWHERE: u32 = u32::MAX;

/// 1980-01-01: the same checkpoint is the same file.
const DATE: u16 = 0x21;

/// A file of the archive.
#[derive(Debug)]
struct Member {
    name: String,
    /// Where its header is, and its first byte, in the archive.
    header: u64,
    at: u64,
    bytes: u64,
}

/// The archive before it has the tensors.
#[derive(Debug)]
pub(super) struct Archive {
    members: Vec<Member>,
    /// Bytes that are known already, and where they go.
    parts: Vec<(u64, Vec<u8>)>,
    /// Where each tensor goes, in their order.
    pub(super) at: Vec<u64>,
    /// Where the directory begins.
    end: u64,
}

/// The class of a storage, for the types that this format has.
fn storage(dtype: Dtype) -> Option<&'static str> {
    Some(match dtype {
        Dtype::BOOL => "BoolStorage",
        Dtype::U8 => "ByteStorage",
        Dtype::I8 => "CharStorage",
        Dtype::I16 => "ShortStorage",
        Dtype::F16 => "HalfStorage",
        Dtype::BF16 => "BFloat16Storage",
        Dtype::I32 => "IntStorage",
        Dtype::F32 => "FloatStorage",
        Dtype::I64 => "LongStorage",
        Dtype::F64 => "DoubleStorage",
        Dtype::C64 => "ComplexFloatStorage",
        Dtype::U16 | Dtype::U32 | Dtype::U64 | Dtype::F8_E4M3 | Dtype::F8_E5M2 | Dtype::F8_E8M0 => {
            return None;
        }
    })
}

fn bytes_of(tensor: &Tensor) -> u64 {
    tensor.slices.iter().map(|placed| placed.bytes).sum()
}

impl Archive {
    /// Lays out a file of these tensors.
    ///
    /// # Errors
    /// A tensor's type is none of this format's.
    pub(super) fn new(tensors: &[&Tensor]) -> Result<Archive, ExportError> {
        let mut archive = Archive {
            members: Vec::new(),
            parts: Vec::new(),
            at: Vec::new(),
            end: 0,
        };
        let pickle = pickle(tensors)?;
        archive.known("data.pkl", pickle);
        archive.known("byteorder", b"little".to_vec());
        for (key, tensor) in tensors.iter().enumerate() {
            let at = archive.member(&format!("data/{key}"), bytes_of(tensor));
            archive.at.push(at);
        }
        archive.known("version", b"3\n".to_vec());
        Ok(archive)
    }

    fn known(&mut self, name: &str, bytes: Vec<u8>) {
        let at = self.member(name, bytes.len() as u64);
        self.parts.push((at, bytes));
    }

    fn member(&mut self, name: &str, bytes: u64) -> u64 {
        let name = format!("{FOLDER}/{name}");
        let header = self.end;
        // The local header has 30 bytes, the name, lengths of 8 bytes each, and padding.
        let fixed = header + 30 + name.len() as u64 + 20 + 4;
        let at = fixed.next_multiple_of(ALIGN);
        self.end = at + bytes;
        self.members.push(Member {
            name,
            header,
            at,
            bytes,
        });
        at
    }

    /// The most bytes of the file.
    pub(super) fn capacity(&self) -> u64 {
        let names: u64 = (self.members.iter()).map(|m| m.name.len() as u64).sum();
        self.end + names + 80 * self.members.len() as u64 + 98
    }

    /// Writes all but the tensors into the image that has them; the file's length.
    pub(super) fn finish(&self, image: &mut [u8]) -> usize {
        let mut put =
            |at: u64, bytes: &[u8]| image[at as usize..][..bytes.len()].copy_from_slice(bytes);
        for (at, bytes) in &self.parts {
            put(*at, bytes);
        }
        let mut directory = Vec::new();
        for member in &self.members {
            let data = &image[member.at as usize..][..member.bytes as usize];
            // The CRC-32 of zip archives.
            let crc = checksum(CrcAlgorithm::Crc32IsoHdlc, data) as u32;
            let header = member.local(crc);
            image[member.header as usize..][..header.len()].copy_from_slice(&header);
            directory.extend(member.central(crc));
        }
        let count = self.members.len() as u64;
        let tail = end_of(self.end, directory.len() as u64, count);
        directory.extend(tail);
        let end = self.end as usize;
        image[end..][..directory.len()].copy_from_slice(&directory);
        end + directory.len()
    }
}

/// Numbers in their order, little-endian.
#[derive(Default)]
struct Record(Vec<u8>);

impl Record {
    fn u16(mut self, value: u16) -> Record {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u32(mut self, value: u32) -> Record {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Record {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn bytes(mut self, bytes: &[u8]) -> Record {
        self.0.extend(bytes);
        self
    }
}

impl Member {
    /// Version 4.5, no flags, stored, a date, the checksum, lengths elsewhere, the name's length.
    fn common(&self, record: Record, crc: u32) -> Record {
        let record = record.u16(45).u16(0).u16(0).u16(0).u16(DATE);
        let record = record.u32(crc).u32(ELSEWHERE).u32(ELSEWHERE);
        record.u16(self.name.len() as u16)
    }

    /// APPNOTE.TXT 4.3.7.
    fn local(&self, crc: u32) -> Vec<u8> {
        let padding = self.at - self.header - 30 - self.name.len() as u64 - 20 - 4;
        let record = self.common(Record::default().u32(0x0403_4b50), crc);
        let record = record.u16(24 + padding as u16).bytes(self.name.as_bytes());
        let record = record.u16(1).u16(16).u64(self.bytes).u64(self.bytes);
        // PyTorch's own mark of padding.
        let record = record.bytes(b"FB").u16(padding as u16);
        record.bytes(&vec![b'Z'; padding as usize]).0
    }

    /// APPNOTE.TXT 4.3.12.
    fn central(&self, crc: u32) -> Vec<u8> {
        let record = self.common(Record::default().u32(0x0201_4b50).u16(45), crc);
        let record = record.u16(28).u16(0).u16(0).u16(0).u32(0).u32(ELSEWHERE);
        let record = record.bytes(self.name.as_bytes()).u16(1).u16(24);
        record.u64(self.bytes).u64(self.bytes).u64(self.header).0
    }
}

/// The end of the directory, in both forms (APPNOTE.TXT 4.3.14 to 4.3.16).
fn end_of(at: u64, bytes: u64, count: u64) -> Vec<u8> {
    let record = Record::default().u32(0x0606_4b50).u64(44).u16(45).u16(45);
    let record = record
        .u32(0)
        .u32(0)
        .u64(count)
        .u64(count)
        .u64(bytes)
        .u64(at);
    let record = record.u32(0x0706_4b50).u32(0).u64(at + bytes).u32(1);
    let record = record
        .u32(0x0605_4b50)
        .u16(0)
        .u16(0)
        .u16(u16::MAX)
        .u16(u16::MAX);
    record.u32(ELSEWHERE).u32(ELSEWHERE).u16(0).0
}

/// A dictionary of tensors by name. Opcodes: Python's `pickletools`.
fn pickle(tensors: &[&Tensor]) -> Result<Vec<u8>, ExportError> {
    let mut out = b"\x80\x02}(".to_vec();
    for (key, tensor) in tensors.iter().enumerate() {
        let class = storage(tensor.dtype).ok_or_else(|| ExportError::Type {
            name: tensor.name.clone(),
            dtype: tensor.dtype,
        })?;
        let elements: u64 = tensor.shape.iter().product();
        text(&mut out, &tensor.name);
        out.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        text(&mut out, "storage");
        out.extend(format!("ctorch\n{class}\n").as_bytes());
        text(&mut out, &key.to_string());
        text(&mut out, "cpu");
        number(&mut out, elements);
        // The storage by its name, and where the tensor begins in it.
        out.extend(b"tQK\0");
        out.push(b'(');
        tensor.shape.iter().for_each(|n| number(&mut out, *n));
        out.extend(b"t(");
        strides(&tensor.shape).for_each(|n| number(&mut out, n));
        // No gradient is wanted, and there are no hooks.
        out.extend(b"t\x89ccollections\nOrderedDict\n)RtR");
    }
    out.extend(b"u.");
    Ok(out)
}

/// Of a tensor in C order, in elements.
fn strides(shape: &[u64]) -> impl Iterator<Item = u64> {
    (0..shape.len()).map(|dim| shape[dim + 1..].iter().map(|n| (*n).max(1)).product())
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(b'X');
    // Names have at most a KiB.
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
}

fn number(out: &mut Vec<u8>, value: u64) {
    match i32::try_from(value) {
        Ok(small) => {
            out.push(b'J');
            out.extend(small.to_le_bytes());
        }
        Err(_) => {
            // Nine bytes, for the sign.
            out.extend(b"\x8a\x09");
            out.extend(value.to_le_bytes());
            out.push(0);
        }
    }
}
