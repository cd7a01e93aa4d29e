//! A node: its slots, and what it writes.

use super::*;

fn new(of: Settings) -> Node {
    let mut node = Node::new(record().digest(), of, NodeState::default());
    for k in 0..of.ranks {
        register(&mut node, k, [Found::Free; 2]);
    }
    drain(|| node.poll_effect());
    node
}

fn register(node: &mut Node, k: u16, found: [Found; 2]) {
    let capacity = BYTES;
    let event = NodeEvent::Slots { k, capacity, found };
    node.handle(event, at(0)).unwrap();
}

fn seal(node: &mut Node, k: u16, step: u64) -> SlotId {
    node.handle(NodeEvent::Wants { k, step }, at(0)).unwrap();
    let filled = drain(|| node.poll_effect())
        .into_iter()
        .find_map(|e| match e {
            NodeEffect::Fill { slot, .. } => Some(slot),
            _ => None,
        });
    let slot = filled.unwrap();
    let copy = copy(step);
    node.handle(NodeEvent::Sealed { slot, copy }, at(0))
        .unwrap();
    slot
}

fn told(attempt: u32, number: u32, step: u64, keep: Option<u64>, stage: Stage) -> NodeEvent {
    let generation = record().digest();
    NodeEvent::Leader(ToNode {
        save: Save {
            generation,
            attempt,
            step,
        },
        number,
        keep,
        stage,
    })
}

fn written(node: &mut Node, slot: SlotId, attempt: u32) {
    let event = NodeEvent::Written {
        slot,
        attempt,
        bytes: BYTES,
        summary: vec![1],
    };
    node.handle(event, at(0)).unwrap();
}

/// The effects in words, and the last message to the leader.
fn deeds(node: &mut Node) -> (Vec<String>, Option<Part>) {
    let mut part = None;
    let mut deed = |e: NodeEffect| match e {
        NodeEffect::Persist(_) => Some("persist".to_owned()),
        NodeEffect::Send(message) => {
            part = Some(message.part);
            None
        }
        NodeEffect::Fill { slot, step } => Some(format!("fill {slot} {step}")),
        NodeEffect::Skip { k, step } => Some(format!("skip {k} {step}")),
        NodeEffect::Write { slot, path, .. } => Some(format!("write {slot} {path}")),
        NodeEffect::StopWrite { slot, attempt } => Some(format!("stop {slot} {attempt}")),
        NodeEffect::Free { slot } => Some(format!("free {slot}")),
        NodeEffect::Refuse { k } => Some(format!("refuse {k}")),
        NodeEffect::Hold { manifest, .. } => Some(format!("hold {manifest}")),
        NodeEffect::Notice(notice) => Some(notice.to_string()),
    };
    let all = drain(|| node.poll_effect());
    let all = all.into_iter().filter_map(&mut deed).collect();
    (all, part)
}

#[test]
fn a_slot_goes_from_free_to_free() {
    let mut node = new(settings(0, 2));
    let [a, b] = [0, 1].map(|k| seal(&mut node, k, 100));
    deeds(&mut node);
    node.handle(told(1, 1, 100, None, Stage::Write), at(0))
        .unwrap();
    let generation = record().digest().hex();
    let path = |k| format!("data/100-{}-1/n0-{k}.safetensors", &generation[..16]);
    let (all, part) = deeds(&mut node);
    let writes = [0, 1].map(|k| format!("write {k}.0 {}", path(k)));
    assert_eq!(all, writes);
    let (done, bytes) = (0, 2 * BYTES);
    assert_eq!(part, Some(Part::Writing { done, bytes }));
    written(&mut node, a, 1);
    assert_eq!(deeds(&mut node), (Vec::new(), None), "mere progress waits");
    written(&mut node, b, 1);
    // What may be said is durable first.
    let (all, part) = deeds(&mut node);
    assert_eq!(all, ["persist"]);
    assert!(matches!(part, Some(Part::Prepared { files }) if files.len() == 2));
    assert!(node.slot(a).unwrap().copy().is_some());
    let over = Stage::Over(Outcome::Committed);
    node.handle(told(1, 2, 100, None, over), at(0)).unwrap();
    let (all, part) = deeds(&mut node);
    assert_eq!(all, ["free 0.0", "free 1.0"]);
    assert_eq!(part, Some(Part::Settled(Outcome::Committed)));
    // Late, and for a leader that does not remember: it stays over.
    node.handle(told(1, 3, 100, None, Stage::Write), at(0))
        .unwrap();
    let (all, part) = deeds(&mut node);
    assert_eq!(
        (all, part),
        (Vec::new(), Some(Part::Settled(Outcome::Committed)))
    );
}

#[test]
fn a_rank_without_a_free_slot_waits_or_leaves_the_save_out() {
    for busy in [Busy::Wait, Busy::Skip] {
        let mut node = new(Settings {
            busy,
            ..settings(0, 1)
        });
        seal(&mut node, 0, 100);
        seal(&mut node, 0, 110);
        deeds(&mut node);
        let (k, step) = (0, 120);
        node.handle(NodeEvent::Wants { k, step }, at(0)).unwrap();
        let (all, _) = deeds(&mut node);
        let does = match busy {
            Busy::Wait => "waits",
            Busy::Skip => "leaves this save out",
        };
        let text = format!(
            "rank 0 has no free slot for step 120 and {does}: step 100 waits to be written, step 110 waits to \
             be written"
        );
        assert_eq!(all.last(), Some(&text));
        assert_eq!(all.contains(&"skip 0 120".to_owned()), busy == Busy::Skip);
        // A newer save is opened: the oldest copy is needed no more, and the rank may fill its slot.
        node.handle(told(1, 1, 120, Some(110), Stage::Write), at(0))
            .unwrap();
        let (all, part) = deeds(&mut node);
        assert_eq!(all[0], "free 0.0");
        assert_eq!(
            all.get(1).map(String::as_str),
            match busy {
                Busy::Wait => Some("fill 0.0 120"),
                Busy::Skip => None,
            }
        );
        assert_eq!(
            matches!(part, Some(Part::Failed { .. })),
            busy == Busy::Skip
        );
    }
}

#[test]
fn no_slot_is_given_out_while_it_is_read() {
    let mut node = new(settings(0, 1));
    let slot = seal(&mut node, 0, 100);
    node.handle(told(1, 1, 100, None, Stage::Write), at(0))
        .unwrap();
    deeds(&mut node);
    let over = Stage::Over(Outcome::Dropped);
    node.handle(told(1, 2, 100, None, over), at(0)).unwrap();
    assert_eq!(deeds(&mut node).0, ["stop 0.0 1"]);
    node.handle_timeout(at(5_000));
    assert_eq!(deeds(&mut node).0, [""; 0], "it is asked once");
    let attempt = 1;
    node.handle(NodeEvent::WriteStopped { slot, attempt }, at(0))
        .unwrap();
    assert_eq!(deeds(&mut node).0, ["free 0.0"]);
    let refused = node.handle(NodeEvent::WriteStopped { slot, attempt }, at(0));
    assert!(matches!(refused, Err(Error::NotInState { .. })));
}

#[test]
fn a_copy_that_is_kept_is_written_again_for_the_next_attempt() {
    let mut node = new(settings(0, 1));
    let slot = seal(&mut node, 0, 100);
    node.handle(told(1, 1, 100, None, Stage::Write), at(0))
        .unwrap();
    let why = "no space left on device".to_owned();
    let attempt = 1;
    node.handle(NodeEvent::WriteFailed { slot, attempt, why }, at(0))
        .unwrap();
    let (_, part) = deeds(&mut node);
    assert!(matches!(part, Some(Part::Failed { why }) if why.contains("no space")));
    let over = Stage::Over(Outcome::Kept);
    node.handle(told(1, 2, 100, None, over), at(0)).unwrap();
    assert_eq!(deeds(&mut node).0, [""; 0]);
    node.handle(told(2, 1, 100, None, Stage::Write), at(0))
        .unwrap();
    assert!(deeds(&mut node).0[0].ends_with("-2/n0-0.safetensors"));
    written(&mut node, slot, 2);
    assert!(matches!(deeds(&mut node).1, Some(Part::Prepared { .. })));
}

#[test]
fn what_was_prepared_is_known_after_a_restart_without_slots() {
    let generation = record().digest();
    let save = Save {
        generation,
        attempt: 3,
        step: 100,
    };
    let file = Written {
        rank: 0,
        bytes: BYTES,
        summary: vec![1],
    };
    let state = NodeState {
        prepared: Some((save, vec![file])),
    };
    let mut node = Node::new(generation, settings(0, 1), state.clone());
    node.handle(told(3, 1, 100, None, Stage::Write), at(0))
        .unwrap();
    assert!(matches!(deeds(&mut node).1, Some(Part::Prepared { .. })));
    // The launcher brings the slots again: nothing is written twice.
    register(&mut node, 0, [Found::Sealed(copy(100)), Found::Free]);
    assert_eq!(deeds(&mut node).0, [""; 0]);
    let over = Stage::Over(Outcome::Committed);
    node.handle(told(3, 2, 100, None, over), at(0)).unwrap();
    assert_eq!(deeds(&mut node).0, ["free 0.0"]);
    // In another generation it says nothing.
    let mut other = Node::new(Digest([1; 32]), settings(0, 1), state);
    register(&mut other, 0, [Found::Sealed(copy(100)), Found::Free]);
    let (all, _) = deeds(&mut other);
    assert_eq!(
        all,
        [
            "free 0.0",
            "rank 0's sealed copy of step 100 is gone: it is of an earlier generation"
        ]
    );
}

#[test]
fn copies_of_a_job_that_is_gone_live_on_for_a_while() {
    let mut node = new(settings(0, 2));
    seal(&mut node, 0, 100);
    seal(&mut node, 1, 100);
    seal(&mut node, 0, 110);
    node.handle(NodeEvent::Wants { k: 1, step: 110 }, at(0))
        .unwrap();
    deeds(&mut node);
    node.handle(NodeEvent::LauncherGone, at(1_000)).unwrap();
    assert_eq!(
        deeds(&mut node).0,
        ["free 1.1"],
        "what was being copied is torn"
    );
    node.handle(NodeEvent::Ended, at(2_000)).unwrap();
    assert_eq!((node.memory(), node.is_empty()), (3 * BYTES, false));
    // Room is made for what needs it, the oldest first.
    let bytes = BYTES;
    node.handle(NodeEvent::Budget { bytes }, at(3_000)).unwrap();
    let (all, _) = deeds(&mut node);
    assert_eq!([all[0].as_str(), &all[2]], ["free 0.0", "free 1.0"]);
    assert!(
        all[1].contains("step 100") && all[1].contains("budget"),
        "{all:?}"
    );
    assert_eq!(node.poll_timeout().map(|(at, _)| at), Some(at(11_000)));
    node.handle_timeout(at(11_000));
    let (all, _) = deeds(&mut node);
    assert!(all[0].contains("its lease"), "{all:?}");
    assert!(node.is_empty() && node.memory() == 0);
}

#[test]
fn slots_beyond_the_budget_are_refused_by_name() {
    let mut node = Node::new(
        record().digest(),
        Settings {
            budget: 3 * BYTES,
            ..settings(0, 2)
        },
        NodeState::default(),
    );
    register(&mut node, 0, [Found::Free; 2]);
    register(&mut node, 1, [Found::Free; 2]);
    let (all, _) = deeds(&mut node);
    assert_eq!(all[0], "refuse 1");
    assert!(all[1].contains("need 2000 bytes, 1000 are left"), "{all:?}");
    let (k, capacity, found) = (2, BYTES, [Found::Free; 2]);
    let foreign = node.handle(NodeEvent::Slots { k, capacity, found }, at(0));
    assert_eq!(foreign, Err(Error::NotMine { rank: 2 }));
}

#[test]
fn what_does_not_fit_the_slot_is_refused() {
    let mut node = new(settings(0, 1));
    let (k, step) = (0, 100);
    node.handle(NodeEvent::Wants { k, step }, at(0)).unwrap();
    let slot = slot(0, 0);
    let late = Copy {
        generation: Digest([1; 32]),
        ..copy(100)
    };
    let long = Copy {
        bytes: BYTES + 1,
        ..copy(100)
    };
    for (copy, foreign) in [(late, true), (long, false)] {
        let error = node
            .handle(NodeEvent::Sealed { slot, copy }, at(0))
            .unwrap_err();
        assert_eq!(matches!(error, Error::OtherGeneration { .. }), foreign);
    }
    let copy = copy(100);
    node.handle(NodeEvent::Sealed { slot, copy }, at(0))
        .unwrap();
    assert_eq!(node.sealed_steps(), [100]);
    let again = node.handle(NodeEvent::Wants { k, step }, at(0));
    assert_eq!(again, Err(Error::Sealed { rank: 0, step }));
}

#[test]
fn slots_that_are_no_more_occupy_nothing() {
    let mut node = new(settings(0, 2));
    let before = node.memory();
    node.handle(NodeEvent::SlotsGone { k: 0 }, at(0)).unwrap();
    assert_eq!(2 * node.memory(), before);
    assert!(
        node.handle(NodeEvent::Wants { k: 0, step: 7 }, at(0))
            .is_err()
    );
    // Larger ones take their place.
    let (k, capacity, found) = (0, 3 * BYTES, [Found::Free; 2]);
    node.handle(NodeEvent::Slots { k, capacity, found }, at(0))
        .unwrap();
    assert_eq!(node.memory(), before / 2 + 6 * BYTES);
    seal(&mut node, 0, 7);
}

#[test]
fn a_node_says_of_a_rank_that_has_ended_what_it_holds() {
    let ended = |of: Settings, ends: u16| {
        let mut node = new(of);
        for (k, step) in [(0, 5), (1, 5), (1, 10)] {
            seal(&mut node, k, step);
        }
        node.handle(NodeEvent::WorkerEnded { k: ends }, at(0))
            .unwrap();
        let said = drain(|| node.poll_effect()).into_iter().rev();
        let mut said = said.filter_map(|e| match e {
            NodeEffect::Send(said) => Some(said),
            _ => None,
        });
        said.next().and_then(|said| said.ended)
    };
    let of = settings(0, 2);
    let lacks = ended(of, 0).unwrap();
    assert_eq!((lacks.newest, lacks.beside), (Some(5), Some(10)));
    let holds = ended(of, 1).unwrap();
    assert_eq!((holds.newest, holds.beside), (Some(10), Some(10)));
    // Of a rank that ended at a step of its own nothing is whole once another one is beyond it.
    let mut node = new(of);
    seal(&mut node, 0, 7);
    node.handle(NodeEvent::WorkerEnded { k: 0 }, at(0)).unwrap();
    let newest = |node: &mut Node| {
        let said = drain(|| node.poll_effect());
        let last = said.iter().rev().find_map(|e| match e {
            NodeEffect::Send(said) => said.ended,
            _ => None,
        });
        last.map(|ended| ended.newest)
    };
    assert_eq!(newest(&mut node), Some(Some(7)));
    let slot = seal(&mut node, 1, 10);
    assert_eq!((newest(&mut node), slot.k), (Some(None), 1));
    // Those that leave a save out wait for nobody.
    let skips = Settings {
        busy: Busy::Skip,
        ..of
    };
    assert_eq!(ended(skips, 0), None);
    // One that never had slots.
    let mut node = Node::new(record().digest(), of, NodeState::default());
    register(&mut node, 1, [Found::Free; 2]);
    seal(&mut node, 1, 5);
    node.handle(NodeEvent::WorkerEnded { k: 0 }, at(0)).unwrap();
    let said = drain(|| node.poll_effect());
    let said = said.iter().rev().find_map(|e| match e {
        NodeEffect::Send(said) => said.ended,
        _ => None,
    });
    assert_eq!(said.map(|e| (e.newest, e.beside)), Some((None, Some(5))));
    // Other workers of the generation were started.
    node.handle(NodeEvent::WorkersAnew, at(0)).unwrap();
    let said = drain(|| node.poll_effect());
    let ended = said
        .iter()
        .any(|e| matches!(e, NodeEffect::Send(said) if said.ended.is_some()));
    assert!(!ended, "{said:?}");
}
