//! Three launchers of which each holds parity of the other two, and what of a lost one comes out of it.

use std::path::PathBuf;

use muster_checkpoint::hex::{Bytes, Id};
use muster_checkpoint::plan::{Held, Plan, Rank};
use muster_checkpoint::slot::Slot;
use muster_checkpoint::sum::{CHUNK, crc};
use muster_protocol::Time;
use muster_protocol::checkpoint::Written;
use muster_protocol::control::slots::SLOTS;
use muster_protocol::memory::Whom;
use muster_protocol::memory::parity::Parity;
use muster_runtime::saving::{Dtype, Origins, Restore, Slice, Want};

use super::*;
use crate::run::saves::tests::{fill_of, given_for};

/// Of the state that the ranks share, for each of them: what three save are three chunks, two, and two.
const SHARE: u64 = 9_000_000;

/// Room of a slot.
const ROOM: u64 = 12_000_000;

const PARITY: Choice = Choice::Parity(2);

/// Waits until it is so.
fn until(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < until, "waits for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Launchers of one job, each of one rank.
struct Nodes {
    all: Vec<Launcher>,
    slots: Vec<[Arc<Slot>; SLOTS]>,
    plan: Plan,
}

impl Nodes {
    async fn start(how: &[(Choice, u64)]) -> Nodes {
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let launcher = |((replicas, budget), who): (&(Choice, u64), &str)| {
            Launcher::of_store(who, *replicas, *budget, dir.clone())
        };
        let held = [Held::whole("w", Dtype::U8, &[SHARE * how.len() as u64])];
        let ranks = (0..how.len() as u32).map(|node| Rank { node, held: &held });
        let ranks: Vec<Rank<'_>> = ranks.collect();
        let mut nodes = Nodes {
            all: how.iter().zip(["na", "nb", "nc"]).map(launcher).collect(),
            slots: Vec::new(),
            plan: Plan::new(&ranks).unwrap(),
        };
        nodes.begin(GENERATION, None);
        for Launcher { saves, two, .. } in &mut nodes.all {
            // What it says of its group is looked at elsewhere.
            while let Ok(Done::Said(_)) = saves.done.1.try_recv() {}
            nodes.slots.push(given_for(saves, two, 0, ROOM).await.0);
        }
        nodes
    }

    async fn three() -> Nodes {
        Nodes::start(&[(PARITY, u64::MAX); 3]).await
    }

    /// State of the ranks before a step.
    fn state(&self, step: u64) -> Vec<u8> {
        let bytes = SHARE * self.all.len() as u64;
        (0..bytes)
            .map(|at| (at / 5 + at / 70_001 + step) as u8)
            .collect()
    }

    fn begin(&mut self, digest: Digest, committed: Option<(Digest, u64)>) {
        let peers: Vec<Peer> = self.all.iter().map(Launcher::peer).collect();
        let nodes = self.all.len();
        for (at, launcher) in self.all.iter_mut().enumerate() {
            let others: Vec<Peer> = (1..nodes).map(|k| peers[(at + k) % nodes]).collect();
            let mut start = start();
            (start.digest, start.first_rank) = (digest, at as u32);
            (start.nodes, start.world, start.slots) = (nodes as u32, nodes as u32, 1);
            *start.peers = Peers {
                key: key(),
                group: others.clone(),
                others,
                committed,
            };
            launcher.saves.begins(&start);
        }
    }

    fn seal(&mut self, node: usize, side: u8, step: u64) {
        let slot = &self.slots[node][usize::from(side)];
        fill_of(&self.plan, &self.state(step), slot, node, step);
        let launcher = &mut self.all[node];
        launcher.saves.look(&launcher.two, Time::ZERO);
    }

    /// All ranks seal it, and all of it is in parity.
    async fn save(&mut self, side: u8, step: u64) {
        for node in 0..self.all.len() {
            self.seal(node, side, step);
        }
        self.come_to_hold(step);
    }

    /// Waits until every stripe of a step is where it belongs.
    fn come_to_hold(&self, step: u64) {
        let others = self.all.len() - 1;
        let is_whole = |launcher: &Launcher| {
            let parities = launcher.parities();
            let Some(parity) = parities.iter().find(|parity| parity.step == step) else {
                return false;
            };
            let mut link = launcher.link();
            let mut is_in = |part: u8| {
                let of = &parity.parts[usize::from(part)];
                let last = of.stripe.pieces(of.bytes) - 1;
                unfold(&mut link, parity.number, part, last).is_some()
            };
            parity.parts.len() == others && (0..others as u8).all(&mut is_in)
        };
        until("parity", || self.all.iter().all(is_whole));
    }

    /// Writes and commits it; the manifest.
    async fn commit(&mut self, side: u8, step: u64) -> Id {
        let slot = SlotId { k: 0, side };
        let save = save(step);
        let mut parts = Vec::new();
        for (rank, launcher) in (0..).zip(&mut self.all) {
            assert!(launcher.saves.ask(SaveAsk::Write { slot, save }).is_empty());
            let news = launcher
                .hears(|news| matches!(news, SaveNews::Written { .. }))
                .await;
            let SaveNews::Written { bytes, summary, .. } = news else {
                panic!("{news:?}");
            };
            parts.push(Written {
                rank,
                bytes,
                summary,
            });
        }
        let first = &mut self.all[0];
        let last = true;
        first.saves.ask(SaveAsk::Assemble { save, parts, last });
        let news = first
            .hears(|news| matches!(news, SaveNews::Assembled { .. }))
            .await;
        let SaveNews::Assembled { manifest, .. } = news else {
            panic!("{news:?}");
        };
        for launcher in &mut self.all {
            launcher.committed(GENERATION, step);
            launcher.saves.ask(SaveAsk::Free { slot });
        }
        Bytes(manifest.0)
    }

    fn job(&self) -> PathBuf {
        self.all[0].dir.path().join("job")
    }

    fn forget_what_was_written(&self) {
        std::fs::remove_dir_all(self.job().join("data")).unwrap();
    }

    /// A worker of this node restores all, without what a lost one has in memory.
    fn restore(&self, manifest: Id, step: u64, at: usize, lost: usize) -> Origins {
        let others = (0..self.all.len()).filter(|node| *node != at && *node != lost);
        let whom = Whom {
            key: key(),
            own: self.all[at].port,
            launcher: self.all[at].id,
            others: others.map(|node| self.all[node].peer()).collect(),
        };
        let restore = Restore::open_with(self.job(), manifest, &whom, 0).unwrap();
        let state = self.state(step);
        let (shape, mut into) = ([state.len() as u64], vec![0; state.len()]);
        let want = Want {
            name: "w",
            dtype: Dtype::U8,
            shape: &shape,
            slice: Slice::whole(&shape),
            into: &mut into,
        };
        restore.load(&mut [want]).unwrap();
        assert!(into == state, "it is what was saved");
        restore.origins()
    }

    /// Bytes of what a node sealed.
    fn bytes(&self, node: usize) -> u64 {
        self.plan.shards[node].layout.bytes
    }
}

impl Launcher {
    fn parities(&self) -> Vec<Parity> {
        let Ok(Answer::Parities { list }) = self.link().ask(&Ask::Parities { above: 0 }) else {
            panic!("it tells what it holds");
        };
        list
    }

    /// Steps of the parity that it holds, and how many stripes are in each.
    fn lanes(&self) -> Vec<(u64, usize)> {
        let lane = |parity: &Parity| (parity.step, parity.parts.len());
        self.parities().iter().map(lane).collect()
    }

    /// Waits until its agent is told this.
    async fn hears(&mut self, is_it: impl Fn(&SaveNews) -> bool) -> SaveNews {
        loop {
            let Told { agent, .. } = done(&mut self.saves, &self.two).await;
            if let Some(news) = agent.into_iter().find(&is_it) {
                return news;
            }
        }
    }

    fn shelf(&self) -> std::sync::MutexGuard<'_, Shelf> {
        lock(&self.saves.replicas.as_ref().unwrap().shelf)
    }
}

/// A byte of a piece, and which parts are in it.
fn unfold(link: &mut Link, number: u64, part: u8, piece: u32) -> Option<(u8, u32)> {
    let ask = Ask::Unfold {
        number,
        part,
        piece,
        len: 1,
    };
    let Answer::Folded { parts } = link.ask(&ask).unwrap() else {
        return None;
    };
    let mut byte = [0];
    link.read(&mut byte, Instant::now() + Duration::from_secs(60))
        .unwrap();
    Some((byte[0], parts))
}

fn from(origins: &Origins, is_it: impl Fn(&str) -> bool) -> u64 {
    let of = origins.from.iter().filter(|(who, _)| is_it(who));
    of.map(|(_, bytes)| bytes).sum()
}

fn of_parity(origins: &Origins) -> u64 {
    from(origins, |who| who.contains("'s parity"))
}

fn of_store(origins: &Origins) -> u64 {
    from(origins, |who| who == "the store")
}

#[tokio::test]
async fn whichever_node_is_lost_the_others_have_its_bytes() {
    let mut nodes = Nodes::three().await;
    let chunks = [0, 1, 2].map(|node| nodes.bytes(node).div_ceil(CHUNK));
    assert_eq!(chunks, [3, 2, 2], "they are of several lengths");
    nodes.save(0, 7).await;
    let said = nodes.all[0].says("in the parity that these hold").await;
    assert!(said.ends_with(": nb, nc"), "{said}");
    let manifest = nodes.commit(0, 7).await;
    nodes.forget_what_was_written();
    for lost in 0..3 {
        for at in (0..3).filter(|at| *at != lost) {
            let origins = nodes.restore(manifest, 7, at, lost);
            assert_eq!(
                of_parity(&origins),
                nodes.bytes(lost),
                "{lost}: {origins:?}"
            );
            assert_eq!(
                (of_store(&origins), &origins.why),
                (0, &None),
                "{origins:?}"
            );
            let own = from(&origins, |who| who == "this node's memory");
            assert_eq!(own, nodes.bytes(at), "{origins:?}");
            let third = &["na", "nb", "nc"][3 - lost - at];
            let both = [
                format!("this node's parity with {third}'s memory"),
                format!("{third}'s parity with this node's memory"),
            ];
            for label in both {
                assert!(
                    from(&origins, |who| who == label) > 0,
                    "{label}: {origins:?}"
                );
            }
        }
    }
    for (node, launcher) in nodes.all.iter().enumerate() {
        assert_eq!(launcher.lanes(), [(7, 2)]);
        // Half a copy of the longest, in whole chunks, not two copies.
        let shelf = launcher.shelf();
        let parity = shelf.used() - shelf.slots();
        assert!((CHUNK..=2 * CHUNK).contains(&parity), "{node}: {parity}");
    }
}

#[tokio::test]
async fn a_node_that_takes_no_part_costs_its_stripes_alone() {
    let plain = (Choice::Nothing, u64::MAX);
    let mut nodes = Nodes::start(&[(PARITY, u64::MAX), (PARITY, u64::MAX), plain]).await;
    for node in 0..3 {
        nodes.seal(node, 0, 7);
    }
    let said = nodes.all[0].says("parity is without a stripe").await;
    assert!(
        said.ends_with("start it with the same --replicas"),
        "{said}"
    );
    until("the stripe that is taken", || {
        let parities = nodes.all[1].parities();
        let number = parities.first().map_or(0, |parity| parity.number);
        unfold(&mut nodes.all[1].link(), number, 0, 1).is_some()
    });
    assert_eq!(nodes.all[1].lanes(), [(7, 1)]);
    let manifest = nodes.commit(0, 7).await;
    let origins = nodes.restore(manifest, 7, 1, 0);
    // The first and the third chunk are what nb holds; it needs nobody else for them.
    let first = from(&origins, |who| who == "this node's parity");
    assert_eq!(first, nodes.bytes(0) - CHUNK, "{origins:?}");
    assert_eq!(of_store(&origins), CHUNK, "{origins:?}");
}

#[tokio::test]
async fn a_flipped_bit_comes_from_the_store() {
    let mut nodes = Nodes::three().await;
    nodes.save(0, 7).await;
    let manifest = nodes.commit(0, 7).await;
    let number = nodes.all[1].parities()[0].number;
    let piece = nodes.all[1].shelf().piece(number, 0).unwrap();
    lock(&piece).flip(1_000_000);
    let origins = nodes.restore(manifest, 7, 1, 0);
    let why = origins.why.clone().unwrap();
    assert!(
        why.contains("does not come out of this node's parity at byte 0"),
        "{why}"
    );
    // That piece alone.
    let (parity, store) = (of_parity(&origins), of_store(&origins));
    assert_eq!(
        (parity, store),
        (nodes.bytes(0) - CHUNK, CHUNK),
        "{origins:?}"
    );
    // A bit of what is needed besides: it is known before anything comes of it.
    lock(&piece).flip(1_000_000);
    let slot = nodes.slots[2][0].fd().try_clone_to_owned().unwrap();
    let memory = std::fs::File::from(slot);
    let at = 4_096 + CHUNK + 5;
    let mut byte = [0];
    memory.read_exact_at(&mut byte, at).unwrap();
    memory.write_all_at(&[byte[0] ^ 1], at).unwrap();
    let origins = nodes.restore(manifest, 7, 1, 0);
    let why = origins.why.clone().unwrap();
    assert!(
        why.contains("what nc's memory holds of") && why.contains("is damaged"),
        "{why}"
    );
    assert!(of_store(&origins) > 0, "{origins:?}");
}

#[tokio::test]
async fn nodes_that_want_parity_over_others_are_named_and_hold_none_of_each_other() {
    let other = (Choice::Parity(3), u64::MAX);
    let mut nodes = Nodes::start(&[(PARITY, u64::MAX), (PARITY, u64::MAX), other]).await;
    for node in 0..3 {
        nodes.seal(node, 0, 7);
    }
    // Both sides say it, of each other.
    let here = nodes.all[0].says("was started with --replicas").await;
    assert!(
        here.contains("nc") && here.contains("parity:3") && here.contains("parity:2"),
        "{here}"
    );
    let there = nodes.all[2].says("hold no parity of each other").await;
    assert!(
        there.starts_with("na was started with --replicas parity:2, this node with parity:3")
            || there.starts_with("nb was started with --replicas parity:2"),
        "{there}"
    );
    until("the stripes of those that agree", || {
        let lanes = |node: usize| nodes.all[node].lanes();
        lanes(0) == [(7, 1)] && lanes(1) == [(7, 1)] && lanes(2).is_empty()
    });
}

#[tokio::test]
async fn a_node_without_room_is_named() {
    // As much as two slots take, and a little.
    let budget = 25_500_000;
    let mut nodes = Nodes::start(&[(PARITY, u64::MAX), (PARITY, budget), (PARITY, u64::MAX)]).await;
    for node in 0..3 {
        nodes.seal(node, 0, 7);
    }
    let said = nodes.all[0].says("parity is without a stripe").await;
    assert!(
        said.contains("nb has room for") && said.ends_with("raise --checkpoint-memory there"),
        "{said}"
    );
    assert!(said.contains("7.0 MiB are needed"), "{said}");
    assert!(nodes.all[1].lanes().is_empty());
    let used = nodes.all[1].shelf().used();
    assert!(used <= budget, "{used}");
}

#[tokio::test]
async fn parity_is_of_one_save_and_the_committed_one_stays() {
    let mut nodes = Nodes::three().await;
    nodes.save(0, 7).await;
    nodes.commit(0, 7).await;
    nodes.save(1, 8).await;
    assert!(
        nodes
            .all
            .iter()
            .all(|node| node.lanes() == [(7, 2), (8, 2)])
    );
    let manifest = nodes.commit(1, 8).await;
    assert!(nodes.all.iter().all(|node| node.lanes() == [(8, 2)]));
    // One that not every rank has sealed is of no use to the next generation.
    nodes.seal(0, 0, 9);
    until("its stripe", || nodes.all[1].lanes() == [(8, 2), (9, 1)]);
    nodes.begin(LATER, Some((GENERATION, 8)));
    let data = nodes.job().join("data");
    let away = nodes.job().join("away");
    std::fs::rename(&data, &away).unwrap();
    for launcher in &nodes.all {
        assert_eq!(launcher.lanes(), [(8, 2)]);
    }
    let origins = nodes.restore(manifest, 8, 2, 0);
    assert_eq!(of_parity(&origins), nodes.bytes(0), "{origins:?}");
    // Once somebody else's image is overwritten, nothing comes out any more.
    std::fs::rename(&away, &data).unwrap();
    fill_of(&nodes.plan, &nodes.state(10), &nodes.slots[1][1], 1, 10);
    let origins = nodes.restore(manifest, 8, 2, 0);
    let why = origins.why.clone().unwrap();
    assert!(
        of_store(&origins) > 0 && why.contains("n1-0"),
        "{origins:?}"
    );
}

#[tokio::test]
async fn two_nodes_hold_all_of_each_other_and_say_so() {
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let launcher = |who| Launcher::of_store(who, Choice::Parity(3), u64::MAX, dir.clone());
    let mut a = launcher("na");
    a.begins(GENERATION, vec![], None);
    let said = a.says("parity over").await;
    assert_eq!(
        said,
        "parity over 3 nodes wants 4, and the job has 1 now: no other node holds what is sealed here"
    );
    let mut nodes = Nodes::start(&[(Choice::Parity(3), u64::MAX); 2]).await;
    nodes.save(0, 7).await;
    let manifest = nodes.commit(0, 7).await;
    nodes.forget_what_was_written();
    let origins = nodes.restore(manifest, 7, 1, 0);
    let parity = from(&origins, |who| who == "this node's parity");
    assert_eq!(
        (parity, of_store(&origins)),
        (nodes.bytes(0), 0),
        "{origins:?}"
    );
}

#[test]
fn who_breaks_off_goes_on_and_nonsense_changes_nothing() {
    let mut a = Launcher::new("na", PARITY, u64::MAX);
    a.begins(GENERATION, vec![], None);
    let stripe = Stripe { of: 2, first: 1 };
    let fold = |bytes| Ask::Fold {
        generation: GENERATION,
        name: name(7),
        bytes,
        local: 3,
        stripe,
        over: 2,
        who: "nz\u{7}".into(),
    };
    let bytes = 4 * CHUNK;
    let chunk = vec![9; CHUNK as usize];
    let until = || Instant::now() + Duration::from_secs(60);
    let send = |link: &mut Link, sum: u64| {
        link.write(&chunk, until()).unwrap();
        link.write(&sum.to_le_bytes(), until()).unwrap();
    };
    let mut link = a.link();
    assert_eq!(link.ask(&fold(bytes)).unwrap(), Answer::GoFrom { piece: 0 });
    send(&mut link, crc(&chunk));
    send(&mut link, crc(&chunk) ^ 1);
    let answer: Answer = link.hear(Duration::from_secs(60)).unwrap();
    assert_eq!(answer, Answer::Damaged { chunk: 3 });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let said = runtime.block_on(a.says("which nz sends for parity"));
    assert!(
        said.starts_with("chunk 3 of n0-0.safetensors, which nz sends"),
        "{said}"
    );
    // What came whole is there.
    let mut link = a.link();
    assert_eq!(link.ask(&fold(bytes)).unwrap(), Answer::GoFrom { piece: 1 });
    send(&mut link, crc(&chunk));
    let answer: Answer = link.hear(Duration::from_secs(60)).unwrap();
    assert_eq!(answer, Answer::Kept);
    assert_eq!(link.ask(&fold(bytes)).unwrap(), Answer::Have);
    let refused = link.ask(&fold(bytes + 1)).unwrap();
    assert!(matches!(refused, Answer::Refused { .. }), "{refused:?}");
    let number = a.parities()[0].number;
    assert_eq!(unfold(&mut link, number, 0, 1), Some((9, 1)));
    for (number, part, piece) in [
        (number + 1, 0, 0),
        (number, 1, 0),
        (number, 15, 0),
        (number, 0, 2),
        (number, 0, u32::MAX),
        (u64::MAX, 0, 0),
    ] {
        assert_eq!(unfold(&mut link, number, part, piece), None);
    }
    // What no stripe can be ends the connection, and no memory is taken for what there is no room for.
    let impossible = Ask::Fold {
        generation: GENERATION,
        name: name(7),
        bytes,
        local: 3,
        stripe: Stripe { of: 0, first: 0 },
        over: 2,
        who: "nz".into(),
    };
    assert!(a.link().ask(&impossible).is_err());
    let mut small = Launcher::new("nb", PARITY, 1 << 30);
    small.begins(GENERATION, vec![], None);
    let answer = small.link().ask(&fold(1 << 40)).unwrap();
    assert_eq!(answer, Answer::NoRoom { room: 1 << 30 });
}

#[tokio::test]
async fn a_save_that_was_begun_is_finished_though_a_newer_one_waits() {
    // It takes its time over the first stripe.
    let (begins, begun) = std::sync::mpsc::channel::<()>();
    let (go, goes) = std::sync::mpsc::channel::<()>();
    let slow = peer(move |mut link| {
        let wait = Duration::from_secs(60);
        assert_eq!(link.hear::<Ask>(wait).unwrap(), Ask::List);
        let (who, pid, list) = ("slow".into(), 1, Vec::new());
        link.say(&Answer::Held { who, pid, list }).unwrap();
        assert!(matches!(link.hear(wait).unwrap(), Ask::Fold { .. }));
        begins.send(()).unwrap();
        let _ended = goes.recv();
        link.say(&Answer::Have).unwrap();
    });
    let mut a = Launcher::new("na", PARITY, u64::MAX);
    let mut b = Launcher::new("nb", PARITY, u64::MAX);
    b.begins(GENERATION, vec![], None);
    let mut start = start();
    start.slots = 1;
    *start.peers = Peers {
        key: key(),
        others: Vec::new(),
        group: vec![slow, b.peer()],
        committed: None,
    };
    a.saves.begins(&start);
    let (slots, _) = given_for(&mut a.saves, &a.two, 0, ROOM).await;
    // Three chunks: both stripes have some.
    let held = [Held::whole("w", Dtype::U8, &[SHARE])];
    let plan = Plan::new(&[Rank {
        node: 0,
        held: &held,
    }]);
    let (plan, state) = (plan.unwrap(), vec![5; SHARE as usize]);
    fill_of(&plan, &state, &slots[0], 0, 7);
    a.saves.look(&a.two, Time::ZERO);
    begun.recv_timeout(Duration::from_secs(60)).unwrap();
    fill_of(&plan, &state, &slots[1], 0, 8);
    a.saves.look(&a.two, Time::ZERO);
    a.comes_to_hold(&[7, 8]);
    go.send(()).unwrap();
    let is_whole = |news: &SaveNews| matches!(news, SaveNews::Replicas(r) if r.whole.is_some());
    let SaveNews::Replicas(replicated) = a.hears(is_whole).await else {
        unreachable!("it was looked at");
    };
    assert_eq!((replicated.whole, replicated.behind), (Some(7), 0));
    // Or by now the newer one's, or both.
    let lanes = b.lanes();
    let known = lanes.iter().all(|lane| [(7, 1), (8, 1)].contains(lane));
    assert!(known && !lanes.is_empty(), "{lanes:?}");
    // Who links up anew is told again.
    let told = a.saves.link_up();
    assert!(told.iter().any(is_whole), "{told:?}");
}
