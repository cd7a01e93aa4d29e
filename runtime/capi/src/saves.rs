//! Saving: what the ranks hold, and a rank's saves.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use muster_runtime::saving::{Blob, Held, Memory as Bytes, Rank, SAMPLE, SaveError, Saver, Slice};

use crate::job::{Inner, Job};
use crate::outcome::{Code, Failure, entry};
use crate::raw::{Described, Memory, Tensor, described, list, list_mut, lock, memory, one, text};

/// Flags of a tensor that was declared: MUSTER_WRITES and MUSTER_LOOKS of the header.
const WRITES: u8 = 1;
const LOOKS: u8 = 2;

/// The longest wait for a slot.
const LONGEST_WAIT: f64 = 86_400.0;

/// The saver and the tensors that were declared.
#[derive(Debug)]
pub(crate) struct Saves {
    saver: Saver,
    index: Index,
    /// For each of the list, how long it is; none: this rank does not write it.
    bytes: Vec<Option<usize>>,
    /// For each, how much of its beginning is compared.
    looks: Vec<usize>,
}

/// Where in the list a rank's slices of tensors are, by name.
#[derive(Debug, Default)]
struct Index(HashMap<String, Vec<(Slice, usize)>>);

impl Index {
    fn add(&mut self, name: &str, slice: &Slice, at: usize) {
        let slices = self.0.entry(name.to_owned()).or_default();
        slices.push((slice.clone(), at));
    }

    fn at(&self, name: &str, slice: &Slice) -> Option<usize> {
        let mut slices = self.0.get(name)?.iter();
        slices.find(|(of, _)| of == slice).map(|(_, at)| *at)
    }
}

/// `muster_blob` of the header.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawBlob {
    pub name: *const std::ffi::c_char,
    pub data: *const u8,
    pub bytes: usize,
}

/// `muster_saved` of the header.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Sealed {
    pub bytes: u64,
    pub copied: f64,
    pub waited: f64,
}

fn of_save(error: &SaveError) -> Failure {
    let code = match error {
        SaveError::NoStore => Code::NoStore,
        SaveError::Busy { .. } => Code::Busy,
        SaveError::Plan(_) | SaveError::Peers { .. } => Code::Plan,
        _ => Code::Save,
    };
    Failure::of(code, error)
}

/// Lists of the tensors that each rank holds. Ranks that hold what all hold, and nothing besides, share one list.
fn lists(all: &[Described<'_>], world: u32) -> Result<(Vec<Vec<Held>>, Vec<usize>), Failure> {
    let mut common: Vec<Held> = Vec::new();
    let mut own: BTreeMap<u32, Vec<Held>> = BTreeMap::new();
    for tensor in all {
        let list = match tensor.rank {
            None => &mut common,
            Some(rank) if rank < world => own.entry(rank).or_default(),
            Some(rank) => {
                let name = tensor.name;
                let text = format!("rank {rank} is to hold `{name}`, and there are {world} ranks");
                return Err(Failure::argument(text));
            }
        };
        let held = Held {
            name: tensor.name.to_owned(),
            dtype: tensor.dtype,
            shape: tensor.shape.to_vec(),
            slices: vec![tensor.slice.clone()],
        };
        list.push(held);
    }
    let mut lists = Vec::with_capacity(own.len() + 1);
    let mut which = vec![0; world as usize];
    for (at, (rank, more)) in (1..).zip(own) {
        lists.push(common.iter().cloned().chain(more).collect());
        if let Some(which) = which.get_mut(rank as usize) {
            *which = at;
        }
    }
    lists.insert(0, common);
    Ok((lists, which))
}

impl Saves {
    /// Where the tensors are that this rank writes.
    ///
    /// # Safety
    /// Those are memory of as many bytes as were declared, which stay as they are for `'a`.
    unsafe fn placed<'a>(&self, data: &[Memory]) -> Result<Vec<Bytes<'a>>, Failure> {
        if data.len() != self.bytes.len() {
            let (given, declared) = (data.len(), self.bytes.len());
            let text =
                format!("the memory of {given} tensors is given, and {declared} were declared");
            return Err(Failure::argument(text));
        }
        (data.iter().zip(&self.bytes))
            .map(|(at, bytes)| match bytes {
                // SAFETY: the caller's promise.
                Some(bytes) => unsafe { memory(at, *bytes) },
                None => Ok(Bytes::Host(&[])),
            })
            .collect()
    }
}

impl Inner {
    fn declared(&mut self) -> Result<&mut Saves, Failure> {
        let text = "nothing was declared: call muster_declare first";
        self.saves.as_mut().ok_or_else(|| Failure::argument(text))
    }

    fn declare(&mut self, all: &[Described<'_>], wants: &mut [u8]) -> Result<(), Failure> {
        let (lists, which) = lists(all, self.env.world)?;
        // Every rank is a node of its own here: which ranks share one is known to none but the launchers, and
        // what each rank writes is even in either case.
        let ranks: Vec<Rank<'_>> = (0..)
            .zip(&which)
            .map(|(node, list)| Rank {
                node,
                held: &lists[*list],
            })
            .collect();
        let mut saver =
            Saver::sharing(&mut self.session, &self.env, &ranks).map_err(|e| of_save(&e))?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        saver.threads(cores / self.local_world.max(1) as usize);

        let mine = |tensor: &Described<'_>| tensor.rank.is_none_or(|rank| rank == self.env.rank);
        let mut index = Index::default();
        for (at, tensor) in all.iter().enumerate().filter(|(_, tensor)| mine(tensor)) {
            index.add(tensor.name, &tensor.slice, at);
        }
        let (mut bytes, mut looks) = (vec![None; all.len()], vec![0; all.len()]);
        for at in saver
            .writes()
            .filter_map(|(name, slice)| index.at(name, slice))
        {
            bytes[at] = Some(all[at].bytes);
        }
        for at in saver
            .looks()
            .filter_map(|(name, slice)| index.at(name, slice))
        {
            looks[at] = all[at].bytes.min(SAMPLE);
        }
        for (want, (bytes, looks)) in wants.iter_mut().zip(bytes.iter().zip(&looks)) {
            let writes = if bytes.is_some() { WRITES } else { 0 };
            *want = writes | if *looks > 0 { LOOKS } else { 0 };
        }
        self.saves = Some(Saves {
            saver,
            index,
            bytes,
            looks,
        });
        Ok(())
    }
}

/// Declares the tensors that all ranks hold.
///
/// # Safety
/// `job` is null or from [`muster_open`](crate::job::muster_open); `tensors` are null or `count`, as the header says;
/// `wants` is null or valid for writes of as many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_declare(
    job: *const Job,
    tensors: *const Tensor,
    count: usize,
    wants: *mut u8,
) -> i32 {
    entry(|| {
        // SAFETY: the caller's promise, here and below.
        let (job, tensors, wants) = unsafe {
            (
                one(job, "job")?,
                list(tensors, count, "tensors")?,
                list_mut(wants, count, "wants")?,
            )
        };
        let all = (tensors.iter())
            // SAFETY: as above.
            .map(|tensor| unsafe { described(tensor) })
            .collect::<Result<Vec<Described<'_>>, Failure>>()?;
        lock(&job.0).declare(&all, wants)?;
        Ok(Code::Ok)
    })
}

/// Has done what the first save of tensors on GPUs would do first.
///
/// # Safety
/// `job` and `data` are as for [`muster_save`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_prepare(job: *const Job, data: *const Memory, count: usize) -> i32 {
    entry(|| {
        // SAFETY: the caller's promise, here and below.
        let (job, data) = unsafe { (one(job, "job")?, list(data, count, "data")?) };
        let mut job = lock(&job.0);
        let saves = job.declared()?;
        // SAFETY: as above.
        let all = unsafe { saves.placed(data)? };
        let Saves { saver, index, .. } = saves;
        saver.prepare(|name: &str, slice: &Slice| all.get(index.at(name, slice)?).copied());
        Ok(Code::Ok)
    })
}

/// Has what ranks are to have alike compared with the next save.
///
/// # Safety
/// `job` is null or from [`muster_open`](crate::job::muster_open). `first` are null or `count`, of which those that
/// are looked at are null or point to as many bytes as the header says, which stay as they are until this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_look(
    job: *const Job,
    first: *const *const u8,
    count: usize,
) -> i32 {
    entry(|| {
        // SAFETY: the caller's promise, here and below.
        let (job, first) = unsafe { (one(job, "job")?, list(first, count, "first")?) };
        let mut job = lock(&job.0);
        let Saves {
            saver,
            index,
            looks,
            ..
        } = job.declared()?;
        if first.len() != looks.len() {
            let (given, declared) = (first.len(), looks.len());
            let text = format!(
                "the beginnings of {given} tensors are given, and {declared} were declared"
            );
            return Err(Failure::argument(text));
        }
        let all = (first.iter().zip(looks.iter()))
            .map(|(at, bytes)| match at.is_null() {
                true => Ok(None),
                // SAFETY: as above.
                false => unsafe { list(*at, *bytes, "first") }.map(Some),
            })
            .collect::<Result<Vec<Option<&[u8]>>, Failure>>()?;
        saver.look(|name, slice| *all.get(index.at(name, slice)?)?);
        Ok(Code::Ok)
    })
}

/// Copies this rank's part of the state into a slot, and seals it.
///
/// # Safety
/// `job` is null or from [`muster_open`](crate::job::muster_open). `data` are null or `count`, of which those that
/// this rank writes are memory of as many bytes as were declared, which stay as they are until this returns. `blobs`
/// are null or `blob_count`, as the header says; `saved` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_save(
    job: *const Job,
    step: u64,
    data: *const Memory,
    count: usize,
    blobs: *const RawBlob,
    blob_count: usize,
    wait: f64,
    saved: *mut Sealed,
) -> i32 {
    entry(|| {
        // SAFETY: the caller's promise, here and below.
        let (job, data, blobs) = unsafe {
            (
                one(job, "job")?,
                list(data, count, "data")?,
                list(blobs, blob_count, "blobs")?,
            )
        };
        let blobs = (blobs.iter())
            .map(|blob| {
                // SAFETY: as above.
                let (name, data) = unsafe {
                    (
                        text(blob.name, "a blob's name")?,
                        list(blob.data, blob.bytes, "a blob's data")?,
                    )
                };
                Ok(Blob {
                    name: name.to_owned(),
                    data: data.to_vec(),
                })
            })
            .collect::<Result<Vec<Blob>, Failure>>()?;
        if wait.is_nan() || wait < 0.0 {
            return Err(Failure::argument(format!("cannot wait for {wait} seconds")));
        }
        let mut job = lock(&job.0);
        let saves = job.declared()?;
        // SAFETY: as above.
        let all = unsafe { saves.placed(data)? };
        let Saves { saver, index, .. } = saves;
        saver.wait(Duration::from_secs_f64(wait.min(LONGEST_WAIT)));
        let state = |name: &str, slice: &Slice| all.get(index.at(name, slice)?).copied();
        let done = saver.save(step, state, blobs).map_err(|e| of_save(&e))?;
        // SAFETY: as above.
        if let Some(saved) = unsafe { saved.as_mut() } {
            *saved = Sealed {
                bytes: done.bytes,
                copied: done.copied.as_secs_f64(),
                waited: done.waited.as_secs_f64(),
            };
        }
        Ok(match done.left_out {
            true => Code::Nothing,
            false => Code::Ok,
        })
    })
}
