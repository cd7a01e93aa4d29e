//! Checkpoints that somebody orders, workers that stand still, and what befalls launchers. Drawn from a stream of
//! numbers of their own, so that everything else of a seed is what it was without them.

use super::{Fault, HEAL_AT, HEAL_LATE, Setup, Times};
use crate::sim::clock::{MS, SEC};
use crate::sim::focus::Focus;
use crate::sim::launcher::Saving;
use crate::sim::rng::Rng;

pub(super) fn add(setup: &mut Setup, focus: Focus) {
    launchers(setup, focus);
    last(setup, focus);
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

/// Other times, live workers, and launchers that are stopped or slow.
fn launchers(setup: &mut Setup, focus: Focus) {
    let mut rng = Rng::new(setup.seed ^ 0x6c61_756e_6368_0000 ^ ((focus as u64) << 56));
    // Where agents are waited for as long as usual, few leaders follow each other.
    let other = match focus {
        Focus::Checkpoints | Focus::Hangs => 750,
        _ => 250,
    };
    if rng.chance(other) {
        setup.times = times(&mut rng);
    }
    if rng.chance(300) {
        setup.live = true;
        setup.stop_steps = true;
    }
    if focus != Focus::Everything || !rng.chance(350) {
        return;
    }
    for _ in 0..rng.between(1, 3) {
        let node = rng.index(setup.nodes.len());
        let at = moment(&mut rng, setup);
        let for_ns = match rng.chance(600) {
            true => rng.between(50 * MS, 4 * SEC),
            false => rng.between(SEC, 20 * SEC),
        };
        let fault = match rng.below(3) {
            0 => Fault::LauncherPause { node, for_ns },
            1 => Fault::SlowReap {
                node,
                by: rng.between(10 * MS, 3 * SEC),
            },
            _ => Fault::Unkillable { node, for_ns },
        };
        setup.faults.push((at, fault));
    }
}

/// Faults that last: longer than agents wait for each other, and than strangers for a job's members.
fn last(setup: &mut Setup, focus: Focus) {
    let mut rng = Rng::new(setup.seed ^ 0x6c61_7374_0000_0000 ^ ((focus as u64) << 56));
    if focus != Focus::Everything || !rng.chance(150) {
        return;
    }
    setup.heal_at = HEAL_LATE;
    for (at, fault) in &mut setup.faults {
        if rng.chance(500) {
            *at += rng.below(HEAL_LATE - HEAL_AT);
        }
        let ns = rng.between(10 * SEC, 60 * SEC);
        if let Some(for_ns) = fault.lasts().filter(|_| rng.chance(400)) {
            *for_ns = ns;
        }
    }
}

/// Times in other proportions than the usual ones. A stranger takes a job over only once its members
/// stopped waiting for each other's agents.
fn times(rng: &mut Rng) -> Times {
    let suspect_after = rng.between(SEC, 4 * SEC);
    let agent_grace = rng.between(3 * suspect_after, 30 * SEC);
    Times {
        suspect_after,
        agent_grace,
        birth_timeout: rng.between(2 * SEC, 6 * SEC),
        start_timeout: rng.between(5 * SEC, 30 * SEC),
        minority_wait: rng.between(suspect_after, 5 * suspect_after),
        orphan_after: agent_grace + rng.between(suspect_after, 5 * suspect_after),
        slot_lease: Times::USUAL.slot_lease,
    }
}

/// Sets one node apart: in one case of eight it keeps another `suspect_after` than all others; its disk is slow, its
/// clock runs ahead, or its machine is suspended for a while.
pub(super) fn set_apart(setup: &mut Setup) {
    let mut rng = Rng::new(setup.seed ^ 0x6f74_6865_7200_0000);
    if rng.chance(125) {
        let node = rng.index(setup.nodes.len());
        let ns = *rng.pick(&[SEC, 4 * SEC, 8 * SEC]).unwrap_or(&SEC);
        setup.other_suspect = Some((node, ns));
    }
    if rng.chance(100) {
        let node = rng.index(setup.nodes.len());
        let all = [30 * MS, 300 * MS, 3 * SEC, 15 * SEC];
        let most = *rng.pick(&all).unwrap_or(&SEC);
        setup.slow_disk = Some((node, most));
    }
    setup.disk = *rng.pick(&[0, MS, 10 * MS, 50 * MS]).unwrap_or(&MS);
    if rng.chance(100) {
        let node = rng.index(setup.nodes.len());
        setup.nodes[node].clock.ppm = 10_000;
    }
    if rng.chance(80) {
        let node = rng.index(setup.nodes.len());
        let at = moment(&mut rng, setup);
        let for_ns = match rng.chance(500) {
            true => rng.between(100 * MS, 3 * SEC),
            false => rng.between(SEC, 15 * SEC),
        };
        setup.faults.push((at, Fault::Suspend { node, for_ns }));
    }
}

/// A person has the job go on without nodes that are dead, most often after half of them or more lost power. Without a
/// store: nobody's word is needed with one.
pub(super) fn give_up(setup: &mut Setup, focus: Focus) {
    let mut rng = Rng::new(setup.seed ^ 0x676f_6573_5f6f_0000);
    if focus != Focus::Everything || setup.store || !rng.chance(80) {
        return;
    }
    let at = rng.between(8 * SEC, setup.heal_at - 15 * SEC);
    if rng.chance(800) {
        let mut nodes: Vec<usize> = (0..setup.nodes.len()).collect();
        rng.shuffle(&mut nodes);
        nodes.truncate(nodes.len().div_ceil(2));
        for node in nodes {
            let fault = Fault::NodeCrash {
                node,
                down: rng.between(8 * SEC, 40 * SEC),
                new_disk: rng.chance(100),
                relaunch: rng.chance(800),
            };
            setup.faults.push((at + rng.below(2 * SEC), fault));
        }
    }
    let for_ns = 12 * SEC;
    setup
        .faults
        .push((at + 2 * SEC, Fault::Continue { for_ns }));
}

/// A person ends the job, at any node, whether or not its launcher takes part.
pub(super) fn ends(setup: &mut Setup, focus: Focus) {
    let mut rng = Rng::new(setup.seed ^ 0x656e_6473_0000_0000);
    if focus != Focus::Everything || !rng.chance(120) {
        return;
    }
    for _ in 0..rng.between(1, 2) {
        let node = rng.index(setup.nodes.len());
        let at = moment(&mut rng, setup).max(5 * SEC);
        setup.faults.push((at, Fault::OrderCancel { node }));
    }
}

/// A node that reads the store as it was a moment ago, as network file systems may.
pub(super) fn stale_reads(setup: &mut Setup, focus: Focus) {
    let mut rng = Rng::new(setup.seed ^ 0x7374_616c_6500_0000);
    if focus != Focus::Everything || !setup.store || !rng.chance(150) {
        return;
    }
    let node = rng.index(setup.nodes.len());
    let at = moment(&mut rng, setup);
    // Leases rest on what a read shows, and a start waits for `suspect_after` beside three quarters of that: a store
    // whose reads are older is refused, or not consistent.
    let most = setup.times.suspect_after / 8;
    let by = *rng.pick(&[MS, most / 4, most]).unwrap_or(&most);
    let for_ns = rng.between(SEC, 30 * SEC);
    setup
        .faults
        .push((at, Fault::StoreStale { node, by, for_ns }));
}

/// Workers that save into slots, and launchers that write what they sealed to the job's store.
pub(super) fn slots(setup: &mut Setup, focus: Focus) {
    let mut rng = Rng::new(setup.seed ^ 0x736c_6f74_7300_0000);
    let focused = matches!(focus, Focus::Everything | Focus::Checkpoints);
    if !focused || !setup.store || !rng.chance(500) {
        return;
    }
    setup.saving = Some(Saving {
        every: rng.between(10, 60),
        fill: *rng.pick(&[MS, 20 * MS, 200 * MS, 2 * SEC]).unwrap_or(&MS),
        write: *rng.pick(&[MS, 50 * MS, 500 * MS, 3 * SEC]).unwrap_or(&MS),
        fails: *rng.pick(&[0, 0, 0, 20, 200]).unwrap_or(&0),
    });
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
