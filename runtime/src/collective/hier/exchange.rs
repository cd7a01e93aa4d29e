//! An all-to-all over hosts: what stays on a host goes through its shared memory, and what leaves it goes
//! to its first rank, from there to the other hosts, and back, piece by piece. A piece stays in the
//! caches, and while the first ranks exchange one, the others prepare the next.

use std::ops::Range;

use super::super::layout::Layout;
use super::super::transport::{Scratch, Transport, Work};
use super::super::watch::{Fault, Watch};
use super::{Hier, PIECE, Stage, cuts_of};

/// Buffers that are kept from call to call.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// To and from the ranks of this host.
    packed: Scratch,
    got: Scratch,
    /// To and from the other hosts.
    send: Scratch,
    came: Scratch,
    /// Bytes that came from them for each rank of this host.
    answers: Scratch,
}

/// Places of all ranks, as the ranks of a host see them.
struct Plan<'a> {
    layout: &'a Layout,
    host: usize,
    /// This rank's place on its host.
    me: usize,
    members: &'a [u32],
    /// The ranks of the other hosts, host by host.
    away: Vec<u32>,
    /// Bytes from one rank to one other, in all and in a piece: the same on all ranks.
    each: usize,
    piece: usize,
}

impl<'a> Plan<'a> {
    fn new(layout: &'a Layout, host: usize, me: usize, each: usize) -> Plan<'a> {
        let (hosts, world) = (layout.hosts(), layout.world());
        let others = hosts.iter().enumerate().filter(|(there, _)| *there != host);
        // Whichever host sends the most in one piece.
        let pairs = hosts
            .iter()
            .map(|there| there.len() * (world - there.len()));
        let pairs = pairs.max().unwrap_or(1).max(1);
        Plan {
            layout,
            host,
            me,
            members: &hosts[host],
            away: others.flat_map(|(_, there)| there).copied().collect(),
            each,
            piece: (PIECE / pairs).max(1),
        }
    }

    fn pieces(&self) -> usize {
        self.each.div_ceil(self.piece).max(1)
    }

    /// The bytes of a piece, of those from one rank to one other; none after the last.
    fn range(&self, piece: usize) -> Range<usize> {
        let start = (piece * self.piece).min(self.each);
        start..(start + self.piece).min(self.each)
    }

    /// Where the piece of a rank lies in an input or an output.
    fn at(&self, rank: u32, piece: usize) -> Range<usize> {
        let (start, range) = (rank as usize * self.each, self.range(piece));
        start + range.start..start + range.end
    }

    /// Bytes to or from a place of this host in one step: what leaves the host goes to the first, what
    /// comes to it came with the piece before, and what stays is exchanged directly.
    fn sizes(&self, step: usize, sent: bool) -> Vec<usize> {
        let direct = self.range(step).len();
        let before = step
            .checked_sub(1)
            .map_or(0, |piece| self.range(piece).len());
        let size = |place: usize| {
            let through = match (self.me, place) {
                (me, place) if me == place => return 0,
                (0, _) if sent => before,
                (0, _) => direct,
                (_, 0) if sent => direct,
                (_, 0) => before,
                _ => 0,
            };
            through * self.away.len() + direct
        };
        (0..self.members.len()).map(size).collect()
    }
}

/// Cuts a buffer's next bytes off.
fn next<'a>(rest: &mut &'a mut [u8], len: usize) -> &'a mut [u8] {
    let (part, after) = std::mem::take(rest).split_at_mut(len);
    *rest = after;
    part
}

impl Hier {
    pub(super) fn all_to_all(
        &mut self,
        stage: &Stage,
        (input, output): (&[u8], &mut [u8]),
        watch: &mut Watch,
    ) -> Result<(), Fault> {
        // Borrowed on its own, beside the transports.
        let layout = self.layout.clone();
        let each = input.len() / layout.world();
        let plan = Plan::new(&layout, self.host, self.place, each);
        let rank = plan.members[plan.me] as usize * each;
        output[rank..rank + each].copy_from_slice(&input[rank..rank + each]);
        // In one step more than there are pieces, the answers to the last one are handed out.
        for step in 0..=plan.pieces() {
            self.within(stage, &plan, step, (input, output), watch)?;
            if step < plan.pieces() {
                self.between(stage, &plan, step, (input, output), watch)?;
            }
        }
        Ok(())
    }

    /// Among the ranks of this host: the first gets what leaves with this piece, and hands out what came
    /// with the one before.
    fn within(
        &mut self,
        stage: &Stage,
        plan: &Plan<'_>,
        step: usize,
        (input, output): (&[u8], &mut [u8]),
        watch: &mut Watch,
    ) -> Result<(), Fault> {
        let Some(local) = &mut self.local else {
            return Ok(());
        };
        let (to, from) = (plan.sizes(step, true), plan.sizes(step, false));
        let (to, from) = (cuts_of(to.into_iter()), cuts_of(from.into_iter()));
        let (sent, came) = (to.last().copied(), from.last().copied());
        let packed = self.buffers.packed.bytes(sent.unwrap_or(0));
        let got = self.buffers.got.bytes(came.unwrap_or(0));
        let direct = plan.range(step).len();
        // What the other hosts sent for each member, one member after the other; none in the first step.
        let before = step
            .checked_sub(1)
            .map_or(0, |piece| plan.range(piece).len());
        let answers = before * plan.away.len();
        let back = self.buffers.answers.bytes(plan.members.len() * answers);
        let mut rest = &mut *packed;
        for (place, rank) in plan.members.iter().enumerate() {
            if place == plan.me {
                continue;
            }
            if plan.me == 0 {
                let own = &back[place * answers..(place + 1) * answers];
                next(&mut rest, answers).copy_from_slice(own);
            } else if place == 0 {
                for away in &plan.away {
                    next(&mut rest, direct).copy_from_slice(&input[plan.at(*away, step)]);
                }
            }
            next(&mut rest, direct).copy_from_slice(&input[plan.at(*rank, step)]);
        }
        // The most that goes between two places, which is to or from the first.
        let most = direct.max(before) * plan.away.len() + direct;
        let work = Work::AllToAll {
            input: packed,
            output: got,
            to: &to,
            from: &from,
            most,
        };
        local.run(stage.with(step as u64, work), watch)?;
        let mut rest = &*got;
        for (place, rank) in plan.members.iter().enumerate() {
            if place == plan.me {
                continue;
            }
            let part = from[place + 1] - from[place];
            let (through, own) = rest[..part].split_at(part - direct);
            output[plan.at(*rank, step)].copy_from_slice(own);
            if place == 0
                && let Some(piece) = step.checked_sub(1)
                && before > 0
            {
                for (away, bytes) in plan.away.iter().zip(through.chunks_exact(before)) {
                    output[plan.at(*away, piece)].copy_from_slice(bytes);
                }
            }
            rest = &rest[part..];
        }
        Ok(())
    }

    /// Between the first ranks of the hosts: what leaves with this piece.
    fn between(
        &mut self,
        stage: &Stage,
        plan: &Plan<'_>,
        step: usize,
        (input, output): (&[u8], &mut [u8]),
        watch: &mut Watch,
    ) -> Result<(), Fault> {
        let Some(net) = &mut self.net else {
            return Ok(());
        };
        let (direct, members) = (plan.range(step).len(), plan.members.len());
        let hosts = plan.layout.hosts();
        let others = || hosts.iter().enumerate().filter(|(at, _)| *at != plan.host);
        let pairs = |(at, there): (usize, &Vec<u32>)| {
            let apart = usize::from(at != plan.host);
            there.len() * members * direct * apart
        };
        let cuts = cuts_of(hosts.iter().enumerate().map(pairs));
        let total = cuts.last().copied().unwrap_or(0);
        let send = self.buffers.send.bytes(total);
        // What a member sends to the other hosts lies in what came from it, in the order of `away`.
        let sizes = cuts_of(plan.sizes(step, false).into_iter());
        let got = self.buffers.got.bytes(sizes.last().copied().unwrap_or(0));
        let mut rest = &mut *send;
        let mut first = 0;
        for (_, there) in others() {
            for (member, start) in sizes.iter().take(members).enumerate() {
                for (i, rank) in there.iter().enumerate() {
                    let from = if member == plan.me {
                        &input[plan.at(*rank, step)]
                    } else {
                        &got[start + (first + i) * direct..][..direct]
                    };
                    next(&mut rest, direct).copy_from_slice(from);
                }
            }
            first += there.len();
        }
        // The bytes that come are as many as those that go: every pair of ranks, both ways.
        let came = self.buffers.came.bytes(total);
        let work = Work::AllToAll {
            input: send,
            output: &mut *came,
            to: &cuts,
            from: &cuts,
            most: total,
        };
        net.run(stage.with(step as u64, work), watch)?;
        let whole = plan.away.len() * direct;
        let answers = self.buffers.answers.bytes(members * whole);
        // From a host comes, one of its ranks after the other, what that rank sends to each member here.
        for (i, rank) in plan.away.iter().enumerate() {
            for member in 0..members {
                let start = (i * members + member) * direct;
                let to = if member == plan.me {
                    &mut output[plan.at(*rank, step)]
                } else {
                    &mut answers[member * whole + i * direct..][..direct]
                };
                to.copy_from_slice(&came[start..start + direct]);
            }
        }
        Ok(())
    }
}
