//! A stranger's Python reads what is written here, and the other way round: by the `safetensors`
//! package, and by PyTorch.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use crate::shard::{Header, Layout, LayoutError, Part};
use crate::slice::Slice;
use crate::testing::ramp;
use crate::{Dtype, Pages};

/// Output of a script; none if the interpreter has no `safetensors`.
fn python(script: &str, path: &Path) -> Option<String> {
    let python = std::env::var("MUSTER_TEST_PYTHON")
        .expect("MUSTER_TEST_PYTHON names a Python with PyTorch");
    let run = |script: &str| {
        Command::new(&python)
            .args(["-c", script])
            .arg(path)
            .output()
            .unwrap()
    };
    if !run("import safetensors").status.success() {
        eprintln!("skipped: {python} has no safetensors package: pip install safetensors");
        return None;
    }
    let output = run(script);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    Some(String::from_utf8(output.stdout).unwrap())
}

/// Each tensor: its name, type, shape, and the bytes of its elements.
const LIST: &str = "
import sys, torch
from safetensors import safe_open
with safe_open(sys.argv[1], framework='pt') as file:
    print(file.metadata()['format'])
    for name in sorted(file.keys()):
        tensor = file.get_tensor(name)
        raw = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else []
        print(name, tensor.dtype, list(tensor.shape), bytes(raw).hex() if tensor.numel() < 100 else sum(map(int, raw)))
";

#[test]
fn pythons_safetensors_reads_a_shard() {
    let padding = reads(Layout::new);
    assert_ne!(padding, Some(0));
}

#[test]
fn pythons_safetensors_finds_no_padding_in_what_is_for_others() {
    let padding = reads(Layout::tight);
    assert!(matches!(padding, None | Some(0)), "{padding:?}");
}

/// Has the package read what is laid out so: how many tensors of padding it finds; none without the package.
fn reads(lay_out: impl Fn(&[Part]) -> Result<Layout, LayoutError>) -> Option<usize> {
    let part = |name: &str, dtype, offset: &[u64], extent: &[u64]| Part {
        name: name.to_owned(),
        dtype,
        slice: Slice {
            offset: offset.to_vec(),
            extent: extent.to_vec(),
        },
    };
    let parts = [
        part("large", Dtype::F32, &[0, 0], &[130, 130]),
        part("half", Dtype::F16, &[4], &[3]),
        part("brain", Dtype::BF16, &[0, 0], &[2, 3]),
        part("eight", Dtype::F8_E4M3, &[0], &[5]),
        part("flag", Dtype::BOOL, &[0], &[2]),
        part("step", Dtype::I64, &[], &[]),
        part("none", Dtype::F32, &[0, 0], &[0, 7]),
        part("cut", Dtype::U8, &[0], &[4]),
        part("cut", Dtype::U8, &[4], &[2]),
    ];
    let layout = lay_out(&parts).unwrap();
    let mut image = Pages::new(layout.bytes as usize).unwrap();
    image[..layout.header.len()].copy_from_slice(&layout.header);
    let mut expected: Vec<String> = Vec::new();
    for (part, at) in parts.iter().zip(&layout.at) {
        let mut bytes = ramp(&part.slice.extent, part.dtype.size());
        if part.dtype == Dtype::BOOL {
            bytes = vec![1, 0];
        }
        image[*at as usize..][..bytes.len()].copy_from_slice(&bytes);
        let torch = match part.dtype {
            Dtype::F32 => "float32",
            Dtype::F16 => "float16",
            Dtype::BF16 => "bfloat16",
            Dtype::F8_E4M3 => "float8_e4m3fn",
            Dtype::BOOL => "bool",
            Dtype::I64 => "int64",
            _ => "uint8",
        };
        let name = match part.name.as_str() {
            "cut" => format!("cut@{}", part.slice.offset[0]),
            name => name.to_owned(),
        };
        let content = match part.slice.elements().unwrap() {
            ..100 => crate::hex::encode(&bytes),
            _ => bytes
                .iter()
                .map(|byte| u64::from(*byte))
                .sum::<u64>()
                .to_string(),
        };
        expected.push(format!(
            "{name} torch.{torch} {:?} {content}",
            part.slice.extent
        ));
    }
    expected.sort();
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("shard.safetensors");
    std::fs::write(&path, &image[..layout.bytes as usize]).unwrap();
    let output = python(LIST, &path)?;
    let mut lines: Vec<&str> = output.lines().map(str::trim_end).collect();
    assert_eq!(lines.remove(0), "pt");
    let (padding, tensors): (Vec<&str>, Vec<&str>) = lines
        .into_iter()
        .partition(|line| line.starts_with(crate::shard::PAD));
    let expected: Vec<&str> = expected.iter().map(|line| line.trim_end()).collect();
    assert_eq!(tensors, expected);
    Some(padding.len())
}

#[test]
fn what_python_wrote_is_read() {
    let script = "
import sys, torch
from safetensors.torch import save_file
save_file({
    'w': torch.arange(12, dtype=torch.float32).reshape(3, 4),
    'b': torch.arange(5, dtype=torch.int16),
    's': torch.tensor(7, dtype=torch.int64),
    'e': torch.zeros(0, 3, dtype=torch.bfloat16),
}, sys.argv[1], metadata={'who': 'stranger'})
";
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("theirs.safetensors");
    if python(script, &path).is_none() {
        return;
    }
    let file = File::open(&path).unwrap();
    let header = Header::read(&file).unwrap();
    assert_eq!(header.metadata["who"], "stranger");
    let read = |name: &str, dtype, shape: &[u64]| {
        let entry = header
            .tensors
            .iter()
            .find(|entry| entry.name == name)
            .unwrap();
        assert_eq!((entry.dtype, &entry.shape[..]), (dtype, shape));
        let mut bytes = vec![0; entry.bytes as usize];
        file.read_exact_at(&mut bytes, entry.at).unwrap();
        bytes
    };
    let floats: Vec<u8> = (0..12u8)
        .flat_map(|at| f32::from(at).to_le_bytes())
        .collect();
    assert_eq!(read("w", Dtype::F32, &[3, 4]), floats);
    let shorts: Vec<u8> = (0..5i16).flat_map(i16::to_le_bytes).collect();
    assert_eq!(read("b", Dtype::I16, &[5]), shorts);
    assert_eq!(read("s", Dtype::I64, &[]), 7i64.to_le_bytes());
    assert_eq!(read("e", Dtype::BF16, &[0, 3]), b"");
    assert_eq!(header.tensors.len(), 4);
}
