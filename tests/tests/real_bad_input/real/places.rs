//! Places that somebody else has: sockets, state directories, ports.

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};

use crate::support::{Bed, query, until};
use muster_protocol::local::Query;

#[test]
fn two_agents_on_one_socket_or_one_state_directory() {
    let mut bed = Bed::new();
    let mut first = bed.agent("a", &[]);
    let mut launcher = bed.launch("a", &["--nnodes=1"]);
    let before = bed.until_runs_on(&["a"]);
    let pid = first.pid().to_string();

    let same = format!("--socket={}", bed.socket("a").display());
    let mut second = bed.try_agent("b", &[], &[&same]);
    assert_eq!(second.code(), 1, "{}", second.log());
    assert!(
        second.log().contains(&pid) && second.log().contains("socket"),
        "{}",
        second.log()
    );

    let same = format!("--state-dir={}", bed.path("a/state").display());
    let mut third = bed.try_agent("c", &[], &[&same]);
    assert_eq!(third.code(), 1, "{}", third.log());
    assert!(
        third.log().contains(&pid) && third.log().contains("state"),
        "{}",
        third.log()
    );

    assert!(first.is_alive() && query(&bed.socket("a"), Query::Status).is_some());
    assert_eq!(bed.until_runs_on(&["a"]), before);
    let _open = bed.finish();
    assert_eq!(launcher.code(), 0);
}

#[test]
fn a_stale_socket_file_stops_neither_agent_nor_launcher() {
    let mut bed = Bed::new();
    // The user's own agent's socket is where a launcher looks first.
    let socket = bed.path("a/run/muster/musterd.sock");
    std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
    let here = format!("--socket={}", socket.display());
    let mut agent = bed.agent_and("a", &[], &[&here]);
    agent.kill();
    assert!(socket.exists(), "the file of a killed agent stays");

    // Nobody answers there: the launcher embeds an agent.
    let worker = bed.path("worker.sh");
    let mut alone = bed.run("a", &["--nnodes=1"], &["sh", worker.to_str().unwrap()]);
    bed.until_runs_on(&["a"]);
    alone.signal(libc::SIGINT);
    assert_eq!(alone.code(), 130, "{}", alone.log());

    // A launcher that was told to use it says that nobody answers, and waits.
    let named = ["--socket", socket.to_str().unwrap(), "--nnodes=1"];
    let mut waiting = bed.run("a", &named, &["sh", worker.to_str().unwrap()]);
    waiting.until_says("no agent answers");
    let _agent = bed.agent_and("a", &[], &[&here]);
    bed.until_runs_on(&["a"]);
    let _open = bed.finish();
    assert_eq!(waiting.code(), 0, "{}", waiting.log());
}

#[test]
fn ports_that_are_taken_are_named_with_the_fix() {
    let mut bed = Bed::new();
    let stranger = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = stranger.local_addr().unwrap().port();

    let taken = format!("--listen=127.0.0.1:{port}");
    let mut agent = bed.try_agent("a", &[], &[&taken]);
    assert_eq!(agent.code(), 1, "{}", agent.log());
    let said = agent.log();
    assert!(
        said.contains(&port.to_string()) && said.contains("listen"),
        "{said}"
    );

    let taken = format!("--http=127.0.0.1:{port}");
    let mut agent = bed.try_agent("b", &[], &[&taken]);
    assert_eq!(agent.code(), 1, "{}", agent.log());
    let said = agent.log();
    assert!(
        said.contains(&port.to_string()) && said.contains("--http off"),
        "{said}"
    );
}

/// Somebody else's service: takes every connection, says something, and keeps it open.
fn strange_service(says: &'static [u8]) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        for stream in listener.incoming().take(1_000).flatten() {
            let mut stream = stream;
            let _gone = stream.write_all(says);
            kept.push(stream);
        }
    });
    port
}

#[test]
fn a_strangers_port_among_the_endpoints_does_no_harm() {
    for says in [&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], b""] {
        let mut bed = Bed::new();
        let strange = strange_service(says);
        let good = bed.port("a");
        let endpoints = format!("--rdzv-endpoint=127.0.0.1:{strange},127.0.0.1:{good}");
        let all = ["--nnodes=2", endpoints.as_str()];
        let worker = bed.path("worker.sh");
        let words = ["sh", worker.to_str().unwrap()];
        let mut launchers = [bed.run("a", &all, &words), bed.run("b", &all, &words)];
        bed.until_runs_on(&["a", "b"]);
        let _open = bed.finish();
        for launcher in &mut launchers {
            assert_eq!(launcher.code(), 0, "{}", launcher.log());
        }
    }
}

#[test]
fn an_endpoint_that_only_a_stranger_holds_is_named_to_the_user() {
    let mut bed = Bed::new();
    let strange = strange_service(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    let endpoint = format!("--rdzv-endpoint=127.0.0.1:{strange}");
    let worker = bed.path("worker.sh");
    let words = ["sh", worker.to_str().unwrap()];
    let mut launcher = bed.run("a", &["--nnodes=2", &endpoint], &words);
    launcher.until_says("waiting for 1 more of 2 nodes");
    launcher.until_says(&format!("127.0.0.1:{strange}"));
    launcher.signal(libc::SIGINT);
    assert_eq!(launcher.code(), 130, "{}", launcher.log());
    until("nothing is left", || bed.worker_pids().is_empty());
}
