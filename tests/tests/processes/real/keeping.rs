//! Which checkpoints stay in a job's store, and the commands that look at them.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use crate::ground::program;
use crate::harness::{Bed, Group};

/// A store, and a job whose workers save where they are told to.
struct Kept {
    bed: Bed,
    store: tempfile::TempDir,
    /// Steps of checkpoints that a person deleted.
    lost: BTreeSet<u64>,
}

impl Kept {
    fn new(nodes: &str, flags: &[&str]) -> Kept {
        let store = tempfile::tempdir().unwrap();
        let (nodes, dir) = (
            format!("--nnodes={nodes}"),
            format!("--store={}", store.path().display()),
        );
        let mut all = vec![&*nodes, &*dir, "--max-restarts=1"];
        all.extend(flags);
        let mut bed = Bed::new(&all);
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let (events, control) = (text(bed.path("events")), text(bed.path("control")));
        bed.script(&["--", &program("saver"), &events, &control, "1", "1000000"]);
        Kept {
            bed,
            store,
            lost: BTreeSet::new(),
        }
    }

    /// Starts these, and waits until they train together.
    fn train(&mut self, nodes: &[usize], after: u64) -> Group {
        for node in nodes {
            self.bed.run(*node, nodes[0]);
        }
        let group = self.bed.group(nodes, after);
        // By then their launchers know that all ranks have attached.
        (self.bed).until("it trains", |bed| bed.has_met(group.generation, 20));
        group
    }

    /// `muster checkpoint`, which returns once it is committed: its step.
    fn save(&self, node: usize) -> u64 {
        let (ok, said) = self.bed.checkpoint(node, &["--json"]);
        assert!(ok, "{said}");
        let said: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(said["committed"]["step"], said["step"], "{said}");
        let step = said["step"].as_u64().unwrap();
        assert!(self.committed().contains(&step));
        step
    }

    /// A command about the store: whether it went well, and what it said.
    fn muster(&self, args: &[&str]) -> (bool, String) {
        let done = Command::new(program("muster"))
            .args(args)
            .arg("--store")
            .arg(self.store.path())
            .output()
            .unwrap();
        let said = [done.stdout, done.stderr].concat();
        (
            done.status.success(),
            String::from_utf8_lossy(&said).into_owned(),
        )
    }

    fn log(&self) -> Vec<Value> {
        let log = self.store.path().join("job/log");
        let read = |slot: u64| std::fs::read_to_string(log.join(format!("{slot:08}.json"))).ok();
        let texts = (1..).map_while(read);
        texts.map(|t| serde_json::from_str(&t).unwrap()).collect()
    }

    fn committed(&self) -> Vec<u64> {
        let step = |entry: &Value| entry["body"]["commit"]["step"].as_u64();
        self.log().iter().filter_map(step).collect()
    }

    /// Steps whose commit such an entry takes back.
    fn taken_back(&self, by: &str) -> BTreeSet<u64> {
        let log = self.log();
        let of = |entry: &Value| {
            let seq = entry["body"][by]["seq"].as_u64()?;
            log.get(usize::try_from(seq).unwrap() - 1)?["body"]["commit"]["step"].as_u64()
        };
        log.iter().filter_map(of).collect()
    }

    /// Steps of which there is data.
    fn stored(&self) -> BTreeSet<u64> {
        let step = |name: &String| name.split('-').next()?.parse().ok();
        self.names("data").iter().filter_map(step).collect()
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let place = self.store.path().join("job").join(folder);
        let entries = std::fs::read_dir(place).into_iter().flatten();
        let name = |entry: std::fs::DirEntry| entry.file_name().into_string().ok();
        entries.filter_map(|entry| name(entry.ok()?)).collect()
    }

    /// The folder with the data of a step.
    fn data(&self, step: u64) -> PathBuf {
        let names = self.names("data");
        let begins = format!("{step}-");
        let name = names.iter().find(|name| name.starts_with(&begins)).unwrap();
        self.store.path().join("job/data").join(name)
    }

    /// Flips one bit in the middle of a checkpoint's largest file; the file's name.
    fn flip(&self, step: u64) -> String {
        let files = std::fs::read_dir(self.data(step)).unwrap();
        let files = files.map(|file| file.unwrap().path());
        let path = files.max_by_key(|path| path.metadata().unwrap().len());
        let path = path.unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        path.file_name().unwrap().to_str().unwrap().to_owned()
    }

    /// Waits until the store holds these and nothing else. Whatever is not there was retired before.
    fn holds(&self, steps: &[u64]) {
        let wanted: BTreeSet<u64> = steps.iter().copied().collect();
        let what = format!("the store holds {wanted:?} alone");
        self.bed.until(&what, |_| {
            let (committed, stored) = (self.committed(), self.stored());
            let retired = &self.taken_back("retire") | &self.lost;
            for step in committed.iter().filter(|step| !stored.contains(step)) {
                assert!(retired.contains(step), "{step} went before it was retired");
            }
            stored == wanted && self.names("manifest").len() == wanted.len()
        });
    }
}

#[test]
fn of_eight_saves_the_newest_three_stay_and_the_best_and_the_pinned() {
    let mut kept = Kept::new("2", &["--keep-best=1"]);
    kept.train(&[0, 1], 0);
    let mut steps = vec![kept.save(0), kept.save(0)];
    let pinned = steps[1].to_string();
    let (ok, said) = kept.muster(&["checkpoint", "pin", "job", &pinned]);
    assert!(ok && said.contains("is pinned"), "{said}");
    // Whichever node is asked, the save is reported once it is committed.
    steps.extend((2..8).map(|n| kept.save(n % 2)));
    let stay = [steps[0], steps[1], steps[5], steps[6], steps[7]];
    kept.holds(&stay);
    // The job's node says where the store is, and what its leader has read.
    let listed = (0..2).map(|node| kept.bed.muster(node, &["checkpoints", "job", "--json"]));
    let listed: Vec<Value> = listed
        .map(|(ok, said)| {
            assert!(ok, "{said}");
            serde_json::from_str(&said).unwrap()
        })
        .collect();
    let of = |row: &Value| row["step"].as_u64().unwrap();
    for rows in &listed {
        let mut shown: Vec<u64> = rows.as_array().unwrap().iter().map(of).collect();
        shown.sort_unstable();
        assert_eq!(shown, stay, "{rows}");
    }
    let both = listed.iter().flat_map(|rows| rows.as_array().unwrap());
    let verified = both.filter(|row| row["verified"] == true).count();
    assert!(verified >= 2, "{listed:?}");
    let (ok, table) = kept.muster(&["checkpoints", "job", "--all"]);
    let word = |step: u64| {
        let line = table.lines().find(|l| l.starts_with(&format!("{step} ")));
        line.unwrap_or_default().to_owned()
    };
    assert!(ok && word(steps[1]).contains("pinned"), "{table}");
    assert!(word(steps[3]).contains("retired"), "{table}");
    kept.bed.order(None, 0);
    assert_eq!((kept.bed.ended(0), kept.bed.ended(1)), (Some(0), Some(0)));
}

#[test]
fn a_flipped_bit_is_named_and_walked_back_past_with_the_reason() {
    let mut kept = Kept::new("2", &[]);
    kept.train(&[0, 1], 0);
    let steps: Vec<u64> = (0..3).map(|_| kept.save(0)).collect();
    kept.bed.kill(0);
    let at = kept.bed.kill(1);
    let file = kept.flip(steps[2]);
    let (ok, said) = kept.muster(&["checkpoint", "verify", "job"]);
    assert!(!ok, "{said}");
    for part in [&file, "chunk 0", "`weights`", &format!("step {}", steps[1])] {
        assert!(said.contains(part), "{part} is not in: {said}");
    }
    let (ok, said) = kept.muster(&["checkpoint", "explain", "job", "--full"]);
    let next = format!("restored next: step {}", steps[1]);
    assert!(ok && said.contains(&next), "{said}");
    assert!(said.contains(&format!("not step {}", steps[2])), "{said}");
    assert!(said.contains("the log does not know yet"), "{said}");
    let newest = steps[2].to_string();
    let (ok, said) = kept.muster(&["checkpoint", "verify", "job", &newest, "--reject"]);
    assert!(!ok && said.contains("rejected by slot"), "{said}");
    // Whoever comes next begins with the one before.
    let group = kept.train(&[2, 3], at);
    let restored: Vec<u64> = (kept.bed.events().into_iter())
        .filter(|e| e.event == "restored" && e.generation == group.generation)
        .map(|e| e.step)
        .collect();
    assert_eq!(restored, [steps[1]; 2]);
    let (ok, said) = kept.bed.muster(2, &["checkpoint", "explain", "job"]);
    assert!(ok && said.contains("rejected in the log: "), "{said}");
    assert!(said.contains(&file), "{said}");
    assert!(
        said.contains(&format!("began with step {}", steps[1])),
        "{said}"
    );
    kept.bed.order(None, 0);
    assert_eq!((kept.bed.ended(2), kept.bed.ended(3)), (Some(0), Some(0)));
}

/// As after a loss that ran away: the next life begins with the step that a person names, and so does the one after it.
#[test]
fn a_job_goes_on_from_an_earlier_step_that_a_person_names() {
    let mut kept = Kept::new("2", &[]);
    kept.train(&[0, 1], 0);
    let steps: Vec<u64> = (0..3).map(|_| kept.save(0)).collect();
    kept.bed.kill(0);
    let mut at = kept.bed.kill(1);
    let first = steps[0].to_string();
    let rollback = ["checkpoint", "rollback", "job", &first];
    // Nothing that is pinned is thrown away, and asking changes nothing.
    let newest = steps[2].to_string();
    let (ok, said) = kept.muster(&["checkpoint", "pin", "job", &newest]);
    assert!(ok, "{said}");
    let before = kept.log().len();
    let (ok, said) = kept.muster(&rollback);
    assert!(!ok && said.contains("pinned"), "{said}");
    let (ok, said) = kept.muster(&["checkpoint", "rollback", "job", "77777777"]);
    assert!(!ok && said.contains(&newest), "{said}");
    assert_eq!(kept.log().len(), before);
    let (ok, said) = kept.muster(&["checkpoint", "unpin", "job", &newest]);
    assert!(ok, "{said}");
    let (ok, said) = kept.muster(&[&rollback[..], &["--dry-run"]].concat());
    assert!(ok && kept.taken_back("reject").is_empty(), "{said}");

    let (ok, said) = kept.muster(&[&rollback[..], &["--json"]].concat());
    let said: Value = serde_json::from_str(&said).unwrap();
    assert!(
        ok && said["rejected"] == serde_json::json!(steps[1..]),
        "{said}"
    );
    let rejected: BTreeSet<u64> = steps[1..].iter().copied().collect();
    assert_eq!(kept.taken_back("reject"), rejected);
    for nodes in [[2, 3], [4, 5]] {
        let group = kept.train(&nodes, at);
        let restored: Vec<u64> = (kept.bed.events().into_iter())
            .filter(|e| e.event == "restored" && e.generation == group.generation && e.t > at)
            .map(|e| e.step)
            .collect();
        assert_eq!(restored, [steps[0]; 2]);
        kept.bed.kill(nodes[0]);
        at = kept.bed.kill(nodes[1]);
    }
}

#[test]
fn what_a_person_deletes_is_rejected_with_the_reason_and_the_rest_is_kept() {
    let mut kept = Kept::new("2", &[]);
    kept.train(&[0, 1], 0);
    let mut steps: Vec<u64> = (0..3).map(|_| kept.save(0)).collect();
    kept.lost.insert(steps[2]);
    std::fs::remove_dir_all(kept.data(steps[2])).unwrap();
    // Seen when the leader looks next.
    steps.push(kept.save(0));
    kept.bed.until("it is rejected", |_| {
        kept.taken_back("reject").contains(&steps[2])
    });
    let log = kept.log();
    let reasons = log
        .iter()
        .filter_map(|e| e["body"]["reject"]["reason"].as_str());
    assert!(reasons.collect::<String>().contains("is not there"));
    kept.holds(&[steps[0], steps[1], steps[3]]);
    assert_eq!(kept.taken_back("retire"), BTreeSet::from([steps[2]]));
    let (ok, said) = kept.muster(&["checkpoint", "verify", "job"]);
    assert!(ok, "{said}");
    kept.bed.order(None, 0);
    assert_eq!((kept.bed.ended(0), kept.bed.ended(1)), (Some(0), Some(0)));
}

#[test]
fn prune_leaves_two_that_are_verified_and_one_is_exported() {
    let mut kept = Kept::new("1", &["--keep-last=10"]);
    kept.train(&[0], 0);
    let steps: Vec<u64> = (0..5).map(|_| kept.save(0)).collect();
    kept.bed.order(None, 0);
    assert_eq!(kept.bed.ended(0), Some(0));
    kept.holds(&steps);
    // By the rules that the job was started with, where nothing else is said.
    let (ok, said) = kept.muster(&["checkpoint", "prune", "job"]);
    assert!(ok && said.contains("nothing to prune"), "{said}");
    assert!(said.contains("--keep-last 10"), "{said}");
    kept.holds(&steps);
    // Nothing is done where that is only asked for, nor while one is known to be damaged.
    let prune = ["checkpoint", "prune", "job", "--keep-last=1"];
    let (ok, said) = kept.muster(&[&prune[..], &["--dry-run"]].concat());
    assert!(ok && said.contains("would be retired"), "{said}");
    let slots = kept.log().len();
    kept.flip(steps[4]);
    let (ok, said) = kept.muster(&prune);
    assert!(!ok && said.contains("nothing is deleted"), "{said}");
    assert_eq!(kept.log().len(), slots);
    kept.holds(&steps);
    let (ok, said) = kept.muster(&["checkpoint", "verify", "job", "--reject"]);
    assert!(!ok, "{said}");
    let (ok, said) = kept.muster(&prune);
    assert!(ok, "{said}");
    kept.holds(&[steps[2], steps[3]]);
    let (ok, said) = kept.muster(&prune);
    assert!(ok && said.contains("nothing to prune"), "{said}");

    let step = steps[3].to_string();
    let to = kept.bed.path("whole.safetensors");
    let export = ["checkpoint", "export", "job", &step, to.to_str().unwrap()];
    let (ok, said) = kept.muster(&export);
    assert!(ok, "{said}");
    let file = std::fs::read(&to).unwrap();
    let header = usize::try_from(u64::from_le_bytes(file[..8].try_into().unwrap())).unwrap();
    let header: Value = serde_json::from_slice(&file[8..][..header]).unwrap();
    assert_eq!(header["weights"]["shape"][0], 1 << 20);
    assert_eq!(header["rows"]["dtype"], "F64");
    let (ok, said) = kept.muster(&export);
    assert!(!ok, "nothing is overwritten: {said}");
    let to = kept.bed.path("whole.pt");
    let export = ["checkpoint", "export", "job", &step, to.to_str().unwrap()];
    let (ok, said) = kept.muster(&export);
    assert!(ok, "{said}");
    assert_eq!(&std::fs::read(&to).unwrap()[..4], b"PK\x03\x04");
}
