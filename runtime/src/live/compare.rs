//! Comparing the states of all ranks, which should be the same bits.

use crate::collective::{Group, GroupError};

/// Bytes of what a rank says: whether it holds a state, then its digest.
const SAID: usize = 33;

/// Result of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// All ranks that hold a state hold the same.
    Same,
    /// More than half of the ranks that hold a state hold the same; these ones, in order, another.
    Deviating { ranks: Vec<u32>, right: Vec<u32> },
    /// No state is held by more than half: nobody can tell which one is right. The ranks by what they hold.
    Undecided { groups: Vec<Vec<u32>> },
}

/// Compares the states of all ranks by their digests; a rank that holds none says `None`. Every rank calls it
/// and comes to the same result.
///
/// # Errors
/// A peer is lost or out of step.
pub fn compare(group: &mut Group, own: Option<[u8; 32]>) -> Result<Comparison, GroupError> {
    let mut said = [0; SAID];
    if let Some(digest) = own {
        said[0] = 1;
        said[1..].copy_from_slice(&digest);
    }
    let mut all = vec![0; SAID * group.world() as usize];
    group.all_gather(&said, &mut all)?;
    let (said, _) = all.as_chunks::<SAID>();
    Ok(judge((0..).zip(said).filter(|(_, said)| said[0] != 0)))
}

fn judge<'a>(said: impl Iterator<Item = (u32, &'a [u8; SAID])>) -> Comparison {
    let mut groups: Vec<(&[u8; SAID], Vec<u32>)> = Vec::new();
    let mut count = 0;
    for (rank, said) in said {
        count += 1;
        match groups.iter_mut().find(|(other, _)| *other == said) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((said, vec![rank])),
        }
    }
    if groups.len() < 2 {
        return Comparison::Same;
    }
    let mut groups: Vec<Vec<u32>> = groups.into_iter().map(|(_, ranks)| ranks).collect();
    let Some(most) = groups.iter().position(|ranks| 2 * ranks.len() > count) else {
        return Comparison::Undecided { groups };
    };
    let right = groups.swap_remove(most);
    let mut ranks = groups.concat();
    ranks.sort_unstable();
    Comparison::Deviating { ranks, right }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(digests: &[u8], expected: Comparison) {
        let said: Vec<[u8; SAID]> = digests.iter().map(|digest| [*digest; SAID]).collect();
        assert_eq!(judge((0..).zip(&said)), expected, "{digests:?}");
    }

    #[test]
    fn the_majority_is_right_and_a_tie_is_not_guessed() {
        let deviating = |ranks: &[u32], right: &[u32]| Comparison::Deviating {
            ranks: ranks.to_vec(),
            right: right.to_vec(),
        };
        check(&[], Comparison::Same);
        check(&[5], Comparison::Same);
        check(&[5, 5, 5], Comparison::Same);
        check(&[5, 7, 5], deviating(&[1], &[0, 2]));
        check(&[8, 7, 5, 5, 5], deviating(&[0, 1], &[2, 3, 4]));
        let tie = |groups: &[&[u32]]| Comparison::Undecided {
            groups: groups.iter().map(|ranks| ranks.to_vec()).collect(),
        };
        check(&[5, 7], tie(&[&[0], &[1]]));
        check(&[5, 7, 5, 7], tie(&[&[0, 2], &[1, 3]]));
        check(&[5, 5, 7, 8], tie(&[&[0, 1], &[2], &[3]]));
    }
}
