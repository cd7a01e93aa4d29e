use crate::{ids::NodeId, record::Member};
use std::collections::BTreeSet;
pub fn keep(members: &[Member], missing: &BTreeSet<(NodeId, NodeId)>) -> Vec<Member> {
    let mut kept = members.to_vec();
    loop {
        let count = |m: &Member| {
            missing
                .iter()
                .filter(|(a, b)| *a == m.node || *b == m.node)
                .filter(|(a, b)| {
                    kept.iter().any(|k| k.node == *a) && kept.iter().any(|k| k.node == *b)
                })
                .count()
        };
        let worst = kept.iter().enumerate().map(|(i, m)| (count(m), i)).max();
        match worst {
            Some((c, i)) if c > 0 => {
                kept.remove(i);
            }
            _ => return kept,
        }
    }
}
