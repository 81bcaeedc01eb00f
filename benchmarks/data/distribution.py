#!/usr/bin/env python3
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""How long weights take from one node to another, against `rsync -a` and `scp` over SSH and `tar | nc` in the same run.

Needs root, with the Python that has Ansible; see README.md beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.sparkwright.dsv41.plugins.module_utils import weights  # noqa: E402

MIB = 2**20
HEAD, WORKER = "10.250.77.1", "10.250.77.2"
SSH_PORT, NC_PORT = 22022, 22023
RIVALS = ["rsync -a", "rsync -a, AES-GCM", "scp", "tar | nc"]
REPO, REVISION = "bench/model", "0" * 40
# The module in a process of its own, as Ansible runs it. Without verifying is for this comparison only: the module has
# no such option.
MODULE = """
import json, os, sys
from ansible.module_utils.testing import patch_module_args
from ansible_collections.sparkwright.dsv41.plugins.module_utils import weight_sources
from ansible_collections.sparkwright.dsv41.plugins.module_utils.weights import Checked
from ansible_collections.sparkwright.dsv41.plugins.modules import weights_fetch
given = json.load(sys.stdin)
if not given["verify"]:
    weight_sources.file_digest = lambda *rest, **options: None
    look = weights_fetch.check_file
    def trust(root, entry, *rest, **options):
        if not options.get("rehash"):
            return look(root, entry, *rest, **options)
        status = os.stat(os.path.join(root, entry.path))
        return Checked(entry, None, status.st_size, status.st_mtime_ns)
    weights_fetch.check_file = trust
with patch_module_args(given["options"]):
    weights_fetch.main()
"""


@dataclass
class Spent:
    """What one way took: seconds and seconds of processors at both ends, one each round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Nodes:
    """Two network namespaces with a link between them, and an SSH server in the head's."""

    head: str
    worker: str
    directory: Path

    @property
    def source(self) -> Path:
        return self.directory / "source"

    @property
    def dest(self) -> Path:
        return self.directory / "dest"

    def ssh(self, key: str) -> list[str]:
        """The client's command, up to the host."""
        options = [
            "BatchMode=yes",
            "IdentitiesOnly=yes",
            "ControlPath=none",
            f"UserKnownHostsFile={self.directory}/known",
        ]
        return [
            *("ssh", "-F", "none", "-p", str(SSH_PORT), "-i", f"{self.directory}/{key}"),
            *(word for option in options for word in ("-o", option)),
        ]


def run(*argv: str | Path) -> None:
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)


def inside(namespace: str, *argv: str) -> list[str]:
    return ["ip", "netns", "exec", namespace, *argv]


@contextmanager
def link(mtu: int) -> Iterator[tuple[str, str]]:
    """The namespaces, each with its end of the link."""
    names = f"bench-{os.getpid()}-head", f"bench-{os.getpid()}-worker"
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run(
            "ip",
            "link",
            "add",
            "bench0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "bench0",
            "netns",
            names[1],
        )
        for name, address in zip(names, (HEAD, WORKER), strict=True):
            run(*inside(name, "ip", "address", "add", f"{address}/24", "dev", "bench0"))
            run(*inside(name, "ip", "link", "set", "bench0", "mtu", str(mtu), "up"))
            run(*inside(name, "ip", "link", "set", "lo", "up"))
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


@contextmanager
def ssh_server(nodes: Nodes) -> Iterator[None]:
    """An SSH server with keys of its own: `plain` may run anything, `peer` what role peers allows a worker."""
    directory = nodes.directory
    for key in "host", "plain", "peer":
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / key)
    serve = directory / "peer-serve"
    environment = jinja2.Environment(keep_trailing_newline=True, trim_blocks=True)
    environment.filters["quote"] = shlex.quote
    template = environment.from_string((ROOT / "roles/peers/templates/peer-serve.j2").read_text())
    entry = {"id": "model", "path": str(nodes.source)}
    serve.write_text(
        template.render(ansible_managed="A benchmark", peers_stream_ports="18730-18793", peers_weights=[entry])
    )
    serve.chmod(0o755)
    public = {key: (directory / f"{key}.pub").read_text() for key in ("host", "plain", "peer")}
    (directory / "authorized").write_text(f'{public["plain"]}restrict,command="{serve}" {public["peer"]}')
    (directory / "known").write_text(f"[{HEAD}]:{SSH_PORT} {public['host']}")
    (directory / "sshd_config").write_text(
        f"ListenAddress {HEAD}:{SSH_PORT}\nHostKey {directory}/host\nPidFile none\nStrictModes no\nUsePAM no\n"
        f"AuthorizedKeysFile {directory}/authorized\nPermitRootLogin prohibit-password\nSubsystem sftp internal-sftp\n"
    )
    # Where it separates privileges; a machine that runs no server may lack it.
    separation = Path("/run/sshd")
    made = not separation.exists()
    separation.mkdir(mode=0o755, exist_ok=True)
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") or "sshd"
    argv = inside(nodes.head, sshd, "-D", "-e", "-f", f"{directory}/sshd_config")
    with open(directory / "sshd_log", "wb") as log:
        server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=log)
    try:
        for _ in range(50):
            if (
                subprocess.run(inside(nodes.worker, *nodes.ssh("plain"), HEAD, "true"), capture_output=True).returncode
                == 0
            ):
                break
            time.sleep(0.1)
        else:
            raise SystemExit(f"no SSH server: {(directory / 'sshd_log').read_text()}")
        yield
    finally:
        server.terminate()
        server.wait()
        if made:
            shutil.rmtree(separation)


def fill(source: Path, size: int, count: int) -> None:
    """Shards of bytes that nothing compresses, and the receipt of a head that verified them."""
    source.mkdir()
    files = {}
    for number in range(1, count + 1):
        path = source / f"model-{number:05}-of-{count:05}.safetensors.bin"
        digest = hashlib.sha256()
        with open(path, "wb") as stream:
            for start in range(0, size, 8 * MIB):
                data = os.urandom(min(8 * MIB, size - start))
                stream.write(data)
                digest.update(data)
        entry = weights.FileEntry(path.name, size, f"sha256:{digest.hexdigest()}")
        files[entry] = path.stat().st_mtime_ns
    weights.write_receipt(str(source), weights.Receipt(weights.Manifest(REPO, REVISION, (), tuple(files)), files))


def module(nodes: Nodes, workers: int, verify: bool) -> Callable[[], None]:
    options = {
        "repo": REPO,
        "revision": REVISION,
        "dest": str(nodes.dest),
        "peer": {"ssh": [*nodes.ssh("peer"), HEAD], "name": "model"},
        "workers": workers,
        "_ansible_tmpdir": str(nodes.directory),
    }
    given = json.dumps({"options": options, "verify": verify})
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "collections")}

    def pull() -> None:
        argv = inside(nodes.worker, sys.executable, "-c", MODULE)
        done = subprocess.run(argv, input=given, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"the module failed: {done.stdout}{done.stderr}")

    return pull


def over_ssh(nodes: Nodes, *options: str) -> Callable[[], None]:
    shell = shlex.join([*nodes.ssh("plain"), *options])
    return lambda: run(*inside(nodes.worker, "rsync", "-a", "-e", shell, f"{HEAD}:{nodes.source}/", f"{nodes.dest}/"))


def scp(nodes: Nodes) -> None:
    options = nodes.ssh("plain")[1:]
    options[options.index("-p")] = "-P"
    run(*inside(nodes.worker, "scp", "-q", "-r", *options, f"{HEAD}:{nodes.source}", str(nodes.dest)))


def tar_nc(nodes: Nodes) -> None:
    nodes.dest.mkdir()
    take = f"nc -l {WORKER} {NC_PORT} | tar -xf - -C {nodes.dest}"
    receiver = subprocess.Popen(inside(nodes.worker, "sh", "-c", take), stdin=subprocess.DEVNULL)
    listening = inside(nodes.worker, "ss", "-Hltn", f"sport = :{NC_PORT}")
    while not subprocess.run(listening, capture_output=True, check=True).stdout:
        time.sleep(0.01)
    run(*inside(nodes.head, "sh", "-c", f"tar -cf - -C {nodes.source} . | nc -N {WORKER} {NC_PORT}"))
    if receiver.wait() != 0:
        raise SystemExit("tar | nc failed")


def processors() -> float:
    """Seconds that all processors of the machine worked so far: an SSH server's are nobody's children."""
    user, nice, system, _idle, _wait, irq, soft = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def same(nodes: Nodes) -> bool:
    """Whether all files came, by size: bytes are the module's to verify, and are not the subject here."""
    sizes = [
        {path.name: path.stat().st_size for path in folder.iterdir() if path.suffix == ".bin"}
        for folder in (nodes.source, nodes.dest)
    ]
    return sizes[0] == sizes[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4, help="size of all files; twice this is needed in --directory")
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--workers", type=int, default=4, help="of the module")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rivals", nargs="*", choices=RIVALS, default=RIVALS)
    parser.add_argument("--mtu", type=int, default=9000)
    parser.add_argument(
        "--directory", default="/dev/shm", help="where the files are; a tmpfs leaves the disk out of it"
    )
    options = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("Run as root: network namespaces are made.")
    total = int(options.gib * 2**30)
    with tempfile.TemporaryDirectory(dir=options.directory) as top, link(options.mtu) as names:
        nodes = Nodes(*names, Path(top))
        fill(nodes.source, total // options.files, options.files)
        with ssh_server(nodes):
            ways: dict[str, Callable[[], None]] = {
                "weights_fetch": module(nodes, options.workers, True),
                "weights_fetch, not verifying": module(nodes, options.workers, False),
                "rsync -a": over_ssh(nodes),
                "rsync -a, AES-GCM": over_ssh(nodes, "-c", "aes128-gcm@openssh.com"),
                "scp": lambda: scp(nodes),
                "tar | nc": lambda: tar_nc(nodes),
            }
            ways = {name: way for name, way in ways.items() if name not in RIVALS or name in options.rivals}
            spent = {name: Spent() for name in ways}
            for turn in range(options.rounds):
                for name in list(ways) if turn % 2 == 0 else list(reversed(ways)):
                    shutil.rmtree(nodes.dest, ignore_errors=True)
                    time.sleep(1)
                    started, used = time.perf_counter(), processors()
                    ways[name]()
                    spent[name].wall.append(time.perf_counter() - started)
                    spent[name].cpu.append(processors() - used)
                    if not same(nodes):
                        raise SystemExit(f"{name} did not bring all files")
                    print(f"round {turn + 1}: {name}: {spent[name].wall[-1]:.2f} s", file=sys.stderr)
            # What a rival would still have to do: all files hashed, as many at a time as there are processors.
            hashing = time.perf_counter()
            command = f"printf '%s\\0' *.bin | xargs -0 -n 1 -P {os.cpu_count()} sha256sum > /dev/null"
            subprocess.run(["sh", "-c", command], cwd=nodes.dest, check=True)
            hashing = time.perf_counter() - hashing
    report(spent, total, options, hashing)


def report(spent: dict[str, Spent], total: int, options: argparse.Namespace, hashing: float) -> None:
    print(f"{total / 2**30:.2f} GiB in {options.files} files, workers {options.workers}, MTU {options.mtu};", end=" ")
    print(f"median of {options.rounds}, least and most; {os.cpu_count()} cores for both ends;", end=" ")
    print(f"Python {platform.python_version()}\n")
    print(f"{'what':30} {'s':>7} {'least':>7} {'most':>7} {'cpu s':>7} {'MiB/s':>7} {'ratio':>6} not verifying")
    for name, each in spent.items():
        # Of each round by itself: what else the machine does changes from round to round.
        ratios = [
            statistics.median(a / b for a, b in zip(each.wall, ours.wall, strict=True))
            for ours in (spent["weights_fetch"], spent["weights_fetch, not verifying"])
        ]
        wall = statistics.median(each.wall)
        print(
            f"{name:30} {wall:7.2f} {min(each.wall):7.2f} {max(each.wall):7.2f} {statistics.median(each.cpu):7.2f} "
            f"{total / MIB / wall:7.0f} {ratios[0]:6.2f} {ratios[1]:13.2f}"
        )
    print(f"\nsha256sum of all files, {os.cpu_count()} at a time: {hashing:.2f} s")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(f"most memory of one process: {peak / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
