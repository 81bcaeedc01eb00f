# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""zfs_replicate with two real pools, over SSH with a worker's key and zfs-serve as the forced command.

The tests follow one another. The roles and the verb rollback run as an owner runs them, on weights of their own. The
other times the module is a process on the machine that has imported it, since emulated machines need more seconds for
importing than for all the rest.
"""

from __future__ import annotations

import importlib.util
import io
import json
import shlex
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
from machines import HEAD, HOSTS, WORKER, Outcome, argv, playbook, ssh
from vm import ROOT

COLLECTION = "ansible_collections/sparkwright/dsv41/plugins"
DATASET = "tank/models"
# A repository of the roles' own.
TINY = {
    "id": "tiny",
    "repo": "acme/tiny",
    "revision": "0123456789abcdef0123456789abcdef01234567",
    "path": "/srv/weights/tiny",
    "include": [],
    "must_exist": ["config.json"],
    "join": "",
    "slim": "",
}
# Writes weights as the role weights does.
FETCHED = f"""import hashlib, os
from ansible_collections.sparkwright.dsv41.plugins.module_utils import weights
root = {TINY["path"]!r}
entries = []
for name, content in ("config.json", b"SAYS"), ("model.bin", os.urandom(4 << 20)):
    open(f"{{root}}/{{name}}", "wb").write(content)
    entries.append(weights.FileEntry(name, len(content), "sha256:" + hashlib.sha256(content).hexdigest()))
manifest = weights.Manifest({TINY["repo"]!r}, {TINY["revision"]!r}, (), tuple(entries))
mtimes = {{entry: os.stat(f"{{root}}/{{entry.path}}").st_mtime_ns for entry in entries}}
weights.write_receipt(root, weights.Receipt(manifest, mtimes))
"""
MIB = 1024 * 1024
KEYS = "/etc/sparkwright/peers"
LIBRARY = "/usr/local/lib/sparkwright-test"
SSH = [
    *("ssh", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes", "-o", "StrictHostKeyChecking=yes"),
    *("-o", f"UserKnownHostsFile={KEYS}/known_hosts", "-i", f"{KEYS}/id_ed25519", "root@10.77.0.1"),
]

# What Ansible puts around a module, reduced to the arguments: one line of them for one run.
AGENT = f"""import os, sys, traceback
from ansible.module_utils import basic
from {COLLECTION.replace("/", ".")}.modules import zfs_replicate
basic._ANSIBLE_PROFILE = "legacy"
for line in iter(sys.stdin.readline, ""):
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        basic._ANSIBLE_ARGS = line.encode()
        try:
            zfs_replicate.main()
        except SystemExit:
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            print("{{}}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
# ssh that kills the receiver when so many MiB have passed.
CUT = """import subprocess, sys, time
limit, *command = sys.argv[1:]
line = subprocess.Popen(command, stdout=subprocess.PIPE)
if not command[-1].startswith("zfs-send"):
    limit = 1 << 30
for count, block in enumerate(iter(lambda: line.stdout.read(1 << 20), b"")):
    if count == int(limit):
        time.sleep(1)
        subprocess.run(["pkill", "-KILL", "-f", "^[^ ]*zfs receive"], check=True)
    sys.stdout.buffer.write(block)
    sys.stdout.buffer.flush()
sys.exit(line.wait())
"""


def put(host: str, path: str, content: str) -> None:
    ssh(host, f"mkdir -p {Path(path).parent} && cat > {path} && chmod 755 {path}", content.encode())


def library() -> bytes:
    """What the module imports, as a tar."""
    stream = io.BytesIO()
    spec = importlib.util.find_spec("ansible")
    assert spec and spec.origin
    ansible = Path(spec.origin).parent

    def add(path: Path, name: str) -> None:
        tar.add(path, name, filter=lambda entry: None if entry.name.endswith((".pyc", "__pycache__")) else entry)

    with tarfile.open(fileobj=stream, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("ansible/__init__.py"))
        add(ansible / "module_utils", "ansible/module_utils")
        add(ROOT / "plugins/modules/zfs_replicate.py", f"{COLLECTION}/modules/zfs_replicate.py")
        for name in ("zfs.py", "findings.py", "progress.py", "weights.py"):
            add(ROOT / "plugins/module_utils" / name, f"{COLLECTION}/module_utils/{name}")
    return stream.getvalue()


def arguments(host: str, state: str, **options: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"host": host, "dataset": DATASET, "mountpoint": "/srv/models", "state": state}
    if state == "received":
        base["source"] = {"ssh": SSH, "dataset": DATASET}
    return {**base, **options}


class Agent:
    """The module on a machine, ready to run."""

    def __init__(self, host: str, user: str) -> None:
        command = f"cd /; PYTHONPATH={LIBRARY} exec runuser -u {user} -- python3 {LIBRARY}/agent.py"
        self.process = subprocess.Popen(argv(host, command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = next(line for line in self.process.stdout if line.startswith("{"))
        return json.loads(answer)  # type: ignore[no-any-return]


AGENTS: dict[tuple[str, str], Agent] = {}


def module(host: str, state: str, check: bool = False, user: str = "root", **options: Any) -> dict[str, Any]:
    """Run the module on a machine; what it told."""
    if (host, user) not in AGENTS:
        AGENTS[host, user] = Agent(host, user)
    return AGENTS[host, user].run(
        {"ANSIBLE_MODULE_ARGS": {**arguments(host, state, **options), "_ansible_check_mode": check}}
    )


def ids(result: dict[str, Any]) -> list[str]:
    assert result.get("failed"), result
    return [finding["id"] for finding in result["findings"]]


def done(result: dict[str, Any]) -> dict[str, Any]:
    assert not result.get("failed"), result["msg"]
    return result


def run(name: str, *arguments: str, **variables: Any) -> Outcome:
    given = {"spark_zfs_dataset": "tank", "weight_sync_head_address": "10.77.0.1", **variables}
    return playbook(name, *arguments, **given, weights_list=[TINY], weight_sync_list=[TINY])


def fetched(says: str) -> None:
    ssh(HEAD, f"PYTHONPATH={LIBRARY} python3 -", FETCHED.replace("SAYS", says).encode())


def prop(host: str, name: str, dataset: str = DATASET) -> str:
    return ssh(host, f"zfs get -Hp -o value {name} {dataset}")


def snapshots(host: str, dataset: str = DATASET) -> dict[str, str]:
    """GUIDs by name, oldest first."""
    lines = ssh(host, f"zfs list -Hp -d 1 -t snapshot -o name,guid -s createtxg {dataset}").splitlines()
    return {line.split("\t")[0].partition("@")[2]: line.split("\t")[1] for line in lines}


def state_of(host: str, dataset: str = DATASET) -> tuple[str, dict[str, str]]:
    """What a check must leave as it is."""
    names = "used,referenced,mounted,mountpoint,readonly,receive_resume_token"
    return ssh(host, f"zfs get -Hp -o value {names} {dataset}"), snapshots(host, dataset)


def sums(host: str, directory: str = "/srv/models") -> str:
    return ssh(host, f"cd {directory} && sha256sum *")


def write(host: str, name: str, mib: int) -> None:
    ssh(host, f"head -c {mib * MIB} /dev/urandom > /srv/models/{name}")


def cut(after_mib: int) -> dict[str, Any]:
    """Receive, and have the receiver killed once that much has come."""
    source = {"ssh": ["python3", f"{LIBRARY}/cut.py", str(after_mib), *SSH], "dataset": DATASET}
    return module(WORKER, "received", source=source)


@pytest.fixture(scope="module", autouse=True)
def pools(initial_state: None) -> Iterator[None]:
    """A pool on both machines, and the way from the worker to the head's."""
    environment = jinja2.Environment(keep_trailing_newline=True)
    environment.filters["quote"] = shlex.quote
    template = environment.from_string((ROOT / "roles/peers/templates/zfs-serve.j2").read_text())
    ours = library()
    for host in HOSTS:
        ssh(host, "modprobe zfs && zpool create -f -m none tank /dev/vdb")
        ssh(host, f"mkdir -p {LIBRARY} && tar -xf - -C {LIBRARY} --no-same-owner", ours)
        put(host, f"{LIBRARY}/agent.py", AGENT)
        put(host, f"{LIBRARY}/cut.py", CUT)
        put(host, "/usr/local/bin/docker", "#!/bin/sh\ncat /run/engine 2> /dev/null || :\n")
    serve = "/usr/local/lib/sparkwright/zfs-serve"
    put(HEAD, serve, template.render(peers_zfs_datasets=[DATASET, "tank/tiny"], ansible_managed="test"))
    ssh(WORKER, f"mkdir -p -m 700 {KEYS} && ssh-keygen -q -t ed25519 -N '' -f {KEYS}/id_ed25519")
    key = ssh(WORKER, f"cat {KEYS}/id_ed25519.pub")
    line = f'restrict,from="10.77.0.2",command="{serve}" {key}\n'
    ssh(HEAD, "cat >> /root/.ssh/authorized_keys", line.encode())
    host_key = ssh(HEAD, "cut -d' ' -f1,2 /etc/ssh/ssh_host_ed25519_key.pub")
    ssh(WORKER, f"cat > {KEYS}/known_hosts", f"10.77.0.1 {host_key}\n".encode())
    yield
    for agent in AGENTS.values():
        agent.process.kill()
        agent.process.wait()


def test_the_head_makes_its_dataset() -> None:
    assert done(module(HEAD, "snapshot"))["changed"]
    names = "recordsize,atime,compression,mounted,mountpoint"
    assert prop(HEAD, names).split() == ["1048576", "off", "lz4", "yes", "/srv/models"]
    assert done(module(HEAD, "snapshot"))["changed"] is False, "nothing is in it"


def test_a_pool_or_a_parent_that_is_missing_is_named() -> None:
    (finding,) = module(HEAD, "snapshot", dataset="tonk/models")["findings"]
    assert finding["id"] == "zfs.pool" and "zpool create tonk" in finding["repair"]
    (finding,) = module(HEAD, "snapshot", dataset="tank/a/models")["findings"]
    assert finding["id"] == "zfs.dataset" and finding["repair"] == "zfs create -p tank/a"


def test_a_snapshot_is_taken_of_what_was_written_and_only_then() -> None:
    write(HEAD, "one", 40)
    planned = done(module(HEAD, "snapshot", check=True))
    assert planned["action"] == "snapshot" and snapshots(HEAD) == {}
    taken = done(module(HEAD, "snapshot"))
    assert snapshots(HEAD) == {taken["snapshot"]: taken["guid"]}
    assert done(module(HEAD, "snapshot"))["changed"] is False
    ssh(HEAD, f"zfs unmount {DATASET} && zfs mount {DATASET} && zpool sync")
    assert int(prop(HEAD, "written")) > 0, "ZFS counts what mounting writes"
    assert done(module(HEAD, "snapshot"))["changed"] is False, "and it is not a change"


def test_a_receiver_that_is_killed_is_resumed_and_not_everything_is_sent_again() -> None:
    killed = cut(15)
    assert ids(killed) == ["zfs.transfer"] and "zfs receive here answered -9" in killed["msg"], killed["msg"]
    assert prop(WORKER, "receive_resume_token") != "-"
    before = state_of(WORKER)
    planned = done(module(WORKER, "received", check=True))
    assert state_of(WORKER) == before
    resumed = done(module(WORKER, "received"))
    assert planned["commands"] == resumed["commands"]
    assert resumed["action"] == "resume" and resumed["resumed_bytes"] >= 10 * MIB
    assert resumed["moved_bytes"] < 31 * MIB, "of 40"
    assert resumed["moved_bytes"] + resumed["resumed_bytes"] >= 40 * MIB
    assert resumed["mounted"] and sums(WORKER) == sums(HEAD)
    assert snapshots(WORKER) == snapshots(HEAD), "names and GUIDs"
    names = "recordsize,atime,compression,readonly,mountpoint"
    assert prop(WORKER, names).split() == ["1048576", "off", "lz4", "on", "/srv/models"]


def test_a_second_run_changes_nothing() -> None:
    before = state_of(WORKER)
    for check in (True, False):
        again = done(module(WORKER, "received", check))
        assert (again["changed"], again["action"]) == (False, "nothing")
    assert state_of(WORKER) == before


def test_only_what_is_new_is_sent() -> None:
    write(HEAD, "two", 8)
    newest = done(module(HEAD, "snapshot"))["snapshot"]
    # Mounted in between, as after a start of the machine.
    ssh(WORKER, f"zfs unmount {DATASET} && zfs mount {DATASET}")
    planned = done(module(WORKER, "received", check=True))
    received = done(module(WORKER, "received"))
    assert planned["commands"] == received["commands"] and planned["diff"] == received["diff"]
    assert (received["action"], received["snapshot"]) == ("incremental", newest)
    assert 8 * MIB <= received["moved_bytes"] < 9 * MIB
    assert sums(WORKER) == sums(HEAD) and snapshots(WORKER) == snapshots(HEAD)


def test_what_is_not_from_the_source_is_refused() -> None:
    ssh(WORKER, "zfs create -o mountpoint=/srv/other tank/other && echo mine > /srv/other/precious")
    other: dict[str, Any] = {
        "dataset": "tank/other",
        "mountpoint": "/srv/other",
        "force_rollback": True,
        "destroy_newer": True,
    }
    refused = module(WORKER, "received", **other)
    assert ids(refused) == ["zfs.foreign"] and "zfs destroy -r tank/other" in refused["msg"]
    ssh(WORKER, f"zfs snapshot tank/other@{list(snapshots(HEAD))[-1]}")
    refused = module(WORKER, "received", **other)
    assert ids(refused) == ["zfs.foreign"], "the same name is not the same snapshot"
    assert ssh(WORKER, "cat /srv/other/precious") == "mine"
    ssh(WORKER, "zfs destroy -r tank/other")


def test_it_is_rolled_back_to_the_snapshot_before() -> None:
    *_, before, newest = snapshots(WORKER)
    refused = module(WORKER, "rolled_back")
    assert ids(refused) == ["zfs.newer"] and newest in refused["msg"] and "written to" in refused["msg"]
    planned = done(module(WORKER, "rolled_back", check=True, destroy_newer=True))
    assert newest in snapshots(WORKER)
    rolled = done(module(WORKER, "rolled_back", destroy_newer=True))
    assert planned["commands"] == rolled["commands"] and rolled["lost"][0] == f"{DATASET}@{newest}"
    assert rolled["snapshot"] == before == list(snapshots(WORKER))[-1]
    assert ssh(WORKER, "ls /srv/models").split() == ["one"]
    assert done(module(WORKER, "rolled_back", snapshot=before))["changed"] is False
    assert done(module(WORKER, "received"))["action"] == "incremental"
    assert sums(WORKER) == sums(HEAD)


def test_a_user_with_rights_does_all_but_mount() -> None:
    ssh(
        WORKER,
        f"zfs destroy -r {DATASET}; useradd -m peer; cp -r {KEYS} /home/peer/keys; chown -R peer /home/peer/keys",
    )
    words = [word.replace(KEYS, "/home/peer/keys") for word in SSH]
    options: dict[str, Any] = {"user": "peer", "source": {"ssh": words, "dataset": DATASET}}
    denied = module(WORKER, "received", **options)
    assert ids(denied) == ["zfs.transfer"] and "permission denied" in denied["msg"]
    rights = "create,mount,receive,snapshot,rollback,destroy,hold,send,readonly,mountpoint,canmount"
    ssh(WORKER, f"zfs allow peer {rights},recordsize,atime,compression tank")
    planned = done(module(WORKER, "received", check=True, **options))
    received = done(module(WORKER, "received", **options))
    assert planned["commands"] == received["commands"] and received["action"] == "full"
    assert (received["mounted"], received["mount_command"]) == (False, f"zfs mount {DATASET}")
    assert [finding["severity"] for finding in received["findings"]] == ["warning"]
    assert snapshots(WORKER).items() <= snapshots(HEAD).items()
    ssh(WORKER, received["mount_command"])
    assert sums(WORKER) == sums(HEAD)

    ssh(HEAD, "echo six > /srv/models/six")
    done(module(HEAD, "snapshot"))
    received = done(module(WORKER, "received", **options))
    assert (received["action"], received["mounted"], received["findings"]) == ("incremental", True, [])
    rolled = done(module(WORKER, "rolled_back", user="peer", destroy_newer=True))
    assert rolled["action"] == "rollback" and "six" not in sums(WORKER)
    made = done(module(WORKER, "present", user="peer", dataset="tank/made", mountpoint="/srv/made"))
    assert made["changed"] and not made["mounted"]
    again = done(module(WORKER, "present", user="peer", dataset="tank/made", mountpoint="/srv/made"))
    assert not again["changed"] and again["findings"], "still not mounted"


def test_the_roles_bring_weights_to_the_worker_and_once_only() -> None:
    weights = "tests/acceptance/zfs_weights.yml"
    rc, text, changed = run(weights, "--tags", "weights")
    assert (rc, changed) == (0, [1, 0]), text
    assert prop(HEAD, "mountpoint,recordsize", "tank/tiny").split() == [TINY["path"], "1048576"]
    fetched("first")
    rc, text, changed = run(weights)
    assert (rc, changed) == (0, [1, 1]), text
    assert sums(WORKER, TINY["path"]) == sums(HEAD, TINY["path"])
    rc, text, changed = run(weights)
    assert (rc, changed) == (0, [0, 0]), text
    fetched("second")
    rc, text, changed = run(weights, "--check")
    assert (rc, changed) == (0, [1, 1]), text


def test_all_nodes_go_back_together_and_not_under_an_engine() -> None:
    (first,) = snapshots(HEAD, "tank/tiny")
    at = {"dataset": "tank/tiny", "mountpoint": TINY["path"]}
    done(module(HEAD, "snapshot", **at))
    done(module(WORKER, "received", **at, source={"ssh": SSH, "dataset": "tank/tiny"}))
    ssh(WORKER, "echo sparkwright-lab-r1 > /run/engine")
    rc, text, _ = run("playbooks/rollback.yml")
    assert rc != 0 and "spark2: found sparkwright-lab-r1 running" in text and len(snapshots(HEAD, "tank/tiny")) == 2
    ssh(WORKER, "rm /run/engine")
    rc, text, changed = run("playbooks/rollback.yml")
    assert (rc, changed) == (0, [1, 1]), text
    for host in HOSTS:
        assert list(snapshots(host, "tank/tiny")) == [first]
        assert ssh(host, f"cat {TINY['path']}/config.json") == "first"
    rc, text, changed = run("playbooks/rollback.yml", snapshot=first)
    assert (rc, changed) == (0, [0, 0]), text


def test_the_worker_reaches_nothing_else_on_the_head() -> None:
    command = " ".join(map(shlex.quote, SSH))
    for request in ("zfs-list tank", f"zfs-send {DATASET} by-hand", "reboot", f"zfs-send {DATASET} sparkwright-x;id"):
        answer = ssh(WORKER, f"{command} {shlex.quote(request)} 2>&1; echo rc=$?")
        assert answer.startswith("zfs-serve: ") and answer.endswith("rc=77"), answer
