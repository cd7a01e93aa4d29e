//! Large objects.

use std::ops::ControlFlow;

use muster_store::{Kind, Verified};

use crate::bed::{Bed, at_once, bounded, bytes, go_on};
use crate::fake::Faults;
use crate::http::Response;
use crate::proxy::Fault;

const NAME: &str = "job/data/1-2-3/n0-0.safetensors";
const MIB: usize = 1 << 20;

fn internal() -> Response {
    Response::new(500).body("<Error><Code>InternalError</Code></Error>")
}

fn upload(bed: &Bed, bytes: &[u8]) -> Result<muster_store::Uploaded, muster_store::StoreError> {
    bounded(|| {
        bed.store
            .upload(NAME, &mut &*bytes, bytes.len() as u64, &mut go_on)
    })
}

fn uploads_left(bed: &Bed) -> usize {
    bed.fake.state.lock().unwrap().uploads.len()
}

#[test]
fn objects_of_all_sizes_arrive_whole() {
    for size in [0, 1, 5 * MIB, 5 * MIB + 1, 17 * MIB + 3] {
        let (bed, bytes) = (Bed::new(), bytes(size));
        let mut steps = vec![0];
        let uploaded = bed
            .store
            .upload(NAME, &mut &bytes[..], size as u64, &mut |progress| {
                assert_eq!(progress.total, size as u64);
                steps.push(progress.done);
                ControlFlow::Continue(())
            });
        let uploaded = uploaded.unwrap();
        assert_eq!(uploaded.verified, Verified::Checksum);
        assert_eq!(uploaded.crc64, muster_checkpoint::sum::crc(&bytes));
        assert!(bed.there(NAME).unwrap() == bytes, "{size}");
        assert_eq!(steps.last(), Some(&(size as u64)));
        assert!(steps.is_sorted());
        assert_eq!(uploads_left(&bed), 0);
    }
}

#[test]
fn each_part_is_tried_again_by_itself() {
    let faults = [
        Fault::Reset,
        Fault::LoseAnswer,
        Fault::Silence,
        Fault::Instead(internal()),
        Fault::Instead(Response::new(503).with("retry-after", 0)),
        Fault::Instead(Response::new(400).body("<Error><Code>BadDigest</Code></Error>")),
    ];
    let (bed, bytes) = (Bed::new(), bytes(17 * MIB));
    for (fault, part) in faults.into_iter().zip([1, 2, 3, 4, 1, 2]) {
        bed.proxy
            .inject("PUT", &format!("partNumber={part}&"), 1, fault);
    }
    assert_eq!(upload(&bed, &bytes).unwrap().verified, Verified::Checksum);
    assert!(bed.there(NAME).unwrap() == bytes);
    // Not the whole upload.
    assert!(bed.proxy.count("PUT", "partNumber=1&") >= 3);
    assert!(bed.proxy.count("PUT", "partNumber=3&") >= 2);
    assert_eq!(bed.proxy.count("POST", "uploads"), 1);
}

#[test]
fn the_last_step_may_go_wrong_in_every_way() {
    let empty = Response::new(200).body("<Error><Code>InternalError</Code></Error>");
    let faults = [
        Fault::LoseAnswer,
        Fault::Reset,
        Fault::Silence,
        Fault::Instead(internal()),
        Fault::Afterwards(internal()),
        // A success in its head that is none in its body.
        Fault::Instead(empty.clone()),
        Fault::Afterwards(empty),
        Fault::Truncate,
    ];
    at_once(faults, |fault| {
        let (bed, bytes) = (Bed::new(), bytes(6 * MIB));
        bed.proxy.inject("POST", "uploadId", 1, fault.clone());
        let uploaded = upload(&bed, &bytes);
        assert_eq!(uploaded.unwrap().verified, Verified::Checksum, "{fault:?}");
        assert!(bed.there(NAME).unwrap() == bytes);
        assert_eq!(uploads_left(&bed), 0);
    });
}

#[test]
fn a_failed_upload_leaves_nothing() {
    let bytes = bytes(17 * MIB);
    for (method, part, fault, kind) in [
        (
            "PUT",
            "partNumber=2&",
            Fault::Instead(internal()),
            Kind::Server,
        ),
        (
            "PUT",
            "partNumber=2&",
            Fault::Instead(Response::new(403).body("<Error><Code>AccessDenied</Code></Error>")),
            Kind::Denied,
        ),
        ("PUT", "partNumber=1&", Fault::Reset, Kind::Network),
        ("POST", "uploads", Fault::Instead(internal()), Kind::Server),
        (
            "POST",
            "uploadId",
            Fault::Instead(Response::new(400).body("<Error><Code>InvalidPart</Code></Error>")),
            Kind::Other,
        ),
    ] {
        let bed = Bed::new();
        bed.proxy.inject(method, part, 99, fault);
        let error = upload(&bed, &bytes).unwrap_err();
        assert_eq!((error.kind, error.unknown), (kind, false), "{error}");
        assert_eq!(bed.there(NAME), None);
        assert_eq!(uploads_left(&bed), 0);
    }
}

#[test]
fn an_upload_that_is_broken_off_leaves_nothing() {
    let (bed, bytes) = (Bed::new(), bytes(17 * MIB));
    let total = bytes.len() as u64;
    let error = bed.store.upload(
        NAME,
        &mut &bytes[..],
        total,
        &mut |progress| match progress.done > 5 << 20 {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        },
    );
    assert_eq!(error.unwrap_err().kind, Kind::Cancelled);
    assert_eq!((bed.there(NAME), uploads_left(&bed)), (None, 0));
}

#[test]
fn a_source_of_another_length_is_refused() {
    for size in [3 * MIB, 11 * MIB] {
        let bytes = bytes(size);
        for announced in [size - 1, size + 1] {
            let bed = Bed::new();
            let error = bed
                .store
                .upload(NAME, &mut &bytes[..], announced as u64, &mut go_on);
            assert_eq!(error.unwrap_err().kind, Kind::Source);
            assert_eq!((bed.there(NAME), uploads_left(&bed)), (None, 0));
        }
    }
}

#[test]
fn a_store_that_joins_parts_wrongly_is_found_out() {
    let bed = Bed::with(Faults {
        corrupting: true,
        ..Faults::default()
    });
    let error = upload(&bed, &bytes(6 * MIB)).unwrap_err();
    assert_eq!(error.kind, Kind::Damaged, "{error}");
    let bed = Bed::with(Faults {
        sumless: true,
        ..Faults::default()
    });
    let uploaded = upload(&bed, &bytes(6 * MIB)).unwrap();
    assert_eq!(uploaded.verified, Verified::Size);
}
