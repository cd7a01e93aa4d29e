use super::*;
use crate::source::Directory;
use crate::sum::CHUNK;
use crate::testing::origin;

#[test]
fn a_type_that_torch_files_do_not_have_is_named() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open(place.path()).unwrap();
    let tensor = Tensor {
        name: "eight".into(),
        dtype: Dtype::F8_E4M3,
        shape: vec![0],
        slices: Vec::new(),
    };
    let manifest = Manifest {
        origin: origin(),
        chunk: CHUNK,
        files: Vec::new(),
        tensors: vec![tensor],
        blobs: Vec::new(),
    };
    let source = Directory::new(dir.clone(), false);
    let options = Options::default();
    let error = export_torch(&manifest, &source, &["*"], (&dir, "x.pt"), options).unwrap_err();
    assert!(
        error.to_string().contains("`eight` is of type F8_E4M3"),
        "{error}"
    );
    assert!(!place.path().join("x.pt").exists());
}
