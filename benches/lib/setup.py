"""What a bench needs before it starts: a Python with torch, the built binaries, free ports, a note about the machine."""

import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
VENV = TARGET / "venv"  # where tests/run has it, too
TORCH = "2.11.0"
TORCHFT = "0.2.0"


def venv():
    """The directory of the virtual environment's programs; makes the environment when it is absent."""
    programs = VENV / "bin"
    if not (programs / "torchrun").exists():
        print(f"installing torch {TORCH} into {VENV} (once; 5 GB)", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        subprocess.run([programs / "pip", "install", "--quiet", f"torch=={TORCH}", "numpy"], check=True)
    return programs


def venv_torchft():
    """The programs of a second environment with torchft, which sees the first one's PyTorch; made when it is absent."""
    torch, programs = venv(), TARGET / "venv-torchft" / "bin"
    if not (programs / "torchft_lighthouse").exists():
        print(f"installing torchft {TORCHFT} into {programs.parent} (once)", file=sys.stderr)
        subprocess.run([torch / "python", "-m", "venv", programs.parent], check=True)
        paths = "import sysconfig; print(sysconfig.get_path('purelib'))"
        there = [subprocess.run([p / "python", "-c", paths], check=True, capture_output=True, text=True).stdout.strip() for p in (torch, programs)]
        Path(there[1], "torch.pth").write_text(there[0] + "\n", encoding="utf-8")
        subprocess.run([programs / "pip", "install", "--quiet", f"torchft=={TORCHFT}"], check=True)
    return programs


def build(*what):
    """Builds it as it is shipped (nothing to do when it is fresh), and returns the directory of the programs."""
    subprocess.run(["cargo", "build", "--profile", "dist", *what], cwd=ROOT, check=True)
    return TARGET / "dist"


def muster(*names):
    """Builds the named binaries and returns their directory."""
    return build(*(word for name in names for word in ("--bin", name)))


def example(package, name):
    """Builds an example of a package; the program."""
    return build("-p", package, "--example", name) / "examples" / name


def torch_example(name):
    """Builds an example of the runtime against the PyTorch of the venv, where tests/run builds it, too, and so in its profile
    (`dev`, in which the runtime is optimized). The program, and what its environment has beside."""
    programs = venv()
    find = "import os, torch; print(os.path.join(os.path.dirname(torch.__file__), 'lib'))"
    library = subprocess.run([programs / "python", "-c", find], check=True, capture_output=True, text=True).stdout.strip()
    target = TARGET / "torch"
    finds = {"LD_LIBRARY_PATH": ":".join(part for part in (library, os.environ.get("LD_LIBRARY_PATH")) if part)}
    env = {
        **os.environ,
        **finds,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(VENV),
        "LIBTORCH_USE_PYTORCH": "1",
        "CARGO_TARGET_DIR": str(target),
    }
    argv = ["cargo", "build", "-p", "muster-runtime", "--features", "torch", "--example", name]
    subprocess.run(argv, cwd=ROOT, env=env, check=True)
    return target / "debug" / "examples" / name, finds


def free_ports(count):
    """TCP ports on loopback that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def machine():
    """Facts a reader needs to judge the figures: (metric, value, unit)."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        ("cores", os.cpu_count(), "cores"),
        ("memory", round(memory, 1), "GiB"),
        ("load_1min", round(os.getloadavg()[0], 2), "processes"),
        ("python", platform.python_version(), "version"),
        ("torch", TORCH, "version"),
        ("kernel", platform.release(), "version"),
    ]
