//! From a group to a communicator: who is on which device, and the id that NCCL finds the ranks by.

use std::ffi::c_char;
use std::sync::Arc;

use cudarc::nccl::sys as nc;

use super::super::Group;
use super::error::{NcclError, Version};
use super::library::Library;
use crate::cuda::{Device, Memory, Stream};

/// Bytes of a version, and of a device's unique id.
const FIXED: usize = 4 + 16;
/// A device's place on its host is no longer.
const MAX_BUS: usize = 32;
const ID: usize = 128;

/// A rank's introduction of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Introduction {
    version: Version,
    uuid: [u8; 16],
    bus: String,
}

impl Introduction {
    fn encode(&self) -> Vec<u8> {
        let mut out = self.version.0.to_le_bytes().to_vec();
        out.extend_from_slice(&self.uuid);
        out.extend(self.bus.bytes().take(MAX_BUS));
        out
    }

    fn decode(bytes: &[u8]) -> Option<Introduction> {
        let (fixed, bus) = bytes.split_at_checked(FIXED)?;
        let (version, uuid) = fixed.split_at(4);
        let bus = std::str::from_utf8(bus).ok()?;
        let fits = bus.len() <= MAX_BUS && bus.chars().all(|c| c.is_ascii_graphic());
        fits.then_some(Introduction {
            version: Version(u32::from_le_bytes(version.try_into().ok()?)),
            uuid: uuid.try_into().ok()?,
            bus: bus.to_owned(),
        })
    }
}

/// A rank's needs of its device.
pub(super) struct Own {
    pub(super) device: Arc<Device>,
    pub(super) stream: Stream,
    /// Two elements.
    pub(super) scratch: Memory,
}

impl Own {
    fn open(library: &Arc<Library>, ordinal: u32) -> Result<Own, NcclError> {
        let device = Device::open(library.driver(), ordinal)?;
        Ok(Own {
            stream: device.stream()?,
            scratch: device.upload(&[0f32; 2])?,
            device,
        })
    }
}

/// Opens this rank's device, and agrees with the others that each has one of its own and the same NCCL.
/// All ranks return the same error, but for the one whose device cannot be opened.
pub(super) fn introduce(
    library: &Arc<Library>,
    ordinal: u32,
    group: &mut Group,
) -> Result<Own, NcclError> {
    let own = Own::open(library, ordinal);
    let introduction = own.as_ref().map(|own| Introduction {
        version: library.version(),
        uuid: own.device.uuid(),
        bus: own.device.bus().to_owned(),
    });
    // Nothing at all: this rank cannot take part, and the others are to know it now.
    let said = introduction.map_or(Vec::new(), |introduction| introduction.encode());
    let all = group.all_gather_bytes(&said)?;
    let own = own?;
    check(&all)?;
    Ok(own)
}

fn check(all: &[Vec<u8>]) -> Result<(), NcclError> {
    let mut known = Vec::with_capacity(all.len());
    for (rank, bytes) in (0..).zip(all) {
        if bytes.is_empty() {
            return Err(NcclError::NotReady { rank });
        }
        let introduction = Introduction::decode(bytes).ok_or(NcclError::Nonsense { rank })?;
        known.push((rank, introduction));
    }
    for (rank, introduction) in &known {
        let (theirs, zeros) = (introduction.version, known[0].1.version);
        if theirs != zeros {
            return Err(NcclError::Versions {
                rank: *rank,
                theirs,
                zeros,
            });
        }
    }
    for (_, one) in &known {
        let same = known.iter().filter(|(_, other)| other.uuid == one.uuid);
        let ranks: Vec<u32> = same.map(|(rank, _)| *rank).collect();
        if ranks.len() > 1 {
            return Err(NcclError::SharedDevice {
                ranks,
                device: one.bus.clone(),
            });
        }
    }
    Ok(())
}

/// Rank 0 makes an id, and everybody gets it.
pub(super) fn share_id(
    library: &Library,
    device: &Device,
    group: &mut Group,
) -> Result<nc::ncclUniqueId, NcclError> {
    let mut id = nc::ncclUniqueId { internal: [0; ID] };
    let mut made = Ok(());
    if group.rank() == 0 {
        made = device
            .enter()
            .map_err(NcclError::from)
            .and_then(|_current| {
                // SAFETY: the pointer is to a live id.
                let code = unsafe { (library.nccl.unique_id)(&raw mut id) };
                library.check_nccl("ncclGetUniqueId", code)
            });
    }
    let bytes = id.internal.map(|byte| byte.to_ne_bytes()[0]);
    let said: &[u8] = if made.is_ok() { &bytes } else { &[] };
    let got = group.broadcast_bytes(0, said)?;
    made?;
    let got: [u8; ID] = match got.try_into() {
        Ok(got) => got,
        Err(got) if got.is_empty() => return Err(NcclError::NotReady { rank: 0 }),
        Err(_) => return Err(NcclError::Nonsense { rank: 0 }),
    };
    id.internal = got.map(|byte| c_char::from_ne_bytes([byte]));
    Ok(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(version: u32, device: u8) -> Vec<u8> {
        let introduction = Introduction {
            version: Version(version),
            uuid: [device; 16],
            bus: format!("0000:0{device}:00.0"),
        };
        let bytes = introduction.encode();
        assert_eq!(Introduction::decode(&bytes), Some(introduction));
        bytes
    }

    #[test]
    fn what_ranks_say_of_themselves_is_judged() {
        let (a, b, c) = (said(22_809, 1), said(22_809, 2), said(22_703, 3));
        assert!(check(&[a.clone(), b.clone()]).is_ok());
        let error = check(&[a.clone(), b.clone(), c]).unwrap_err();
        assert!(
            matches!(
                error,
                NcclError::Versions {
                    rank: 2,
                    theirs: Version(22_703),
                    ..
                }
            ),
            "{error}"
        );
        assert!(error.to_string().contains("2.27.3"), "{error}");
        let error = check(&[a.clone(), b.clone(), a.clone()]).unwrap_err();
        let NcclError::SharedDevice { ranks, device } = error else {
            panic!("{error}");
        };
        assert_eq!((ranks, device.as_str()), (vec![0, 2], "0000:01:00.0"));
        let missing = check(&[a.clone(), Vec::new()]).unwrap_err();
        assert!(matches!(missing, NcclError::NotReady { rank: 1 }));
        for nonsense in [
            &a[..10],
            &[&a[..], &[0xff]].concat(),
            &[&a[..], &[b'x'; 40]].concat(),
        ] {
            let error = check(&[b.clone(), nonsense.to_vec()]).unwrap_err();
            assert!(matches!(error, NcclError::Nonsense { rank: 1 }), "{error}");
        }
    }

    #[test]
    fn versions_are_read_as_nccl_writes_them() {
        assert_eq!(Version(22_809).to_string(), "2.28.9");
        assert_eq!(Version(21_900).to_string(), "2.19.0");
        assert_eq!(Version(2_708).to_string(), "2.7.8");
    }
}
