# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""NFS: what is exported, to whom, and how it is mounted. Recorded on two machines, see tests/fixtures/nfs/README.md."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils import nfs

FIXTURES = Path(__file__).parents[3] / "fixtures/nfs"
PLACE, SOURCE = "/srv/weights/tiny", "10.77.0.1:/srv/weights/tiny"
DISK = [nfs.Mount("/", "ext4", "/dev/vda", frozenset({"rw"}))]
IDLE = nfs.Server(0, False)


def mountinfo(transport: str) -> list[nfs.Mount]:
    return nfs.parse_mountinfo((FIXTURES / f"mountinfo-{transport}.txt").read_text())


def etab() -> dict[nfs.Entry, frozenset[str]]:
    return nfs.parse_etab((FIXTURES / "etab.txt").read_text())


def ids(paths: list[str], clients: list[str], **given: object) -> list[str]:
    arguments = {"mounts": DISK, "server": IDLE, "exported": {}, **given}
    return [finding.id for finding in nfs.export_problems("spark1", paths, clients, **arguments)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("transport", "options"), [("tcp", {"proto=tcp", "nconnect=8"}), ("rdma", {"port=20049"})])
def test_a_recorded_mount_is_read(transport: str, options: set[str]) -> None:
    mount = nfs.mount_of(f"{PLACE}/config.json", mountinfo(transport))
    assert mount is not None and (mount.target, mount.source, mount.fstype) == (PLACE, SOURCE, "nfs4")
    assert options | {"ro", "vers=4.2", "nosuid"} <= mount.options
    assert nfs.mount_problem("spark2", PLACE, SOURCE, transport == "rdma", mountinfo(transport)) is None


def test_another_transport_source_or_nothing_is_a_problem() -> None:
    other = nfs.mount_problem("spark2", PLACE, SOURCE, True, mountinfo("tcp"))
    assert other and (other.id, other.needed) == ("nfs.transport", "proto=rdma")
    assert nfs.mount_problem("spark2", PLACE, "10.9.9.9:/srv", False, mountinfo("tcp"))
    absent = nfs.mount_problem("spark2", f"{PLACE}/below", SOURCE, False, mountinfo("tcp"))
    assert absent and "is not mounted" in absent.found


def test_our_entries_are_added_and_removed_and_strangers_stay() -> None:
    ours = nfs.Entry(PLACE, "10.77.0.2")
    assert ours in etab() and nfs.Entry("/srv/other", "10.77.0.0/24") in etab()
    text = nfs.exports_text([PLACE], ["10.77.0.2"])
    assert nfs.parse_exports(text) == [ours]
    assert nfs.changes([PLACE], ["10.77.0.2"], text, etab()) == nfs.Changes((), ())
    moved = nfs.changes([PLACE], ["10.77.0.3"], text, etab())
    assert (moved.add, moved.remove) == ((nfs.Entry(PLACE, "10.77.0.3"),), (ours,))
    assert nfs.changes([], [], text, etab()).remove == (ours,)
    assert nfs.changes([], [], "", etab()).remove == (), "what our file did not name was not ours"
    looser = {ours: etab()[ours] - {"all_squash"}}
    assert nfs.changes([PLACE], ["10.77.0.2"], text, looser).add == (ours,)


def test_nobody_is_not_everybody() -> None:
    assert ids([PLACE], []) == ["nfs.clients"]
    assert ids([PLACE], [""]) == ids([PLACE], ["*"]) == ids([PLACE], ["10.0.0.0/8"]) == ids([PLACE], ["0.0.0.0"])
    assert ids([PLACE], ["0.0.0.0"]) == ["nfs.clients"]
    assert ids([PLACE], ["10.77.0.2"]) == []


def test_everything_in_the_way_is_told_at_once() -> None:
    mounts = [nfs.Mount("/", "overlay", "overlay", frozenset())]
    root = {nfs.Entry("/export", "*"): frozenset({"ro", "fsid=0"})}
    found = ids([PLACE], [], mounts=mounts, server=nfs.Server(8, False), exported=root)
    assert found == ["nfs.clients", "nfs.filesystem", "nfs.server", "nfs.root"]
    assert ids([PLACE], ["10.77.0.2"], server=nfs.Server(8, True)) == []


def test_a_mount_hides_no_files_and_replaces_no_strangers() -> None:
    stranger = [*DISK, nfs.Mount(PLACE, "nfs4", "10.9.9.9:/models", frozenset())]
    assert nfs.obstacle("spark2", PLACE, SOURCE, False, DISK, 0) is None
    assert nfs.obstacle("spark2", PLACE, SOURCE, False, DISK, 2)
    assert nfs.obstacle("spark2", PLACE, SOURCE, False, stranger, 0)
    assert nfs.obstacle("spark2", PLACE, SOURCE, True, stranger, 0) is None, "ours, with the head's former address"


@pytest.mark.parametrize("path", [PLACE, "/a-b/c.d/.e_f", "/x y", "/"])
def test_a_unit_has_the_name_that_systemd_asks_for(path: str) -> None:
    try:
        command = ["systemd-escape", "--path", "--suffix=mount", path]
        wanted = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except FileNotFoundError:
        wanted = {
            PLACE: "srv-weights-tiny.mount",
            "/a-b/c.d/.e_f": r"a\x2db-c.d-.e_f.mount",
            "/x y": r"x\x20y.mount",
            "/": "-.mount",
        }[path]
    assert nfs.unit_name(path) == wanted
    assert nfs.where(nfs.unit_text(path, SOURCE, nfs.mount_options(True, 8))) == path


def test_what_is_closed_to_others_is_found() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own directories are closed to others
        tree = Path(name)
        tree.chmod(0o755)
        (tree / "folder").mkdir()
        (tree / "folder/file").write_text("")
        assert nfs.unreadable(name) is None
        assert nfs.unreadable(f"{name}/folder") is None
        (tree / "folder/file").chmod(0o600)
        assert nfs.unreadable(name) == f"{name}/folder/file"
        (tree / "folder").chmod(0o700)
        assert nfs.unreadable(name) == f"{name}/folder"
        tree.chmod(0o700)
        assert nfs.unreadable(f"{name}/folder") == name, "above it"


def test_the_listener_for_rdma_is_seen() -> None:
    assert nfs.listens_for_rdma((FIXTURES / "portlist-rdma.txt").read_text())
    assert not nfs.listens_for_rdma((FIXTURES / "portlist-tcp.txt").read_text())
