//! The project's own sources, for tests that look at what stands in them.

use std::path::{Path, PathBuf};

/// All files of these folders of the project, and below: each one's path from the project's root on, and what it says.
pub(crate) fn sources(folders: &[&str]) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut left: Vec<PathBuf> = folders.iter().map(|folder| root.join(folder)).collect();
    let mut found = Vec::new();
    while let Some(folder) = left.pop() {
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                left.push(path);
                continue;
            }
            let text = String::from_utf8_lossy(&std::fs::read(&path).unwrap()).into_owned();
            let name = path.strip_prefix(root).unwrap().display().to_string();
            found.push((name, text));
        }
    }
    found
}

/// Those of them that name one of these, besides tests.
pub(crate) fn that_name(folders: &[&str], words: &[&str]) -> Vec<String> {
    let all = sources(folders).into_iter();
    let names = all.filter(|(name, text)| {
        !name.ends_with("tests.rs") && words.iter().any(|word| text.contains(word))
    });
    let mut names: Vec<String> = names.map(|(name, _)| name).collect();
    names.sort_unstable();
    names
}
