//! Slurm's information to a task about its job: who its peers are.
//!
//! Pure: the environment comes in through a closure; nothing here resolves a name, reads a file or asks Slurm. The
//! grammar of node lists is that of Slurm's hostlists (`man scontrol`, "show hostnames"):
//! `n[1-3,07-09],gpu-a[001-010]b`, several bracket groups per entry, the last one varying fastest, the width of a
//! range's lower bound kept.

use std::fmt;

/// Most bytes of a node list that are read. A list of 4,096 names of 255 bytes would be longer, but Slurm folds those.
pub(crate) const MAX_INPUT: usize = 64 * 1024;
/// Most names that a list may stand for.
pub(crate) const MAX_NODES: usize = 4096;
/// Longest host name (RFC 1123).
const MAX_NAME: usize = 255;

/// Why a node list was refused. Nothing is kept of a list that was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NodeListError {
    /// The text is longer than [`MAX_INPUT`] bytes.
    TooLong { bytes: usize },
    /// It stands for more than [`MAX_NODES`] names.
    TooMany,
    /// One name is longer than a host name may be.
    NameTooLong { at: usize },
    /// Something else was expected at this byte.
    Syntax { at: usize, expected: &'static str },
}

impl fmt::Display for NodeListError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong { bytes } => {
                write!(
                    f,
                    "the node list is {bytes} bytes long, at most {MAX_INPUT} are read"
                )
            }
            Self::TooMany => write!(f, "the node list names more than {MAX_NODES} nodes"),
            Self::NameTooLong { at } => {
                write!(
                    f,
                    "byte {at} of the node list: a name of more than {MAX_NAME} bytes"
                )
            }
            Self::Syntax { at, expected } => {
                write!(f, "byte {at} of the node list: expected {expected}")
            }
        }?;
        write!(
            f,
            "; see what Slurm makes of it with `scontrol show hostnames`, or name a peer with --rdzv-endpoint"
        )
    }
}

impl std::error::Error for NodeListError {}

/// Why the environment of a Slurm task could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SlurmError {
    /// A variable that every task of a step has is missing.
    Missing { variable: &'static str },
    /// A variable that must be a number is not one.
    NotANumber {
        variable: &'static str,
        value: String,
    },
    /// The list of nodes does not parse.
    NodeList {
        variable: &'static str,
        source: NodeListError,
    },
    /// The task's place is outside its own step: the variables belong to different steps.
    OutOfRange {
        variable: &'static str,
        value: u32,
        below: u32,
    },
}

impl fmt::Display for SlurmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { variable } => write!(
                f,
                "SLURM_STEP_ID is set but {variable} is not: start with `srun`, or unset SLURM_STEP_ID to run outside Slurm"
            ),
            Self::NotANumber { variable, value } => write!(
                f,
                "{variable}={value:?} is not a number: start with `srun`, which sets it"
            ),
            Self::NodeList { variable, .. } => write!(f, "{variable} does not parse"),
            Self::OutOfRange {
                variable,
                value,
                below,
            } => write!(
                f,
                "{variable}={value}, but the step has only {below}: the environment mixes two steps; start with a fresh `srun`"
            ),
        }
    }
}

impl std::error::Error for SlurmError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::NodeList { source, .. } => Some(source),
            Self::Missing { .. } | Self::NotANumber { .. } | Self::OutOfRange { .. } => None,
        }
    }
}

/// A task's view of its Slurm step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SlurmJob {
    /// SLURM_JOB_ID: stays the same when the job is requeued.
    pub(crate) job_id: u32,
    /// SLURM_STEP_ID: counts the `srun`s of the job from 0.
    pub(crate) step_id: u32,
    /// The step's nodes, in the order of `node_id`. Slurm's names; they resolve where NodeAddr follows NodeName.
    pub(crate) nodes: Vec<String>,
    /// SLURM_NODEID: this node's place in `nodes`.
    pub(crate) node_id: u32,
    /// SLURM_PROCID: this task's number in the step, 0..`ntasks`.
    pub(crate) procid: u32,
    /// SLURM_NTASKS of the step: one launcher a node makes this the number of nodes.
    pub(crate) ntasks: u32,
    /// SLURM_RESTART_COUNT: how often the job was requeued. Slurm leaves it unset on the first run, which is 0 here.
    pub(crate) restart_count: u32,
    /// SLURM_LOCALID: this task's number among the step's tasks on this node.
    pub(crate) local_id: u32,
}

impl SlurmJob {
    /// The agents of the step's launchers as first peers of each other. The port is the job's, so
    /// that jobs of several users meet on one node without calling each other's agents; two jobs
    /// whose numbers differ by a multiple of 9,000 share one. It lies below the ports that Linux
    /// gives away by itself, and below torchrun's 29400.
    pub(crate) fn peers(&self) -> String {
        let port = 20_000 + self.job_id % 9_000;
        let peers = self.nodes.iter().map(|node| format!("{node}:{port}"));
        peers.collect::<Vec<_>>().join(",")
    }
}

/// This task as Slurm describes it, or `None` where it runs in no step (no Slurm, a login shell under `salloc`, the
/// batch script itself: only `srun` starts tasks on the other nodes, so there is nobody to find without it).
///
/// # Errors
/// [`SlurmError`] when SLURM_STEP_ID is set but the rest is missing or contradicts itself. Slurm's numbers for steps
/// that are no steps (batch, extern, interactive: 0xffff_fffb and above) count as no step.
pub(crate) fn peers_from_env(
    get: impl Fn(&str) -> Option<String>,
) -> Result<Option<SlurmJob>, SlurmError> {
    const FIRST_SPECIAL_STEP: u32 = 0xffff_fff0;
    let number = |variable: &'static str| -> Result<Option<u32>, SlurmError> {
        let Some(value) = get(variable).filter(|v| !v.is_empty()) else {
            return Ok(None);
        };
        match value.parse() {
            Ok(n) => Ok(Some(n)),
            Err(_) => Err(SlurmError::NotANumber { variable, value }),
        }
    };
    let must = |variable| number(variable)?.ok_or(SlurmError::Missing { variable });

    let Some(step_id) = number("SLURM_STEP_ID")?.filter(|&s| s < FIRST_SPECIAL_STEP) else {
        return Ok(None);
    };
    // The step may have fewer nodes than the job, and SLURM_NODEID counts within the step.
    let (variable, list) = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"]
        .into_iter()
        .find_map(|v| get(v).filter(|l| !l.is_empty()).map(|l| (v, l)))
        .ok_or(SlurmError::Missing {
            variable: "SLURM_STEP_NODELIST",
        })?;
    let nodes = expand(&list).map_err(|source| SlurmError::NodeList { variable, source })?;

    let job = SlurmJob {
        job_id: must("SLURM_JOB_ID")?,
        step_id,
        node_id: must("SLURM_NODEID")?,
        procid: must("SLURM_PROCID")?,
        // Inside a job the plain SLURM_NTASKS may still be the allocation's.
        ntasks: match number("SLURM_STEP_NUM_TASKS")? {
            Some(n) => n,
            None => must("SLURM_NTASKS")?,
        },
        restart_count: number("SLURM_RESTART_COUNT")?.unwrap_or(0),
        local_id: number("SLURM_LOCALID")?.unwrap_or(0),
        nodes,
    };
    let within = |variable, value, below| {
        if value < below {
            Ok(())
        } else {
            Err(SlurmError::OutOfRange {
                variable,
                value,
                below,
            })
        }
    };
    // MAX_NODES fits into u32.
    within(
        "SLURM_NODEID",
        job.node_id,
        u32::try_from(job.nodes.len()).unwrap_or(u32::MAX),
    )?;
    within("SLURM_PROCID", job.procid, job.ntasks)?;
    Ok(Some(job))
}

/// The names that a Slurm node list stands for, in its order, repetitions kept. An empty list is an error.
///
/// # Errors
/// [`NodeListError`]; no list, however made, takes more than [`MAX_NODES`] names of memory.
pub(crate) fn expand(list: &str) -> Result<Vec<String>, NodeListError> {
    if list.len() > MAX_INPUT {
        return Err(NodeListError::TooLong { bytes: list.len() });
    }
    let mut parser = Parser {
        text: list.as_bytes(),
        at: 0,
    };
    let mut names = Vec::new();
    loop {
        parser.entry(&mut names)?;
        match parser.peek() {
            None => return Ok(names),
            Some(b',') => parser.at += 1,
            Some(_) => return Err(parser.expected("a comma or the end")),
        }
    }
}

/// One range in brackets: the numbers `low..=high`, written with at least `width` digits.
struct Range {
    low: u64,
    high: u64,
    width: usize,
}

struct Parser<'a> {
    text: &'a [u8],
    at: usize,
}

impl Parser<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn expected(&self, expected: &'static str) -> NodeListError {
        NodeListError::Syntax {
            at: self.at,
            expected,
        }
    }

    /// entry := (letters | '[' range (',' range)* ']')+
    fn entry(&mut self, names: &mut Vec<String>) -> Result<(), NodeListError> {
        let start = self.at;
        let room = MAX_NODES - names.len();
        if room == 0 {
            return Err(NodeListError::TooMany);
        }
        let mut made = vec![String::new()];
        loop {
            match self.peek() {
                Some(b'[') => {
                    self.at += 1;
                    made = self.group(&made, room)?;
                }
                Some(c) if is_name_byte(c) => {
                    let from = self.at;
                    while self.peek().is_some_and(is_name_byte) {
                        self.at += 1;
                    }
                    for name in &mut made {
                        name.extend(self.text[from..self.at].iter().map(|&b| char::from(b)));
                    }
                }
                _ => break,
            }
            if made.iter().any(|name| name.len() > MAX_NAME) {
                return Err(NodeListError::NameTooLong { at: start });
            }
        }
        if self.at == start {
            return Err(self.expected("a node name (letters, digits, '-', '_', '.')"));
        }
        names.append(&mut made);
        Ok(())
    }

    /// Every name so far with every number of the group behind it; the number varies fastest.
    fn group(&mut self, prefixes: &[String], room: usize) -> Result<Vec<String>, NodeListError> {
        let mut ranges = Vec::new();
        let mut numbers: u64 = 0;
        loop {
            let range = self.range()?;
            numbers = numbers.saturating_add((range.high - range.low).saturating_add(1));
            // Checked before anything is allocated: a short text can stand for 10^18 names.
            if numbers.saturating_mul(prefixes.len() as u64) > room as u64 {
                return Err(NodeListError::TooMany);
            }
            ranges.push(range);
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b']') => break,
                _ => return Err(self.expected("a comma or ']'")),
            }
        }
        self.at += 1;
        let mut made = Vec::new();
        for prefix in prefixes {
            for Range { low, high, width } in &ranges {
                made.extend((*low..=*high).map(|n| format!("{prefix}{n:0width$}")));
            }
        }
        Ok(made)
    }

    fn range(&mut self) -> Result<Range, NodeListError> {
        let start = self.at;
        let (low, width) = self.number()?;
        let mut high = low;
        if self.peek() == Some(b'-') {
            self.at += 1;
            high = self.number()?.0;
            if high < low {
                return Err(NodeListError::Syntax {
                    at: start,
                    expected: "a range that rises",
                });
            }
        }
        Ok(Range { low, high, width })
    }

    /// A number of at most 18 digits (which fits into 64 bits) and how many digits it was written with.
    fn number(&mut self) -> Result<(u64, usize), NodeListError> {
        let start = self.at;
        let mut value: u64 = 0;
        while let Some(c @ b'0'..=b'9') = self.peek() {
            if self.at - start == 18 {
                return Err(NodeListError::Syntax {
                    at: start,
                    expected: "at most 18 digits",
                });
            }
            value = value * 10 + u64::from(c - b'0');
            self.at += 1;
        }
        if self.at == start {
            return Err(self.expected("a digit"));
        }
        Ok((value, self.at - start))
    }
}

fn is_name_byte(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(list: &str, names: &[&str]) {
        assert_eq!(
            expand(list).as_deref(),
            Ok(names
                .iter()
                .map(|s| s.to_string())
                .collect::<Vec<_>>()
                .as_slice())
        );
    }

    #[track_caller]
    fn refuse(list: &str, error: NodeListError) {
        assert_eq!(expand(list), Err(error));
    }

    fn syntax(at: usize, expected: &'static str) -> NodeListError {
        NodeListError::Syntax { at, expected }
    }

    #[test]
    fn each_job_has_a_port_of_its_own() {
        let job = |job_id| SlurmJob {
            job_id,
            step_id: 0,
            nodes: vec!["n1".into(), "n2".into()],
            node_id: 0,
            local_id: 0,
            procid: 0,
            ntasks: 2,
            restart_count: 0,
        };
        assert_eq!(job(7).peers(), "n1:20007,n2:20007");
        assert_eq!(job(8_999).peers(), "n1:28999,n2:28999");
        assert_eq!(job(9_000).peers(), "n1:20000,n2:20000");
        assert_eq!(job(u32::MAX).peers(), "n1:25295,n2:25295");
    }

    #[test]
    fn plain_names_keep_their_order_and_repetitions() {
        check("n1", &["n1"]);
        check("b,a,b", &["b", "a", "b"]);
        check("gpu-a.rack_7.example", &["gpu-a.rack_7.example"]);
    }

    #[test]
    fn ranges_keep_the_width_of_their_lower_bound() {
        check(
            "n[1-3,07-09],gpu-a[009-011]b",
            &[
                "n1",
                "n2",
                "n3",
                "n07",
                "n08",
                "n09",
                "gpu-a009b",
                "gpu-a010b",
                "gpu-a011b",
            ],
        );
        check("n[8-11]", &["n8", "n9", "n10", "n11"]);
        check("n[098-101]", &["n098", "n099", "n100", "n101"]);
        check("[1-2]", &["1", "2"]);
    }

    #[test]
    fn the_last_of_several_groups_varies_fastest() {
        check("r[1-2]n[0-1]", &["r1n0", "r1n1", "r2n0", "r2n1"]);
        check(
            "r[1,3]-c[01]s[2-3]x",
            &["r1-c01s2x", "r1-c01s3x", "r3-c01s2x", "r3-c01s3x"],
        );
        check("a[1][2][3]", &["a123"]);
    }

    #[test]
    fn broken_lists_are_refused_at_the_byte() {
        const NAME: &str = "a node name (letters, digits, '-', '_', '.')";
        refuse("", syntax(0, NAME));
        refuse("a,", syntax(2, NAME));
        refuse(",a", syntax(0, NAME));
        refuse("n[", syntax(2, "a digit"));
        refuse("n[]", syntax(2, "a digit"));
        refuse("n[1", syntax(3, "a comma or ']'"));
        refuse("n[1-]", syntax(4, "a digit"));
        refuse("n[1,]", syntax(4, "a digit"));
        refuse("n[3-1]", syntax(2, "a range that rises"));
        refuse("n[a]", syntax(2, "a digit"));
        refuse("n]", syntax(1, "a comma or the end"));
        refuse("n 1", syntax(1, "a comma or the end"));
        refuse("knoten\u{e9}", syntax(6, "a comma or the end"));
        refuse("n[1234567890123456789]", syntax(2, "at most 18 digits"));
    }

    #[test]
    fn limits_hold_before_memory_is_taken() {
        assert_eq!(expand("n[1-4096]").map(|n| n.len()), Ok(MAX_NODES));
        refuse("n[0-4096]", NodeListError::TooMany);
        refuse("n[1-4096],x", NodeListError::TooMany);
        refuse("n[0-999999999999999999]", NodeListError::TooMany);
        refuse("n[0-63][0-63][0-1]", NodeListError::TooMany);
        refuse(
            "a[1-99][1-99][1-99][1-99][1-99][1-99][1-99][1-99][1-99][1-99][1-99]",
            NodeListError::TooMany,
        );
        refuse(&"a".repeat(256), NodeListError::NameTooLong { at: 0 });
        refuse(
            &"a".repeat(MAX_INPUT + 1),
            NodeListError::TooLong {
                bytes: MAX_INPUT + 1,
            },
        );
        // Many groups of one number: linear work, and the name's own limit ends it.
        refuse(&"[1]".repeat(20_000), NodeListError::NameTooLong { at: 0 });
    }

    /// No text of the grammar's own letters makes the parser panic or exceed its limits.
    #[test]
    fn any_short_text_is_read_or_refused() {
        let letters = b"n0[],-19";
        let mut text = Vec::new();
        for mut code in 0..letters.len().pow(6) {
            text.clear();
            for _ in 0..6 {
                text.push(letters[code % letters.len()]);
                code /= letters.len();
            }
            let text = std::str::from_utf8(&text).unwrap();
            if let Ok(names) = expand(text) {
                assert!(!names.is_empty() && names.len() <= MAX_NODES, "{text}");
            }
        }
    }

    const TASK: &[(&str, &str)] = &[
        ("SLURM_JOB_ID", "17"),
        ("SLURM_STEP_ID", "2"),
        ("SLURM_JOB_NODELIST", "n[1-3]"),
        ("SLURM_STEP_NODELIST", "n[2-3]"),
        ("SLURM_NODEID", "1"),
        ("SLURM_PROCID", "1"),
        ("SLURM_NTASKS", "3"),
        ("SLURM_STEP_NUM_TASKS", "2"),
    ];

    /// `TASK` with some variables replaced, or removed where the value is empty.
    fn task(changes: &[(&str, &str)]) -> Result<Option<SlurmJob>, SlurmError> {
        peers_from_env(|name| {
            let all = changes.iter().chain(TASK);
            let found = all.into_iter().find(|(n, _)| *n == name)?;
            (!found.1.is_empty()).then(|| found.1.to_string())
        })
    }

    #[test]
    fn a_task_knows_its_step() {
        let job = SlurmJob {
            job_id: 17,
            step_id: 2,
            nodes: vec!["n2".into(), "n3".into()],
            node_id: 1,
            procid: 1,
            ntasks: 2,
            restart_count: 0,
            local_id: 0,
        };
        assert_eq!(task(&[]), Ok(Some(job.clone())));
        let again = SlurmJob {
            restart_count: 1,
            ..job.clone()
        };
        assert_eq!(task(&[("SLURM_RESTART_COUNT", "1")]), Ok(Some(again)));
        let second = SlurmJob { local_id: 1, ..job };
        assert_eq!(task(&[("SLURM_LOCALID", "1")]), Ok(Some(second)));
    }

    #[test]
    fn outside_a_step_there_are_no_peers() {
        assert_eq!(peers_from_env(|_| None), Ok(None));
        assert_eq!(task(&[("SLURM_STEP_ID", "")]), Ok(None));
        // The batch script's own pseudo step.
        assert_eq!(task(&[("SLURM_STEP_ID", "4294967291")]), Ok(None));
    }

    #[test]
    fn a_step_that_contradicts_itself_is_refused() {
        assert_eq!(
            task(&[("SLURM_NODEID", "2")]),
            Err(SlurmError::OutOfRange {
                variable: "SLURM_NODEID",
                value: 2,
                below: 2
            })
        );
        assert_eq!(
            task(&[("SLURM_PROCID", "")]),
            Err(SlurmError::Missing {
                variable: "SLURM_PROCID"
            })
        );
        assert_eq!(
            task(&[("SLURM_NTASKS", "-1"), ("SLURM_STEP_NUM_TASKS", "")]),
            Err(SlurmError::NotANumber {
                variable: "SLURM_NTASKS",
                value: "-1".into()
            })
        );
        assert_eq!(
            task(&[("SLURM_STEP_NODELIST", ""), ("SLURM_JOB_NODELIST", "n[")]),
            Err(SlurmError::NodeList {
                variable: "SLURM_JOB_NODELIST",
                source: syntax(2, "a digit")
            })
        );
    }
}
