//! From a place to a group: who is where, the connections, and the shared memory.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use super::error::GroupError;
use super::formation::{Mesh, connect, gather};
use super::handshake::Place;
use super::hier::Hier;
use super::layout::Layout;
use super::share::share;
use super::shm::Local;
use super::tcp::Net;
use super::transport::Transport;
use super::vigil::Known;
use super::watch::{Aborter, Control, Watch};
use super::wire::Purpose;
use super::{Group, MAX_WORLD};
use crate::env::WorkerEnv;

/// How long a rank spins before it sleeps, if every rank of this machine has a core.
const SPIN: Duration = Duration::from_micros(20);
/// How long others wait for the word of whoever waits for a silent rank, in a group with several stages.
const GRACE: Duration = Duration::from_secs(1);

/// With whom a rank shares memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    /// With all ranks of the same kernel, process namespace and user.
    #[default]
    Auto,
    /// As `Auto`, but only with ranks that say the same number: a part of a host.
    Among(u64),
    /// With none: TCP only.
    Off,
}

/// A place in a group to be formed.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    pub rank: u32,
    pub world: u32,
    /// Where rank 0 listens; not needed in a world of one.
    pub master: Option<(String, u16)>,
    /// The secret of the generation: whoever does not know it is not served.
    pub token: [u8; 32],
    /// The generation: ranks of another one are refused.
    pub digest: [u8; 32],
    pub sharing: Sharing,
    /// How long to wait for all ranks.
    pub form_within: Duration,
    /// How long one operation may take; longer than the longest step of the slowest rank.
    pub op_within: Duration,
}

impl GroupConfig {
    /// A group of this process alone: nothing is connected, and nothing is waited for.
    pub fn alone() -> GroupConfig {
        GroupConfig {
            rank: 0,
            world: 1,
            master: None,
            token: [0; 32],
            digest: [0; 32],
            sharing: Sharing::Auto,
            form_within: Duration::ZERO,
            op_within: Duration::ZERO,
        }
    }

    /// The place that the launcher gave, with a minute to form and a minute for each operation. The
    /// generation's digest, which only its workers are told, is the token too.
    pub fn from_env(env: &WorkerEnv) -> GroupConfig {
        GroupConfig {
            rank: env.rank,
            world: env.world,
            master: env.master.clone(),
            token: env.digest.0,
            digest: env.digest.0,
            sharing: Sharing::Auto,
            form_within: Duration::from_secs(60),
            op_within: Duration::from_secs(60),
        }
    }
}

/// A rank, and where it listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    pub rank: u32,
    pub address: SocketAddr,
}

/// A group whose addresses are known.
#[derive(Clone, Debug)]
pub struct Topology {
    pub rank: u32,
    /// The ranks of each host, which share memory.
    pub hosts: Vec<Vec<Seat>>,
    /// See [`GroupConfig`].
    pub token: [u8; 32],
    pub digest: [u8; 32],
    pub form_within: Duration,
    pub op_within: Duration,
}

impl Group {
    /// Forms the group: returns when this rank is connected with all that it talks to.
    ///
    /// # Errors
    /// Not all ranks came within [`GroupConfig::form_within`]; another rank refused this one; the
    /// address cannot be used; a rank of the same host cannot share memory.
    pub fn form(config: &GroupConfig) -> Result<Group, GroupError> {
        Self::form_abortable(config, &Aborter::new()?)
    }

    /// As [`form`](Self::form); `aborter` ends the formation, and later the group.
    ///
    /// # Errors
    /// As there, and [`GroupError::Aborted`].
    pub fn form_abortable(config: &GroupConfig, aborter: &Aborter) -> Result<Group, GroupError> {
        if config.rank >= config.world || config.world > MAX_WORLD {
            return Err(GroupError::BadPlace {
                rank: config.rank,
                world: config.world,
                most: MAX_WORLD,
            });
        }
        let until = Instant::now() + config.form_within;
        let mut topology = Topology {
            rank: config.rank,
            hosts: Vec::new(),
            token: config.token,
            digest: config.digest,
            form_within: config.form_within,
            op_within: config.op_within,
        };
        let Some(master) = config.master.as_ref().filter(|_| config.world > 1) else {
            if config.world > 1 {
                return Err(GroupError::NoMaster {
                    world: config.world,
                });
            }
            let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
            topology.hosts = vec![vec![Seat {
                rank: 0,
                address: nowhere,
            }]];
            return establish(&topology, None, aborter, until);
        };
        let place = Place::new(config.rank, config.world, &config.token, &config.digest);
        let (seats, listener) = gather(config, &place, master, aborter, until)?;
        let mut hosts: BTreeMap<[u8; 32], Vec<Seat>> = BTreeMap::new();
        for (seat, key) in seats {
            hosts.entry(key).or_default().push(seat);
        }
        topology.hosts = hosts.into_values().collect();
        establish(&topology, Some(&listener), aborter, until)
    }

    /// Connects ranks whose addresses are known. `listener` is where this rank's seat says.
    ///
    /// # Errors
    /// As [`form_abortable`](Self::form_abortable).
    pub fn connect(
        topology: &Topology,
        listener: &TcpListener,
        aborter: &Aborter,
    ) -> Result<Group, GroupError> {
        let until = Instant::now() + topology.form_within;
        establish(topology, Some(listener), aborter, until)
    }
}

/// Ranks that this rank talks to.
struct Neighbours<'a> {
    /// All of this rank's host, itself included.
    host: &'a [Seat],
    /// The first rank of each host, in order; empty if this rank is not one.
    firsts: Vec<Seat>,
}

fn establish(
    topology: &Topology,
    listener: Option<&TcpListener>,
    aborter: &Aborter,
    until: Instant,
) -> Result<Group, GroupError> {
    let mut hosts = topology.hosts.clone();
    for host in &mut hosts {
        host.sort_by_key(|seat| seat.rank);
    }
    hosts.sort_by_key(|host| host.first().map(|seat| seat.rank));
    let ranks = hosts
        .iter()
        .map(|host| host.iter().map(|seat| seat.rank).collect());
    let count: usize = hosts.iter().map(Vec::len).sum();
    let world = u32::try_from(count).unwrap_or(u32::MAX);
    let bad = || GroupError::BadPlace {
        rank: topology.rank,
        world,
        most: MAX_WORLD,
    };
    let layout = Layout::new(ranks.collect())
        .filter(|_| world <= MAX_WORLD)
        .ok_or_else(bad)?;
    let (at, index) = layout.place(topology.rank).ok_or_else(bad)?;
    let firsts = hosts.iter().filter_map(|host| host.first().copied());
    let neighbours = Neighbours {
        host: &hosts[at],
        firsts: if index == 0 {
            firsts.collect()
        } else {
            Vec::new()
        },
    };
    let place = Place::new(topology.rank, world, &topology.token, &topology.digest);
    let mut mesh = match listener {
        Some(listener) if world > 1 => {
            let wanted = neighbours.wanted(topology.rank);
            let waited = topology.form_within;
            connect(&place, &wanted, listener, aborter, waited, until)?
        }
        _ => Mesh::new(),
    };
    let local_firsts = hosts.len() > 1;
    let spin = spin(&hosts, topology.rank);
    let local = match neighbours.host.len() {
        0 | 1 => None,
        _ => {
            let ranks: Vec<u32> = neighbours.host.iter().map(|seat| seat.rank).collect();
            let region = share(topology.rank, &ranks, &mesh, aborter, until)?;
            aborter.covers(&region);
            Some(Local::new(region, ranks, index, spin))
        }
    };
    let net = (local_firsts && index == 0).then(|| {
        let peers = neighbours.firsts.iter().map(|seat| {
            let stream = mesh.remove(&(seat.rank, Purpose::Data))?;
            Some((seat.rank, stream))
        });
        Net::new(peers.collect(), at, spin)
    });
    let controls = mesh
        .into_iter()
        .filter(|((_, purpose), _)| *purpose == Purpose::Control)
        .map(|((rank, _), stream)| Control::new(rank, stream))
        .collect();
    let single = layout.hosts().iter().all(|host| host.len() == 1);
    let stages = local_firsts && (!single || !super::tcp::is_direct(world));
    let transport: Option<Box<dyn Transport>> = match (local, net) {
        (None, None) => None,
        (Some(local), None) if !local_firsts => Some(Box::new(local)),
        (None, Some(net)) if single => Some(Box::new(net)),
        (local, net) => match Hier::new(layout.clone(), topology.rank, local, net) {
            Some(hier) => Some(Box::new(hier)),
            None => return Err(bad()),
        },
    };
    Ok(Group {
        rank: topology.rank,
        world,
        layout,
        seq: 0,
        transport,
        watch: Watch {
            rank: topology.rank,
            world,
            aborter: aborter.clone(),
            controls,
            within: topology.op_within,
            grace: if stages { GRACE } else { Duration::ZERO },
            known: Known::new(topology.op_within),
            words: vec![0; world as usize],
        },
        over: None,
        waits: None,
        word: 0,
        told: None,
        within_once_told: None,
    })
}

impl Neighbours<'_> {
    fn wanted(&self, rank: u32) -> Vec<(Seat, Purpose)> {
        let others = |seat: &&Seat| seat.rank != rank;
        let mut wanted: Vec<_> = self
            .host
            .iter()
            .filter(others)
            .map(|seat| (*seat, Purpose::Control))
            .collect();
        for seat in self.firsts.iter().filter(others) {
            wanted.push((*seat, Purpose::Control));
            wanted.push((*seat, Purpose::Data));
        }
        wanted
    }
}

/// How long to spin: not at all where ranks share cores, as a spinning one keeps another from its work.
fn spin(hosts: &[Vec<Seat>], rank: u32) -> Duration {
    let seats = || hosts.iter().flatten();
    let here = seats().find(|seat| seat.rank == rank);
    let same = |seat: &&Seat| here.is_some_and(|here| here.address.ip() == seat.address.ip());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if seats().filter(same).count() <= cores {
        SPIN
    } else {
        Duration::ZERO
    }
}
