//! Parity in memory: after a node's loss its bytes come out of what the others hold, and after two from the store.

use nix::sys::signal::Signal;

use super::saves::Saves;

/// MiB of the ranks' state, of which each of three saves a third.
const STATE: usize = 36;

/// A launcher's words when all of them are held.
const HELD: &str = "is in the parity that these hold";

/// MiB that a line says of all sources that are called so.
fn mib(line: &str, called: &str) -> f64 {
    let (_, restored) = line.split_once(" restored step ").unwrap();
    let (_, sources) = restored.split_once(": ").unwrap();
    let sources = sources.split(", ").filter(|part| part.contains(called));
    let amount = |part: &str| {
        let (number, rest) = part.trim().split_once(' ').unwrap();
        let scale = [
            ("B", 1.0 / 1_048_576.0),
            ("KiB", 1.0 / 1_024.0),
            ("MiB", 1.0),
        ];
        let unit = rest.split(' ').next().unwrap();
        let (_, scale) = scale.into_iter().find(|(name, _)| *name == unit).unwrap();
        number.parse::<f64>().unwrap() * scale
    };
    sources.map(amount).sum()
}

#[test]
fn a_lost_nodes_bytes_come_out_of_what_the_others_hold() {
    let (mut saves, first) = Saves::three("parity:2", "2:3", STATE);
    let step = saves.save_held(HELD);
    let lost = first.nodes()[1];
    let stay: Vec<usize> = (0..3).filter(|node| *node != lost).collect();
    let at = saves.bed.kill(lost);
    let next = saves.bed.group(&stay, at);
    assert_eq!(saves.restored(&next), step);
    // Once more, from the same: nothing was saved since.
    saves.bed.signal(next.pid(stay[1]), Signal::SIGKILL);
    let third = saves.bed.group(&stay, next.began());
    assert_eq!(saves.restored(&third), step);
    let share = STATE as f64 / 3.0;
    for line in saves.origins(&stay, 4) {
        assert!(line.contains(&format!("restored step {step}:")), "{line}");
        assert!(line.contains(" 0 B from the store"), "{line}");
        // A third of the state is what the lost node had: half of it each held.
        let (here, there) = (
            mib(&line, " from this node's parity with "),
            mib(&line, "'s parity with this node's memory"),
        );
        let whole = here + there;
        assert!((share - 0.5..share + 0.5).contains(&whole), "{line}");
        assert!(here.min(there) >= 4.0, "{line}");
        let own = mib(&line, " from this node's memory");
        assert!((share - 0.5..share + 0.5).contains(&own), "{line}");
    }
    saves.finish(&stay);
}

#[test]
fn two_nodes_that_are_lost_at_once_cost_what_only_the_store_has() {
    let (mut saves, first) = Saves::three("parity:2", "1:3", STATE);
    let step = saves.save_held(HELD);
    let stays = first.nodes()[0];
    let lost: Vec<usize> = (0..3).filter(|node| *node != stays).collect();
    saves.bed.kill(lost[0]);
    let at = saves.bed.kill(lost[1]);
    let next = saves.bed.group(&[stays], at);
    assert_eq!(saves.restored(&next), step);
    let share = STATE as f64 / 3.0;
    let line = saves.origins(&[stays], 1).pop().unwrap();
    assert!(line.contains(&format!("restored step {step}:")), "{line}");
    // It holds parity of both, of which each is worth nothing without the other.
    assert_eq!(mib(&line, " from this node's parity"), 0.0, "{line}");
    assert!(line.contains("which is in no memory"), "{line}");
    let stored = mib(&line, " from the store");
    assert!(
        (2.0 * share - 0.5..2.0 * share + 0.5).contains(&stored),
        "{line}"
    );
    saves.finish(&[stays]);
}
