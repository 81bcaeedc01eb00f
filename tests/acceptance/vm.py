#!/usr/bin/env python3
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Two virtual machines with real kernels, wired like two DGX Sparks: `vm.py image|up|reset|exec N COMMAND|down`.

QEMU emulates them, so no KVM is needed. Both are booted once, brought to the state that the tests start from, and
saved; `up` and `reset` restore that in seconds. Disks and memory of the saved state stay in .vm until their content
changes. Building ZFS for their kernel takes minutes; it is done once for each kernel and stays in .vm, too.
Standard library only. Safe to run again at any point: each step looks at what is there.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
VM = ROOT / ".vm"
IMAGE = VM / "image"  # kernel, first stage and disk that both machines start from
SAVED = VM / "saved"  # disk and memory of each machine in the initial state
ZFS = VM / "zfs"  # modules for each kernel and version of ZFS; they outlive the image
SUITE = "trixie"
COMPONENTS = "main,contrib"  # ZFS is in contrib
MEMORY_MIB = 1536
DATA_GIB = 3
BEAT_S = 10
KEY = VM / "id_ed25519"
KNOWN_HOSTS = VM / "known_hosts"
SSH_CONFIG = VM / "ssh_config"
# Commands that are needed, and Debian's packages of them.
TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "ssh": "openssh-client",
}
IMAGE_TOOLS = {
    "mmdebstrap": "mmdebstrap",
    "mkfs.ext4": "e2fsprogs",
    "cpio": "cpio",
    "busybox": "busybox-static",
    "xz": "xz-utils",
}


GIVE_UP = threading.Event()
LOCKS: list[int] = []


class VmError(Exception):
    """Something the user must know or do; shown without a traceback."""


@dataclass(frozen=True)
class Nic:
    """A network interface of a machine; `rail` is the wire to the other machine that it hangs on, if any."""

    name: str
    mac: str  # the number of the machine goes in
    rail: int | None = None
    mtu: int = 9000


MANAGEMENT = Nic("enP7s7", "52:54:00:aa:00:{n:02x}")
# Two ports with two PCIe functions each, as on a Spark; the second port has no cable.
FABRIC = [
    Nic("enp1s0f0np0", "52:54:00:77:00:{n:02x}", rail=0),
    Nic("enP2p1s0f0np0", "52:54:00:77:01:{n:02x}", rail=1),
    Nic("enp1s0f1np1", "52:54:00:77:10:{n:02x}"),
    Nic("enP2p1s0f1np1", "52:54:00:77:11:{n:02x}"),
]


@dataclass(frozen=True)
class Machine:
    n: int

    @property
    def name(self) -> str:
        return f"spark{self.n}"

    @property
    def ssh_port(self) -> int:
        return 2200 + self.n

    @property
    def directory(self) -> Path:
        """What lasts as long as the process does."""
        return VM / "run" / self.name

    @property
    def disk(self) -> Path:
        return self.directory / "disk.qcow2"

    @property
    def data_disk(self) -> Path:
        """/dev/vdb: empty after each start, for whatever a test makes of it."""
        return self.directory / "data.qcow2"

    @property
    def pid_file(self) -> Path:
        return self.directory / "pid"

    @property
    def ready(self) -> Path:
        """There once a machine was restored completely."""
        return self.directory / "ready"

    @property
    def saved_disk(self) -> Path:
        return SAVED / f"{self.name}.qcow2"

    @property
    def saved_memory(self) -> Path:
        return SAVED / f"{self.name}.memory"

    def wire_port(self, rail: int, n: int) -> int:
        return 27700 + 10 * rail + n

    def pid(self) -> int | None:
        try:
            pid = int(self.pid_file.read_text())
        except (OSError, ValueError):
            return None
        return pid if self.is_process(pid) else None

    def is_process(self, pid: int) -> bool:
        """Whether a process is this machine; a pid file may outlive it and name somebody else's."""
        try:
            return str(self.pid_file).encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False


MACHINES = [Machine(1), Machine(2)]


def say(text: str) -> None:
    print(f"vm: {text}", flush=True)


class Beat:
    """A line every ten seconds while something takes long."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.started = self.last = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def __call__(self) -> None:
        if time.monotonic() - self.last >= BEAT_S:
            self.last = time.monotonic()
            say(f"... {self.what} ({self.seconds:.0f} s)")


def run(what: str, argv: list[str | Path], **env: str) -> None:
    """Run a command quietly; show the end of its output when it fails."""
    log = VM / "logs" / f"{what.replace(' ', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    say(what)
    beat = Beat(what)
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv,
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **env},
            pass_fds=LOCKS,  # whoever kills this script alone leaves the command running: the lock stays with it
        )
        try:
            while process.poll() is None:
                time.sleep(0.1)
                beat()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
    if process.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise VmError(f"{what} failed (exit code {process.returncode}):\n{tail}\n(all of it: {log})")
    if beat.seconds > BEAT_S:
        say(f"{what}: done in {beat.seconds:.0f} s")


def wait_for(what: str, limit_s: float, done: Callable[[], bool], pause_s: float = 0.2) -> None:
    beat = Beat(f"waiting for {what}")
    while not done():
        if beat.seconds > limit_s:
            raise VmError(f"{what}: not after {limit_s:.0f} s")
        if GIVE_UP.is_set():
            raise VmError(f"{what}: given up")
        time.sleep(pause_s)
        beat()


def stamp(*parts: str | bytes | Path) -> str:
    digest = hashlib.sha256()
    for part in parts:
        content = part.read_bytes() if isinstance(part, Path) else part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()[:16]


# The machine that this runs on


def lock() -> None:
    """Let one command work at a time on this checkout; the lock goes with the process and what `run` started."""
    VM.mkdir(exist_ok=True)
    handle = os.open(VM / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise VmError(f"another run works on these machines (lock {VM / 'lock'}); wait for it") from error
    LOCKS.append(handle)


def missing(tools: dict[str, str]) -> list[str]:
    """Debian packages of the commands that are not there."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [package for command, package in tools.items() if not shutil.which(command, path=path)]


def install_packages(packages: list[str]) -> None:
    """Install Debian packages, or say which ones are missing."""
    if not packages:
        return
    names = " ".join(packages)
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise VmError(f"missing packages; install them and run again: sudo apt-get install {names}")
    say(f"installing Debian packages (they stay): {names}")
    # The lab and the acceptance machines may be made at the same time; apt-get would not wait.
    turn = ["flock", "/run/lock/sparkwright-apt"]
    run("apt-get update", [*turn, "apt-get", "update"])
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    run("apt-get install", [*turn, "apt-get", "install", "-y", "--no-install-recommends", *packages], **env)


def need_memory() -> None:
    needed = len(MACHINES) * MEMORY_MIB
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) // 1024
    if available < needed:
        raise VmError(f"{available} MiB of memory available; needed {needed} MiB for {len(MACHINES)} machines")


def need_ports() -> None:
    """The ports on 127.0.0.1 that QEMU is about to use."""
    for machine in MACHINES:
        wires = [machine.wire_port(nic.rail, machine.n) for nic in FABRIC if nic.rail is not None]
        wanted = [(socket.SOCK_STREAM, machine.ssh_port), *((socket.SOCK_DGRAM, port) for port in wires)]
        for kind, port in wanted:
            with socket.socket(socket.AF_INET, kind) as probe:
                if kind == socket.SOCK_STREAM:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError as error:
                    protocol = "TCP" if kind == socket.SOCK_STREAM else "UDP"
                    raise VmError(
                        f"port 127.0.0.1:{port} ({protocol}) is taken; needed for {machine.name}. "
                        f"Find its owner with: ss -lunt -p 'sport = :{port}'"
                    ) from error


# The image


def image_files() -> list[Path]:
    return sorted(path for path in (HERE / "image").rglob("*") if path.is_file() and path.name != "initial_state.sh")


def image_marker() -> Path:
    names = " ".join(str(path.relative_to(HERE)) for path in image_files())
    return IMAGE / f"ready-{stamp(SUITE, COMPONENTS, names, *image_files(), KEY.with_suffix('.pub'))}"


def make_image() -> None:
    """Debian in a directory, then a disk of it; the directory goes again."""
    if not KEY.exists():
        run("SSH key", ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "sparkwright-acceptance", "-f", KEY])
    if image_marker().exists():
        return
    if os.geteuid() != 0:
        raise VmError("making the image of the machines needs root (files of many owners); run this as root")
    keyring = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    install_packages(missing(IMAGE_TOOLS) + ([] if keyring.exists() else ["debian-archive-keyring"]))
    rootfs = VM / "rootfs"
    # An earlier attempt that was killed.
    run("remove leftovers", ["rm", "-rf", "--one-file-system", rootfs, IMAGE, SAVED])
    IMAGE.mkdir()
    run("Debian for the machines", debian("minbase", package_list("packages.txt"), rootfs), INITRD="No")
    modules = zfs_modules(rootfs)
    run("disk of the machines", [HERE / "image/make.sh", rootfs, IMAGE, KEY.with_suffix(".pub"), modules])
    run("remove the directory", ["rm", "-rf", "--one-file-system", rootfs])
    image_marker().touch()


def package_list(name: str) -> list[str]:
    lines = (HERE / "image" / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def debian(variant: str, packages: list[str], directory: Path) -> list[str | Path]:
    """Command that unpacks Debian into a directory."""
    return [
        *("mmdebstrap", "--mode=root", f"--variant={variant}", f"--components={COMPONENTS}"),
        *(f"--include={','.join(packages)}", "--aptopt=APT::Install-Recommends false", "--aptopt=Acquire::Retries 3"),
        *(f"--dpkgopt={HERE / 'image/dpkg.cfg'}", SUITE, directory),
    ]


def zfs_modules(rootfs: Path) -> Path:
    """Directory of zfs.ko and spl.ko for the kernel and the ZFS that a root file system holds; built if need be."""
    kernel = next((rootfs / "usr/lib/modules").iterdir()).name
    query = ["dpkg-query", f"--admindir={rootfs}/var/lib/dpkg", "-W", "-f", "${Version}", "zfsutils-linux"]
    version = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    built = ZFS / f"{kernel}_{version}"
    if built.exists():
        return built
    # Unpacked only: compilers need no configuration, and zfs-dkms would build at once, for the kernel of the host.
    tree, unfinished = VM / "zfs-tree", ZFS / "unfinished"
    run("remove leftovers of ZFS", ["rm", "-rf", "--one-file-system", tree, unfinished])
    packages = [*package_list("zfs_packages.txt"), f"linux-headers-{kernel}", f"zfs-dkms={version}"]
    run("compiler for ZFS", debian("extract", packages, tree))
    shutil.copy(HERE / "image/zfs.sh", tree / "zfs.sh")
    run("ZFS for the kernel of the machines", ["chroot", tree, "bash", "/zfs.sh", kernel, str(os.cpu_count() or 1)])
    unfinished.mkdir(parents=True)
    for name in ("spl.ko", "zfs.ko"):
        shutil.copy(tree / name, unfinished / name)
    unfinished.rename(built)
    run("remove the compiler", ["rm", "-rf", "--one-file-system", tree])
    return built


def write_ssh_files() -> None:
    """How to reach the machines; the host key is the one that the image holds."""
    host_key = " ".join((IMAGE / "host_key.pub").read_text().split()[:2])
    KNOWN_HOSTS.write_text("".join(f"[127.0.0.1]:{machine.ssh_port} {host_key}\n" for machine in MACHINES))
    blocks = [f"Host {machine.name}\n  Port {machine.ssh_port}\n" for machine in MACHINES]
    common = {
        "HostName": "127.0.0.1",
        "User": "root",
        "IdentityFile": f'"{KEY}"',
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": f'"{KNOWN_HOSTS}"',
        "StrictHostKeyChecking": "yes",
        "BatchMode": "yes",
        "ConnectTimeout": "60",
        "ServerAliveInterval": "10",
        "LogLevel": "ERROR",
    }
    blocks.append("Host spark*\n" + "".join(f"  {name} {value}\n" for name, value in common.items()))
    SSH_CONFIG.write_text("\n".join(blocks))


# The machines


def qemu(machine: Machine) -> list[str]:
    """Command line of a machine, without what differs between a first start and a restored one."""
    n, other = machine.n, 3 - machine.n
    interfaces = [(MANAGEMENT, f"user,net=10.0.2{n}.0/24,hostfwd=tcp:127.0.0.1:{machine.ssh_port}-:22")]
    for index, nic in enumerate(FABRIC):
        backend = f"hubport,hubid={index}"  # a hub with nobody else on it
        if nic.rail is not None:
            here, there = machine.wire_port(nic.rail, n), machine.wire_port(nic.rail, other)
            backend = (
                f"dgram,local.type=inet,local.host=127.0.0.1,local.port={here}"
                f",remote.type=inet,remote.host=127.0.0.1,remote.port={there}"
            )
        interfaces.append((nic, backend))
    names = " ".join(f"ifname={nic.name}:{nic.mac.format(n=n)}" for nic, _ in interfaces)
    kernel = (
        f"console=ttyS0 quiet mitigations=off tsc=reliable no_timer_check nowatchdog audit=0 apparmor=0 "
        f"random.trust_cpu=on systemd.hostname={machine.name} {names}"
    )
    argv = [
        *("qemu-system-x86_64", "-name", machine.name, "-no-user-config", "-nodefaults", "-display", "none"),
        *("-machine", "q35,vmport=off,hpet=off,usb=off,smbus=off", "-accel", "tcg,thread=multi,tb-size=512"),
        *("-cpu", "Nehalem", "-smp", "1", "-m", str(MEMORY_MIB)),
        *("-kernel", str(IMAGE / "vmlinuz"), "-initrd", str(IMAGE / "initrd"), "-append", kernel),
        *("-drive", f"file={machine.disk},if=none,id=disk,format=qcow2,cache=unsafe,discard=unmap"),
        *("-drive", f"file={machine.data_disk},if=none,id=data,format=qcow2,cache=unsafe,discard=unmap"),
        *("-device", "virtio-blk-pci,drive=disk", "-device", "virtio-blk-pci,drive=data,serial=data"),
        *("-device", "virtio-rng-pci"),
        *("-serial", f"file:{machine.directory}/console", "-pidfile", str(machine.pid_file)),
        # A path of a unix socket is short by nature: relative to the directory that QEMU starts in.
        *("-qmp", f"unix:{monitor(machine)},server=on,wait=off"),
    ]
    for index, (nic, backend) in enumerate(interfaces):
        argv += ["-netdev", f"{backend.replace(',', f',id=net{index},', 1)}"]
        mtu = "" if nic is MANAGEMENT else f",host_mtu={nic.mtu},speed=200000,duplex=full"
        argv += ["-device", f"virtio-net-pci,id={nic.name},netdev=net{index},mac={nic.mac.format(n=n)},romfile={mtu}"]
    return argv


def monitor(machine: Machine) -> str:
    return os.path.relpath(machine.directory / "qmp", ROOT)


def ask(machine: Machine, command: str, **arguments: Any) -> Any:
    """One command to QEMU's monitor (QMP)."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(monitor(machine))
        stream = connection.makefile("rw", encoding="utf-8")
        json.loads(stream.readline())  # greeting
        for request in ({"execute": "qmp_capabilities"}, {"execute": command, "arguments": arguments}):
            stream.write(json.dumps(request) + "\n")
            stream.flush()
            while "event" in (answer := json.loads(stream.readline())):
                pass
            if "error" in answer:
                raise VmError(f"{machine.name}: QEMU refuses {request['execute']}: {answer['error']['desc']}")
    return answer["return"]


def start(machine: Machine, backing: Path, backing_format: str, *extra: str) -> None:
    """Start QEMU on a fresh layer over a disk, and an empty second disk."""
    shutil.rmtree(machine.directory, ignore_errors=True)
    machine.directory.mkdir(parents=True)
    layer = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(backing), "-F", backing_format, str(machine.disk)]
    data = ["qemu-img", "create", "-q", "-f", "qcow2", str(machine.data_disk), f"{DATA_GIB}G"]
    argv = [*qemu(machine), *extra, "-daemonize"]
    for command in (layer, data, argv):
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise VmError(f"{machine.name}: {command[0]} failed: {result.stderr.strip()}")


def stop(machine: Machine) -> None:
    pid = machine.pid()
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + 20
        while machine.is_process(pid):  # QEMU removes its pid file before it lets its ports go
            time.sleep(0.1)
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(machine.directory, ignore_errors=True)


def ssh(machine: Machine, *command: str) -> list[str]:
    return ["ssh", "-F", str(SSH_CONFIG), machine.name, *command]


def on(machine: Machine, command: str, stdin: str = "") -> str:
    """Output of a shell command on a machine."""
    result = subprocess.run(
        ssh(machine, command), input=stdin, capture_output=True, text=True, check=False, timeout=500
    )
    if result.returncode != 0:
        raise VmError(f"{machine.name}: {command!r} failed (exit code {result.returncode}): {result.stderr.strip()}")
    return result.stdout


def greets(machine: Machine) -> bool:
    """Whether the SSH server of a machine says hello; cheaper than a login."""
    if machine.pid() is None:
        raise VmError(f"{machine.name}: QEMU has gone; see {machine.directory}/console")
    try:
        with socket.create_connection(("127.0.0.1", machine.ssh_port), 5) as connection:
            connection.settimeout(5)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def save() -> None:
    """Boot both machines, bring them to the initial state and save that: disk and memory."""
    shutil.rmtree(SAVED, ignore_errors=True)
    SAVED.mkdir()
    for machine in MACHINES:
        start(machine, IMAGE / "disk.img", "raw")
        for nic in FABRIC:
            ask(machine, "set_link", name=nic.name, up=nic.rail is not None)
    on_all(prepare)
    on_all(freeze)


def prepare(machine: Machine) -> None:
    wait_for(f"{machine.name} to boot", 600, lambda: greets(machine))
    on(machine, f"sh -s -- {machine.n}", (HERE / "image/initial_state.sh").read_text())
    say(f"{machine.name}: booted, in the initial state")
    on(machine, f"{proof(machine)} && sync")


def freeze(machine: Machine) -> None:
    ask(machine, "stop")
    ask(machine, "migrate-set-parameters", **{"max-bandwidth": 1 << 40})
    ask(machine, "migrate", uri=f"exec:cat > {shlex.quote(str(machine.saved_memory))}")
    wait_for(f"{machine.name} to be saved", 120, lambda: saved(machine))
    machine.disk.rename(machine.saved_disk)
    stop(machine)


def saved(machine: Machine) -> bool:
    answer = ask(machine, "query-migrate")
    if answer["status"] == "failed":
        raise VmError(f"{machine.name}: saving failed: {answer.get('error-desc', answer)}")
    return bool(answer["status"] == "completed")


def loaded(machine: Machine) -> bool:
    return bool(ask(machine, "query-status")["status"] != "inmigrate")


def on_all(action: Callable[[Machine], None]) -> None:
    """Do the same to all machines at once; the first failure or an interrupt ends what waits."""
    GIVE_UP.clear()
    with ThreadPoolExecutor() as pool:
        try:
            for done in as_completed([pool.submit(action, machine) for machine in MACHINES]):
                done.result()
        except BaseException:
            GIVE_UP.set()
            raise


def saved_marker() -> Path:
    """Saved memory fits one QEMU and one command line only."""
    version = subprocess.run(["qemu-system-x86_64", "--version"], capture_output=True, check=True).stdout
    arguments = "\n".join(argument for machine in MACHINES for argument in qemu(machine))
    inside = HERE / "image/initial_state.sh"
    return SAVED / f"ready-{stamp(image_marker().name, version, arguments, str(DATA_GIB), inside)}"


def restore() -> None:
    """Both machines in the initial state, whatever they were in before."""
    beat = Beat("restoring")
    for machine in MACHINES:
        stop(machine)
    need_memory()
    need_ports()
    if not saved_marker().exists():
        save()
        saved_marker().touch()
        say(f"saved the initial state: {beat.seconds:.0f} s")
        beat = Beat("restoring")
    for machine in MACHINES:
        start(machine, machine.saved_disk, "qcow2", "-incoming", f"exec:cat {shlex.quote(str(machine.saved_memory))}")
    on_all(wake)
    say(f"both machines are in the initial state: {beat.seconds:.0f} s")


def wake(machine: Machine) -> None:
    wait_for(f"{machine.name} to load", 120, lambda: loaded(machine))
    ask(machine, "cont")  # it was saved while it stood still
    wait_for(f"{machine.name} to answer", 300, lambda: greets(machine))
    on(machine, f"date -u -s @{time.time():.0f} && {proof(machine)}")
    machine.ready.touch()


def proof(machine: Machine) -> str:
    """Shell command that fails unless the other machine answers over both rails with large frames."""
    peers = [f"10.7{7 + nic.rail}.0.{3 - machine.n}" for nic in FABRIC if nic.rail is not None]
    # ping gives up at the first "unreachable", which a peer that is still booting causes.
    return " && ".join(
        f"timeout 200 sh -c 'until ping -q -c 1 -W 5 -M do -s 8972 {peer}; do sleep 1; done'" for peer in peers
    )


def image() -> None:
    """What takes long on a fresh machine and needs no memory: tools, and the disk of the machines."""
    if (os.uname().sysname, os.uname().machine) != ("Linux", "x86_64"):
        raise VmError(f"{os.uname().sysname} on {os.uname().machine} found; the machines need Linux on x86_64")
    install_packages(missing(TOOLS))
    make_image()


def up() -> None:
    image()
    write_ssh_files()
    if saved_marker().exists() and all(
        machine.pid() and machine.ready.exists() and greets(machine) for machine in MACHINES
    ):
        say("both machines run already (`reset` brings back the initial state)")
    else:
        restore()


def reset() -> None:
    if not image_marker().exists() or not saved_marker().exists():
        raise VmError("there is no saved state to go back to; run `vm.py up` first")
    restore()


def down() -> None:
    """Stop the machines and remove what they wrote; image and saved state stay for the next `up`."""
    for machine in MACHINES:
        if machine.pid():
            say(f"stopping {machine.name}")
        stop(machine)
    shutil.rmtree(VM / "run", ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("image", help="make the image of both machines only")
    commands.add_parser("up", help="make and start both machines")
    commands.add_parser("reset", help="bring both machines back to the initial state")
    commands.add_parser("down", help="stop both machines; image and saved state stay (remove .vm to be rid of them)")
    execute = commands.add_parser("exec", help="run a command on machine N")
    execute.add_argument("n", type=int, choices=[machine.n for machine in MACHINES])
    execute.add_argument("argv", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if args.command == "exec":
            if not SSH_CONFIG.exists():
                raise VmError("no machines; run `vm.py up` first")
            os.execvp("ssh", ssh(Machine(args.n), "--", *args.argv))
        lock()
        {"image": image, "up": up, "reset": reset, "down": down}[args.command]()
    except VmError as error:
        print(f"vm: {error}", file=sys.stderr)
        return 1
    except PermissionError as error:
        print(f"vm: {error}; was it made by another user?", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("vm: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
