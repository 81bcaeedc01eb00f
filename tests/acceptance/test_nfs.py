# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Weights by the kernel's NFS server, over TCP and over RDMA on Soft-RoCE. The tests follow one another."""

from __future__ import annotations

import hashlib
import os
import subprocess

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils import nfs, weights
from machines import HEAD, WORKER, Outcome, argv, playbook, ssh

PLACE = "/srv/weights/tiny"
TINY = {
    "id": "tiny",
    "repo": "acme/tiny",
    "revision": "0123456789abcdef0123456789abcdef01234567",
    "path": PLACE,
    "include": [],
    "must_exist": ["config.json"],
    "join": "",
    "slim": "",
}
SIZE = 96 << 20
UNIT = "srv-weights-tiny.mount"


def sync(backend: str, *arguments: str, **variables: object) -> Outcome:
    given = {"weight_sync_backend": backend, "weight_sync_list": [TINY], "fabric_probe": False, **variables}
    return playbook("tests/acceptance/nfs_weights.yml", *arguments, **given)


def mounted() -> nfs.Mount | None:
    mount = nfs.mount_of(PLACE, nfs.parse_mountinfo(ssh(WORKER, "cat /proc/self/mountinfo")))
    return mount if mount and mount.target == PLACE else None


def exported() -> set[str]:
    return {str(entry) for entry in nfs.parse_etab(ssh(HEAD, "cat /var/lib/nfs/etab 2>/dev/null || true"))}


@pytest.fixture(scope="module", autouse=True)
def digest(initial_state: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """SHA-256 of the large file of verified weights, which the head gets."""
    tree = tmp_path_factory.mktemp("tiny")
    contents = {"config.json": b"{}", "model.bin": os.urandom(SIZE)}
    entries = []
    for name, content in contents.items():
        (tree / name).write_bytes(content)
        (tree / name).chmod(0o644)
        # Whole seconds, which tar keeps.
        os.utime(tree / name, (1_700_000_000, 1_700_000_000))
        entries.append(weights.FileEntry(name, len(content), "sha256:" + hashlib.sha256(content).hexdigest()))
    manifest = weights.Manifest(str(TINY["repo"]), str(TINY["revision"]), (), tuple(entries))
    weights.write_receipt(str(tree), weights.Receipt(manifest, dict.fromkeys(entries, 1_700_000_000 * 10**9)))
    archive = subprocess.run(["tar", "-C", str(tree), "-c", "."], capture_output=True, check=True).stdout
    ssh(HEAD, f"mkdir -p {PLACE} /srv/other && tar -C {PLACE} -x --no-same-owner && chmod 755 {PLACE}", archive)
    ssh(HEAD, "echo '/srv/other 10.77.0.0/24(ro,no_subtree_check)' > /etc/exports")
    return hashlib.sha256(contents["model.bin"]).hexdigest()


def test_what_is_in_the_way_is_refused_and_nothing_changes() -> None:
    ssh(HEAD, f"chmod 600 {PLACE}/config.json")
    rc, text, _ = sync("nfs", weight_sync_nfs_clients=[])
    assert rc != 0 and "spark1: [nfs.clients] found no fabric address of a worker" in text
    assert f"[nfs.mode] found {PLACE}/config.json closed to others" in text, "all at once"
    assert "inactive" in ssh(HEAD, "systemctl is-active nfs-server", check=False), "not started"
    assert not ssh(HEAD, "ls /etc/exports.d 2>/dev/null || true").strip()
    ssh(HEAD, f"chmod 644 {PLACE}/config.json")


def test_weights_are_mounted_over_tcp_by_the_worker_alone(digest: str) -> None:
    rc, text, changed = sync("nfs", "--check", weight_sync_nfs_rdma=False)
    assert rc == 0 and min(changed) > 0, text
    assert mounted() is None and exported() == set()
    rc, text, changed = sync("nfs", weight_sync_nfs_rdma=False)
    assert rc == 0, text
    mount = mounted()
    assert mount and {"ro", "vers=4.2", "proto=tcp", "nconnect=8"} <= mount.options and mount.fstype == "nfs4"
    assert exported() == {f"10.77.0.2:{PLACE}", "10.77.0.0/24:/srv/other"}
    assert ssh(WORKER, f"systemctl is-enabled {UNIT}").strip() == "enabled"
    assert ssh(WORKER, f"sha256sum < {PLACE}/model.bin").split()[0] == digest
    rc, text, changed = sync("nfs", weight_sync_nfs_rdma=False)
    assert (rc, changed) == (0, [0, 0]), text


def test_a_server_that_restarts_during_reads_costs_no_byte(digest: str) -> None:
    ssh(WORKER, f"umount {PLACE}; systemctl start {UNIT}")  # nothing in the page cache
    read = f"for i in $(seq 96); do dd if={PLACE}/model.bin bs=1M skip=$((i-1)) count=1 status=none; sleep 0.1; done"
    reader = subprocess.Popen(
        argv(WORKER, f"({read}) | sha256sum"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    ssh(HEAD, "sleep 3; systemctl stop nfs-server; sleep 3; systemctl start nfs-server")
    assert reader.poll() is None, "it restarted while the worker read"
    out, _ = reader.communicate(timeout=240)
    assert out.split()[0] == digest
    assert f"10.77.0.2:{PLACE}" in exported(), "our exports come back with the server"


def test_rdma_is_taken_where_both_ends_have_it(digest: str) -> None:
    rc, text, changed = sync("nfs", weight_sync_verify="full")
    assert rc == 0 and min(changed) > 0, text
    mount = mounted()
    assert mount and {"proto=rdma", "port=20049"} <= mount.options
    assert "xprt:\trdma" in ssh(WORKER, "cat /proc/self/mountstats")
    assert ssh(WORKER, f"sha256sum < {PLACE}/model.bin").split()[0] == digest
    rc, text, changed = sync("nfs")
    assert (rc, changed) == (0, [0, 0]), text


def test_another_way_takes_mount_and_export_back_and_leaves_strangers() -> None:
    rc, text, _ = sync("local")
    assert rc != 0 and "has no receipt" in text, "the worker has nothing of its own"
    assert mounted() is None and not ssh(WORKER, f"ls /etc/systemd/system/{UNIT}", check=False).startswith("/")
    assert exported() == {"10.77.0.0/24:/srv/other"}


def test_files_of_the_worker_are_not_hidden() -> None:
    ssh(WORKER, f"mkdir -p {PLACE} && touch {PLACE}/own")
    rc, text, _ = sync("nfs")
    assert rc != 0 and f"spark2: [nfs.mount] found {PLACE} holds 1 file(s) or directories of its own" in text
    assert mounted() is None
