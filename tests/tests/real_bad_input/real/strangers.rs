//! Agents that do not belong: another secret, no secret, another cluster. (Another version cannot
//! be made of the same build: `net::tests::refusing` plays one.)

use crate::support::{Bed, get, until};

#[test]
fn another_secret_or_cluster_is_kept_out_and_both_sides_say_so() {
    let mut bed = Bed::new();
    let ours = bed.script("ours", "0123456789abcdef0123456789abcdef");
    let theirs = bed.script("theirs", "an altogether different secret..");
    let ours = format!("--secret-file={}", ours.display());
    let theirs = format!("--secret-file={}", theirs.display());
    let http = bed.port("http");
    let http_flag = format!("--http=127.0.0.1:{http}");
    let _a = bed.agent_and("a", &[], &[&ours, &http_flag]);
    let _b = bed.agent_and("b", &["a"], &[&ours]);
    let mut wrong = bed.agent_and("wrong", &["a", "b"], &[&theirs]);
    let mut none = bed.agent_and("none", &["a", "b"], &["--insecure"]);
    let mut other = bed.agent_and("other", &["a", "b"], &[&ours, "--cluster=elsewhere"]);
    wrong.until_says("refused");
    none.until_says("refused");
    other.until_says("refused");
    until("a counts its refusals", || {
        let text = get(([127, 0, 0, 1], http).into(), "/metrics").unwrap_or_default();
        ["wrong_secret", "no_secret", "other_cluster"]
            .iter()
            .all(|word| {
                text.lines()
                    .any(|l| l.contains(&format!("\"{word}\"")) && !l.ends_with(" 0"))
            })
    });

    // Launchers on them do not get in, and the job of those who belong is not held up.
    let flags = ["--nnodes=2:5"];
    let mut outside: Vec<_> = ["wrong", "none", "other"]
        .iter()
        .map(|n| bed.launch(n, &flags))
        .collect();
    for launcher in &mut outside {
        launcher.until_says("waiting for 1 more of 2 to 5 nodes");
        assert!(
            launcher.log().contains("connected to 0 others"),
            "{}",
            launcher.log()
        );
    }
    let mut inside = [bed.launch("a", &flags), bed.launch("b", &flags)];
    let before = bed.until_runs_on(&["a", "b"]);
    let _open = bed.finish();
    for launcher in &mut inside {
        assert_eq!(launcher.code(), 0, "{}", launcher.log());
    }
    assert_eq!(before.len(), 2);
    for launcher in &mut outside {
        assert!(launcher.is_alive(), "{}", launcher.log());
    }
}
