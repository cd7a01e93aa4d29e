//! PyTorch itself on what a launcher gives its workers: the master's reserved port above all.

mod needs_torch {
    use std::net::SocketAddr;
    use std::time::Duration;

    use muster_protocol::local::{ToAgent, ToLauncher};

    use crate::fake::{Agent, Launcher};

    fn python() -> String {
        std::env::var("MUSTER_TEST_PYTHON").expect("MUSTER_TEST_PYTHON names a Python with PyTorch")
    }

    #[test]
    fn the_error_that_pytorch_records_is_told() {
        let script = "
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError('the data set is empty')
main()
";
        let mut agent = Agent::new();
        let python = python();
        let _launcher = Launcher::start(&agent, &["--", &python, "-c", script]);
        agent.accept();
        agent.run(1);
        let told = agent.fact_within(Duration::from_secs(120));
        let Some(ToAgent::Exited { exit, .. }) = told else {
            panic!("{told:?}")
        };
        assert_eq!(exit.code, 1);
        assert!(
            exit.tail.ends_with("ValueError: the data set is empty"),
            "{}",
            exit.tail
        );
        assert!(exit.tail.starts_with("Traceback"), "{}", exit.tail);
    }

    /// Two launchers of two workers each: rank 0's TCPStore binds the port that the launcher holds,
    /// the second launcher verifies the first one's guard, and gloo uses the named interface.
    #[test]
    fn a_plain_ddp_script_trains_on_two_nodes() {
        let python = python();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/ddp.py");
        let mut agents = [Agent::new(), Agent::new()];
        let dir = agents[0].path("checkpoints");
        let args = [
            "--nnodes=2",
            "--nproc-per-node=2",
            "--rdzv-id=ddp",
            script,
            "--steps",
            "20",
            "--save-every",
            "10",
            "--checkpoint-dir",
            dir.to_str().unwrap(),
        ];
        let _launchers = [0, 1].map(|n| {
            let launcher = Launcher::start_with(&agents[n], &args, &[("PYTHON_EXEC", &python)]);
            agents[n].accept();
            launcher
        });
        for number in 1..=2 {
            let mut start = agents[0].start(number);
            (start.nodes, start.world) = (2, 4);
            start.master = SocketAddr::from(([127, 0, 0, 1], agents[0].port));
            let digest = start.digest;
            agents[0].send(ToLauncher::Start(start.clone()));
            (start.node_rank, start.first_rank) = (1, 2);
            agents[1].send(ToLauncher::Start(start));
            for agent in &mut agents {
                assert_eq!(agent.fact(), ToAgent::Started { digest, attempt: 1 });
            }
            for agent in &mut agents {
                let ended = agent.fact_within(Duration::from_secs(120));
                assert_eq!(ended, Some(ToAgent::Finished { digest }));
            }
        }
        assert!(std::fs::read_dir(dir).unwrap().next().is_some());
    }
}
