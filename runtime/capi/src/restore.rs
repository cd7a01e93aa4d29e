//! Restoring.

use std::ffi::{CStr, CString, c_char};

use muster_runtime::saving::{Damage, LoadError, MemoryMut, Restore, RestoreError, Wanted};

use crate::outcome::{Code, Failure, entry};
use crate::raw::{Described, Memory, Tensor, described, list, memory_mut, one, out, text};

/// `muster_restore` of the header.
#[derive(Debug)]
pub struct Checkpoint {
    restore: Restore,
    /// The tensors' names, as C wants them.
    names: Vec<CString>,
}

/// `muster_origin` of the header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Origin {
    pub step: u64,
    pub world: u32,
    pub reserved: u32,
    pub tensors: usize,
}

fn of_restore(error: &RestoreError) -> Failure {
    let code = match error {
        RestoreError::Damaged { .. } => Code::Damaged,
        RestoreError::Digest { .. } | RestoreError::NoStore | RestoreError::Location(_) => {
            Code::Environment
        }
        _ => Code::Restore,
    };
    Failure::of(code, error)
}

fn of_load(error: &LoadError) -> Failure {
    let code = match error {
        _ if error.damage().is_some_and(Damage::is_certain) => Code::Damaged,
        LoadError::Missing { .. }
        | LoadError::Differs { .. }
        | LoadError::Slice { .. }
        | LoadError::Buffer { .. } => Code::Mismatch,
        _ => Code::Restore,
    };
    Failure::of(code, error)
}

impl Checkpoint {
    pub(crate) fn new(restore: Restore) -> Result<Checkpoint, Failure> {
        let name = |name: &str| {
            CString::new(name).map_err(|_| Failure {
                code: Code::Restore,
                text: format!(
                    "the tensor {name:?} has a zero byte in its name, which C cannot say"
                ),
            })
        };
        let tensors = restore.manifest().tensors.iter();
        let names = tensors
            .map(|tensor| name(&tensor.name))
            .collect::<Result<_, _>>()?;
        Ok(Checkpoint { restore, names })
    }
}

/// Opens the checkpoint that this worker's generation begins with.
///
/// # Safety
/// Both are null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_restore_open(
    restore: *mut *mut Checkpoint,
    origin: *mut Origin,
) -> i32 {
    entry(|| {
        // SAFETY: the caller's promise.
        let (at, origin) = unsafe { (out(restore, "restore")?, out(origin, "origin")?) };
        *at = std::ptr::null_mut();
        *origin = Origin::default();
        let Some(restore) = Restore::from_env().map_err(|e| of_restore(&e))? else {
            return Ok(Code::Nothing);
        };
        *origin = Origin {
            step: restore.step(),
            world: restore.world(),
            reserved: 0,
            tensors: restore.manifest().tensors.len(),
        };
        *at = Box::into_raw(Box::new(Checkpoint::new(restore)?));
        Ok(Code::Ok)
    })
}

/// The name of an element type, as C wants it.
fn dtype(name: &str) -> &'static CStr {
    const NAMES: [&CStr; 17] = [
        c"BOOL", c"U8", c"I8", c"F8_E4M3", c"F8_E5M2", c"F8_E8M0", c"U16", c"I16", c"F16", c"BF16",
        c"U32", c"I32", c"F32", c"U64", c"I64", c"F64", c"C64",
    ];
    let found = NAMES
        .into_iter()
        .find(|known| known.to_bytes() == name.as_bytes());
    found.unwrap_or(c"")
}

/// A tensor of the checkpoint.
///
/// # Safety
/// `restore` is null or from [`muster_restore_open`]; `tensor` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_restore_tensor(
    restore: *const Checkpoint,
    i: usize,
    tensor: *mut Tensor,
) -> i32 {
    entry(|| {
        // SAFETY: the caller's promise.
        let (checkpoint, into) = unsafe { (one(restore, "restore")?, out(tensor, "tensor")?) };
        let tensors = &checkpoint.restore.manifest().tensors;
        let (Some(tensor), Some(name)) = (tensors.get(i), checkpoint.names.get(i)) else {
            let text = format!("tensor {i} of {}", tensors.len());
            return Err(Failure::argument(text));
        };
        *into = Tensor {
            name: name.as_ptr(),
            dtype: dtype(tensor.dtype.name()).as_ptr(),
            // No manifest has more than 32.
            dims: tensor.shape.len() as u32,
            rank: u32::MAX,
            shape: tensor.shape.as_ptr(),
            offset: std::ptr::null(),
            extent: std::ptr::null(),
        };
        Ok(Code::Ok)
    })
}

/// State that is no tensor.
///
/// # Safety
/// `restore` is null or from [`muster_restore_open`]; `name` is null or text; `data` and `bytes` are null or valid
/// for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_restore_blob(
    restore: *const Checkpoint,
    name: *const c_char,
    data: *mut *const u8,
    bytes: *mut usize,
) -> i32 {
    entry(|| {
        // SAFETY: the caller's promise.
        let (checkpoint, name, data, bytes) = unsafe {
            (
                one(restore, "restore")?,
                text(name, "a blob's name")?,
                out(data, "data")?,
                out(bytes, "bytes")?,
            )
        };
        let Some(blob) = checkpoint.restore.blob(name) else {
            (*data, *bytes) = (std::ptr::null(), 0);
            return Ok(Code::Nothing);
        };
        (*data, *bytes) = (blob.as_ptr(), blob.len());
        Ok(Code::Ok)
    })
}

/// Fills tensors, or boxes of them.
///
/// # Safety
/// `restore` is null or from [`muster_restore_open`]; `tensors` are null or `count`, as the header says; `into` are
/// null or as many, each memory of that tensor's or box's bytes that nobody else uses until this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_restore_load(
    restore: *const Checkpoint,
    tensors: *const Tensor,
    into: *const Memory,
    count: usize,
) -> i32 {
    entry(|| {
        // SAFETY: the caller's promise, here and below.
        let (checkpoint, tensors, into) = unsafe {
            (
                one(restore, "restore")?,
                list(tensors, count, "tensors")?,
                list(into, count, "into")?,
            )
        };
        let all = (tensors.iter())
            // SAFETY: as above.
            .map(|tensor| unsafe { described(tensor) })
            .collect::<Result<Vec<Described<'_>>, Failure>>()?;
        apart(&all, into)?;
        let wants = (all.iter().zip(into))
            .map(|(tensor, at)| {
                Ok(Wanted {
                    name: tensor.name,
                    dtype: tensor.dtype,
                    shape: tensor.shape,
                    slice: tensor.slice.clone(),
                    // SAFETY: as above; no two overlap.
                    into: unsafe { memory_mut(at, tensor.bytes)? },
                })
            })
            .collect::<Result<Vec<Wanted<'_, MemoryMut<'_>>>, Failure>>()?;
        (checkpoint.restore.load_into(wants)).map_err(|e| of_load(&e))?;
        Ok(Code::Ok)
    })
}

/// That no two lie on top of each other: each is filled by threads of its own.
fn apart(all: &[Described<'_>], into: &[Memory]) -> Result<(), Failure> {
    // A device's addresses are no others than a process's: both are in one space.
    let mut spans: Vec<(usize, usize, &str)> = (all.iter().zip(into))
        .filter(|(tensor, _)| tensor.bytes > 0)
        .map(|(tensor, memory)| (memory.at.addr(), tensor.bytes, tensor.name))
        .collect();
    spans.sort_unstable();
    for pair in spans.windows(2) {
        if let [(a, bytes, first), (b, _, second)] = pair
            && a.saturating_add(*bytes) > *b
        {
            let text = format!("`{first}` and `{second}` share memory: load it once");
            return Err(Failure::argument(text));
        }
    }
    Ok(())
}

/// Closes a checkpoint.
///
/// # Safety
/// `restore` is null, or from [`muster_restore_open`], and not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_restore_close(restore: *mut Checkpoint) {
    entry(|| {
        if !restore.is_null() {
            // SAFETY: the caller's promise: it is from `Box::into_raw`, and this is its last use.
            drop(unsafe { Box::from_raw(restore) });
        }
        Ok(Code::Ok)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_fails_is_no_damage_of_the_checkpoint() {
        let path = "data/40-05-1/n0-0.safetensors".to_owned();
        let of = |damage: Damage| of_load(&LoadError::Damage(damage));
        let gone = of(Damage::Gone { path: path.clone() });
        assert_eq!(gone.code, Code::Damaged, "{}", gone.text);
        let failure = of(Damage::Disk { path });
        assert_eq!(failure.code, Code::Restore, "{}", failure.text);
        for words in ["EIO", "n0-0.safetensors", "may be whole", "kernel's log"] {
            assert!(failure.text.contains(words), "{}", failure.text);
        }
    }
}
