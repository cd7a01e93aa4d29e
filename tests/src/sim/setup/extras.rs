//! Checkpoints that somebody orders, and workers that stand still. Drawn from a stream of numbers of their
//! own, so that everything else of a seed is what it was without them.

use super::{Fault, Setup};
use crate::sim::clock::{MS, SEC};
use crate::sim::focus::Focus;
use crate::sim::rng::Rng;

pub(super) fn add(setup: &mut Setup, focus: Focus) {
    let mut rng = Rng::new(setup.seed ^ 0x6578_7472_6173_0000 ^ ((focus as u64) << 56));
    let (orders, hangs) = match focus {
        Focus::Everything => (300, 150),
        Focus::Checkpoints => (1000, 100),
        Focus::Hangs => (150, 1000),
        Focus::Disks
        | Focus::Leaders
        | Focus::Commits
        | Focus::LatePuts
        | Focus::StoreRaces
        | Focus::Leases => return,
    };
    if rng.chance(orders) {
        // Without the runtime an order is refused, now and then.
        setup.stop_steps = rng.chance(950);
        for save in &mut setup.saves {
            *save = match rng.chance(300) {
                true => rng.between(500 * MS, 8 * SEC),
                false => rng.between(MS, 500 * MS),
            };
        }
        for _ in 0..rng.between(1, 8) {
            let node = rng.index(setup.nodes.len());
            let at = moment(&mut rng, setup);
            setup.faults.push((at, Fault::OrderCheckpoint { node }));
        }
    }
    if rng.chance(hangs) {
        setup.watches = true;
        setup.ends_hung = rng.chance(400);
        for _ in 0..rng.between(1, 3) {
            let node = rng.index(setup.nodes.len());
            let at = moment(&mut rng, setup);
            let for_ns = rng.between(200 * MS, 15 * SEC);
            let fault = match rng.below(3) {
                0 => Fault::Hang { node, for_ns: None },
                1 => Fault::Busy { node, for_ns },
                _ => Fault::Hang {
                    node,
                    for_ns: Some(for_ns),
                },
            };
            setup.faults.push((at, fault));
        }
    }
}

/// Half of the time close to something else that happens.
fn moment(rng: &mut Rng, setup: &Setup) -> u64 {
    let near = setup.faults.get(rng.index(setup.faults.len().max(1)));
    let at = match near.map(|f| f.0) {
        Some(near) if rng.chance(500) => near + rng.below(2 * SEC),
        _ => 2 * SEC + rng.below(setup.heal_at - 4 * SEC),
    };
    at.min(setup.heal_at - SEC)
}
