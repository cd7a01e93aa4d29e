//! Finding an agent, asking it, and what the exit codes say.

use serde_json::Value;

use crate::agents::{World, stderr, stdout, until};

#[test]
fn nobody_answers() {
    let world = World::new();
    for command in ["status", "nodes", "jobs"] {
        let output = world.muster(&[command]);
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        assert!(stderr(&output).contains("muster doctor"), "{output:?}");
        assert!(output.stdout.is_empty());
    }
    let named = world.muster(&["status", "--socket", "/no/such/socket"]);
    assert_eq!(named.status.code(), Some(3));
    assert!(stderr(&named).contains("there is no such socket"));
    // A socket that was left behind is no agent.
    drop(std::os::unix::net::UnixListener::bind(world.socket()).unwrap());
    assert_eq!(world.muster(&["status"]).status.code(), Some(3));
    let by_name = world.muster(&["status", "--socket", world.socket().to_str().unwrap()]);
    assert_eq!(by_name.status.code(), Some(3));
    assert!(stderr(&by_name).contains("any more"), "{by_name:?}");
}

#[test]
fn wrong_usage_is_told_apart() {
    let world = World::new();
    for args in [
        &["nonsense"][..],
        &["events"],
        &["drain", "--grace", "soon"],
    ] {
        assert_eq!(world.muster(args).status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn the_only_agent_is_found() {
    let world = World::new();
    let agent = world.agent("alone", &world.socket());
    let status = world.json(&["status"]);
    assert_eq!(status["node"], agent.id.as_str());
    assert_eq!(status["host"], "alone");
    assert_eq!(status["cluster"], "test");
    assert_eq!(status["secret"], true);
    assert_eq!(status["socket"], world.socket().to_str().unwrap());
    let nodes = world.json(&["nodes"]);
    assert_eq!(nodes.as_array().map(Vec::len), Some(1));
    assert_eq!(world.json(&["jobs"]), Value::Array(Vec::new()));
    // Nothing but text where nobody reads colours.
    let text = stdout(&world.muster(&["nodes"]));
    assert!(text.starts_with("NODE") && text.contains("alone") && !text.contains('\u{1b}'));
}

#[test]
fn several_agents_are_listed_and_one_can_be_named() {
    let world = World::new();
    let embedded = world.dir.path().join("muster/run-4711.sock");
    let _a = world.agent("a", &world.socket());
    let b = world.agent("b", &embedded);
    let output = world.muster(&["status"]);
    assert_eq!(output.status.code(), Some(2));
    let text = stderr(&output);
    for socket in [&world.socket(), &embedded] {
        assert!(
            text.contains(&format!("--socket {}", socket.display())),
            "{text}"
        );
    }
    let named = world.json(&["status", "--socket", embedded.to_str().unwrap()]);
    assert_eq!(named["node"], b.id.as_str());
    let by_environment = world
        .command(&["status", "-o", "json"])
        .env("MUSTER_SOCKET", &embedded)
        .output()
        .unwrap();
    assert!(stdout(&by_environment).contains(&b.id));
}

#[test]
fn peers_see_each_other_and_one_is_drained() {
    let world = World::new();
    let other = world.dir.path().join("other.sock");
    let a = world.agent("a", &world.socket());
    let listening = until("a listens", || {
        let status = world.json(&["status"]);
        status["listening"][0].as_str().map(str::to_owned)
    });
    let b = world.agent_with("b", &other, vec![listening]);
    until("they are connected", || {
        let nodes = world.json(&["nodes"]);
        let rows = nodes.as_array()?.clone();
        let row = rows.iter().find(|r| r["node"] == b.id.as_str())?;
        (row["connected"] == true && row["host"] == "b").then_some(())
    });
    let unknown = world.muster(&["drain", "nobody"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(stderr(&unknown).contains("muster nodes"));
    assert!(b.is_running());
    let drained = world.json(&["drain", "b", "--grace", "1s", "--wait"]);
    assert_eq!(drained["node"], b.id.as_str());
    assert_eq!(
        (&drained["gone"], &drained["grace_ms"]),
        (&true.into(), &1000.into())
    );
    until("b ends", || (!b.is_running()).then_some(()));
    assert!(a.is_running());
}

#[test]
fn doctor_looks_at_the_state_of_the_agent_that_it_asked() {
    let world = World::new();
    let _agent = world.agent("a", &world.socket());
    let asked = world.json(&["status"])["state_dir"].clone();
    let elsewhere = world.dir.path().join("configured");
    let output = world
        .command(&["doctor", "-o", "json"])
        .env("MUSTER_STATE_DIR", &elsewhere)
        .output()
        .unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    let found = checks.iter().find(|c| c["check"] == "state directory");
    let detail = found.unwrap()["detail"].as_str().unwrap();
    assert!(detail.contains(asked.as_str().unwrap()), "{detail}");
}

/// A stderr that nobody reads any more must not turn an answer into a crash.
#[test]
fn nothing_panics_where_nobody_reads() {
    let world = World::new();
    for line in [
        &["status"][..],
        &["agent", "--state-dir=/proc/none"],
        &["demo", "--nodes=0"],
        &["demo-worker", "x"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let status = world
            .command(line)
            .stdout(writer.try_clone().unwrap())
            .stderr(writer)
            .status()
            .unwrap();
        // 101: a panic.
        assert!(
            matches!(status.code(), Some(code) if code != 101),
            "{line:?}: {status}"
        );
    }
}

#[test]
fn doctor_looks_at_the_agent_and_at_a_store() {
    let world = World::new();
    let _agent = world.agent("a", &world.socket());
    until("it listens", || {
        world.json(&["status"])["listening"][0].as_str().map(|_| ())
    });
    let store = world.dir.path().join("store");
    std::fs::create_dir(&store).unwrap();
    let report = world.json(&["doctor", "--store", store.to_str().unwrap()]);
    let status = |name: &str| {
        let all = report["checks"].as_array().unwrap();
        let check = all.iter().find(|c| c["check"] == name);
        check.unwrap_or_else(|| panic!("no check {name}: {report:#}"))["status"].clone()
    };
    for name in [
        "agent",
        "version",
        "cluster secret",
        "peers",
        "store",
        "state directory",
        "date",
    ] {
        assert_eq!(status(name), "ok", "{name}: {report:#}");
    }
    assert_eq!(status("listening"), "warn");
    assert_eq!(report["fail"], 0);
    let broken = world.muster(&["doctor", "--store", "/no/such/store"]);
    assert_eq!(broken.status.code(), Some(1));
    assert!(stdout(&broken).contains("fail  store"));
}

#[test]
fn doctor_without_an_agent_fails_only_where_one_is_named() {
    let world = World::new();
    let report = world.json(&["doctor"]);
    assert_eq!(report["checks"][1]["check"], "agent", "{report:#}");
    assert_eq!(report["checks"][1]["status"], "warn");
    let named = world.muster(&["doctor", "--socket", "/no/such"]);
    assert_eq!(named.status.code(), Some(1));
}

#[test]
fn configuration_names_its_sources() {
    let world = World::new();
    let file = world.dir.path().join("m.toml");
    std::fs::write(&file, "cluster = \"c9\"\n").unwrap();
    let output = world
        .command(&["config", "-o", "json", "--config", file.to_str().unwrap()])
        .env("MUSTER_MDNS", "off")
        .output()
        .unwrap();
    let config: Value = serde_json::from_slice(&output.stdout).unwrap();
    let row = |key: &str| {
        let rows = config["rows"].as_array().unwrap();
        rows.iter().find(|r| r["key"] == key).unwrap().clone()
    };
    assert_eq!(row("cluster")["value"], "\"c9\"");
    assert_eq!(row("cluster")["source"], format!("file {}", file.display()));
    assert_eq!(row("mdns")["source"], "environment MUSTER_MDNS");
    // Without a secret no agent would start; what it would be told is shown all the same.
    assert!(config["warnings"][0].as_str().unwrap().contains("secret"));
    std::fs::write(&file, "clutser = \"c9\"\n").unwrap();
    let wrong = world.muster(&["config", "--config", file.to_str().unwrap()]);
    assert_eq!(wrong.status.code(), Some(1));
    assert!(stderr(&wrong).contains("cluster"));
}

#[test]
fn completions_and_pages_know_every_command() {
    let world = World::new();
    for shell in ["bash", "zsh", "fish"] {
        let script = stdout(&world.muster(&["completions", shell]));
        for command in ["run", "events", "doctor", "cancel"] {
            assert!(script.contains(command), "{shell} {command}");
        }
    }
    assert!(stdout(&world.muster(&["man"])).contains(".SH SUBCOMMANDS"));
    let dir = world.dir.path().to_str().unwrap();
    assert!(world.muster(&["man", dir]).status.success());
    let page = std::fs::read_to_string(world.dir.path().join("muster-events.1")).unwrap();
    assert!(page.contains("follow"));
}

#[test]
fn a_reader_that_has_enough_is_no_error() {
    let world = World::new();
    let mut child = world
        .command(&["completions", "bash"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
}

/// A listener there answers each question with these bytes and closes.
fn answering(world: &World, bytes: &'static [u8]) {
    answering_times(world, bytes, usize::MAX);
}

/// The same, so many times; then nobody listens there.
fn answering_times(world: &World, bytes: &'static [u8], times: usize) {
    use std::io::{Read, Write};
    let listener = std::os::unix::net::UnixListener::bind(world.socket()).unwrap();
    // Ends with the test's process.
    std::thread::spawn(move || {
        for stream in listener.incoming().take(times) {
            let mut stream = stream.unwrap();
            let mut length = [0; 4];
            stream.read_exact(&mut length).unwrap();
            let mut question = vec![0; u32::from_le_bytes(length) as usize];
            stream.read_exact(&mut question).unwrap();
            stream.write_all(bytes).unwrap();
        }
    });
}

#[test]
fn answers_that_are_none_are_refused_by_name() {
    let check = |bytes: &'static [u8], code: i32, text: &str| {
        let world = World::new();
        answering(&world, bytes);
        let socket = world.socket();
        let output = world.muster(&["jobs", "--socket", socket.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert!(stderr(&output).contains(text), "{output:?}");
        // What does not speak Muster is no agent to choose either.
        assert_eq!(world.muster(&["jobs"]).status.code(), Some(3));
    };
    // A length beyond every limit; a cut frame; another version; no JSON inside.
    check(&[255, 255, 255, 255], 3, "the limit is");
    check(&[9, 0, 0, 0, 1, 0], 3, "in the middle of a frame");
    check(&[2, 0, 0, 0, 99, 0], 1, "version 99");
    check(&[], 3, "closed the connection");
    let version = muster_protocol::codec::WIRE_VERSION;
    let frame: &'static [u8] = Vec::leak(vec![5, 0, 0, 0, version, 0, 2, b'{', b'x']);
    check(frame, 1, "not JSON");
}

/// The kernel takes connections for a process that is stopped.
#[test]
fn an_agent_that_is_stopped_is_named_and_another_is_asked_beside_it() {
    let world = World::new();
    let stopped = world.dir.path().join("muster/run-4711.sock");
    let _listens = std::os::unix::net::UnixListener::bind(&stopped).unwrap();
    let output = world.muster(&["jobs"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(
        stderr(&output).contains(stopped.to_str().unwrap()),
        "{output:?}"
    );
    let agent = world.agent("runs", &world.socket());
    assert_eq!(world.json(&["status"])["node"], agent.id.as_str());
}

/// An agent inside a launcher goes with its job, right behind the event that tells of the end.
#[test]
fn following_events_ends_well_where_the_agent_goes_with_the_job() {
    use muster_protocol::codec::{WIRE_VERSION, encode_frame};
    use muster_protocol::local::Answer;
    let world = World::new();
    let end = r#"[{"seq":7,"event":"generation","generation":2,"kind":"finished"}]"#;
    let frame = encode_frame(&Answer::Json(end.into())).unwrap();
    assert_eq!(frame[0], WIRE_VERSION);
    let mut bytes = u32::try_from(frame.len()).unwrap().to_le_bytes().to_vec();
    bytes.extend(frame);
    // The second question is whether there is more.
    answering_times(&world, Vec::leak(bytes), 2);
    let socket = world.socket();
    let args = [
        "events",
        "j",
        "--follow",
        "--socket",
        socket.to_str().unwrap(),
    ];
    let output = world.muster(&args);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(stdout(&output).contains("finished"), "{output:?}");
}

#[test]
fn a_checkpoint_that_cannot_begin_yet_says_why_while_it_waits() {
    use muster_protocol::codec::encode_frame;
    use muster_protocol::local::Answer;
    let world = World::new();
    let jobs =
        r#"[{"job":"j","digest":"ab","checkpoint":{"stage":"waiting","why":"not every worker"}}]"#;
    let frame = encode_frame(&Answer::Json(jobs.into())).unwrap();
    let mut bytes = u32::try_from(frame.len()).unwrap().to_le_bytes().to_vec();
    bytes.extend(frame);
    answering(&world, Vec::leak(bytes));
    let socket = world.socket();
    let args = ["checkpoint", "j", "--timeout", "2s", "--socket"];
    let output = world.muster(&[&args[..], &[socket.to_str().unwrap()]].concat());
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    // Once while it waits, and once as the reason why it gives up.
    assert_eq!(said.matches("not every worker").count(), 2, "{said}");
}

#[test]
fn colours_only_on_a_terminal_and_never_with_no_color() {
    let world = World::new();
    let _agent = world.agent("a", &world.socket());
    let on_terminal = |no_color: &str| {
        let muster = env!("CARGO_BIN_EXE_muster");
        let command = world
            .command(&[])
            .get_envs()
            .fold(std::process::Command::new("script"), |mut c, (k, v)| {
                c.env(k, v.unwrap_or_default());
                c
            })
            .args(["-qec", &format!("{muster} nodes"), "/dev/null"])
            .env("TERM", "xterm")
            .env("NO_COLOR", no_color)
            .output();
        command.ok().map(|output| stdout(&output))
    };
    let Some(coloured) = on_terminal("") else {
        eprintln!("SKIPPED: there is no `script` to make a terminal with");
        return;
    };
    assert!(coloured.contains("\u{1b}[32malive"), "{coloured:?}");
    let plain = on_terminal("1").unwrap();
    assert!(
        plain.contains("alive") && !plain.contains('\u{1b}'),
        "{plain:?}"
    );
}
