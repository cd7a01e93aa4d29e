use std::collections::BTreeMap;
use std::sync::Mutex;

use proptest::prelude::*;

use super::*;
use crate::hex::Bytes;
use crate::manifest::{DataFile, Origin, Tensor};
use crate::sum::{ChunkSum, file_digest};
use crate::testing::{Random, ramp, read_slice, tensor_of, tiling};
use crate::verify::{Depth, verify};

/// Files in memory, and what was read of them.
#[derive(Default)]
pub(crate) struct Memory {
    pub(crate) files: BTreeMap<String, Vec<u8>>,
    pub(crate) read: Mutex<Vec<(String, u64)>>,
    /// Reads that were said to be shared with others.
    shared: Mutex<Vec<(String, u64)>>,
    broken: Option<rustix::io::Errno>,
}

impl Source for Memory {
    fn size(&self, path: &str) -> io::Result<u64> {
        let file = self.files.get(path).ok_or(io::ErrorKind::NotFound)?;
        Ok(file.len() as u64)
    }
    fn read(&self, path: &str, at: u64, into: &mut [u8], readers: Readers) -> io::Result<()> {
        if let Some(errno) = self.broken {
            return Err(errno.into());
        }
        self.read.lock().unwrap().push((path.to_owned(), at));
        if readers == Readers::Several {
            self.shared.lock().unwrap().push((path.to_owned(), at));
        }
        let file = self.files.get(path).ok_or(io::ErrorKind::NotFound)?;
        let bytes = file.get(at as usize..at as usize + into.len());
        into.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

pub(crate) fn manifest(tensors: Vec<Tensor>, files: &BTreeMap<String, Vec<u8>>) -> Manifest {
    let origin = Origin {
        job: "j".to_owned(),
        lineage: Bytes([7; 32]),
        generation: Bytes([0; 32]),
        number: 1,
        attempt: 0,
        step: 10,
        world: 3,
        saved_at: 0,
    };
    let files = (files.iter())
        .map(|(path, bytes)| {
            let sums: Vec<ChunkSum> = bytes.chunks(CHUNK as usize).map(ChunkSum::of).collect();
            DataFile {
                path: path.clone(),
                bytes: bytes.len() as u64,
                digest: file_digest(&sums),
                chunks: sums
                    .iter()
                    .map(|sum| Bytes(sum.crc.to_be_bytes()))
                    .collect(),
            }
        })
        .collect();
    Manifest {
        origin,
        chunk: CHUNK,
        files,
        tensors,
        blobs: Vec::new(),
    }
}

/// A tensor saved in these slices, and its bytes.
pub(crate) fn saved(shape: &[u64], dtype: Dtype, slices: &[Slice]) -> (Manifest, Memory, Vec<u8>) {
    let whole = ramp(shape, dtype.size());
    let (tensor, files) = tensor_of(shape, dtype, slices, &whole);
    let files = (files.into_iter().enumerate())
        .map(|(at, bytes)| (format!("f{at}"), bytes))
        .collect();
    let manifest = manifest(vec![tensor], &files);
    (
        manifest,
        Memory {
            files,
            ..Memory::default()
        },
        whole,
    )
}

fn get(
    manifest: &Manifest,
    source: &impl Source,
    slice: &Slice,
) -> Result<(Vec<u8>, Loaded), LoadError> {
    get_by(Team::alone(3), manifest, source, slice)
}

fn get_by(
    team: Team,
    manifest: &Manifest,
    source: &impl Source,
    slice: &Slice,
) -> Result<(Vec<u8>, Loaded), LoadError> {
    let tensor = &manifest.tensors[0];
    let mut into = vec![0; (slice.elements().unwrap_or(0) * tensor.dtype.size()) as usize];
    let mut wants = [Want {
        name: &tensor.name,
        dtype: tensor.dtype,
        shape: &tensor.shape,
        slice: slice.clone(),
        into: &mut into,
    }];
    let loaded = load(manifest, source, &mut wants, team)?;
    Ok((into, loaded))
}

proptest! {
    #[test]
    fn any_world_loads_what_any_other_saved(
        shape in proptest::collection::vec(0u64..8, 0..4),
        (from, to) in (any::<u64>(), any::<u64>()),
        dtype in 0usize..17,
    ) {
        let dtype = Dtype::ALL[dtype];
        let (manifest, source, whole) = saved(&shape, dtype, &tiling(&shape, from));
        verify(&manifest, &source, Depth::Everything { threads: 2 }).unwrap();
        // All slices of the new world at once, each into memory of its own.
        let slices = tiling(&shape, to);
        let expected: Vec<Vec<u8>> = slices.iter().map(|slice| read_slice(&whole, &shape, slice, dtype.size())).collect();
        let mut into: Vec<Vec<u8>> = expected.iter().map(|bytes| vec![0xaa; bytes.len()]).collect();
        let mut wants: Vec<Want<'_>> = (slices.iter().zip(&mut into))
            .map(|(slice, into)| Want { name: "t", dtype, shape: &shape, slice: slice.clone(), into })
            .collect();
        let loaded = load(&manifest, &source, &mut wants, Team::alone(3)).unwrap();
        prop_assert_eq!(loaded.wanted, whole.len() as u64);
        prop_assert_eq!(&into, &expected);

        // Every other one to memory that somebody else writes to.
        let mut into: Vec<Vec<u8>> = expected.iter().map(|bytes| vec![0xaa; bytes.len()]).collect();
        let there = There::new(&expected);
        let wants: Vec<Wanted<'_, Room<'_>>> = (slices.iter().zip(&mut into).enumerate())
            .map(|(at, (slice, into))| {
                let into = match at % 2 {
                    0 => Room::Here(into),
                    _ => Room::Far(into.len() as u64),
                };
                Wanted { name: "t", dtype, shape: &shape, slice: slice.clone(), into }
            })
            .collect();
        load_to(&manifest, &source, wants, &there, Team::alone(3)).unwrap();
        for (at, (bytes, there)) in into.iter().zip(there.all()).enumerate() {
            prop_assert_eq!(if at % 2 == 0 { bytes } else { &there }, &expected[at]);
        }
    }
}

/// Memory that only a sink writes to; what is put is there once it is flushed.
struct There(Vec<Mutex<Vec<u8>>>);

/// A thread's memory, and all that was put from it.
struct Lorry {
    memory: Pages,
    put: Mutex<Vec<(usize, u64, Part)>>,
}

impl std::ops::Deref for Lorry {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.memory
    }
}

impl std::ops::DerefMut for Lorry {
    fn deref_mut(&mut self) -> &mut [u8] {
        assert!(self.put.lock().unwrap().is_empty(), "it was not flushed");
        &mut self.memory
    }
}

impl There {
    fn new(like: &[Vec<u8>]) -> There {
        let empty = like.iter().map(|bytes| Mutex::new(vec![0xbb; bytes.len()]));
        There(empty.collect())
    }

    fn all(self) -> impl Iterator<Item = Vec<u8>> {
        self.0.into_iter().map(|one| one.into_inner().unwrap())
    }
}

impl Sink for There {
    type Buffer = Lorry;

    fn buffer(&self) -> Result<Lorry, LoadError> {
        Ok(Lorry {
            memory: buffer()?,
            put: Mutex::default(),
        })
    }

    fn put(&self, want: usize, at: u64, from: &Lorry, part: Part) -> Result<(), LoadError> {
        from.put.lock().unwrap().push((want, at, part));
        Ok(())
    }

    fn flush(&self, lorry: &mut Lorry) -> Result<(), LoadError> {
        let put = std::mem::take(&mut *lorry.put.lock().unwrap());
        for (want, at, part) in put {
            let mut memory = self.0[want].lock().unwrap();
            let Some(room) = memory.get_mut(at as usize..at as usize + part.bytes) else {
                return Err(LoadError::Far("too short".into()));
            };
            room.copy_from_slice(&lorry.memory[part.at..][..part.bytes]);
        }
        Ok(())
    }
}

/// 5 chunks of rows, in one file.
fn large() -> (Manifest, Memory, Vec<u8>, Vec<u64>) {
    let shape = vec![5 * 1024, 1024];
    let (manifest, source, whole) = saved(&shape, Dtype::F32, &[Slice::whole(&shape)]);
    (manifest, source, whole, shape)
}

#[test]
fn only_the_chunks_that_are_needed_are_read() {
    let (manifest, source, whole, shape) = large();
    let rows = Slice {
        offset: vec![2100, 0],
        extent: vec![100, 1024],
    };
    let (bytes, loaded) = get(&manifest, &source, &rows).unwrap();
    assert!(bytes == read_slice(&whole, &shape, &rows, 4));
    assert_eq!((loaded.wanted, loaded.read), (100 << 12, CHUNK));
    assert_eq!(*source.read.lock().unwrap(), [("f0".to_owned(), 2 * CHUNK)]);
    // Columns are in all of them; chunks are the unit of verifying.
    let column = Slice {
        offset: vec![0, 7],
        extent: vec![5120, 1],
    };
    let (bytes, loaded) = get(&manifest, &source, &column).unwrap();
    assert!(bytes == read_slice(&whole, &shape, &column, 4));
    assert_eq!(loaded.read, 5 * CHUNK, "not the few bytes after the tensor");
}

#[test]
fn what_other_ranks_here_want_too_is_read_as_such() {
    let (manifest, source, _, shape) = large();
    let whole = Slice::whole(&shape);
    let half = |offset: u64| Slice {
        offset: vec![offset, 0],
        extent: vec![2560, 1024],
    };
    let team = |ranks| Team { threads: 3, ranks };
    let chunks = |which: &[u64]| -> Vec<(String, u64)> {
        let name = |chunk: &u64| ("f0".to_owned(), chunk * CHUNK);
        which.iter().map(name).collect()
    };
    for (ranks, slice, shared) in [
        // The border is of both halves, wherever the other rank is.
        (1, half(0), chunks(&[2])),
        (2, half(2560), chunks(&[2])),
        (1, whole.clone(), vec![]),
        // Each rank wants the whole tensor.
        (2, whole, chunks(&[0, 1, 2, 3, 4, 5])),
    ] {
        get_by(team(ranks), &manifest, &source, &slice).unwrap();
        let mut said = std::mem::take(&mut *source.shared.lock().unwrap());
        said.sort();
        assert_eq!(said, shared, "{ranks} ranks, {slice:?}");
    }
}

#[test]
fn damage_is_named_by_file_tensor_and_chunk() {
    let (manifest, mut source, _, shape) = large();
    source.files.get_mut("f0").unwrap()[2 * CHUNK as usize + 77] ^= 0x10;
    let error = get(&manifest, &source, &Slice::whole(&shape)).unwrap_err();
    match error.damage() {
        Some(Damage::Chunk {
            path,
            chunk: 2,
            tensors,
            ..
        }) => {
            assert_eq!((path.as_str(), &tensors[..]), ("f0", &["t".to_owned()][..]));
        }
        _ => panic!("{error}"),
    }
    assert!(
        error.to_string().contains("chunk 2") && error.to_string().contains("`t`"),
        "{error}"
    );
    // What lies elsewhere can still be read.
    let rows = Slice {
        offset: vec![0, 0],
        extent: vec![1000, 1024],
    };
    get(&manifest, &source, &rows).unwrap();
    let found = verify(&manifest, &source, Depth::Everything { threads: 2 }).unwrap_err();
    assert!(matches!(
        found.damage(),
        Some(Damage::Chunk { chunk: 2, .. })
    ));
    verify(&manifest, &source, Depth::Sizes).unwrap();

    let cut = source.files.get_mut("f0").unwrap();
    cut.pop();
    let error = get(&manifest, &source, &rows).unwrap_err();
    assert!(
        matches!(error.damage(), Some(Damage::Size { .. })),
        "{error}"
    );
    source.files.clear();
    let error = verify(&manifest, &source, Depth::Sizes).unwrap_err();
    assert!(
        matches!(error.damage(), Some(Damage::Gone { .. })),
        "{error}"
    );
}

#[test]
fn a_digest_that_differs_is_damage() {
    let (mut manifest, source, _) = saved(&[4], Dtype::U8, &[Slice::whole(&[4])]);
    manifest.files[0].digest = Bytes([0; 16]);
    let error = verify(&manifest, &source, Depth::Everything { threads: 1 }).unwrap_err();
    assert!(
        matches!(error.damage(), Some(Damage::Digest { .. })),
        "{error}"
    );
}

#[test]
fn a_store_that_does_not_answer_is_no_damage() {
    let (manifest, mut source, _) = saved(&[4], Dtype::U8, &[Slice::whole(&[4])]);
    source.broken = Some(rustix::io::Errno::TIMEDOUT);
    let error = get(&manifest, &source, &Slice::whole(&[4])).unwrap_err();
    assert!(
        error.damage().is_none() && matches!(error, LoadError::Unreadable { .. }),
        "{error}"
    );
    source.broken = Some(rustix::io::Errno::IO);
    let error = get(&manifest, &source, &Slice::whole(&[4])).unwrap_err();
    assert!(
        matches!(error.damage(), Some(damage @ Damage::Disk { .. }) if !damage.is_certain()),
        "{error}"
    );
}

#[test]
fn wants_that_do_not_fit_are_refused() {
    let (manifest, source, _) = saved(&[4, 2], Dtype::F32, &[Slice::whole(&[4, 2])]);
    let refused = |name, dtype, shape: &[u64], slice: Slice, bytes| {
        let mut into = vec![0; bytes];
        let mut wants = [Want {
            name,
            dtype,
            shape,
            slice,
            into: &mut into,
        }];
        load(&manifest, &source, &mut wants, Team::alone(1)).unwrap_err()
    };
    let (whole, f32) = (Slice::whole(&[4, 2]), Dtype::F32);
    assert!(matches!(
        refused("u", f32, &[4, 2], whole.clone(), 32),
        LoadError::Missing { .. }
    ));
    assert!(matches!(
        refused("t", Dtype::BF16, &[4, 2], whole.clone(), 16),
        LoadError::Differs { .. }
    ));
    assert!(matches!(
        refused("t", f32, &[8], Slice::whole(&[8]), 32),
        LoadError::Differs { .. }
    ));
    assert!(matches!(
        refused("t", f32, &[4, 2], whole, 31),
        LoadError::Buffer {
            slice: 32,
            given: 31,
            ..
        }
    ));
    let outside = Slice {
        offset: vec![3, 0],
        extent: vec![2, 2],
    };
    assert!(matches!(
        refused("t", f32, &[4, 2], outside, 16),
        LoadError::Slice { .. }
    ));
}

/// A manifest made by hand that has two slices on one byte must not make threads write there.
#[test]
fn an_unchecked_manifest_is_checked() {
    let (mut manifest, source, _) = saved(&[4], Dtype::U8, &[Slice::whole(&[4])]);
    let twice = manifest.tensors[0].slices[0].clone();
    manifest.tensors[0].slices.push(twice);
    let error = get(&manifest, &source, &Slice::whole(&[4])).unwrap_err();
    assert!(matches!(error, LoadError::Manifest(_)), "{error}");
}

#[test]
fn many_wants_over_many_chunks() {
    let (manifest, source, whole, shape) = large();
    let mut random = Random(3);
    let slices: Vec<Slice> = (0..20)
        .map(|_| {
            let offset = [random.below(5000), random.below(1000)];
            let extent = [1 + random.below(120), 1 + random.below(24)];
            Slice {
                offset: offset.to_vec(),
                extent: extent.to_vec(),
            }
        })
        .collect();
    let mut into: Vec<Vec<u8>> = slices
        .iter()
        .map(|s| vec![0; s.elements().unwrap() as usize * 4])
        .collect();
    let mut wants: Vec<Want<'_>> = (slices.iter().zip(&mut into))
        .map(|(slice, into)| Want {
            name: "t",
            dtype: Dtype::F32,
            shape: &shape,
            slice: slice.clone(),
            into,
        })
        .collect();
    load(&manifest, &source, &mut wants, Team::alone(4)).unwrap();
    for (slice, into) in slices.iter().zip(&into) {
        assert!(*into == read_slice(&whole, &shape, slice, 4), "{slice}");
    }
}
