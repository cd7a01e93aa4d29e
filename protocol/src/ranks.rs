//! The order of ranks: a pure function of who survived and who joins.
//!
//! Survivors keep their relative order, so the member that has been there longest keeps rank 0 and
//! most ranks stay where they were. A newcomer goes behind the last member of its own switch, else
//! of its zone, else to the end, so that ring neighbours are near each other.

use std::cmp::Ordering;

use crate::record::{Member, Place};

/// The members of the next generation in rank order.
///
/// `survivors` are in the rank order of the generation before (none at a birth). A joiner that
/// stands among the survivors, or twice among the joiners, counts once. The order of the joiners
/// does not matter.
pub fn order(survivors: &[Member], joiners: &[Member]) -> Vec<Member> {
    let mut ordered = survivors.to_vec();
    let mut joiners: Vec<&Member> = joiners.iter().collect();
    joiners.sort_by(|a, b| by_place(a, b));
    for joiner in joiners {
        if ordered.iter().any(|m| m.node == joiner.node) {
            continue;
        }
        let behind = |near: fn(Place, Place) -> bool| {
            ordered.iter().rposition(|m| near(m.place, joiner.place))
        };
        let at = behind(same_switch).or_else(|| behind(same_zone));
        let at = at.map_or(ordered.len(), |last| last + 1);
        ordered.insert(at, joiner.clone());
    }
    ordered
}

/// Zone, switch, then node. Unknown places come last, so that rank 0 of a new job is on a node of
/// which something is known.
fn by_place(a: &Member, b: &Member) -> Ordering {
    let key = |m: &Member| {
        let Place { zone, switch } = m.place;
        (zone == [0; 2], zone, switch == [0; 2], switch, m.node)
    };
    key(a).cmp(&key(b)).then_with(|| a.cmp(b))
}

/// Switches are named within their zone. Unknown is like nothing.
fn same_switch(a: Place, b: Place) -> bool {
    a == b && a.switch != [0; 2]
}

fn same_zone(a: Place, b: Place) -> bool {
    a.zone == b.zone && a.zone != [0; 2]
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use proptest::prelude::*;

    use super::*;
    use crate::ids::{LauncherId, NodeId, StateId};

    fn member(node: u8, zone: u8, switch: u8) -> Member {
        Member {
            node: NodeId([node; 32]),
            state: StateId([node; 8]),
            launcher: LauncherId([node; 8]),
            slots: 1,
            guard: SocketAddr::from(([127, 0, 0, 1], 1000)),
            place: Place {
                zone: [zone, 0],
                switch: [switch, 0],
            },
        }
    }

    fn nodes(members: &[Member]) -> Vec<u8> {
        members.iter().map(|m| m.node.0[0]).collect()
    }

    #[test]
    fn a_birth_is_grouped_by_zone_switch_and_node() {
        let joiners = [
            member(1, 2, 1),
            member(2, 0, 0),
            member(3, 1, 2),
            member(4, 1, 1),
            member(5, 2, 1),
            member(6, 1, 1),
            member(7, 1, 0),
        ];
        assert_eq!(nodes(&order(&[], &joiners)), [4, 6, 3, 7, 1, 5, 2]);
    }

    #[test]
    fn a_joiner_goes_next_to_its_own() {
        let survivors = [
            member(9, 1, 1),
            member(5, 2, 1),
            member(7, 1, 2),
            member(3, 0, 0),
        ];
        // Switch 1 of zone 2 is not switch 1 of zone 1; an unknown place is near to nobody.
        let joiners = [
            member(1, 1, 1),
            member(2, 1, 3),
            member(4, 2, 9),
            member(6, 3, 1),
            member(8, 0, 0),
        ];
        let all = order(&survivors, &joiners);
        assert_eq!(nodes(&all), [9, 1, 5, 4, 7, 2, 3, 6, 8]);
    }

    fn members(from: u8) -> impl Strategy<Value = Vec<Member>> {
        let places = proptest::collection::vec((0u8..4, 0u8..3), 0..12);
        places.prop_map(move |places| {
            let with =
                |(n, (zone, switch)): (usize, &(u8, u8))| member(from + n as u8, *zone, *switch);
            places.iter().enumerate().map(with).collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn everybody_once_and_survivors_in_order(
            old in members(1).prop_shuffle(),
            new in members(100).prop_shuffle(),
            cut in 0usize..12,
        ) {
            let all = order(&old, &new);
            let mut sorted = nodes(&all);
            sorted.sort_unstable();
            let mut expected = [nodes(&old), nodes(&new)].concat();
            expected.sort_unstable();
            prop_assert_eq!(sorted, expected);
            let kept: Vec<u8> = nodes(&all).into_iter().filter(|n| *n < 100).collect();
            prop_assert_eq!(kept, nodes(&old));
            if let Some(first) = old.first() {
                prop_assert_eq!(&all[0], first);
            }
            // The order in which joiners were heard of does not matter, nor hearing twice.
            let cut = cut.min(new.len());
            let turned = [&new[cut..], &new[..cut], &old[..]].concat();
            prop_assert_eq!(&order(&old, &turned), &all);
            // Joiners of one known switch stand together, behind all its survivors.
            for joiner in new.iter().filter(|m| m.place.switch != [0; 2]) {
                let like = |m: &&Member| m.place == joiner.place && m.node.0[0] >= 100;
                let at = |m: &Member| all.iter().position(|o| o.node == m.node).unwrap();
                let mut spots: Vec<usize> = new.iter().filter(like).map(at).collect();
                spots.sort_unstable();
                prop_assert!(spots.windows(2).all(|w| w[1] == w[0] + 1));
                let last_old = old.iter().filter(|m| m.place == joiner.place).map(at).max();
                prop_assert!(last_old.is_none_or(|last| last + 1 == spots[0]));
            }
        }
    }
}
