//! Real servers, as processes that end with the test.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

pub(crate) struct Running {
    child: Child,
    /// Its files, and its log.
    pub(crate) place: tempfile::TempDir,
    /// Files that it leaves elsewhere.
    pub(crate) litter: Vec<PathBuf>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        for path in &self.litter {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Running {
    /// Starts a program whose path a variable names.
    pub(crate) fn start(variable: &str, command: impl FnOnce(&Path, &mut Command)) -> Self {
        let program = std::env::var_os(variable)
            .unwrap_or_else(|| panic!("{variable} is not set: tests/run installs it and sets it"));
        let place = tempfile::tempdir().unwrap();
        let log = std::fs::File::create(place.path().join("log")).unwrap();
        let mut program = Command::new(PathBuf::from(program));
        command(place.path(), &mut program);
        let child = program
            .current_dir(place.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        Self {
            child,
            place,
            litter: Vec::new(),
        }
    }

    /// Waits until it is of use, at most two minutes.
    pub(crate) fn until<T>(&mut self, mut ready: impl FnMut() -> Result<T, String>) -> T {
        let began = Instant::now();
        loop {
            let why = match ready() {
                Ok(value) => return value,
                Err(why) => why,
            };
            let ended = self.child.try_wait().unwrap();
            if ended.is_some() || began.elapsed() > Duration::from_secs(120) {
                let log = std::fs::read_to_string(self.place.path().join("log"));
                panic!(
                    "not ready: {why}; ended: {ended:?}; {}",
                    log.unwrap_or_default()
                );
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Ports that are free, below those that the kernel gives to outgoing connections. A server binds them some time later:
/// tests that run at once under nextest take them out of different ranges.
pub(crate) fn ports<const N: usize>() -> [u16; N] {
    const SLOTS: u16 = 12;
    const OF_EACH: u16 = 800;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let spread = u16::try_from(std::process::id() % u32::from(OF_EACH)).unwrap();
    let slot = std::env::var("NEXTEST_TEST_GLOBAL_SLOT").ok();
    let slot: u16 = slot.and_then(|slot| slot.parse().ok()).unwrap_or(0);
    let first = 10_000 + slot % SLOTS * OF_EACH;
    let mut free = (0..OF_EACH)
        .map(|_| first + (spread + NEXT.fetch_add(1, Ordering::Relaxed)) % OF_EACH)
        .filter(|port| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok());
    std::array::from_fn(|_| free.next().expect("a free port"))
}

const SEAWEEDFS: &str = r#"{"identities":[{"name":"t","credentials":[{"accessKey":"test","secretKey":"testsecret"}],"actions":["Admin","Read","Write","List","Tagging"]}]}"#;

/// SeaweedFS, with the buckets `bucket` and `other-bucket`, once `ready` says that its port answers.
pub(crate) fn seaweedfs(mut ready: impl FnMut(u16) -> Result<(), String>) -> (Running, u16) {
    let all = ports::<14>();
    let mut server = Running::start("MUSTER_TEST_WEED", |place, command| {
        seaweedfs_arguments(place, command, &all);
    });
    for part in ["admin", "filer", "master", "s3", "volume"] {
        let socket = |port| format!("/tmp/seaweedfs-{part}-grpc-{port}.sock").into();
        server.litter.extend(all.iter().map(socket));
    }
    server.until(|| ready(all[0]));
    (server, all[0])
}

fn seaweedfs_arguments(place: &Path, command: &mut Command, ports: &[u16]) {
    std::fs::write(place.join("s3.json"), SEAWEEDFS).unwrap();
    std::fs::create_dir(place.join("data")).unwrap();
    command
        .env("S3_BUCKET", "bucket,other-bucket")
        .args(["mini", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-dir=data"])
        .args(["-s3.config=s3.json", "-master.telemetry=false"])
        .args(["-s3.port.iceberg=0", "-s3.port.lance=0"])
        .args(["-filer.localSocket=filer.sock", "-s3.localSocket=s3.sock"]);
    let flags = [
        "s3.port",
        "s3.port.grpc",
        "master.port",
        "master.port.grpc",
        "volume.port",
        "volume.port.grpc",
        "volume.port.public",
        "filer.port",
        "filer.port.grpc",
        "filer.port.public",
        "admin.port",
        "admin.port.grpc",
        "webdav.port",
        "debug.port",
    ];
    for (flag, port) in flags.iter().zip(ports) {
        command.arg(format!("-{flag}={port}"));
    }
}

/// `rclone serve s3`, which ignores conditions, with the bucket `bucket`.
pub(crate) fn rclone(mut ready: impl FnMut(u16) -> Result<(), String>) -> (Running, u16) {
    let [port] = ports();
    let mut server = Running::start("MUSTER_TEST_RCLONE", |place, command| {
        std::fs::create_dir_all(place.join("data/bucket")).unwrap();
        command
            .env("RCLONE_CONFIG", place.join("none"))
            .args(["serve", "s3", "--auth-key", "test,testsecret", "--addr"])
            .arg(format!("127.0.0.1:{port}"))
            .arg("data");
    });
    server.until(|| ready(port));
    (server, port)
}
