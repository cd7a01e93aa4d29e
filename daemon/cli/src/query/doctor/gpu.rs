//! GPUs: whether workers here would see devices and find the driver's library.
//!
//! Nothing is loaded: the library's presence and the devices' rights decide.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

use super::Check;

const NAME: &str = "GPUs";
const LIBRARY: &str = "libnvidia-ml.so.1";
/// Where distributions and container runtimes put the driver's libraries.
const FOLDERS: &[&str] = &[
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/local/cuda/compat",
    "/run/opengl-driver/lib",
    "/usr/lib/wsl/lib",
    "/home/kubernetes/bin/nvidia/lib64",
];

/// The GPUs and the driver that were found on this node.
#[derive(Debug, Default)]
struct Seen {
    devices: Vec<String>,
    /// A device that exists and cannot be opened, and why.
    denied: Option<String>,
    library: Option<PathBuf>,
    driver: Option<String>,
    cuda_visible: Option<String>,
}

pub(super) fn check() -> Check {
    let mut seen = Seen {
        devices: devices(),
        library: library(std::env::var("LD_LIBRARY_PATH").ok().as_deref()),
        driver: fs::read_to_string("/proc/driver/nvidia/version")
            .ok()
            .and_then(|text| version(&text).map(str::to_owned)),
        cuda_visible: std::env::var("CUDA_VISIBLE_DEVICES").ok(),
        denied: None,
    };
    seen.denied = seen.devices.iter().find_map(|name| {
        let path = Path::new("/dev").join(name);
        let error = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .err()?;
        Some(format!("{}: {error}", path.display()))
    });
    judge(&seen)
}

/// `nvidia0`, `nvidia1`, ..., without nvidiactl and its like.
fn devices() -> Vec<String> {
    let mut all: Vec<String> = fs::read_dir("/dev")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| {
            name.strip_prefix("nvidia")
                .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
        })
        .collect();
    all.sort();
    all
}

fn library(path: Option<&str>) -> Option<PathBuf> {
    let own = path
        .unwrap_or_default()
        .split(':')
        .filter(|p| !p.is_empty());
    own.chain(FOLDERS.iter().copied())
        .map(|folder| Path::new(folder).join(LIBRARY))
        .find(|file| file.is_file())
}

/// The number in "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar ...".
fn version(text: &str) -> Option<&str> {
    let is_number =
        |word: &&str| word.contains('.') && word.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    text.lines().next()?.split_whitespace().find(is_number)
}

fn judge(seen: &Seen) -> Check {
    let count = seen.devices.len();
    let driver = seen
        .driver
        .as_ref()
        .map_or(String::new(), |v| format!(", driver {v}"));
    match (count, &seen.library) {
        (0, None) if seen.driver.is_none() => Check::ok(
            NAME,
            "none here: one worker unless --nproc-per-node says otherwise",
        ),
        (0, _) => Check::warn(
            NAME,
            format!("the driver is here{driver}, but no /dev/nvidia0"),
            "in a container: start it with GPUs (docker run --gpus all; runtimeClassName: nvidia); on a host: nvidia-modprobe, or load the module with nvidia-smi as root",
        ),
        (_, None) => Check::fail(
            NAME,
            format!(
                "{count} devices{driver}, but {LIBRARY} is in none of the usual folders nor in LD_LIBRARY_PATH"
            ),
            "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility; on a host: install the driver's libraries of the same version",
        ),
        (_, Some(library)) => {
            let detail = format!("{count}{driver}, {}", library.display());
            if let Some(denied) = &seen.denied {
                return Check::fail(
                    NAME,
                    format!("{detail}; {denied}"),
                    "let this user open the devices (group video or render), or allow them in the container's device cgroup",
                );
            }
            match &seen.cuda_visible {
                Some(visible) if visible.is_empty() || visible == "-1" => Check::warn(
                    NAME,
                    format!("{detail}; hidden by CUDA_VISIBLE_DEVICES={visible:?}"),
                    "unset CUDA_VISIBLE_DEVICES",
                ),
                Some(visible) => {
                    Check::ok(NAME, format!("{detail}; CUDA_VISIBLE_DEVICES={visible}"))
                }
                None => Check::ok(NAME, detail),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        let devices = vec!["nvidia0".to_owned()];
        let library = Some(PathBuf::from("/usr/lib/libnvidia-ml.so.1"));
        let driver = Some("550.54.15".to_owned());
        let verdict = |seen: Seen| judge(&seen).verdict;
        assert_eq!(verdict(Seen::default()), Verdict::Ok);
        let bare = || Seen {
            devices: devices.clone(),
            driver: driver.clone(),
            ..Seen::default()
        };
        assert_eq!(verdict(bare()), Verdict::Fail);
        let full = || Seen {
            library: library.clone(),
            ..bare()
        };
        assert_eq!(verdict(full()), Verdict::Ok);
        let hidden = Seen {
            cuda_visible: Some(String::new()),
            ..full()
        };
        assert_eq!(verdict(hidden), Verdict::Warn);
        let denied = Seen {
            denied: Some("/dev/nvidia0: denied".into()),
            ..full()
        };
        assert_eq!(verdict(denied), Verdict::Fail);
        let module_only = Seen {
            driver: driver.clone(),
            ..Seen::default()
        };
        assert_eq!(verdict(module_only), Verdict::Warn);
    }

    #[test]
    fn the_drivers_version() {
        let text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version:  gcc\n";
        assert_eq!(version(text), Some("550.54.15"));
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build  (x)\n";
        assert_eq!(version(open), Some("570.133.20"));
        assert_eq!(version(""), None);
    }

    #[test]
    fn the_library_is_found_on_the_path_first() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(LIBRARY);
        fs::write(&file, "").unwrap();
        let path = format!("/nowhere:{}", dir.path().display());
        assert_eq!(library(Some(&path)), Some(file));
    }
}
