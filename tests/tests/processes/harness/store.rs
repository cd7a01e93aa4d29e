//! Contents of a job's store.

use std::path::Path;

use serde_json::Value;

/// The steps whose commits are in the job's log, in its order.
pub(crate) fn committed(store: &Path) -> Vec<u64> {
    let mut entries: Vec<(u64, Value)> = (std::fs::read_dir(store.join("job/log")).into_iter())
        .flatten()
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let seq = path.file_stem()?.to_str()?.parse().ok()?;
            let text = std::fs::read_to_string(&path).ok()?;
            Some((seq, serde_json::from_str(&text).ok()?))
        })
        .collect();
    entries.sort_by_key(|(seq, _)| *seq);
    let step = |(_, entry): &(u64, Value)| entry["body"]["commit"]["step"].as_u64();
    entries.iter().filter_map(step).collect()
}

/// Metrics of the model in each of the job's checkpoints, by step.
pub(crate) fn metrics(store: &Path) -> Vec<(u64, Value)> {
    let manifests = std::fs::read_dir(store.join("job/manifest")).unwrap();
    let mut all: Vec<(u64, Value)> = manifests
        .map(|entry| {
            let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
            let manifest: Value = serde_json::from_str(&text).unwrap();
            let body = &manifest["body"];
            let mut blobs = body["blobs"].as_array().unwrap().iter();
            let blob = blobs.find(|blob| blob["name"] == "metrics").unwrap();
            let hex = blob["data"].as_str().unwrap().as_bytes();
            let byte = |pair: &[u8]| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap();
            let bytes: Vec<u8> = hex.chunks(2).map(byte).collect();
            let step = body["origin"]["step"].as_u64().unwrap();
            (step, serde_json::from_slice(&bytes).unwrap())
        })
        .collect();
    all.sort_by_key(|(step, _)| *step);
    all
}
