//! How agents find each other, and by which protocol they talk.

use muster_protocol::local::Query;
use serde_json::Value;

use crate::harness::Bed;

fn sees(bed: &Bed, node: usize, host: usize) -> bool {
    bed.peer(node, host)["connected"] == true
}

/// Agents that are told of nobody.
#[test]
fn agents_of_one_network_find_each_other_by_mdns_alone() {
    let mut bed = Bed::on_hosts(&[]);
    // The first has it off, and is there before the others look around.
    bed.agent_that_calls(3, &[]);
    bed.env("MUSTER_MDNS", "true");
    for node in [1, 2] {
        bed.agent_that_calls(node, &[]);
    }
    bed.until("two find each other", |bed| {
        sees(bed, 1, 2) && sees(bed, 2, 1)
    });
    let known = bed.query(3, Query::Nodes).unwrap_or_default();
    assert_eq!(known.as_array().map_or(0, Vec::len), 1, "{known}");
    for node in [1, 2] {
        assert_eq!(bed.peer(node, 3), Value::Null);
    }
    // Nothing but the switch kept it out.
    bed.kill_agent(3);
    bed.agent_that_calls(3, &[]);
    bed.until("all find each other", |bed| {
        [(3, 1), (3, 2), (1, 3), (2, 3)]
            .iter()
            .all(|(node, host)| sees(bed, *node, *host))
    });
}

/// TCP is tried first: where it is lost, QUIC carries the control plane, and TCP again where UDP is.
#[test]
fn quic_stands_in_for_tcp_and_tcp_for_quic() {
    let mut bed = Bed::on_hosts(&[]);
    bed.env("MUSTER_QUIC", "true");
    bed.hosts().drop(1, "tcp");
    bed.agent_that_calls(1, &[]);
    bed.agent_that_calls(2, &[1]);
    let both = |bed: &Bed| sees(bed, 1, 2) && sees(bed, 2, 1);
    let neither = |bed: &Bed| !(sees(bed, 1, 2) || sees(bed, 2, 1));
    bed.until("they meet without TCP", both);
    bed.hosts().drop(1, "both");
    bed.until("they lose each other", neither);
    bed.hosts().drop(1, "udp");
    bed.until("they meet without UDP", both);
}

/// Without the option UDP is no way in: it was QUIC that met above.
#[test]
fn without_the_option_tcp_is_the_only_way() {
    let mut bed = Bed::on_hosts(&[]);
    bed.hosts().drop(1, "tcp");
    bed.env("MUSTER_LOG", "muster_daemon=debug");
    bed.agent_that_calls(1, &[]);
    bed.agent_that_calls(2, &[1]);
    // Some in a row: every second one would have been QUIC.
    bed.until("dials came to nothing", |bed| {
        let log = std::fs::read_to_string(bed.path("n2.agent.log")).unwrap_or_default();
        log.matches("a dial came to nothing").count() >= 3
    });
    assert!(!sees(&bed, 2, 1));
    bed.hosts().heal();
    bed.until("they meet by TCP", |bed| sees(bed, 2, 1));
}
