# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""A disk that fills up at each stage of fetching weights: a real file system of a few MiB, a real hub, a real module.

Needs root and loop devices, but no lab. What takes the room away is a ballast file beside the weights.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from hub import Hub, Rule

pytest.importorskip("huggingface_hub")

MIB = 2**20
DISK_BYTES = 320 * MIB
RECEIPT = ".sparkwright-weights.json"
PEER_SERVE = Path(__file__).parents[1] / "render/golden/peer-serve"
# The module in a process of its own. `fill` names the function before which the disk becomes full, if any.
MODULE = """
import json, subprocess, sys
from ansible.module_utils.testing import patch_module_args
from ansible_collections.sparkwright.dsv41.plugins.module_utils import join
from ansible_collections.sparkwright.dsv41.plugins.modules import weights_fetch
given = json.load(sys.stdin)
def full_before(owner, name):
    function = getattr(owner, name)
    def fill_first(*arguments):
        subprocess.run(given["fill_with"], check=True)
        return function(*arguments)
    setattr(owner, name, fill_first)
if given["full_before"] == "join":
    full_before(join, "join")
if given["full_before"] == "write_receipt":
    full_before(weights_fetch, "write_receipt")
with patch_module_args(given["options"]):
    weights_fetch.main()
"""

Result = dict[str, Any]


class Disk:
    """A mounted ext4 of its own, and the ballast on it."""

    def __init__(self, mount: Path) -> None:
        self.dest = mount / "weights"
        self.ballast = mount / "ballast"

    @property
    def free(self) -> int:
        return shutil.disk_usage(self.ballast.parent).free

    def fill(self, leave: int = 0) -> None:
        """Take all room but this, to the last block."""
        with self.ballast.open("ab") as stream:
            step = 64 * MIB
            while step >= 4096:
                size = os.fstat(stream.fileno()).st_size
                if self.free - step < leave:
                    step //= 2
                    continue
                try:
                    os.posix_fallocate(stream.fileno(), size, step)
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    step //= 2

    def make_room(self) -> None:
        self.ballast.unlink()


@pytest.fixture
def disk() -> Iterator[Disk]:
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4") or not Path("/dev/loop-control").exists():
        pytest.skip("NOT TESTED: a full disk needs root, mkfs.ext4 and loop devices")
    with tempfile.TemporaryDirectory(prefix="disk-full-") as folder:
        image, mount = Path(folder) / "image", Path(folder) / "mount"
        mount.mkdir()
        with image.open("wb") as stream:
            stream.truncate(DISK_BYTES)
        # Blocks as on a large disk, none that only root may use: the free space told is the free space there is.
        subprocess.run(["mkfs.ext4", "-q", "-b", "4096", "-m", "0", image], check=True)
        done = subprocess.run(["mount", "-o", "loop", image, mount], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"NOT TESTED: a full disk needs loop mounts ({done.stderr.strip()})")
        try:
            yield Disk(mount)
        finally:
            subprocess.run(["umount", mount], check=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "hub"


@pytest.fixture
def hub(root: Path) -> Iterator[Hub]:
    root.mkdir()
    with Hub(root) as running:
        yield running


@pytest.fixture
def publish(hub: Hub, root: Path) -> Callable[[dict[str, bytes]], None]:
    """Makes `acme/model` of these files."""

    def write(files: dict[str, bytes]) -> None:
        for path, data in files.items():
            (root / "acme/model" / path).parent.mkdir(parents=True, exist_ok=True)
            (root / "acme/model" / path).write_bytes(data)

    return write


@pytest.fixture
def fetch(hub: Hub, disk: Disk, tmp_path: Path) -> Callable[..., Result]:
    """Runs the module once, with these options besides the usual ones."""

    def run(full_before: str = "", check: bool = False, **options: Any) -> Result:
        given = {
            "repo": "acme/model",
            "revision": hub.commit("acme/model"),
            "dest": str(disk.dest),
            "endpoint": hub.url,
            "_ansible_tmpdir": str(tmp_path),
            "_ansible_check_mode": check,
            **options,
        }
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        code += (
            f"from pathlib import Path; from test_disk_full import Disk; Disk(Path({str(disk.dest.parent)!r})).fill()"
        )
        spoken = {"options": given, "full_before": full_before, "fill_with": [sys.executable, "-c", code]}
        collections = str(Path(__file__).parents[2] / "collections")
        done = subprocess.run(
            [sys.executable, "-c", MODULE],
            input=json.dumps(spoken),
            env={**os.environ, "PYTHONPATH": collections},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        assert lines, done.stderr
        result: Result = json.loads(lines[-1])
        return result

    return run


def noise(name: str, size: int) -> bytes:
    return hashlib.shake_256(name.encode()).digest(size)


def content(folder: Path) -> dict[str, bytes]:
    """The files below a directory, without the client's and our own bookkeeping."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != RECEIPT and path.relative_to(folder).parts[0] != ".cache"
    }


def got(hub: Hub) -> list[str]:
    """The files whose bytes were asked for since the last `forget`, each once."""
    return sorted({entry["path"].split("/", 5)[5] for entry in hub.requests("GET", "/resolve/")})


def when(condition: Callable[[], object], action: Callable[[], None]) -> threading.Thread:
    """Do something, in a thread, as soon as this is so."""

    def watch() -> None:
        end = time.monotonic() + 60
        while not condition() and time.monotonic() < end:
            time.sleep(0.001)
        action()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def assert_told(result: Result, disk: Disk, left: int, size: int) -> None:
    """The message of a disk that filled up: where, how many files and bytes, what is free, and a sum that is right."""
    assert result.get("failed"), result
    match = re.search(
        rf"The file system of {disk.dest} is full: {left} file\(s\) still need (\d+) bytes, (\d+) are free now; "
        r"(\d+) - (\d+) = (\d+) bytes \([\d.]+ GiB\) are missing\. Make room and run again\.",
        result["msg"],
    )
    assert match, result["msg"]
    need, free, need_again, free_again, short = map(int, match.groups())
    assert (need, need - free) == (need_again, short) and free == free_again
    assert need == size
    assert not (disk.dest / RECEIPT).exists()


def assert_refused(result: Result, disk: Disk, hub: Hub, size: int) -> None:
    """The message of a disk that is known to be too small, and that nobody was asked for a byte."""
    free = disk.free
    assert result.get("failed"), result
    assert f"The file system of {disk.dest} is too small" in result["msg"]
    assert f"{free} are free" in result["msg"] and f"- {free} = {size - free} bytes" in result["msg"]
    assert got(hub) == []


def test_known_before_fetching(hub: Hub, disk: Disk, publish: Any, fetch: Any, root: Path) -> None:
    files = {"a.bin": noise("a", 2 * MIB), "b.bin": noise("b", 24 * MIB)}
    publish(files)
    disk.fill(leave=20 * MIB)
    for check in (True, False):
        assert_refused(fetch(check=check), disk, hub, 26 * MIB)
        assert content(disk.dest) == {}
    disk.make_room()
    assert fetch()["fetched"] == ["a.bin", "b.bin"]
    assert content(disk.dest) == files


def test_a_big_file(hub: Hub, disk: Disk, publish: Any, fetch: Any) -> None:
    files = {"a.bin": noise("a", 2 * MIB), "b.bin": noise("b", 24 * MIB), "c.bin": noise("c", 2 * MIB)}
    publish(files)
    hub.faults(Rule("b.bin", "slow", method="GET", seconds=2))
    filling = when(lambda: hub.requests("GET", "b.bin"), lambda: disk.fill(leave=4 * MIB))
    result = fetch(workers=1)
    filling.join()
    hub.faults()
    assert_told(result, disk, left=2, size=26 * MIB)
    assert "the others are kept" in result["msg"]
    assert result["fetched"] == ["a.bin"]
    assert content(disk.dest) == {"a.bin": files["a.bin"]}
    assert not list(disk.dest.rglob("*.incomplete"))

    hub.forget()
    assert_refused(fetch(), disk, hub, 26 * MIB)
    disk.make_room()
    assert fetch()["fetched"] == ["b.bin", "c.bin"]
    assert got(hub) == ["b.bin", "c.bin"]
    assert content(disk.dest) == files
    assert (disk.dest / RECEIPT).exists()


def test_small_files(hub: Hub, disk: Disk, publish: Any, fetch: Any) -> None:
    files = {f"tokens/{number:03}.json": noise(str(number), 30_000) for number in range(60)}
    publish(files)
    hub.faults(Rule("030.json", "slow", method="GET", seconds=2))
    filling = when(lambda: hub.requests("GET", "030.json"), disk.fill)
    result = fetch(workers=2)
    filling.join()
    hub.faults()
    done = result["fetched"]
    # Those before the one that was held up, less what the other worker had in its hands.
    assert 25 <= len(done) < 60
    assert_told(result, disk, left=60 - len(done), size=(60 - len(done)) * 30_000)
    # Whatever has the name of a file is that file.
    there = content(disk.dest)
    assert set(there) >= set(done) and there.items() <= files.items()

    hub.forget()
    disk.make_room()
    again = fetch()
    assert sorted(again["fetched"]) == got(hub) == sorted(set(files) - set(there))
    assert content(disk.dest) == files


def in_parts() -> tuple[dict[str, bytes], bytes]:
    whole = noise("whole", 24 * MIB + 5)
    parts = {f"big.bin.part{number:02}": whole[number * 9 * MIB : (number + 1) * 9 * MIB] for number in range(3)}
    return {**parts, "sums.txt": f"{hashlib.sha256(whole).hexdigest()}  big.bin\n".encode()}, whole


@pytest.mark.parametrize("keep_parts", [False, True])
def test_joining(hub: Hub, disk: Disk, publish: Any, fetch: Any, keep_parts: bool) -> None:
    files, whole = in_parts()
    publish(files)
    options = {"join": "sums.txt", "keep_parts": keep_parts}
    need = fetch(check=True, **options)["need_bytes"]
    hub.forget()
    fetched = sum(map(len, files.values()))
    assert need > fetched
    # Room for the parts alone is not enough, and that is known.
    disk.fill(leave=fetched + (need - fetched) // 2)
    refused = fetch(**options)
    # The list of digests is read to know what is to be had.
    assert got(hub) == ["sums.txt"] and f"joining needs {need - fetched} more" in refused["msg"]
    assert f"{fetched} + {need - fetched} - {disk.free} = {need - disk.free} bytes" in refused["msg"]
    disk.make_room()

    result = fetch(full_before="join", **options)
    assert result["failed"]
    assert f"{disk.dest}" in result["msg"] and "is full while big.bin is joined" in result["msg"]
    assert "make room and run again" in result["msg"]
    begun = {path: data for path, data in content(disk.dest).items() if not path.startswith(".big.bin.joining")}
    assert begun == files
    assert not (disk.dest / RECEIPT).exists()
    hub.forget()
    disk.make_room()
    assert fetch(**options)["fetched"] == []
    assert got(hub) == ["sums.txt"]
    kept = files if keep_parts else {"sums.txt": files["sums.txt"]}
    assert content(disk.dest) == {**kept, "big.bin": whole}
    assert (disk.dest / RECEIPT).exists()


def test_the_receipt(hub: Hub, disk: Disk, publish: Any, fetch: Any) -> None:
    files = {"a.bin": noise("a", 2 * MIB), "config.json": b"{}\n"}
    publish(files)
    result = fetch(full_before="write_receipt")
    assert result.get("failed"), (result, disk.free, disk.ballast.exists() and disk.ballast.stat())
    match = re.fullmatch(
        rf"The file system of {disk.dest} is full: all 2 file\(s\) are there and verified, but not the receipt, "
        r"(\d+) bytes; \d+ are free\. Make room and run again\.",
        result["msg"],
    )
    assert match, result["msg"]
    assert content(disk.dest) == files
    assert not list(disk.dest.glob(f"{RECEIPT}*"))
    hub.forget()
    disk.make_room()
    again = fetch()
    assert again["changed"] and again["fetched"] == []
    assert got(hub) == []
    assert (disk.dest / RECEIPT).stat().st_size == int(match[1])
    # An old receipt is as good as before when a new one cannot be written.
    os.utime(disk.dest / "a.bin", ns=(0, 0))
    before = (disk.dest / RECEIPT).read_bytes()
    assert fetch(full_before="write_receipt")["failed"]
    assert (disk.dest / RECEIPT).read_bytes() == before


def test_from_another_node(hub: Hub, disk: Disk, publish: Any, fetch: Any, tmp_path: Path) -> None:
    if not shutil.which("rsync") or not shutil.which("ss"):
        pytest.skip("NOT TESTED: a copy from another node needs rsync and iproute2")
    files = {"a.bin": noise("a", 2 * MIB), "b.bin": noise("b", 128 * MIB), "c.bin": noise("c", 2 * MIB)}
    publish(files)
    shared = tmp_path / "shared"
    assert fetch(dest=str(shared))["changed"]
    there = "/var/lib/sparkwright/weights/model"
    script = tmp_path / "ssh"
    script.write_text(
        '#!/bin/sh\nexport SSH_ORIGINAL_COMMAND="$1" SSH_CONNECTION="127.0.0.1 4242 127.0.0.1 22"\n'
        + PEER_SERVE.read_text().replace(there, str(shared)).partition("\n")[2]
    )
    script.chmod(0o755)
    options = {"peer": {"ssh": [str(script)], "name": "model"}, "workers": 1}
    hub.forget()
    disk.fill(leave=100 * MIB)
    assert_refused(fetch(**options), disk, hub, 132 * MIB)
    disk.make_room()

    growing = disk.dest / ".cache/sparkwright/b.bin"
    # rsync makes the file empty first: the room goes while it grows.
    filling = when(lambda: growing.exists() and growing.stat().st_size, disk.fill)
    result = fetch(**options)
    filling.join()
    half = growing.stat().st_size
    assert 0 < half < 128 * MIB
    assert_told(result, disk, left=2, size=130 * MIB - half)
    assert result["fetched"] == ["a.bin"]
    assert content(disk.dest) == {"a.bin": files["a.bin"]}

    # Room for what is missing, and a little for the file system's own, is room enough.
    disk.make_room()
    disk.fill(leave=130 * MIB - half + MIB)
    again = fetch(**options)
    assert again["fetched"] == ["b.bin", "c.bin"], again
    assert content(disk.dest) == files
    assert not growing.exists() and (disk.dest / RECEIPT).exists()
    assert hub.requests() == []
