//! The environment that the launcher gives a worker: torchrun's variables and Muster's own.

use muster_protocol::Digest;

/// A worker's place in its generation.
///
/// | variable | field | when absent |
/// |---|---|---|
/// | `RANK`, `WORLD_SIZE` | [`rank`](Self::rank), [`world`](Self::world) | both absent: 0 of 1 |
/// | `LOCAL_RANK` | [`local_rank`](Self::local_rank) | 0 |
/// | `MASTER_ADDR`, `MASTER_PORT` | [`master`](Self::master) | an error, if the world is larger than 1 |
/// | `TORCHELASTIC_RESTART_COUNT` | [`restart`](Self::restart) | 0 |
/// | `MUSTER_GENERATION` | [`generation`](Self::generation) | 0 |
/// | `MUSTER_GENERATION_DIGEST` | [`digest`](Self::digest): 64 hexadecimal digits | all zero |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerEnv {
    pub rank: u32,
    pub world: u32,
    pub local_rank: u32,
    pub master: Option<(String, u16)>,
    pub restart: u64,
    pub generation: u64,
    pub digest: Digest,
}

/// The environment does not describe a worker. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvError {
    #[error("{name} is not set; start the worker with `muster run`, or set it as torchrun does")]
    Missing { name: &'static str },
    #[error(
        "{name} is {value:?}, which is not {expected}; unset it, or start the worker with `muster run`"
    )]
    Invalid {
        name: &'static str,
        value: String,
        expected: &'static str,
    },
    #[error("RANK is {rank}, but WORLD_SIZE is {world}: ranks are 0 to {world} exclusive")]
    RankOutOfRange { rank: u32, world: u32 },
}

impl WorkerEnv {
    /// Reads this process's environment.
    ///
    /// # Errors
    /// A variable is missing or malformed, or the rank is not below the world size.
    pub fn from_env() -> Result<WorkerEnv, EnvError> {
        Self::from_lookup(|name| {
            std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
        })
    }

    /// The same from any other source of variables.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_lookup(get: impl Fn(&str) -> Option<String>) -> Result<WorkerEnv, EnvError> {
        fn parse<T: std::str::FromStr>(
            value: Option<String>,
            name: &'static str,
            expected: &'static str,
        ) -> Result<Option<T>, EnvError> {
            match value {
                None => Ok(None),
                Some(value) => match value.trim().parse() {
                    Ok(parsed) => Ok(Some(parsed)),
                    Err(_) => Err(EnvError::Invalid {
                        name,
                        value,
                        expected,
                    }),
                },
            }
        }
        const NUMBER: &str = "a whole number";
        let rank = parse(get("RANK"), "RANK", NUMBER)?;
        let world = parse(get("WORLD_SIZE"), "WORLD_SIZE", NUMBER)?;
        let (rank, world) = match (rank, world) {
            (None, None) => (0, 1),
            (Some(rank), Some(world)) => (rank, world),
            (None, Some(_)) => return Err(EnvError::Missing { name: "RANK" }),
            (Some(_), None) => return Err(EnvError::Missing { name: "WORLD_SIZE" }),
        };
        if rank >= world {
            return Err(EnvError::RankOutOfRange { rank, world });
        }
        let port = parse(get("MASTER_PORT"), "MASTER_PORT", "a port number")?;
        let master = match (get("MASTER_ADDR").filter(|addr| !addr.is_empty()), port) {
            (Some(addr), Some(port)) => Some((addr, port)),
            _ if world == 1 => None,
            (None, _) => {
                return Err(EnvError::Missing {
                    name: "MASTER_ADDR",
                });
            }
            (_, None) => {
                return Err(EnvError::Missing {
                    name: "MASTER_PORT",
                });
            }
        };
        let digest = match get("MUSTER_GENERATION_DIGEST") {
            None => Digest::ZERO,
            Some(value) => Digest::from_hex(&value).ok_or(EnvError::Invalid {
                name: "MUSTER_GENERATION_DIGEST",
                value,
                expected: "64 hexadecimal digits",
            })?,
        };
        Ok(WorkerEnv {
            rank,
            world,
            local_rank: parse(get("LOCAL_RANK"), "LOCAL_RANK", NUMBER)?.unwrap_or(0),
            master,
            restart: parse(
                get("TORCHELASTIC_RESTART_COUNT"),
                "TORCHELASTIC_RESTART_COUNT",
                NUMBER,
            )?
            .unwrap_or(0),
            generation: parse(get("MUSTER_GENERATION"), "MUSTER_GENERATION", NUMBER)?.unwrap_or(0),
            digest,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)]) -> Result<WorkerEnv, EnvError> {
        WorkerEnv::from_lookup(|name| {
            vars.iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn a_launched_worker_and_a_bare_one() {
        let hex = "ab".repeat(32);
        let env = read(&[
            ("RANK", "3"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "10.0.0.1"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RESTART_COUNT", "2"),
            ("MUSTER_GENERATION", "7"),
            ("MUSTER_GENERATION_DIGEST", &hex),
        ])
        .unwrap();
        assert_eq!((env.rank, env.world, env.local_rank), (3, 4, 1));
        assert_eq!(env.master, Some(("10.0.0.1".to_owned(), 29500)));
        assert_eq!((env.restart, env.generation), (2, 7));
        assert_eq!(env.digest, Digest([0xab; 32]));

        let bare = read(&[]).unwrap();
        assert_eq!((bare.rank, bare.world, bare.master), (0, 1, None));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let missing = |name| Err(EnvError::Missing { name });
        assert_eq!(read(&[("RANK", "0")]), missing("WORLD_SIZE"));
        assert_eq!(
            read(&[("RANK", "0"), ("WORLD_SIZE", "2")]),
            missing("MASTER_ADDR")
        );
        assert_eq!(
            read(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h")]),
            missing("MASTER_PORT")
        );
        assert_eq!(
            read(&[("RANK", "2"), ("WORLD_SIZE", "2")]),
            Err(EnvError::RankOutOfRange { rank: 2, world: 2 })
        );
        for (name, value) in [
            ("WORLD_SIZE", "-1"),
            ("MASTER_PORT", "70000"),
            ("MUSTER_GENERATION_DIGEST", "abc"),
            ("MUSTER_GENERATION", "x"),
        ] {
            let got = read(&[(name, value), ("RANK", "0")]);
            assert!(
                matches!(got, Err(EnvError::Invalid { name: n, .. } | EnvError::Missing { name: n })
                if n == name || n == "WORLD_SIZE"),
                "{name}={value}: {got:?}"
            );
        }
    }
}
