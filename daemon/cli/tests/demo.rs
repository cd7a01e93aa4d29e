//! `muster demo` as a user runs it: real processes on loopback.

#[cfg(test)]
mod real {
    use std::io::Read;
    use std::path::Path;
    use std::process::{Child, Command, ExitStatus, Stdio};
    use std::time::{Duration, Instant};

    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;
    use serde_json::Value;

    /// The bound of a whole run; a usual one takes 15 s.
    const PATIENCE: Duration = Duration::from_secs(150);

    /// A demo whose folder lies in `tmp`, so that what it leaves can be seen.
    fn start(tmp: &Path, args: &[&str]) -> Child {
        Command::new(env!("CARGO_BIN_EXE_muster"))
            .arg("demo")
            .args(args)
            .env("TMPDIR", tmp)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(tmp.join("stderr")).unwrap())
            .spawn()
            .unwrap()
    }

    fn stderr(tmp: &Path) -> String {
        std::fs::read_to_string(tmp.join("stderr")).unwrap()
    }

    fn until(what: &str, tmp: &Path, mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds() {
            assert!(
                Instant::now() < deadline,
                "never came true: {what}\n{}",
                stderr(tmp)
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn end(child: &mut Child, tmp: &Path) -> ExitStatus {
        let mut status = None;
        until("the demo ends", tmp, || {
            status = child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    /// Processes whose command line names something in this folder: agents, launchers, workers.
    fn running(tmp: &Path) -> usize {
        let name = tmp.to_str().unwrap();
        let pids = std::fs::read_dir("/proc").unwrap().filter_map(|e| {
            let pid = e.unwrap().file_name().into_string().unwrap();
            pid.bytes().all(|b| b.is_ascii_digit()).then_some(pid)
        });
        pids.filter_map(|pid| std::fs::read(format!("/proc/{pid}/cmdline")).ok())
            .filter(|line| String::from_utf8_lossy(line).contains(name))
            .count()
    }

    fn folders(tmp: &Path) -> usize {
        let entries = std::fs::read_dir(tmp).unwrap();
        entries
            .filter(|e| e.as_ref().unwrap().path().is_dir())
            .count()
    }

    #[test]
    fn it_survives_its_nodes_and_ends_as_if_undisturbed() {
        survives_its_nodes(&[]);
    }

    #[test]
    fn live_workers_survive_in_their_processes() {
        let result = survives_its_nodes(&["--live"]);
        for change in result["changes"].as_array().unwrap() {
            assert!(
                change["steps_redone"].as_u64().unwrap_or(0) <= 1,
                "{change}"
            );
        }
    }

    fn survives_its_nodes(more: &[&str]) -> Value {
        let tmp = tempfile::tempdir().unwrap();
        let args = ["--steps", "400", "--seed", "7", "-o", "json"];
        let mut demo = start(tmp.path(), &[&args, more].concat());
        let status = end(&mut demo, tmp.path());
        let mut text = String::new();
        demo.stdout
            .take()
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();
        assert!(status.success(), "{status}\n{text}\n{}", stderr(tmp.path()));
        let result: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(result["ok"], true);
        assert_eq!(result["steps_lost_on_planned"], 0);
        assert_eq!(result["reached"], result["undisturbed"]);
        let changes: Vec<(&str, u64)> = result["changes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|c| (c["what"].as_str().unwrap(), c["world"].as_u64().unwrap()))
            .collect();
        let expected = [
            ("form", 4),
            ("kill", 3),
            ("join", 4),
            ("kill_rank_0", 3),
            ("drain", 2),
        ];
        assert_eq!(changes, expected);
        for change in result["changes"].as_array().unwrap() {
            let planned = !change["stopped_at_step"].is_null();
            assert_eq!(
                planned,
                matches!(change["what"].as_str(), Some("join" | "drain")),
                "{change}"
            );
            assert!(change["total_ms"].as_u64().unwrap() > 0, "{change}");
        }
        assert_eq!(folders(tmp.path()), 0);
        until("every process is gone", tmp.path(), || {
            running(tmp.path()) == 0
        });
        result
    }

    #[test]
    fn nothing_stays_when_it_is_interrupted_or_killed() {
        let tmp = tempfile::tempdir().unwrap();
        for signal in [Signal::SIGINT, Signal::SIGKILL] {
            let mut demo = start(tmp.path(), &["-o", "json"]);
            until("workers train", tmp.path(), || {
                stderr(tmp.path()).contains("trains with 4 ranks")
            });
            assert!(running(tmp.path()) >= 12);
            kill(Pid::from_raw(demo.id() as i32), signal).unwrap();
            let status = end(&mut demo, tmp.path());
            if signal == Signal::SIGINT {
                assert_eq!(status.code(), Some(130));
                assert_eq!(folders(tmp.path()), 0);
            }
            until("every process is gone", tmp.path(), || {
                running(tmp.path()) == 0
            });
        }
    }

    #[test]
    fn a_run_that_goes_wrong_says_so() {
        let tmp = tempfile::tempdir().unwrap();
        let mut demo = start(tmp.path(), &["-o", "json"]);
        until("workers train", tmp.path(), || {
            stderr(tmp.path()).contains("trains with 4 ranks")
        });
        // Somebody else ends the agent of n2.
        let root = std::fs::read_dir(tmp.path())
            .unwrap()
            .map(|e| e.unwrap().path())
            .find(|p| p.is_dir())
            .unwrap();
        let socket = root.join("n2/s");
        let agent = std::fs::read_dir("/proc")
            .unwrap()
            .filter_map(|e| e.unwrap().file_name().to_str()?.parse::<i32>().ok())
            .find(|pid| {
                let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                let line = String::from_utf8_lossy(&line).into_owned();
                line.contains("\0agent\0") && line.contains(socket.to_str().unwrap())
            })
            .unwrap();
        kill(Pid::from_raw(agent), Signal::SIGKILL).unwrap();
        assert_eq!(end(&mut demo, tmp.path()).code(), Some(1));
        let text = stderr(tmp.path());
        assert!(text.contains("the agent of n2 ended: signal: 9"), "{text}");
        assert!(text.contains("---- n3 agent.log"), "{text}");
        until("every process is gone", tmp.path(), || {
            running(tmp.path()) == 0
        });
        assert_eq!(folders(tmp.path()), 0);
    }
}
