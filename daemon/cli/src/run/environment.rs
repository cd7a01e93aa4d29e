//! A worker's environment: torchrun's contract (torch/distributed/elastic/agent/server/
//! local_elastic_agent.py, `_start_workers`) and Muster's own variables.

use std::ffi::OsString;
use std::path::Path;

use muster_protocol::control::slots::{CACHE_ENV, RESTORE_ENV, STORE_ENV, STORE_ID_ENV};
use muster_protocol::local::Start;
use muster_protocol::memory::{MEMORY_ENV, Whom};
use muster_protocol::{LauncherId, StoreUuid};

use super::procs::MARK;

/// Environment that all workers of one launcher share, whatever the generation.
#[derive(Clone, Debug)]
pub struct Job {
    pub id: String,
    pub launcher: LauncherId,
    pub role: String,
    pub max_restarts: u32,
    /// The signals that the launcher takes, as they were named.
    pub signals: String,
    /// Each worker sees one GPU, as device 0.
    pub virtual_local_rank: bool,
    /// The job's folder in its store, a path or a bucket's location.
    pub store: Option<OsString>,
    /// The store's own name, by which workers know it.
    pub store_id: Option<StoreUuid>,
    /// The folder with copies of what this node saves.
    pub cache: Option<OsString>,
    /// The port at which this launcher gives what it holds in memory.
    pub memory: Option<u16>,
}

/// Whether the launcher's own environment has a variable: what the user set is not overridden.
pub type IsSet<'a> = &'a dyn Fn(&str) -> bool;

/// The variables to set on top of the launcher's own environment. `interface` is the network
/// interface that peers verified.
pub fn variables(
    job: &Job,
    start: &Start,
    local_rank: u16,
    error_file: &Path,
    interface: Option<&str>,
    is_set: IsSet<'_>,
) -> Vec<(&'static str, OsString)> {
    let rank = start.first_rank + u32::from(local_rank);
    let shown = if job.virtual_local_rank {
        0
    } else {
        local_rank
    };
    let mut vars: Vec<(&'static str, OsString)> = vec![
        ("RANK", rank.to_string().into()),
        ("LOCAL_RANK", shown.to_string().into()),
        ("GROUP_RANK", start.node_rank.to_string().into()),
        ("ROLE_RANK", rank.to_string().into()),
        ("ROLE_NAME", job.role.clone().into()),
        ("LOCAL_WORLD_SIZE", start.slots.to_string().into()),
        ("WORLD_SIZE", start.world.to_string().into()),
        ("GROUP_WORLD_SIZE", start.nodes.to_string().into()),
        ("ROLE_WORLD_SIZE", start.world.to_string().into()),
        ("MASTER_ADDR", start.master.ip().to_string().into()),
        ("MASTER_PORT", start.master.port().to_string().into()),
        (
            "TORCHELASTIC_RESTART_COUNT",
            start.restart_count.to_string().into(),
        ),
        (
            "TORCHELASTIC_MAX_RESTARTS",
            job.max_restarts.to_string().into(),
        ),
        ("TORCHELASTIC_RUN_ID", job.id.clone().into()),
        ("TORCHELASTIC_SIGNALS_TO_HANDLE", job.signals.clone().into()),
        // Rank 0 hosts the store: there is no agent's store to outlive.
        ("TORCHELASTIC_USE_AGENT_STORE", "False".into()),
        ("TORCHELASTIC_ERROR_FILE", error_file.into()),
        (MARK, job.launcher.hex().into()),
        ("MUSTER_GENERATION", start.number.to_string().into()),
        ("MUSTER_GENERATION_DIGEST", start.digest.hex().into()),
    ];
    if let Some(store) = &job.store {
        vars.push((STORE_ENV, store.into()));
    }
    if let Some(id) = &job.store_id {
        vars.push((STORE_ID_ENV, id.hex().into()));
    }
    if let Some(cache) = &job.cache {
        vars.push((CACHE_ENV, cache.into()));
    }
    if let Some(own) = job.memory {
        let whom = Whom {
            key: start.peers.key,
            own,
            launcher: job.launcher,
            others: start.peers.by_use(),
        };
        vars.push((MEMORY_ENV, whom.encode().into()));
    }
    if let Some(restore) = &start.restore {
        vars.push((RESTORE_ENV, restore.hex().into()));
    }
    let mut unless_set = |name: &'static str, value: &str| {
        if !is_set(name) {
            vars.push((name, value.into()));
        }
    };
    unless_set("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
    if start.slots > 1 {
        unless_set("OMP_NUM_THREADS", "1");
    }
    if let Some(name) = interface {
        unless_set("GLOO_SOCKET_IFNAME", name);
        unless_set("NCCL_SOCKET_IFNAME", name);
    }
    vars
}

/// The one GPU that a worker sees with --virtual-local-rank, of those that the launcher does.
///
/// # Errors
/// `CUDA_VISIBLE_DEVICES` names fewer.
pub fn device(local_rank: u16, visible: Option<&str>) -> Result<String, String> {
    let Some(visible) = visible else {
        return Ok(local_rank.to_string());
    };
    let device = visible.split(',').nth(usize::from(local_rank));
    device.map(|d| d.trim().to_owned()).ok_or_else(|| {
        format!(
            "--virtual-local-rank: CUDA_VISIBLE_DEVICES={visible} names no GPU for local rank {local_rank}: \
             start fewer workers with --nproc-per-node, or name more GPUs"
        )
    })
}

/// torchrun's macros in a worker's arguments: `${local_rank}` and `$local_rank`.
pub fn substitute(arg: &OsString, local_rank: u16) -> OsString {
    let Some(text) = arg.to_str().filter(|t| t.contains("local_rank")) else {
        return arg.clone();
    };
    let value = local_rank.to_string();
    let text = text.replace("${local_rank}", &value);
    let mut out = String::new();
    let mut rest = text.as_str();
    while let Some(at) = rest.find("$local_rank") {
        let after = &rest[at + "$local_rank".len()..];
        out.push_str(&rest[..at]);
        // $local_rank_2 is another name.
        if after.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_') {
            out.push_str("$local_rank");
        } else {
            out.push_str(&value);
        }
        rest = after;
    }
    out.push_str(rest);
    out.into()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use muster_protocol::Digest;

    use super::*;

    fn start() -> Start {
        Start {
            digest: Digest([0xab; 32]),
            lineage: Digest([0xaa; 32]),
            attempt: 1,
            number: 3,
            node_rank: 1,
            nodes: 2,
            first_rank: 2,
            slots: 2,
            world: 4,
            master: "10.0.0.1:4711".parse().unwrap(),
            master_guard: "10.0.0.1:4712".parse().unwrap(),
            master_launcher: LauncherId([1; 8]),
            restart_count: 2,
            restore: None,
            peers: Box::default(),
            why: String::new(),
        }
    }

    fn job() -> Job {
        Job {
            id: "j".into(),
            launcher: LauncherId([0xcd; 8]),
            role: "trainer".into(),
            max_restarts: 5,
            signals: "SIGTERM,SIGINT".into(),
            virtual_local_rank: false,
            store: None,
            store_id: None,
            cache: None,
            memory: None,
        }
    }

    #[test]
    fn the_whole_contract() {
        let vars = variables(
            &job(),
            &start(),
            1,
            Path::new("/l/error.json"),
            Some("eth0"),
            &|_| false,
        );
        let got: BTreeMap<&str, String> = vars
            .iter()
            .map(|(k, v)| (*k, v.to_string_lossy().into_owned()))
            .collect();
        let digest = "ab".repeat(32);
        let launcher = "cd".repeat(8);
        let expected: BTreeMap<&str, String> = [
            ("RANK", "3"),
            ("LOCAL_RANK", "1"),
            ("GROUP_RANK", "1"),
            ("ROLE_RANK", "3"),
            ("ROLE_NAME", "trainer"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("WORLD_SIZE", "4"),
            ("GROUP_WORLD_SIZE", "2"),
            ("ROLE_WORLD_SIZE", "4"),
            ("MASTER_ADDR", "10.0.0.1"),
            ("MASTER_PORT", "4711"),
            ("TORCHELASTIC_RESTART_COUNT", "2"),
            ("TORCHELASTIC_MAX_RESTARTS", "5"),
            ("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT"),
            ("TORCHELASTIC_RUN_ID", "j"),
            ("TORCHELASTIC_USE_AGENT_STORE", "False"),
            ("TORCHELASTIC_ERROR_FILE", "/l/error.json"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            ("OMP_NUM_THREADS", "1"),
            ("GLOO_SOCKET_IFNAME", "eth0"),
            ("NCCL_SOCKET_IFNAME", "eth0"),
            ("MUSTER_LAUNCHER", &launcher),
            ("MUSTER_GENERATION", "3"),
            ("MUSTER_GENERATION_DIGEST", &digest),
        ]
        .map(|(k, v)| (k, v.to_owned()))
        .into();
        assert_eq!(got, expected);
    }

    #[test]
    fn with_a_virtual_local_rank_each_worker_sees_its_gpu_as_device_0() {
        let virtual_ranks = Job {
            virtual_local_rank: true,
            ..job()
        };
        let vars = variables(&virtual_ranks, &start(), 1, Path::new("e"), None, &|_| {
            false
        });
        let get = |wanted| vars.iter().find(|(name, _)| *name == wanted);
        assert_eq!(get("LOCAL_RANK"), Some(&("LOCAL_RANK", "0".into())));
        assert_eq!(get("RANK"), Some(&("RANK", "3".into())));
        assert_eq!(device(1, None), Ok("1".into()));
        assert_eq!(device(1, Some("4, 7")), Ok("7".into()));
        assert_eq!(device(0, Some("GPU-8f2")), Ok("GPU-8f2".into()));
        assert!(device(2, Some("4,7")).is_err());
    }

    #[test]
    fn a_worker_is_told_which_store_it_is() {
        let of_store = Job {
            store: Some("/shared/j".into()),
            store_id: Some(StoreUuid([0xef; 16])),
            ..job()
        };
        let vars = variables(&of_store, &start(), 0, Path::new("e"), None, &|_| false);
        let get = |wanted| vars.iter().find(|(name, _)| *name == wanted);
        assert_eq!(get(STORE_ENV), Some(&(STORE_ENV, "/shared/j".into())));
        assert_eq!(
            get(STORE_ID_ENV),
            Some(&(STORE_ID_ENV, "ef".repeat(16).into()))
        );
    }

    #[test]
    fn what_the_user_set_stays() {
        let mine = [
            "OMP_NUM_THREADS",
            "GLOO_SOCKET_IFNAME",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        ];
        let vars = variables(&job(), &start(), 0, Path::new("e"), Some("eth0"), &|name| {
            mine.contains(&name)
        });
        assert!(vars.iter().all(|(name, _)| !mine.contains(name)));
        assert!(vars.iter().any(|(name, _)| *name == "NCCL_SOCKET_IFNAME"));
        let mut one = start();
        one.slots = 1;
        let vars = variables(&job(), &one, 0, Path::new("e"), None, &|_| false);
        assert!(
            vars.iter()
                .all(|(name, _)| *name != "OMP_NUM_THREADS" && !name.ends_with("IFNAME"))
        );
    }

    #[test]
    fn macros() {
        for (arg, expected) in [
            ("a-${local_rank}-$local_rank.txt", "a-3-3.txt"),
            ("$local_rank_2", "$local_rank_2"),
            ("$local_rank", "3"),
            ("$rank", "$rank"),
        ] {
            assert_eq!(substitute(&arg.into(), 3), expected);
        }
    }
}
