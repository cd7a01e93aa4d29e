//! `muster logs JOB`: the workers' output, from the files that `muster run --log-dir` wrote.
//!
//! ```text
//! <run>/attempt_<restart count>[.<again>]/<local rank>/{stdout,stderr}.log
//! ```
//! The agent only says where; the files are read here, with the caller's own rights.

mod files;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use muster_protocol::local::Query;
use serde_json::{Value, json};

use super::client::{Client, rows_of};
use super::output::{Failure, clean, field, flag, list, put, put_json};
use crate::run::console::say;
use files::{Attempt, LogFile, Source, Tailer};

/// Between two looks at files that are followed.
const POLL: Duration = Duration::from_millis(200);
/// Between two questions whether a followed job is over.
const ASK: Duration = Duration::from_secs(1);

/// `muster logs`
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The job's id
    job: String,
    /// Only this rank, counted over the whole job as it runs now
    #[arg(long, value_name = "RANK")]
    rank: Option<u64>,
    /// Only this rank, counted on this node
    #[arg(long, value_name = "RANK", conflicts_with = "rank")]
    local_rank: Option<u64>,
    /// Only this stream
    #[arg(long, value_enum)]
    stream: Option<Source>,
    /// The attempt, as its folder is numbered: 2, or 2.1 for the second start at the same restart count [default: the
    /// last]
    #[arg(long, value_name = "N")]
    attempt: Option<String>,
    /// Only the last lines of each file
    #[arg(long, value_name = "LINES")]
    tail: Option<usize>,
    /// Go on printing what is written, until the job is over
    #[arg(short, long)]
    follow: bool,
    /// Where the files are, when no agent knows the job any more: what `muster run --log-dir` was given
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,
    #[command(flatten)]
    common: super::Common,
}

pub(super) async fn main(args: &Args) -> Result<(), Failure> {
    let place = match &args.log_dir {
        Some(dir) => Place::named(dir, args)?,
        None => Place::ask(args).await?,
    };
    let attempts = place.attempts()?;
    let attempt = choose(&attempts, args.attempt.as_deref())?;
    let wanted = |file: &LogFile| {
        place.local_rank.is_none_or(|rank| rank == file.local_rank)
            && args.stream.is_none_or(|stream| stream == file.stream)
    };
    let mut found = attempt.files();
    found.retain(wanted);
    if args.common.out.json() {
        let rows: Vec<Value> = found.iter().map(|f| file_json(args, attempt, f)).collect();
        return put_json(&Value::Array(rows));
    }
    if args.follow {
        return follow(args, &place, attempt.clone(), wanted).await;
    }
    if found.is_empty() {
        return Err(Failure::Refused(nothing_in(attempt, place.local_rank)));
    }
    let several = found.len() > 1;
    for file in &found {
        if several {
            put(format!("==> {} <==\n", file.title()).as_bytes())?;
        }
        file.print(args.tail, &mut |bytes| put(bytes))?;
    }
    Ok(())
}

fn file_json(args: &Args, attempt: &Attempt, file: &LogFile) -> Value {
    json!({
        "job": args.job, "attempt": attempt.name, "local_rank": file.local_rank,
        "stream": file.stream.word(), "path": file.path.to_string_lossy(), "bytes": file.len(),
    })
}

/// Where a job's output is.
struct Place {
    root: PathBuf,
    local_rank: Option<u64>,
    /// The agent's client, to ask whether the job still runs.
    client: Option<Client>,
}

impl Place {
    fn named(dir: &Path, args: &Args) -> Result<Place, Failure> {
        if args.rank.is_some() {
            return Err(Failure::Usage(
                "with --log-dir no agent is asked which ranks are here: use --local-rank".into(),
            ));
        }
        let root = files::run_folder(dir, &args.job).ok_or_else(|| {
            Failure::Refused(format!(
                "there is no output of {} in {}: name the folder that `muster run --log-dir` was given on this node",
                clean(&args.job),
                dir.display()
            ))
        })?;
        Ok(Place {
            root,
            local_rank: args.local_rank,
            client: None,
        })
    }

    async fn ask(args: &Args) -> Result<Place, Failure> {
        let job = clean(&args.job);
        let client = Client::find(args.common.socket.as_deref(), Some(&args.job)).await?;
        let jobs = client.query(Query::Jobs).await?;
        let rows: Vec<&Value> = rows_of(&jobs, &args.job).collect();
        // Jobs of several users may have the same id: take the one that runs here.
        let row = rows
            .iter()
            .find(|r| flag(r, "launcher_here"))
            .or(rows.iter().find(|r| !field(r, "log_dir").is_empty()))
            .or(rows.first());
        let Some(row) = row else {
            return Err(Failure::Refused(format!(
                "no job {job} is known on this agent: `muster jobs` lists them; for one that is over, name its folder with --log-dir"
            )));
        };
        let local_rank = match args.rank {
            Some(rank) => Some(local_rank(row, rank)?),
            None => args.local_rank,
        };
        let dir = field(row, "log_dir");
        if dir.is_empty() {
            return Err(Failure::Refused(if flag(row, "launcher_here") {
                format!(
                    "{job} was started without --log-dir, so its output went to the terminal of `muster run` only; next time: muster run --log-dir DIR --tee 3 (files and terminal) or --redirects 3 (files only)"
                )
            } else {
                format!(
                    "{job} has no launcher on this node: run `muster logs` on one of its nodes ({}), or name the folder of a job that is over with --log-dir",
                    names(row)
                )
            }));
        }
        let root = files::run_folder(Path::new(&dir), &args.job).ok_or_else(|| {
            Failure::Refused(format!(
                "{job} has written nothing to {} yet, or that folder is not visible from here: in a container, run `muster logs` inside it",
                clean(&dir)
            ))
        })?;
        Ok(Place {
            root,
            local_rank,
            client: Some(client),
        })
    }

    fn attempts(&self) -> Result<Vec<Attempt>, Failure> {
        files::attempts(&self.root).map_err(|e| {
            Failure::Refused(format!(
                "cannot read {}: {e}; run as the user who started the job",
                self.root.display()
            ))
        })
    }
}

fn names(row: &Value) -> String {
    let all: Vec<String> = list(row, "members")
        .iter()
        .take(8)
        .map(|m| clean(&field(m, "name")))
        .collect();
    if all.is_empty() {
        "none now".into()
    } else {
        all.join(", ")
    }
}

/// The place on this node of a rank of the whole job.
fn local_rank(row: &Value, rank: u64) -> Result<u64, Failure> {
    let number = |m: &Value, key: &str| m.get(key).and_then(Value::as_u64);
    let place = |m: &Value| {
        let (first, slots) = (number(m, "first_rank")?, number(m, "slots")?);
        rank.checked_sub(first).filter(|local| *local < slots)
    };
    let here = row.get("here").and_then(place);
    // Where the rank was when a job that is over last ran.
    let was = || row.get("last_here").and_then(place);
    if let Some(local) = here.or_else(was) {
        return Ok(local);
    }
    let holder = list(row, "members").iter().find(|m| place(m).is_some());
    Err(Failure::Refused(match holder {
        Some(m) => format!(
            "rank {rank} runs on {}: run `muster logs` there",
            clean(&field(m, "name"))
        ),
        None => format!(
            "rank {rank} is not on this node, of {} ranks that the job has now; for a former one use --local-rank and --attempt",
            field(row, "world")
        ),
    }))
}

/// The attempt that is named, else the last.
fn choose<'a>(attempts: &'a [Attempt], named: Option<&str>) -> Result<&'a Attempt, Failure> {
    let Some(name) = named else {
        return attempts.last().ok_or_else(|| {
            Failure::Refused("the job has started no worker on this node yet".into())
        });
    };
    // Without a suffix: the last start at that restart count.
    let exact = attempts.iter().find(|a| a.name == name);
    let found = match name.contains('.') {
        true => exact,
        false => attempts
            .iter()
            .rev()
            .find(|a| a.name.split('.').next() == Some(name)),
    };
    found.ok_or_else(|| {
        let names: Vec<&str> = attempts.iter().map(|a| a.name.as_str()).collect();
        Failure::Refused(format!(
            "there is no attempt {} here; there are: {}",
            clean(name),
            names.join(", ")
        ))
    })
}

fn nothing_in(attempt: &Attempt, local_rank: Option<u64>) -> String {
    match local_rank {
        Some(rank) => format!(
            "attempt {} has no output of local rank {rank} in files: was the job started with --tee 3 or --redirects 3, and does this node have so many workers?",
            attempt.name
        ),
        None => format!(
            "attempt {} has no output in files: --log-dir alone only says where; next time: muster run --log-dir DIR --tee 3 (files and terminal) or --redirects 3 (files only)",
            attempt.name
        ),
    }
}

/// Prints what is written, and goes over to the next attempt when there is one, until the job is
/// over and everything is printed.
async fn follow(
    args: &Args,
    place: &Place,
    mut attempt: Attempt,
    wanted: impl Fn(&LogFile) -> bool,
) -> Result<(), Failure> {
    let mut tailers: Vec<Tailer> = Vec::new();
    let mut tail = args.tail;
    let mut asked = Instant::now();
    let mut over = false;
    loop {
        for file in attempt.files().into_iter().filter(&wanted) {
            if !tailers.iter().any(|t| t.file == file) {
                tailers.push(Tailer::new(file, tail));
            }
        }
        // What appears later is shown from its beginning.
        tail = None;
        let prefixed = tailers.len() > 1;
        for tailer in &mut tailers {
            tailer.pump(prefixed, over, &mut |bytes| put(bytes))?;
        }
        if over {
            return Ok(());
        }
        if args.attempt.is_none()
            && let Some(last) = place.attempts()?.pop()
            && last.name != attempt.name
        {
            for tailer in &mut tailers {
                tailer.pump(prefixed, true, &mut |bytes| put(bytes))?;
            }
            say(&format!("attempt {}", last.name));
            tailers.clear();
            attempt = last;
        }
        if asked.elapsed() > ASK {
            asked = Instant::now();
            over = is_over(place, &args.job).await;
        }
        if !over {
            tokio::time::sleep(POLL).await;
        }
    }
}

async fn is_over(place: &Place, job: &str) -> bool {
    let Some(client) = &place.client else {
        return false;
    };
    match client.query(Query::Jobs).await {
        Ok(jobs) => !rows_of(&jobs, job).any(|row| flag(row, "launcher_here")),
        // The agent is away, or ended with its job: the files alone do not tell. An embedded
        // agent's socket goes with it.
        Err(_) => !client.path.exists(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_the_job_become_ranks_of_the_node() {
        let row = json!({ "world": 6, "here": { "first_rank": 2, "slots": 2 }, "members": [
            { "name": "a", "first_rank": 0, "slots": 2 }, { "name": "b", "first_rank": 2, "slots": 2 },
            { "name": "c", "first_rank": 4, "slots": 2 } ] });
        assert_eq!(local_rank(&row, 3).unwrap(), 1);
        let text = |rank| local_rank(&row, rank).unwrap_err().to_string();
        assert!(text(4).contains("runs on c"));
        assert!(text(6).contains("of 6 ranks"));
    }

    #[test]
    fn the_last_attempt_unless_one_is_named() {
        let all = ["0", "0.1", "1", "2", "2.1"].map(|name| Attempt {
            name: name.into(),
            dir: PathBuf::from("/x"),
        });
        let check = |named: Option<&str>| choose(&all, named).map(|a| a.name.clone()).ok();
        assert_eq!(check(None).as_deref(), Some("2.1"));
        assert_eq!(check(Some("0")).as_deref(), Some("0.1"));
        assert_eq!(check(Some("2.1")).as_deref(), Some("2.1"));
        assert_eq!(check(Some("1")).as_deref(), Some("1"));
        assert_eq!(check(Some("3")), None);
        assert!(choose(&[], None).is_err());
    }
}
