//! Ranks that do not hold the same: what they save together is no state of the job, and people are told.

use crate::real::saves::Saves;

/// The exit code of a job whose last save was not committed.
pub(crate) const UNSAVED: i32 = 74;

/// Output of `muster checkpoint job -o json`: whether it went well, the step, and why not.
pub(crate) fn ordered(said: &str) -> (bool, Option<u64>, Option<String>) {
    let json = said.find('{').map_or("", |at| &said[at..]);
    let mut values = serde_json::Deserializer::from_str(json).into_iter();
    let said: serde_json::Value = values.next().unwrap().unwrap();
    let why = said["why"].as_str().map(str::to_owned);
    (said["ok"].as_bool().unwrap(), said["step"].as_u64(), why)
}

/// How many lines for people have this; an agent inside its launcher writes its log to the same place.
pub(crate) fn shown(said: &str, what: &str) -> usize {
    let people = said.lines().filter(|line| !line.starts_with('{'));
    people.filter(|line| line.contains(what)).count()
}

#[test]
fn a_save_of_ranks_that_hold_other_tensors_is_given_up() {
    let mut saves = Saves::with(&["--max-restarts=1"], "2", 1, 1_000_000);
    saves.bed.env("SAVER_UNLIKE", "1");
    let group = saves.train(&[0, 1], 0);
    saves.trains(&group);
    let (ok, said) = saves.bed.checkpoint(1, &["-o", "json"]);
    let (saved, step, why) = ordered(&said);
    assert!(!ok && !saved && step.is_some(), "{said}");
    assert!(why.unwrap().contains("first at `alone`"), "{said}");
    assert_eq!(saves.committed(), [0; 0]);
    saves.bed.order(None, 0);
    for node in 0..2 {
        assert_eq!(
            saves.bed.ended(node),
            Some(UNSAVED),
            "{}",
            saves.bed.said(node)
        );
        // When it was given up, and at the end.
        let said = saves.bed.said(node);
        assert_eq!(shown(&said, "first at `alone`"), 2, "{said}");
    }
}
