//! How long launchers have waited decides which of them agree with the others.

use super::super::scripted::{Scripted, config, member, node, record, registers};
use super::told::{outside, ticket};
use crate::local::{Register, ToAgent};
use crate::spec::JobSpec;
use crate::time::Span;
use crate::wire::JobMessage;

/// Where another agent takes over, all tickets come to it anew, in whatever order.
#[test]
fn the_launcher_that_has_waited_longest_decides_on_the_flags() {
    let spec = |max_restarts| JobSpec {
        min_nodes: 4,
        max_nodes: 4,
        max_restarts,
        ..JobSpec::default()
    };
    let waited = |k, max_restarts, ms| match ticket(k, &spec(max_restarts), None) {
        JobMessage::Ticket(mut ticket) => {
            ticket.waited_ms = ms;
            JobMessage::Ticket(ticket)
        }
        other => panic!("{other:?}"),
    };
    let come = [(3, 0, 8_000), (4, 0, 9_000), (5, 5, 1_000)];
    for order in [[0, 1, 2], [0, 2, 1], [2, 0, 1], [2, 1, 0], [1, 2, 0]] {
        let mut s = Scripted::new(config(0, 2), Vec::new());
        (3..6).for_each(|i| s.peer(i));
        for i in order {
            let (k, max_restarts, ms) = come[i];
            s.hears(k, waited(k, max_restarts, ms));
        }
        let refused = s.sent.iter().filter_map(|(to, body)| match body {
            JobMessage::TicketRefused { .. } => Some(*to),
            _ => None,
        });
        assert_eq!(refused.collect::<Vec<_>>(), [node(5)], "{order:?}");
    }
}

/// Its agent was started anew meanwhile.
#[test]
fn a_ticket_says_how_long_its_launcher_has_waited_for_all_agents() {
    let mut s = outside();
    s.says(ToAgent::Register(Register {
        waited_ms: 9_000,
        ..registers(3, record(1, 2).spec)
    }));
    s.pass(Span::from_secs(1));
    let tickets = s.sent.iter().filter_map(|(_, body)| match body {
        JobMessage::Ticket(ticket) if ticket.member.launcher == member(3).launcher => {
            Some(ticket.waited_ms)
        }
        _ => None,
    });
    let longest = tickets.max().unwrap_or(0);
    assert!((9_900..=10_000).contains(&longest), "{longest}");
}
