use std::os::unix::fs::PermissionsExt;

use clap::Parser;

use super::*;

#[derive(Debug, Parser)]
struct Command {
    #[command(flatten)]
    flags: Flags,
}

const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// Surroundings with nothing in them but what a test puts there.
struct World {
    tmp: tempfile::TempDir,
    inputs: Inputs,
}

impl World {
    fn new() -> World {
        World {
            tmp: tempfile::tempdir().unwrap(),
            inputs: Inputs {
                root: true,
                ..Inputs::default()
            },
        }
    }

    /// With a secret, so that the default addresses are allowed.
    fn with_secret() -> World {
        let mut world = World::new();
        let path = world.write("secret", &format!("{SECRET}\n"));
        world = world.env(
            "CREDENTIALS_DIRECTORY",
            path.parent().unwrap().to_str().unwrap(),
        );
        std::fs::rename(&path, world.tmp.path().join("cluster-secret")).unwrap();
        world
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = self.tmp.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        path
    }

    fn file(mut self, text: &str) -> World {
        self.inputs.default_file = Some(self.write("musterd.toml", text));
        self
    }

    fn env(mut self, name: &str, value: &str) -> World {
        self.inputs.environment.insert(name.into(), value.into());
        self
    }

    fn flags(mut self, flags: &[&str]) -> World {
        let words = std::iter::once(&"musterd").chain(flags);
        self.inputs.flags = Command::try_parse_from(words).unwrap().flags;
        self
    }

    fn load(&self) -> (AgentConfig, Effective) {
        load(&self.inputs).unwrap()
    }

    fn error(&self) -> String {
        load(&self.inputs).unwrap_err().to_string()
    }
}

fn source(effective: &Effective, key: &str) -> String {
    let row = effective.rows.iter().find(|r| r.key == key).unwrap();
    row.source.to_string()
}

#[test]
fn the_defaults_are_what_the_documentation_says() {
    let (config, effective) = World::with_secret().load();
    assert_eq!(config.cluster, "default");
    assert_eq!(
        config.listen,
        [SocketAddr::from(([0, 0, 0, 0], DEFAULT_PORT))]
    );
    assert_eq!(config.state_dir, Path::new("/var/lib/muster"));
    assert_eq!(config.socket, Path::new("/run/muster/musterd.sock"));
    assert_eq!(config.http, Some(SocketAddr::from(([127, 0, 0, 1], 9477))));
    assert_eq!(config.suspect_after, Span::from_secs(2));
    assert_eq!(config.agent_grace, Span::from_secs(30));
    assert_eq!(config.secret.unwrap().bytes(), SECRET.as_bytes());
    assert!(config.mdns && !config.quic && !config.insecure);
    assert_eq!(source(&effective, "secret_file"), "systemd credential");
    assert_eq!(source(&effective, "listen"), "default");
    assert!(effective.warnings.is_empty());
}

#[test]
fn flags_win_over_environment_over_file_over_defaults() {
    let world = World::with_secret()
        .file("cluster = 'file'\nhttp = 'off'\nquic = true\nagent_grace = '1m'");
    let (config, _) = world.load();
    assert_eq!((config.cluster.as_str(), config.http), ("file", None));
    let world = world.env("MUSTER_CLUSTER", "env").env("MUSTER_QUIC", "0");
    let (config, _) = world.load();
    assert_eq!((config.cluster.as_str(), config.quic), ("env", false));
    let world = world.flags(&["--cluster", "flag", "--quic"]);
    let (config, effective) = world.load();
    assert_eq!((config.cluster.as_str(), config.quic), ("flag", true));
    assert_eq!(config.agent_grace, Span::from_secs(60));
    assert_eq!(source(&effective, "cluster"), "flag --cluster");
    assert!(source(&effective, "http").contains("musterd.toml"));
    assert_eq!(
        source(&effective, "agent_grace"),
        source(&effective, "http")
    );
    // The listing is itself a valid file, and the secret is not in it.
    let listing = effective.to_string();
    assert!(listing.parse::<toml::Table>().is_ok(), "{listing}");
    assert!(!listing.contains(SECRET));
    assert!(!format!("{config:?}").contains(SECRET));
}

#[test]
fn lists_and_maps_are_read_from_every_layer() {
    let expected = |config: &AgentConfig| {
        assert_eq!(config.labels["zone"], "a");
        assert_eq!(config.labels["gpu"], "h200");
        assert_eq!(config.place, ["dc", "rack"]);
        let all: Vec<_> = config.bootstrap.iter().map(Bootstrap::to_string).collect();
        assert_eq!(all, ["node-1:7970", "[::1]:9", "10.0.0.1:7970", "x.y:80"]);
    };
    let world = World::with_secret().file(
        "bootstrap = ['node-1', '[::1]:9', '10.0.0.1', 'x.y:80']\nplace = ['dc', 'rack']\n[labels]\nzone = 'a'\ngpu = 'h200'",
    );
    expected(&world.load().0);
    let world = World::with_secret()
        .env("MUSTER_BOOTSTRAP", "node-1, [::1]:9,10.0.0.1,x.y:80,")
        .env("MUSTER_PLACE", "dc,rack")
        .env("MUSTER_LABELS", "zone=a,gpu=h200");
    expected(&world.load().0);
    let world = World::with_secret().flags(&[
        "--bootstrap",
        "node-1,[::1]:9",
        "--bootstrap",
        "10.0.0.1",
        "--bootstrap",
        "x.y:80",
        "--place",
        "dc,rack",
        "--labels",
        "zone=a",
        "--labels",
        "gpu=h200",
    ]);
    expected(&world.load().0);
}

#[test]
fn an_unknown_key_is_named_with_the_closest_one() {
    let text = World::with_secret().file("state_dirr = '/x'").error();
    assert!(
        text.contains("\"state_dirr\"") && text.contains("\"state_dir\""),
        "{text}"
    );
    assert!(text.contains("musterd.toml"), "{text}");
    let text = World::with_secret()
        .env("MUSTER_SUSPECT_AFTR", "1s")
        .error();
    assert!(
        text.contains("MUSTER_SUSPECT_AFTR") && text.contains("\"suspect_after\""),
        "{text}"
    );
    // What belongs to others is only mentioned; what Kubernetes makes up, not even that.
    let (_, effective) = World::with_secret()
        .env("MUSTER_LIBRARY", "/opt/libmuster.so")
        .env("MUSTER_SOMETHING_ELSE", "1")
        .env("MUSTER_PORT", "tcp://10.0.0.1:7970")
        .env("MUSTER_PORT_7970_TCP_ADDR", "10.0.0.1")
        .env("MUSTER_SERVICE_HOST", "10.0.0.1")
        .env("MUSTER_SERVICE_PORT_HTTP", "9477")
        .env("MUSTER_SOCKET_PORT", "tcp://10.0.0.1:7970")
        .load();
    assert_eq!(effective.warnings.len(), 1);
    assert!(effective.warnings[0].contains("MUSTER_SOMETHING_ELSE"));
}

#[test]
fn a_wrong_value_is_named_with_its_source() {
    for (file, parts) in [
        ("listen = ['nonsense']", ["listen", "ip:port"]),
        ("listen = []", ["listen", "at least one"]),
        ("listen = '1.2.3.4:5'", ["listen", "list of texts"]),
        ("quic = 'maybe'", ["quic", "true or false"]),
        ("suspect_after = 2", ["suspect_after", "\"2s\""]),
        (
            "suspect_after = '2 parsecs'",
            ["suspect_after", "ms, s, m or h"],
        ),
        ("suspect_after = '1ms'", ["suspect_after", "200ms"]),
        ("agent_grace = '1s'", ["agent_grace", "suspect_after"]),
        ("agent_grace = '-1s'", ["agent_grace", "no time"]),
        ("agent_grace = '9999999h'", ["agent_grace", "no time"]),
        ("agent_grace = 'infs'", ["agent_grace", "no time"]),
        ("http = '9477'", ["http", "ip:port"]),
        ("state_dir = 'relative'", ["state_dir", "absolute"]),
        ("cluster = ''", ["cluster", "1 to 64"]),
        ("bootstrap = ['http://x/']", ["bootstrap", "host:port"]),
        ("bootstrap = ['x:0']", ["bootstrap", "port"]),
        ("checkpoint_memory = '64Q'", ["checkpoint_memory", "64G"]),
        (
            "checkpoint_memory = '99999999T'",
            ["checkpoint_memory", "64G"],
        ),
        ("checkpoint_lease = 600", ["checkpoint_lease", "\"600s\""]),
        ("labels = ['a']", ["labels", "table"]),
        ("labels = { a = 1 }", ["labels", "text"]),
        ("log_format = 'xml'", ["log_format", "json"]),
        ("cluster = ", ["musterd.toml", "TOML"]),
    ] {
        let text = World::with_secret().file(file).error();
        for part in parts {
            assert!(text.contains(part), "{file}: {text}");
        }
        assert!(text.contains("musterd.toml"), "{file}: {text}");
    }
    let text = World::with_secret().env("MUSTER_QUIC", "maybe").error();
    assert!(
        text.contains("environment MUSTER_QUIC") && text.contains("maybe"),
        "{text}"
    );
    let text = World::with_secret()
        .flags(&["--labels", "nonsense"])
        .error();
    assert!(
        text.contains("flag --labels") && text.contains("name=value"),
        "{text}"
    );
}

#[test]
fn a_named_file_must_exist_and_the_default_one_need_not() {
    let mut world = World::with_secret();
    world.inputs.default_file = Some(world.tmp.path().join("absent"));
    world.load();
    let world = world.env("MUSTER_CONFIG", "/nonexistent/muster.toml");
    let text = world.error();
    assert!(
        text.contains("/nonexistent/muster.toml") && text.contains("MUSTER_CONFIG"),
        "{text}"
    );
    // An empty variable is an unset one, but an empty list is a list.
    let world = world.env("MUSTER_CONFIG", "").env("MUSTER_CLUSTER", "");
    assert_eq!(world.load().0.cluster, "default");
    let other = world.write("other.toml", "cluster = 'other'");
    let world = world.flags(&["--config", other.to_str().unwrap()]);
    assert_eq!(world.load().0.cluster, "other");
}

#[test]
fn an_address_that_others_can_reach_needs_a_secret() {
    let text = World::new().error();
    for part in [
        "0.0.0.0:7970",
        "secret_file",
        "MUSTER_SECRET_FILE",
        "insecure = true",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let mixed = ["--listen", "127.0.0.1:1", "--listen", "10.0.0.1:1"];
    assert!(World::new().flags(&mixed).error().contains("10.0.0.1:1"));
    let (config, _) = World::new().flags(&["--insecure"]).load();
    assert!(config.secret.is_none() && config.insecure);
}

#[test]
fn a_secret_that_is_no_secret_is_refused() {
    let world = World::new();
    for (text, part) in [
        ("", "empty"),
        ("short\n", "at least 16"),
        (&"x".repeat(5000), "more than 4096"),
    ] {
        let path = world.write("secret", text);
        let world = World::new().flags(&["--secret-file", path.to_str().unwrap()]);
        let error = world.error();
        assert!(error.contains(part) && error.contains("secret"), "{error}");
    }
    let error = World::new()
        .env("MUSTER_SECRET_FILE", "/nonexistent/s")
        .error();
    assert!(
        error.contains("/nonexistent/s") && error.contains("urandom"),
        "{error}"
    );
    let error = World::new().env("MUSTER_SECRET_FILE", "/").error();
    assert!(error.contains("directory"), "{error}");
}

#[test]
fn a_secret_for_all_eyes_is_mentioned_but_not_in_a_pod() {
    use std::os::unix::fs::PermissionsExt;
    let world = World::new();
    let path = world.write("secret", SECRET);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let world = world.env("MUSTER_SECRET_FILE", path.to_str().unwrap());
    let (_, effective) = world.load();
    assert!(
        effective.warnings[0].contains("chmod 600"),
        "{:?}",
        effective.warnings
    );
    let (_, effective) = world.env("KUBERNETES_SERVICE_HOST", "10.0.0.1").load();
    assert!(effective.warnings.is_empty());
}

#[test]
fn the_surroundings_choose_the_directories() {
    let paths = |world: World| {
        let (config, _) = world.load();
        (config.state_dir, config.socket)
    };
    let mut world = World::with_secret()
        .env("XDG_RUNTIME_DIR", "/run/user/7")
        .env("HOME", "/home/u");
    let root = (
        PathBuf::from("/var/lib/muster"),
        PathBuf::from("/run/muster/musterd.sock"),
    );
    assert_eq!(load(&world.inputs).unwrap().0.socket, root.1);
    world.inputs.root = false;
    let (_, effective) = world.load();
    assert_eq!(
        source(&effective, "socket"),
        "default under $XDG_RUNTIME_DIR"
    );
    let world = world
        .env("STATE_DIRECTORY", "/var/lib/muster:/var/lib/other")
        .env("RUNTIME_DIRECTORY", "/run/muster");
    assert_eq!(paths(world), root);
    let environment = BTreeMap::from([("XDG_RUNTIME_DIR".to_owned(), "/run/user/7".to_owned())]);
    assert_eq!(
        socket_candidates(&environment),
        [
            Path::new("/run/user/7/muster/musterd.sock"),
            Path::new("/run/muster/musterd.sock")
        ]
    );
}

/// Every key is a flag of its name, so that the three spellings stay one.
#[test]
fn every_key_is_a_flag() {
    use clap::CommandFactory;
    let command = Command::command();
    let flags: Vec<String> = command
        .get_arguments()
        .filter_map(|a| a.get_long())
        .map(|l| l.replace('-', "_"))
        .filter(|l| l != "config")
        .collect();
    let keys: Vec<&str> = keys::KEYS.iter().map(|k| k.name).collect();
    assert_eq!(flags, keys);
    for key in keys::KEYS {
        assert_eq!(
            key.flag.trim_start_matches("--").replace('-', "_"),
            key.name
        );
        let world = World::new().flags(&[&format!("{}=x", key.flag)]);
        assert_eq!(world.inputs.flags.given(key.name), ["x"]);
    }
}

#[test]
fn memory_for_slots_has_a_unit_or_no_bound() {
    let of = |text: &str| {
        let world = World::with_secret().env("MUSTER_CHECKPOINT_MEMORY", text);
        world.load().0.checkpoint_memory
    };
    let usual = World::with_secret().load().0;
    assert_eq!(usual.checkpoint_memory, u64::MAX);
    assert_eq!(usual.checkpoint_lease, Span::from_secs(600));
    let cases = [
        ("4096", 4096),
        ("3K", 3 << 10),
        ("5MiB", 5 << 20),
        ("64G", 64 << 30),
        ("2 TiB", 2 << 40),
        ("unlimited", u64::MAX),
    ];
    for (text, bytes) in cases {
        assert_eq!(of(text), bytes, "{text}");
    }
}

#[test]
fn an_agent_on_loopback_makes_its_users_secret_once() {
    let home = tempfile::tempdir().unwrap();
    let inputs = |insecure: bool| Inputs {
        flags: Flags {
            listen: vec!["127.0.0.1:0".into()],
            insecure: insecure.then(|| "true".into()),
            ..Flags::default()
        },
        environment: [("HOME".to_owned(), home.path().display().to_string())].into(),
        ..Inputs::default()
    };
    let path = home.path().join(".config/muster/secret");
    assert!(load(&inputs(true)).unwrap().0.secret.is_none() && !path.exists());
    let first = load(&inputs(false)).unwrap().0.secret;
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!((first.is_some(), mode & 0o777), (true, 0o600));
    assert_eq!(load_for_user(&inputs(false)).unwrap().0.secret, first);
    assert_eq!(
        std::fs::read_dir(path.parent().unwrap()).unwrap().count(),
        1
    );
    let homeless = Inputs {
        environment: BTreeMap::new(),
        ..inputs(false)
    };
    assert!(matches!(load(&homeless), Err(ConfigError::HomeSecret(_))));
}
