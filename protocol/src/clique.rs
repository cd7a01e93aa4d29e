//! Members that are left out when links are missing (R19): a generation's members must all reach each other.
//!
//! The largest clique of a graph is NP-hard to find; this is the greedy one, and the same on every
//! node: drop the member with the most missing links, of several the one of the highest rank, until
//! no link is missing.

use std::collections::BTreeSet;

use crate::ids::NodeId;

/// Splits `members`, in rank order, into those that stay (in the same order) and those that are
/// dropped (in the order of dropping). `missing` are the pairs without a link in both directions;
/// pairs with strangers, and of a node with itself, count for nothing.
pub fn drop_unlinked(
    members: &[NodeId],
    missing: &BTreeSet<(NodeId, NodeId)>,
) -> (Vec<NodeId>, Vec<NodeId>) {
    let rank = |node: &NodeId| members.iter().position(|m| m == node);
    let mut links: BTreeSet<(usize, usize)> = missing
        .iter()
        .filter_map(|(a, b)| Some((rank(a)?, rank(b)?)))
        .filter(|(a, b)| a != b)
        .map(|(a, b)| (a.min(b), a.max(b)))
        .collect();
    let mut dropped: Vec<usize> = Vec::new();
    // Each turn takes at least one missing link away.
    while !links.is_empty() {
        let mut count = vec![0usize; members.len()];
        for (a, b) in &links {
            count[*a] += 1;
            count[*b] += 1;
        }
        // The last of the greatest ones.
        let worst = (0..members.len()).max_by_key(|rank| count[*rank]);
        let Some(worst) = worst else { break };
        links.retain(|(a, b)| *a != worst && *b != worst);
        dropped.push(worst);
    }
    let stays = (0..members.len()).filter(|rank| !dropped.contains(rank));
    (
        stays.map(|rank| members[rank]).collect(),
        dropped.iter().map(|rank| members[*rank]).collect(),
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn node(n: u8) -> NodeId {
        NodeId([n; 32])
    }

    fn check(members: u8, missing: &[(u8, u8)], expected: &[u8]) {
        let members: Vec<NodeId> = (0..members).map(node).collect();
        let missing = missing.iter().map(|(a, b)| (node(*a), node(*b))).collect();
        let (_, dropped) = drop_unlinked(&members, &missing);
        let dropped: Vec<u8> = dropped.iter().map(|n| n.0[0]).collect();
        assert_eq!(dropped, expected);
    }

    #[test]
    fn the_worst_goes_first_and_ties_go_by_rank() {
        check(4, &[], &[]);
        check(2, &[(0, 1)], &[1]);
        check(4, &[(0, 1), (0, 2), (3, 0)], &[0]);
        check(4, &[(0, 1), (2, 3)], &[3, 1]);
        // One link told from both sides is one link; strangers count for nothing.
        check(4, &[(0, 1), (1, 0), (1, 9), (2, 2)], &[1]);
        // Two halves that cannot see each other: the half of rank 0 stays.
        check(4, &[(0, 2), (0, 3), (1, 2), (1, 3)], &[3, 2]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_stays_is_a_clique_and_nobody_goes_for_nothing(
            count in 0u8..12,
            pairs in proptest::collection::vec((0u8..14, 0u8..14), 0..40),
        ) {
            let members: Vec<NodeId> = (0..count).map(node).collect();
            let missing: BTreeSet<_> = pairs.iter().map(|(a, b)| (node(*a), node(*b))).collect();
            let unlinked = |a: NodeId, b: NodeId| {
                a != b && (missing.contains(&(a, b)) || missing.contains(&(b, a)))
            };
            let (stay, dropped) = drop_unlinked(&members, &missing);
            prop_assert_eq!(stay.len() + dropped.len(), members.len());
            prop_assert!(stay.is_sorted());
            for a in &stay {
                prop_assert!(!stay.iter().any(|b| unlinked(*a, *b)));
            }
            for (at, gone) in dropped.iter().enumerate() {
                // When it went, it missed a link to somebody who was still there.
                let there = stay.iter().chain(&dropped[at..]);
                prop_assert!(there.into_iter().any(|b| unlinked(*gone, *b)));
            }
        }
    }
}
