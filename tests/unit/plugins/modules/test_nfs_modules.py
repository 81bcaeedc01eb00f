# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Files of nfs_export and nfs_mount below another root; servers and mounts are tested on two machines."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.modules import nfs_export, nfs_mount

Run = Callable[..., dict[str, Any]]
FIXTURES = Path(__file__).parents[3] / "fixtures/nfs"
SOURCE = "10.77.0.1:/srv/weights/tiny"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    shutil.copy(FIXTURES / "mountinfo-tcp.txt", tmp_path / "proc/self/mountinfo")
    return tmp_path


@pytest.fixture
def place() -> Iterator[str]:
    """A directory that is open to all, as pytest's own are not, and on a disk by the recorded mounts."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield name


def test_export_plans_writes_and_rests(root: Path, place: str, run_module: Run) -> None:
    options = {"host": "spark1", "paths": [place], "clients": ["10.77.0.3", "10.77.0.2"], "rdma": True}
    file, config = root / "etc/exports.d/sparkwright.exports", root / "etc/nfs.conf.d/sparkwright.conf"
    assert run_module(nfs_export.main, check=True, root=str(root), **options)["changed"]
    assert not file.exists()
    made = run_module(nfs_export.main, root=str(root), **options)
    assert made["changed"] and file.read_text() == made["after"] and "rdma=y" in config.read_text()
    assert file.stat().st_mode & 0o777 == 0o644
    (line,) = [line for line in made["after"].splitlines() if line.startswith("/")]
    assert line.split()[1].startswith("10.77.0.2(ro,") and line.split()[2].startswith("10.77.0.3(ro,")
    assert not run_module(nfs_export.main, root=str(root), **options)["changed"]
    tcp = run_module(nfs_export.main, root=str(root), **{**options, "rdma": False})
    assert tcp["changed"] and not config.exists()
    gone = run_module(nfs_export.main, root=str(root), host="spark1", state="absent")
    assert gone["changed"] and not file.exists()
    assert not run_module(nfs_export.main, root=str(root), host="spark1", state="absent")["changed"]


def test_export_to_nobody_is_refused_before_anything_is_written(root: Path, place: str, run_module: Run) -> None:
    refused = run_module(nfs_export.main, root=str(root), host="spark1", paths=[place, "/no/such"], clients=[])
    assert refused["failed"] and [finding["id"] for finding in refused["findings"]] == ["nfs.clients", "nfs.path"]
    assert not (root / "etc/exports.d").exists()


def test_mount_units_are_written_and_only_ours_are_removed(root: Path, run_module: Run) -> None:
    units = root / "etc/systemd/system"
    stranger = units / "srv-other.mount"
    stranger.write_text("[Mount]\nWhere=/srv/other\n")
    mounts = [{"path": "/srv/weights/tiny", "source": SOURCE}]
    options = {"host": "spark2", "mounts": mounts, "root": str(root)}
    assert run_module(nfs_mount.main, check=True, **options)["mounted"] == ["/srv/weights/tiny"]
    assert list(units.iterdir()) == [stranger]
    made = run_module(nfs_mount.main, **options)
    assert made["changed"] and set(made["after"]) == {"srv-weights-tiny.mount"}
    assert f"What={SOURCE}" in (units / "srv-weights-tiny.mount").read_text()
    assert not run_module(nfs_mount.main, **options)["changed"], "the recorded mount is the one that is wanted"
    assert run_module(nfs_mount.main, rdma=True, **options)["changed"]
    gone = run_module(nfs_mount.main, host="spark2", root=str(root))
    assert gone["unmounted"] == ["/srv/weights/tiny"] and list(units.iterdir()) == [stranger]


def test_a_strangers_mount_is_refused(root: Path, run_module: Run) -> None:
    mounts = [{"path": "/srv/weights/tiny", "source": "10.99.0.1:/elsewhere"}]
    refused = run_module(nfs_mount.main, host="spark2", mounts=mounts, root=str(root))
    assert refused["failed"] and f"{SOURCE} (nfs4) mounted on /srv/weights/tiny" in refused["msg"]
    assert list((root / "etc/systemd/system").iterdir()) == []
