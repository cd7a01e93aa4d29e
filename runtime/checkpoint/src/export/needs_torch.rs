//! PyTorch itself reads what is exported for it.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use super::*;
use crate::hex::encode;
use crate::manifest::Placed;
use crate::persist::Path as How;
use crate::source::Readers;
use crate::sum::{CHUNK, ChunkSum};
use crate::testing::{origin, ramp};

/// Each tensor: its name, type, shape, and the bytes of its elements, or their sum.
const LIST: &str = "
import sys, torch
for more in [{'weights_only': True}, {'weights_only': False}, {'weights_only': True, 'mmap': True}]:
    state = torch.load(sys.argv[1], **more)
    assert type(state) is dict
    for name, tensor in state.items():
        assert tensor.is_contiguous() and not tensor.requires_grad
        raw = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else []
        print(name, tensor.dtype, list(tensor.shape), bytes(raw).hex() if tensor.numel() < 100 else sum(map(int, raw)))
";

struct Memory(Vec<u8>);

impl Source for Memory {
    fn size(&self, _path: &str) -> io::Result<u64> {
        Ok(self.0.len() as u64)
    }

    fn read(&self, _path: &str, at: u64, into: &mut [u8], _readers: Readers) -> io::Result<()> {
        into.copy_from_slice(&self.0[at as usize..][..into.len()]);
        Ok(())
    }
}

/// A checkpoint of these tensors, and what PyTorch calls their types.
fn checkpoint(tensors: &BTreeMap<&str, (Dtype, &[u64])>) -> (Manifest, Memory) {
    let mut data = Vec::new();
    let tensors: Vec<Tensor> = (tensors.iter())
        .map(|(name, (dtype, shape))| {
            let at = data.len() as u64;
            let bytes = match dtype {
                Dtype::BOOL => vec![1, 0],
                _ => ramp(shape, dtype.size()),
            };
            data.extend(&bytes);
            let placed = Placed {
                slice: Slice::whole(shape),
                file: 0,
                at,
                bytes: bytes.len() as u64,
            };
            Tensor {
                name: (*name).to_owned(),
                dtype: *dtype,
                shape: shape.to_vec(),
                slices: vec![placed],
            }
        })
        .collect();
    let written = Written {
        bytes: data.len() as u64,
        chunks: data.chunks(CHUNK as usize).map(ChunkSum::of).collect(),
        path: How::Found,
    };
    let manifest = Manifest {
        origin: origin(),
        chunk: CHUNK,
        files: vec![written.data_file("data/1/n0-0.safetensors".into())],
        tensors,
        blobs: Vec::new(),
    };
    manifest.check().unwrap();
    (manifest, Memory(data))
}

#[test]
fn torch_load_reads_what_is_exported_for_it() {
    let tensors: BTreeMap<&str, (Dtype, &[u64])> = [
        ("big", (Dtype::F32, &[1100, 1100][..])),
        ("brain", (Dtype::BF16, &[2, 3])),
        ("complex", (Dtype::C64, &[2])),
        ("double", (Dtype::F64, &[3, 2, 2])),
        ("empty", (Dtype::F32, &[0, 7])),
        ("flag", (Dtype::BOOL, &[2])),
        ("half", (Dtype::F16, &[3])),
        ("model.0.weight \u{fc}", (Dtype::I32, &[4])),
        ("scalar", (Dtype::I64, &[])),
        ("short", (Dtype::I16, &[5])),
        ("signed", (Dtype::I8, &[5])),
        ("unsigned", (Dtype::U8, &[5])),
    ]
    .into();
    let (manifest, source) = checkpoint(&tensors);
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open(place.path()).unwrap();
    let options = Options::default();
    let written = export_torch(&manifest, &source, &["*"], (&dir, "all.pt"), options).unwrap();
    let path = place.path().join("all.pt");
    assert_eq!(written.bytes, path.metadata().unwrap().len());

    let output = python(&path);
    let mut expected = String::new();
    for (name, (dtype, shape)) in &tensors {
        let kind = match dtype {
            Dtype::F32 => "float32",
            Dtype::BF16 => "bfloat16",
            Dtype::C64 => "complex64",
            Dtype::F64 => "float64",
            Dtype::BOOL => "bool",
            Dtype::F16 => "float16",
            Dtype::I32 => "int32",
            Dtype::I64 => "int64",
            Dtype::I16 => "int16",
            Dtype::I8 => "int8",
            _ => "uint8",
        };
        let placed = &manifest.tensor(name).unwrap().slices[0];
        let bytes = &source.0[placed.at as usize..][..placed.bytes as usize];
        let content = match shape.iter().product::<u64>() {
            ..100 => encode(bytes),
            _ => bytes.iter().map(|b| u64::from(*b)).sum::<u64>().to_string(),
        };
        expected.push_str(&format!("{name} torch.{kind} {shape:?} {content}\n"));
    }
    let lines = |text: &str| -> Vec<String> {
        text.lines()
            .map(|line| line.trim_end().to_owned())
            .collect()
    };
    assert_eq!(lines(&output), lines(&expected.repeat(3)));
}

fn python(path: &Path) -> String {
    let python = std::env::var("MUSTER_TEST_PYTHON")
        .expect("MUSTER_TEST_PYTHON names a Python with PyTorch");
    let output = Command::new(python).args(["-c", LIST]).arg(path).output();
    let output = output.unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    String::from_utf8(output.stdout).unwrap()
}
