//! Decoders allocate in proportion to what they are given, whatever it says.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use muster_checkpoint::manifest::Manifest;
use muster_checkpoint::part::{Note, Part};
use muster_checkpoint::shard::Header;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: everything is the system's allocator's; only numbers are kept beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(now, Ordering::Relaxed);
        // SAFETY: as the caller's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller's.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// A name, what is decoded, and by what.
type Input = (&'static str, Vec<u8>, fn(&[u8]));

/// Bytes allocated at once during the call, for each byte of the input.
fn ratio(input: &[u8], decode: impl Fn(&[u8])) -> f64 {
    let before = NOW.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    decode(input);
    let most = MOST.load(Ordering::Relaxed) - before;
    most as f64 / input.len() as f64
}

fn repeated(before: &str, element: impl Fn(usize) -> String, after: &str, count: usize) -> Vec<u8> {
    let all: Vec<String> = (0..count).map(element).collect();
    format!("{before}{}{after}", all.join(",")).into_bytes()
}

/// In one test, as the count is the process's.
#[test]
fn nothing_is_allocated_beyond_the_inputs_size() {
    let body = |field: &str| {
        format!("{{\"format\":\"muster-checkpoint\",\"version\":1,\"body\":{{\"{field}\":[")
    };
    let manifest: fn(&[u8]) = |input| drop(Manifest::decode(input));
    let header: fn(&[u8]) = |input| drop(Header::decode(input, 0));
    let note: fn(&[u8]) = |input| drop(Note::decode(input));
    let part: fn(&[u8]) = |input| drop(Part::decode(input));
    let noted = |field: &str| format!("{{\"version\":1,\"body\":{{\"{field}\":");
    let tensor = "{\"name\":\"\",\"dtype\":\"U8\",\"shape\":[],\"slices\":[]}";
    let slice = "{\"slice\":{\"offset\":[],\"extent\":[]},\"file\":0,\"at\":0,\"bytes\":0}";
    let open = format!("{}{}", body("tensors"), tensor.trim_end_matches("]}"));
    let close = "]}}";
    let file =
        "{\"path\":\"\",\"bytes\":0,\"digest\":\"00000000000000000000000000000000\",\"chunks\":[]}";
    // JSON is refused as a whole before anything of it is kept, so these are whole.
    let inputs: [Input; 12] = [
        (
            "tensors",
            repeated(&body("tensors"), |_| tensor.to_owned(), close, 20_000),
            manifest,
        ),
        (
            "slices",
            repeated(&open, |_| slice.to_owned(), "]}]}}", 20_000),
            manifest,
        ),
        (
            "files",
            repeated(&body("files"), |_| file.to_owned(), close, 20_000),
            manifest,
        ),
        (
            "chunks",
            repeated(
                &format!("{}{{\"chunks\":[", body("files")),
                |_| "\"0123456789abcdef\"".to_owned(),
                "]}]}}",
                50_000,
            ),
            manifest,
        ),
        (
            "dimensions",
            repeated(
                &format!("{}{{\"shape\":[", body("tensors")),
                |_| "0".to_owned(),
                "]}]}}",
                500_000,
            ),
            manifest,
        ),
        (
            "blob",
            format!(
                "{}{{\"name\":\"\",\"data\":\"{}\"}}{close}",
                body("blobs"),
                "0".repeat(1 << 20)
            )
            .into_bytes(),
            manifest,
        ),
        ("brackets", vec![b'['; 1 << 20], manifest),
        (
            "header",
            repeated(
                "{",
                |at| format!("\"{at}\":{{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,0]}}"),
                "}",
                20_000,
            ),
            header,
        ),
        (
            "metadata",
            repeated(
                "{\"__metadata__\":{",
                |at| format!("\"{at}\":\"\""),
                "}}",
                50_000,
            ),
            header,
        ),
        (
            "files of a draft",
            repeated(
                &format!("{}{{\"files\":[", noted("draft")),
                |_| "[\"\",0]".to_owned(),
                "]}}}",
                100_000,
            ),
            note,
        ),
        (
            "blobs of a note",
            repeated(
                &format!("{}[", noted("blobs")),
                |_| "{\"name\":\"\",\"data\":\"\"}".to_owned(),
                "]}}",
                50_000,
            ),
            note,
        ),
        (
            "chunks of a part",
            repeated(
                &format!("{}{{\"chunks\":[", noted("file")),
                |_| "\"0123456789abcdef\"".to_owned(),
                "]}}}",
                50_000,
            ),
            part,
        ),
    ];
    for (name, input, decode) in inputs {
        let ratio = ratio(&input, decode);
        eprintln!("{name}: {} bytes, {ratio:.1} for each", input.len());
        assert!(ratio < 16.0, "{name}: {ratio} bytes for each byte");
    }
}
