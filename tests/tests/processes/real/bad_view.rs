//! One node sees the store otherwise than all others do: what its ranks find damaged is whole.

use std::path::Path;
use std::process::Command;

use super::saves::Saves;

/// Its workers save where they are told to, and nowhere else.
const NEVER: u64 = 1_000_000;

/// Where `$0/view-$NODE_NAME` is, the workers of that node read the job's folder whose path stands in it.
const VIEW: &str = r#"
view="$0/view-$NODE_NAME"
if [ -e "$view" ]; then MUSTER_CHECKPOINT_DIR=$(cat "$view"); export MUSTER_CHECKPOINT_DIR; fi
exec "$@"
"#;

/// Flips a bit in the middle of every data file.
fn flip_all(data: &Path) {
    for folder in std::fs::read_dir(data).unwrap() {
        for file in std::fs::read_dir(folder.unwrap().path()).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_some_and(|e| e == "safetensors") {
                let mut bytes = std::fs::read(&path).unwrap();
                let middle = bytes.len() / 2;
                bytes[middle] ^= 1;
                std::fs::write(&path, bytes).unwrap();
            }
        }
    }
}

#[test]
fn a_node_that_cannot_read_what_others_read_is_left_out_and_then_ends() {
    // No restart is left to a script that fails.
    let mut saves = Saves::with(&["--max-restarts=0"], "2:3", 3, NEVER);
    let control = saves.bed.path("control");
    let plain = saves.bed.job_command().to_vec();
    let mut script = vec!["--", "sh", "-c", VIEW, control.to_str().unwrap()];
    script.extend(plain[1..].iter().map(String::as_str));
    saves.bed.script(&script);
    let first = saves.train(&[0, 1], 0);
    saves.trains(&first);
    let (ok, said) = saves.bed.checkpoint(0, &[]);
    assert!(ok, "{said}");
    saves
        .bed
        .until("it is committed", |_| !saves.committed().is_empty());
    saves.bed.kill(0);
    let at = saves.bed.kill(1);
    let committed = *saves.committed().last().unwrap();

    // All of the store, with what says that it is this one.
    let (folder, copy) = (saves.folder(), saves.bed.path("copy"));
    let copied = Command::new("cp")
        .arg("-r")
        .args([folder.parent().unwrap(), &copy])
        .status();
    assert!(copied.unwrap().success());
    let view = copy.join(folder.file_name().unwrap());
    flip_all(&view.join("data"));
    std::fs::write(control.join("view-n4"), view.to_str().unwrap()).unwrap();
    for node in [2, 3, 4] {
        saves.bed.run(node, 2);
    }
    // Each time it is out for longer; after the third its launcher ends, and says why.
    assert_eq!(saves.bed.ended(4), Some(1));
    let said = saves.bed.said(4);
    for part in ["this node is of no use to the job", "has read all of it"] {
        assert!(said.contains(part), "{said}");
    }
    for node in [2, 3] {
        let said = saves.bed.said(node);
        assert!(said.contains("The view of it on "), "n{node}: {said}");
    }
    let last = saves.bed.group(&[2, 3], at);
    let restored = saves.restored(&last);
    assert!(restored >= committed, "{restored} of {committed}");
    assert!(saves.entries("reject").is_empty());
    saves.trains(&last);
    saves.bed.order(None, 0);
    assert_eq!((saves.bed.ended(2), saves.bed.ended(3)), (Some(0), Some(0)));
}
