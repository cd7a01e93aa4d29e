//! Messages to the agent and to people about saves that other nodes do not hold.

use muster_protocol::local::{Replicated, SaveNews};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::super::choice::Choice;
use super::super::freeing::Freeing;
use super::*;

/// A pusher that nobody runs, and what it tells.
struct Told {
    pusher: Pusher,
    done: UnboundedReceiver<Done>,
    begin: Instant,
}

impl Told {
    fn by(choice: Choice) -> Told {
        let (done, told) = unbounded_channel();
        let shelf = Shelf::new(choice, u64::MAX, Freeing::start().unwrap());
        let shelf = Arc::new(Mutex::new(shelf));
        Told {
            pusher: Pusher::new(shelf, done, "na".into(), choice.over()),
            done: told,
            begin: Instant::now(),
        }
    }

    /// The only rank seals a save, and this becomes of it; what is told then, so many seconds after the beginning.
    fn after(&mut self, step: u64, why: Left, seconds: u64) -> (Option<Replicated>, Vec<String>) {
        let now = self.begin + Duration::from_secs(seconds);
        let job = Job {
            generation: Digest::ZERO,
            name: Name::new(step, &Digest::ZERO, "n0-0.safetensors").unwrap(),
            bytes: 1,
            to: To {
                holder: Peer {
                    launcher: LauncherId([2; 8]),
                    guard: ([127, 0, 0, 1], 1).into(),
                },
                how: How::Copy,
            },
            all: 1,
        };
        self.pusher.add(
            Seal {
                generation: Digest::ZERO,
                step,
                rank: 0,
                ranks: 1,
                jobs: vec![job],
            },
            now,
        );
        let (item, _) = self.pusher.queue.take(now).unwrap();
        self.pusher.queue.leave(&item, why);
        self.pusher.stands(now);
        let (mut agent, mut people) = (None, Vec::new());
        while let Ok(done) = self.done.try_recv() {
            match done {
                Done::Stands(standing) => {
                    let SaveNews::Replicas(told) = standing.news() else {
                        unreachable!("it is told so");
                    };
                    assert_eq!(agent.replace(told), None, "once");
                }
                Done::Said(text) => people.push(text),
                other => panic!("{other:?}"),
            }
        }
        (agent, people)
    }
}

fn stands(behind: u64, missed: u64, whole: Option<u64>) -> Option<Replicated> {
    Some(Replicated {
        behind,
        missed,
        whole,
    })
}

#[test]
fn saves_that_come_too_fast_are_told_at_once_then_once_a_minute_and_when_it_is_over() {
    for (choice, what) in [
        (Choice::Copy, "copies on other nodes are"),
        (Choice::Parity(2), "parity is"),
    ] {
        let mut told = Told::by(choice);
        let quiet = |whole| (stands(0, 0, whole), Vec::new());
        assert_eq!(told.after(10, Left::Held, 0), quiet(Some(10)));
        let slow = |behind, slow, whole: &str| {
            format!(
                "{what} behind: saves come faster than they are sent to other nodes; of the newest {behind}, and of {slow} so far, not all is there, {whole}. Save less often, or see to a faster network"
            )
        };
        let newest = "the newest that is complete is of step 10";
        let (agent, people) = told.after(20, Left::Slow, 1);
        assert_eq!(agent, stands(1, 1, Some(10)));
        assert_eq!(people, [slow(1, 1, newest)]);
        // The agent is told each time, people after a minute.
        for (step, at) in [(30, 2), (40, 60)] {
            let (agent, people) = told.after(step, Left::Slow, at);
            assert_eq!(agent, stands(step / 10 - 1, step / 10 - 1, Some(10)));
            assert!(people.is_empty(), "{people:?}");
        }
        let (agent, people) = told.after(50, Left::Slow, 61);
        assert_eq!(agent, stands(4, 4, Some(10)));
        assert_eq!(people, [slow(4, 4, newest)]);
        // One that is complete is no end of it: that takes as many in a row as it takes to send all again.
        let mut step = 50;
        let mut over = Vec::new();
        while over.is_empty() {
            step += 10;
            let (agent, people) = told.after(step, Left::Held, 62);
            assert_eq!(agent, stands(0, 4, Some(step)));
            over = people;
            assert!(step < 1_000);
        }
        assert!(step > 60, "{step}");
        assert_eq!(over, [format!("{what} complete again: step {step}")]);
        assert_eq!(
            told.after(step + 10, Left::Held, 63),
            (stands(0, 4, Some(step + 10)), Vec::new())
        );
    }
}

#[test]
fn who_never_had_one_complete_is_told_so_and_what_a_node_refuses_is_not_too_fast() {
    let mut told = Told::by(Choice::Copy);
    // People were told by whom, and why.
    let (agent, people) = told.after(10, Left::Failed, 0);
    assert_eq!((agent, people), (stands(1, 1, None), Vec::new()));
    let (agent, people) = told.after(20, Left::Slow, 1);
    assert_eq!(agent, stands(2, 2, None));
    let words = "of the newest 2, and of 1 so far, not all is there, none is complete.";
    assert!(people.len() == 1 && people[0].contains(words), "{people:?}");
}
