//! Differences from life to life, and from job to job.

/// How a life ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum End {
    /// All workers exit with 0.
    Finished,
    /// One worker exits with a code of its own, and no restart is left.
    Failed,
    /// Ctrl-C at one launcher.
    Cancelled,
    /// SIGTERM to all launchers.
    AllLeft,
    /// SIGKILL to all launchers; agents of their own live on.
    LaunchersKilled,
    /// SIGKILL to all processes of all nodes.
    AllKilled,
}

impl End {
    pub(crate) const ALL: [End; 6] = [
        End::Finished,
        End::Failed,
        End::Cancelled,
        End::AllLeft,
        End::LaunchersKilled,
        End::AllKilled,
    ];

    /// The exit code of all launchers in the end; none: they were killed.
    pub(super) fn code(self, life: usize) -> Option<i32> {
        match self {
            End::Finished => Some(0),
            End::Failed => Some(10 + i32::try_from(life).unwrap()),
            End::Cancelled => Some(130),
            End::AllLeft => Some(143),
            End::LaunchersKilled | End::AllKilled => None,
        }
    }

    fn kills(self) -> bool {
        matches!(self, End::LaunchersKilled | End::AllKilled)
    }
}

/// Which nodes come, by those of the life before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Back {
    Same,
    /// A majority of them.
    Some,
    /// None of them.
    Others,
    /// They and others.
    More,
}

impl Back {
    pub(crate) const ALL: [Back; 4] = [Back::Same, Back::Some, Back::Others, Back::More];
}

/// How they come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Coming {
    Together,
    OneAfterTheOther,
    BeforeTheOldHaveGone,
}

impl Coming {
    pub(crate) const ALL: [Coming; 3] = [
        Coming::Together,
        Coming::OneAfterTheOther,
        Coming::BeforeTheOldHaveGone,
    ];
}

/// Fate of the nodes' stored state between two lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum State {
    Kept,
    Lost,
}

impl State {
    pub(crate) const ALL: [State; 2] = [State::Kept, State::Lost];
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Agents {
    /// In `muster run`, which is told of no other node.
    Alone,
    /// In `muster run`.
    Embedded,
    /// A `musterd` on each node.
    Daemons,
}

impl Agents {
    pub(crate) const ALL: [Agents; 2] = [Agents::Embedded, Agents::Daemons];
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Store {
    None,
    Directory,
    Bucket,
}

impl Store {
    pub(crate) const ALL: [Store; 3] = [Store::None, Store::Directory, Store::Bucket];
}

/// Settings that stay as they are over all lives of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Setting {
    pub(crate) agents: Agents,
    pub(crate) store: Store,
    pub(crate) state: State,
}

impl Setting {
    pub(crate) fn all() -> impl Iterator<Item = Setting> {
        let places = Agents::ALL
            .iter()
            .flat_map(|agents| Store::ALL.map(|store| (*agents, store)));
        places.flat_map(|(agents, store)| {
            State::ALL.map(|state| Setting {
                agents,
                store,
                state,
            })
        })
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Life {
    pub(crate) coming: Coming,
    pub(crate) nodes: Vec<usize>,
    pub(crate) end: End,
    /// Of the job's specification, from this life on.
    pub(crate) flags: Vec<String>,
}

impl Life {
    pub(crate) fn new(coming: Coming, nodes: Vec<usize>, end: End) -> Life {
        Life {
            coming,
            nodes,
            end,
            flags: Vec::new(),
        }
    }
}

/// From one life to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Turn {
    pub(crate) end: End,
    pub(crate) back: Back,
    pub(crate) coming: Coming,
}

impl Turn {
    pub(crate) fn all() -> impl Iterator<Item = Turn> {
        let ends = End::ALL
            .iter()
            .flat_map(|end| Back::ALL.map(|back| (*end, back)));
        ends.flat_map(|(end, back)| Coming::ALL.map(|coming| Turn { end, back, coming }))
    }

    /// Whether there can be such a turn, and somebody is left to decide what follows it.
    pub(crate) fn is_possible(self, setting: Setting) -> bool {
        let overlaps = self.coming == Coming::BeforeTheOldHaveGone;
        // What is in use is not lost.
        if overlaps && setting.state == State::Lost {
            return false;
        }
        // Of the nodes that decide, the last one may be the only one in the end. If it is dead then, and does not
        // come back, nobody else may decide.
        let decides = setting.store != Store::None
            || self.back == Back::Same
            || (self.end == End::LaunchersKilled && setting.agents == Agents::Daemons);
        !overlaps || !self.end.kills() || decides
    }
}

/// Lives that begin with three nodes, with these turns between them; the last one finishes.
pub(crate) fn lives(turns: &[Turn]) -> Vec<Life> {
    let mut all = vec![Life::new(Coming::Together, vec![0, 1, 2], End::Finished)];
    for turn in turns {
        let before = all.last_mut().unwrap();
        before.end = turn.end;
        let mut nodes = before.nodes.clone();
        // Nodes that come anew have never been there: what they would remember may be undecided for ever.
        let new = 1 + all.iter().flat_map(|life| &life.nodes).max().unwrap();
        match turn.back {
            Back::Same => {}
            Back::Some => nodes.truncate(nodes.len() / 2 + 1),
            Back::Others => nodes = (new..new + 3).collect(),
            Back::More => nodes.extend(new..new + 2),
        }
        assert!((2..=6).contains(&nodes.len()), "{turns:?}");
        all.push(Life::new(turn.coming, nodes, End::Finished));
    }
    all
}

/// Five lives with the same turn between any two of them. Nodes that are not in every one are in every second one.
pub(super) fn five(turn: Turn) -> Vec<Life> {
    let others = match turn.back {
        Back::Same => vec![0, 1, 2],
        Back::Some => vec![0, 1],
        Back::Others => vec![3, 4, 5],
        Back::More => vec![0, 1, 2, 3, 4],
    };
    let life = |at: usize| {
        let nodes = if at.is_multiple_of(2) {
            vec![0, 1, 2]
        } else {
            others.clone()
        };
        let coming = if at == 0 {
            Coming::Together
        } else {
            turn.coming
        };
        Life::new(coming, nodes, turn.end)
    };
    (0..5).map(life).collect()
}

/// Two values of two things that may differ, of one turn in one setting.
pub(super) fn pairs(setting: Setting, turn: Turn) -> Vec<String> {
    let values = [
        format!("{:?}", setting.agents),
        format!("{:?} store", setting.store),
        format!("{:?}", setting.state),
        format!("{:?}", turn.end),
        format!("{:?} back", turn.back),
        format!("{:?}", turn.coming),
    ];
    let two = |one: usize| (0..one).map(move |other| (one, other));
    let all = (0..values.len()).flat_map(two);
    all.map(|(one, other)| format!("{} and {}", values[other], values[one]))
        .collect()
}

/// For each setting four turns, in which every two values meet that can. The same at each call.
pub(super) fn rows() -> Vec<(Setting, Vec<Turn>)> {
    let mut met = std::collections::HashSet::new();
    let mut rows = Vec::new();
    for setting in Setting::all() {
        let mut turns: Vec<Turn> = Vec::new();
        while turns.len() < 4 {
            let fits = |turn: &Turn| {
                let nodes = lives(&turns).last().map_or(0, |life| life.nodes.len());
                let fits = match turn.back {
                    Back::Some => nodes > 2,
                    Back::More => nodes < 5,
                    Back::Same | Back::Others => true,
                };
                fits && turn.is_possible(setting) && !turns.iter().any(|t| t.end == turn.end)
            };
            let new = |turn: &Turn| {
                let pairs = pairs(setting, *turn);
                pairs.iter().filter(|pair| !met.contains(*pair)).count()
            };
            // Of equals the last one is taken; each setting begins elsewhere, so that none is always last.
            let mut all: Vec<Turn> = Turn::all().filter(fits).collect();
            let begin = (rows.len() * 17 + turns.len() * 29) % all.len();
            all.rotate_left(begin);
            let next = all.into_iter().max_by_key(new).unwrap();
            met.extend(pairs(setting, next));
            turns.push(next);
        }
        rows.push((setting, turns));
    }
    rows
}
