//! `muster checkpoint export JOB STEP FILE`: a checkpoint's tensors, whole, in one file.

use std::path::{Path, PathBuf};

use muster_checkpoint::dir::Dir;
use muster_checkpoint::persist::Options;
use muster_checkpoint::{export, export_torch};
use serde_json::json;

use super::super::output::{Failure, put, put_json};
use super::{THREADS, Where, gib, named, split};
use crate::kept::{Unknown, words};

/// `muster checkpoint export`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    of: Where,
    /// Its step
    step: u64,
    /// The file to write; nothing is overwritten
    file: PathBuf,
    /// Format to write [default: torch for a name that ends in .pt or .pth, else safetensors]
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Only the tensors whose names match: `*` is any number of characters, `?` is one
    #[arg(long = "tensor", value_name = "PATTERN")]
    tensors: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// For the safetensors package, in any language
    Safetensors,
    /// For `torch.load`: a dictionary of tensors by name
    Torch,
}

impl Format {
    fn of(file: &Path) -> Format {
        let end = file.extension().and_then(|end| end.to_str());
        match end {
            Some("pt" | "pth") => Format::Torch,
            _ => Format::Safetensors,
        }
    }
}

pub(super) async fn main(args: &Args) -> Result<(), Failure> {
    let opened = args.of.open(false).await?;
    let row = opened.row(args.step)?.clone();
    let manifest = opened.whole_manifest(&row)?;
    let shown = args.file.display();
    let Some((folder, name)) = split(&args.file) else {
        return Err(Failure::Usage(format!("{shown} does not name a file")));
    };
    let folder = Dir::open(folder)
        .map_err(|e| Failure::Refused(format!("the folder of {shown} cannot be opened: {e}")))?;
    let reader = opened.place.open().map_err(Unknown::Store)?;
    let patterns: Vec<&str> = match args.tensors.is_empty() {
        true => vec!["*"],
        false => args.tensors.iter().map(String::as_str).collect(),
    };
    let format = args.format.unwrap_or(Format::of(&args.file));
    let write = match format {
        Format::Safetensors => export,
        Format::Torch => export_torch,
    };
    let options = Options {
        threads: THREADS,
        ..Options::default()
    };
    let written = write(&manifest, &reader, &patterns, (&folder, name), options)
        .map_err(|error| Failure::Refused(words(&error)))?;
    let tensors = manifest.matching(&patterns).count();
    if args.of.json() {
        return put_json(&json!({
            "ok": true, "step": row.commit.step, "slot": row.seq, "file": args.file.to_string_lossy(),
            "bytes": written.bytes, "tensors": tensors,
        }));
    }
    let text = format!(
        "{} is in {shown}: {tensors} tensors, {}\n",
        named(&row),
        gib(written.bytes)
    );
    put(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_says_the_format() {
        assert_eq!(Format::of(Path::new("a/model.pt")), Format::Torch);
        assert_eq!(
            Format::of(Path::new("model.safetensors")),
            Format::Safetensors
        );
        assert_eq!(Format::of(Path::new("model")), Format::Safetensors);
    }
}
