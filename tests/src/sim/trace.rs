//! Steps as lines for a person who looks for a fault.

use muster_protocol::local::ToLauncher;
use muster_protocol::wire::{JobMessage, Message};

use super::step::Step;

/// The most characters of a step's line.
const MOST: usize = 400;

/// The line of a step that was carried out at `at` (nanoseconds); none for those that only repeat.
pub fn line(at: u64, step: &Step) -> Option<String> {
    let text = match step {
        Step::LauncherHears {
            frame: ToLauncher::Welcome { .. },
            ..
        }
        | Step::Timer { .. }
        | Step::StoreRead { .. }
        | Step::BeaconRead { .. }
        | Step::BeaconWrite { .. }
        | Step::StoreAnswer { .. }
        | Step::BeaconAnswer { .. }
        | Step::Written { .. }
        | Step::Probed { .. } => return None,
        Step::Deliver { to, from, frame } => match Message::decode(frame) {
            Ok(Message::Job { body, .. }) => match *body {
                JobMessage::Status(s) if s.started.is_some() && !s.stopped => return None,
                body => format!("{from} -> {to}: {body:?}"),
            },
            _ => return None,
        },
        Step::StorePut { node, slot, .. } => format!("{node} puts {slot}"),
        step => format!("{step:?}"),
    };
    let text: String = text.chars().take(MOST).collect();
    Some(format!("{:10.4} {text}", at as f64 / 1e9))
}
