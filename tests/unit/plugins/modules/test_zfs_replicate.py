# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The module on a worker and a head whose pools are one file of JSON each, with zfs-serve itself between them.

The stand-in for zfs speaks the words of OpenZFS 2.3 (tests/fixtures/zfs); what it knows of ZFS is only what the module
relies on. The real one is in tests/acceptance/test_zfs.py.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ansible_cli
import jinja2
import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils.progress import Progress
from ansible_collections.sparkwright.dsv41.plugins.modules import zfs_replicate

ROOT = Path(__file__).parents[4]
SERVE = ROOT / "roles/peers/templates/zfs-serve.j2"
DATASET = "tank/models"
MIB = 1024 * 1024

# A file is its size; contents are what files there are.
ZFS = r"""#!PYTHON -IS
import json, os, re, sys, time
base = os.path.dirname(os.path.abspath(sys.argv[0]))
words = sys.argv[1:]
with open(base + "/calls", "a") as stream:
    print(os.path.basename(sys.argv[0]), *words, file=stream)
with open(base + "/pool.json") as stream:
    pool = json.load(stream)
sets = pool["datasets"]
TAKES = ("-o", "-t", "-d", "-s", "-i")


def save():
    with open(base + "/pool.json.new", "w") as stream:
        json.dump(pool, stream)
    os.replace(base + "/pool.json.new", base + "/pool.json")


def die(text, code=1):
    print(text, file=sys.stderr)
    sys.exit(code)


def number():
    pool["txg"] += 1
    return pool["txg"]


def total(files):
    return sum(files.values())


def find(name):
    return sets[name] if name in sets else die("cannot open '%s': dataset does not exist" % name)


def snap(name):
    dataset, _, short = name.partition("@")
    found = [each for each in find(dataset)["snapshots"] if each["name"] == short]
    return found[0] if found else die("cannot open '%s': dataset does not exist" % name)


def written(data, old):
    new = {name: size for name, size in data["files"].items() if old.get(name) != size}
    gone = [name for name in old if name not in data["files"]]
    return total(new) + 512 * len(gone) + data.get("touched", 0)


def value(name, key):
    data = sets[name]
    last = data["snapshots"][-1]["files"] if data["snapshots"] else {}
    if key.startswith("written@"):
        return str(written(data, snap(name + "@" + key[8:])["files"]))
    facts = {
        "type": "filesystem", "available": pool["available"], "referenced": total(data["files"]) + 98304,
        "used": total(data["files"]), "written": written(data, last), "mounted": "yes" if data["mounted"] else "no",
        "mountpoint": data["props"].get("mountpoint", "none"), "readonly": "off",
        "receive_resume_token": data.get("token", "-"),
        "inconsistent": str(int(data.get("partial", 0))), "recordsize": "131072", "atime": "on", "compression": "on",
    }
    found = str({**facts, **data["props"]}[key])
    return str(1048576) if found == "1M" else found


def may(right):
    if right in pool["forbidden"]:
        die("cannot %s '%s': permission denied" % (right, words[-1]))


if os.path.basename(sys.argv[0]) == "zpool":
    sys.exit(0)
verb, rest = words[0], words[1:]
options, plain = [], []
while rest:
    word = rest.pop(0)
    if word in TAKES and not (verb == "send" and word == "-t"):
        options.append((word, rest.pop(0)))
    elif word.startswith("-"):
        options.append((word, ""))
    else:
        plain.append(word)
flags = dict(options)
if verb == "get":
    find(plain[1])
    for key in plain[0].split(","):
        print(*([value(plain[1], key)] if flags["-o"] == "value" else [key, value(plain[1], key)]), sep="\t")
elif verb == "list" and flags.get("-t") == "snapshot":
    for each in find(plain[0])["snapshots"]:
        print(plain[0] + "@" + each["name"], each["guid"], each["txg"], 1, each["holds"], "-", sep="\t")
elif verb == "list":
    find(plain[0])
    print(*[name for name in sets if (name + "/").startswith(plain[0] + "/")], sep="\n")
elif verb == "create":
    may("create")
    if os.path.dirname(plain[0]) not in sets:
        die("cannot create '%s': parent does not exist" % plain[0])
    props = dict(each.split("=", 1) for key, each in options if key == "-o")
    sets[plain[0]] = {"props": props, "files": {}, "snapshots": [], "mounted": pool["root"]}
    save()
    if not pool["root"]:
        die("filesystem successfully created, but it may only be mounted by root")
elif verb == "set":
    may("set")
    *props, name = plain
    data = find(name)
    old = data["props"].get("mountpoint", "none")
    data["props"].update(each.split("=", 1) for each in props)
    if old == "none" and data["props"].get("mountpoint", "none") != "none" and pool["root"]:
        data["mounted"] = True
    save()
    if pool.get("busy"):
        die("cannot set mount attributes for '%s': mount failed\nproperty may be set but unable to remount filesystem"
            % name, 255)
elif verb == "diff":
    if "diff" in pool["forbidden"]:
        die("Unable to obtain diffs: \n   The sys_mount privilege or diff delegated permission is needed")
    old = snap(plain[0])["files"]
    data = find(plain[0].partition("@")[0])
    for name in sorted(set(old) | set(data["files"])):
        if old.get(name) != data["files"].get(name):
            print("M", name, sep="\t")
elif verb == "mount":
    if not pool["root"]:
        die("cannot mount '%s': Insufficient privileges" % plain[0])
    find(plain[0])["mounted"] = True
    save()
elif verb == "snapshot":
    may("snapshot")
    dataset, _, short = plain[0].partition("@")
    data = find(dataset)
    guid = number()
    data["snapshots"].append(
        {"name": short, "guid": pool["guids"] + guid, "txg": guid, "files": dict(data["files"]), "holds": 0})
    save()
elif verb == "destroy":
    may("destroy")
    dataset, _, names = plain[0].partition("@")
    for short in names.split(","):
        find(dataset)["snapshots"].remove(snap(dataset + "@" + short))
    save()
elif verb == "rollback":
    may("rollback")
    data, target = find(plain[0].partition("@")[0]), snap(plain[0])
    index = data["snapshots"].index(target)
    if data["snapshots"][index + 1:] and "-r" not in flags:
        die("cannot rollback to '%s': more recent snapshots or bookmarks exist" % plain[0])
    data["snapshots"] = data["snapshots"][: index + 1]
    data["files"] = dict(target["files"])
    data.pop("touched", 0)
    save()
elif verb == "send":
    if "-t" in flags:
        try:
            name, guid, origin, done = json.loads(bytes.fromhex(plain[0].replace("-", "")))
        except ValueError:
            die("cannot resume send: resume token is corrupt")
        if "-nvP" in flags:
            print("resume token contents:\nnvlist version: 0\n\tobject = 0x80\n\toffset = 0x0\n\tbytes = %#x" % done)
            if origin:
                print("\tfromguid = %#x" % origin)
            print("\ttoguid = %#x\n\ttoname = %s" % (guid, name), flush=True)
        dataset, _, short = name.partition("@")
        if short not in [each["name"] for each in sets.get(dataset, {"snapshots": []})["snapshots"]]:
            die("cannot resume send: '%s' used in the initial send no longer exists" % name, 255)
    else:
        name, done, origin = plain[0], 0, 0
        if "-i" in flags:
            origin = snap(name.partition("@")[0] + flags["-i"])["guid"]
    target = snap(name)
    source = [each["files"] for each in find(name.partition("@")[0])["snapshots"] if each["guid"] == origin]
    size = max(written(target, source[0] if source else {}) - done, 0)
    if "-nvP" in flags:
        print("%s\t%s\t%d\nsize\t%d" % ("incremental" if origin else "full", name, size, size))
        sys.exit(0)
    head = {"name": name, "origin": origin, "size": size, "done": done, "snapshot": target}
    out = sys.stdout.buffer
    out.write(json.dumps(head).encode() + b"\n")
    for place in range(0, size, 65536):
        if pool.get("stop") is not None and place >= pool["stop"]:
            out.flush()
            die("warning: cannot send '%s': signal received" % name, 255 if pool.get("lost") else 1)
        out.write(b"x" * min(65536, size - place))
        if pool.get("slow"):
            out.flush()
            time.sleep(pool["slow"])
elif verb == "receive" and "-A" in flags:
    data = find(plain[0])
    del data["token"]
    if data.pop("partial", False):
        del sets[plain[0]]
    save()
elif verb == "receive":
    may("receive")
    head = json.loads(sys.stdin.buffer.readline() or die("cannot receive: failed to read from stream"))
    target, name = head["snapshot"], plain[0]
    data = sets.get(name)
    if data is None:
        data = sets[name] = {"props": {}, "files": {}, "snapshots": [], "mounted": False, "partial": True}
    elif not head["origin"] and "-F" not in flags and not (data.get("partial") and head["done"]):
        die("cannot receive new filesystem stream: destination '%s' exists\nmust specify -F to overwrite it" % name)
    elif head["origin"] and (not data["snapshots"] or data["snapshots"][-1]["guid"] != head["origin"]):
        die("cannot receive incremental stream: most recent snapshot of %s does not\nmatch incremental source" % name)
    elif head["origin"] and written(data, data["snapshots"][-1]["files"]):
        die("cannot receive incremental stream: destination %s has been modified\nsince most recent snapshot" % name)
    if "-F" in flags:
        data["mounted"] = False
    elif not head["done"]:
        data["props"].update(each.split("=", 1) for key, each in options if key == "-o")
    arrived = 0
    while arrived < head["size"]:
        block = sys.stdin.buffer.read(65536)
        arrived += len(block)
        if pool.get("full") is not None and arrived > pool["full"]:
            die("cannot receive new filesystem stream: out of space")
        if not block:
            done = head["done"] + arrived
            data["token"] = json.dumps([head["name"], target["guid"], head["origin"], done]).encode().hex()
            save()
            die("cannot receive resume stream: checksum mismatch or incomplete stream.\n"
                "Partially received snapshot is saved.")
    if not arrived == head["size"]:
        die("cannot receive: invalid stream")
    data.pop("token", None)
    data.pop("partial", None)
    data["files"] = dict(target["files"])
    data["snapshots"].append({**target, "txg": number(), "holds": 0})
    save()
else:
    die("unexpected: zfs " + " ".join(words), 99)
"""

# The forced command of the worker's key.
SSH = """#!/bin/sh
for request; do :; done
echo "$request" >> HEAD/requests
[ ! -e HEAD/gone ] || { echo "ssh: connect to host 10.77.0.1 port 22: No route to host" >&2; exit 255; }
SSH_ORIGINAL_COMMAND=$request PATH=HEAD:/usr/bin:/bin exec /bin/sh HEAD/zfs-serve
"""


def render(*datasets: str) -> str:
    environment = jinja2.Environment(keep_trailing_newline=True, autoescape=False)
    environment.filters["quote"] = shlex.quote
    return environment.from_string(SERVE.read_text()).render(peers_zfs_datasets=datasets, ansible_managed="")


class Node:
    """One machine's pool."""

    def __init__(self, directory: Path, guids: int) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        for name in ("zfs", "zpool"):
            (directory / name).write_text(ZFS.replace("PYTHON", sys.executable))
            (directory / name).chmod(0o755)
        top = {"props": {"mountpoint": "none"}, "files": {}, "snapshots": [], "mounted": False}
        self.write(
            {"datasets": {"tank": top}, "txg": 1, "guids": guids, "available": 2**30, "forbidden": [], "root": True}
        )

    def read(self) -> dict[str, Any]:
        return json.loads((self.directory / "pool.json").read_text())  # type: ignore[no-any-return]

    def write(self, pool: dict[str, Any]) -> None:
        (self.directory / "pool.json").write_text(json.dumps(pool))

    def set(self, **values: Any) -> None:
        self.write({**self.read(), **values})

    def zfs(self, *words: str) -> None:
        subprocess.run([self.directory / "zfs", *words], check=True, capture_output=True)

    def files(self, **sizes: int) -> None:
        """Write files of these sizes in bytes."""
        pool = self.read()
        pool["datasets"][DATASET]["files"].update(sizes)
        self.write(pool)

    @property
    def models(self) -> dict[str, Any]:
        return self.read()["datasets"][DATASET]  # type: ignore[no-any-return]

    @property
    def snapshots(self) -> list[str]:
        return [each["name"] for each in self.models["snapshots"]]

    def changes(self) -> list[str]:
        """What was run that changes something."""
        reads = ("zfs get", "zfs list", "zfs send", "zpool sync")
        return [line for line in self.calls() if not line.startswith(reads)]

    def calls(self) -> list[str]:
        """What was run at all."""
        path = self.directory / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def head(tmp_path: Path) -> Node:
    node = Node(tmp_path / "head", 10**19)
    (node.directory / "zfs-serve").write_text(render(DATASET))
    return node


@pytest.fixture
def worker(tmp_path: Path, head: Node) -> Node:
    node = Node(tmp_path / "worker", 10**18)
    (node.directory / "ssh").write_text(SSH.replace("HEAD", str(head.directory)))
    (node.directory / "ssh").chmod(0o755)
    return node


@pytest.fixture
def on(run_module: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, worker: Node) -> Any:
    """Run the module on a node: on(node, state, check, option=...)."""
    monkeypatch.setattr(os, "sync", lambda: None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    def run(node: Node, state: str, check: bool = False, **options: Any) -> Any:
        monkeypatch.setenv("PATH", str(node.directory))
        base: dict[str, Any] = {"host": node.directory.name, "state": state, "dataset": DATASET}
        base["mountpoint"] = str(tmp_path / f"srv-{node.directory.name}")
        if state == "received":
            base["source"] = {"ssh": ["ssh", "root@10.77.0.1"], "dataset": DATASET}
        return run_module(zfs_replicate.main, check=check, **{**base, **options})

    return run


@pytest.fixture
def filled(head: Node, tmp_path: Path) -> Node:
    """The head with one file of 3 MiB in its first snapshot, as the module leaves it."""
    pool = head.read()
    props = {"recordsize": "1M", "atime": "off", "compression": "lz4", "mountpoint": str(tmp_path / "srv-head")}
    pool["datasets"][DATASET] = {"props": props, "files": {}, "snapshots": [], "mounted": True}
    head.write(pool)
    more(head, one=3 * MIB)
    return head


def more(head: Node, **sizes: int) -> str:
    """Files and another snapshot of ours on the head; its name."""
    head.files(**sizes)
    pool = head.read()
    pool["txg"] += 1
    data = pool["datasets"][DATASET]
    name = f"sparkwright-20260102T0304{pool['txg']:02}Z"
    data["snapshots"].append(
        {"name": name, "guid": 10**19 + pool["txg"], "txg": pool["txg"], "files": dict(data["files"]), "holds": 0}
    )
    head.write(pool)
    return name


def ids(result: Any) -> list[str]:
    assert result["failed"]
    return [finding["id"] for finding in result["findings"]]


# Snapshots on the head


def test_the_head_makes_its_dataset_and_a_snapshot_of_what_was_written(head: Node, on: Any, tmp_path: Path) -> None:
    planned = on(head, "snapshot", check=True)
    assert planned["changed"] and head.changes() == []
    made = on(head, "snapshot")
    assert made["commands"] == planned["commands"] and "recordsize=1M" in made["commands"][0]
    assert (made["action"], made["mounted"], head.snapshots) == ("nothing", True, [])
    (tmp_path / "srv-head").mkdir()
    assert on(head, "snapshot")["changed"] is False, "an empty dataset is not worth a snapshot"

    head.files(one=MIB)
    (tmp_path / "srv-head/one").touch()
    planned = on(head, "snapshot", check=True)
    taken = on(head, "snapshot")
    assert planned["action"] == taken["action"] == "snapshot" and planned["changed"] and taken["changed"]
    assert head.snapshots == [taken["snapshot"]] and taken["snapshot"].startswith("sparkwright-2")
    assert taken["guid"] == str(head.models["snapshots"][0]["guid"])
    assert f"@{taken['snapshot']}" in taken["diff"]["after"] and "@" not in taken["diff"]["before"]
    for check in (True, False):
        again = on(head, "snapshot", check)
        assert (again["changed"], again["snapshot"]) == (False, taken["snapshot"])


def test_present_is_the_dataset_without_a_snapshot(head: Node, on: Any, tmp_path: Path) -> None:
    planned = on(head, "present", check=True)
    made = on(head, "present")
    assert planned["commands"] == made["commands"] and made["mounted"] and made["changed"]
    head.files(one=MIB)
    assert on(head, "present")["changed"] is False and head.snapshots == []
    pool = head.read()
    pool["datasets"][DATASET]["mounted"] = False
    head.write(pool)
    assert on(head, "present", check=True)["commands"] == [f"zfs mount {DATASET}"]
    (tmp_path / "srv-head").mkdir(exist_ok=True)
    (tmp_path / "srv-head/precious").touch()
    assert ids(on(head, "present")) == ["zfs.mountpoint"], "files that are below the mount"


def test_to_mount_it_is_not_to_change_it(filled: Node, on: Any) -> None:
    """ZFS counts what mounting writes."""
    pool = filled.read()
    pool["datasets"][DATASET]["touched"] = 1024
    filled.write(pool)
    assert on(filled, "snapshot")["changed"] is False
    filled.set(forbidden=["diff"])
    assert on(filled, "snapshot")["action"] == "snapshot", "in doubt it has changed"


def test_a_property_that_somebody_changed_is_set_again(filled: Node, on: Any) -> None:
    filled.zfs("set", "atime=on", DATASET)
    result = on(filled, "snapshot")
    assert result["commands"] == [f"zfs set atime=off {DATASET}"]
    assert "atime=on" in result["diff"]["before"] and "atime=off" in result["diff"]["after"]
    assert on(filled, "snapshot", properties={"atime": False})["changed"] is False, "YAML's off"


def test_the_head_keeps_what_the_policy_says_and_what_workers_hold(filled: Node, on: Any) -> None:
    filled.zfs("snapshot", f"{DATASET}@by-hand")
    names = [*filled.snapshots, *(more(filled, **{f"file{number}": MIB}) for number in range(3))]
    assert on(filled, "snapshot", check=True)["removed"] == ["sparkwright-20260102T030402Z"]
    on(filled, "snapshot")
    assert filled.snapshots == names[1:], "three by default, and never another's"
    assert on(filled, "snapshot", keep=0)["removed"] == [], "0 is for all"
    guid = str(filled.models["snapshots"][1]["guid"])
    result = on(filled, "snapshot", keep=1, protect=[guid])
    assert result["removed"] == [names[3]] and filled.snapshots == ["by-hand", names[2], names[4]]


def test_a_pool_or_a_parent_that_is_missing_is_named(head: Node, on: Any) -> None:
    (finding,) = on(head, "snapshot", dataset="tonk/models")["findings"]
    assert (finding["id"], finding["needed"]) == ("zfs.pool", "pool tonk")
    assert "zpool create tonk" in finding["repair"]
    (finding,) = on(head, "snapshot", dataset="tank/a/models")["findings"]
    assert (finding["id"], finding["repair"]) == ("zfs.dataset", "zfs create -p tank/a")
    assert head.changes() == []


def test_files_that_a_mount_would_hide_are_found(head: Node, on: Any, tmp_path: Path) -> None:
    (tmp_path / "srv-head").mkdir()
    (tmp_path / "srv-head/precious").touch()
    (finding,) = on(head, "snapshot")["findings"]
    assert finding["id"] == "zfs.mountpoint" and "precious" in finding["found"]
    assert head.changes() == []


# Copies on a worker


def test_full_then_nothing_then_an_increment(filled: Node, worker: Node, on: Any) -> None:
    planned = on(worker, "received", check=True)
    assert (planned["action"], planned["changed"], planned["moved_bytes"]) == ("full", True, 0)
    assert worker.changes() == []
    first = on(worker, "received")
    assert (first["action"], first["size_bytes"]) == ("full", 3 * MIB) and first["moved_bytes"] >= 3 * MIB
    assert first["commands"] == planned["commands"] and first["diff"] == planned["diff"]
    assert (first["snapshot"], first["guid"]) == (filled.snapshots[0], str(filled.models["snapshots"][0]["guid"]))
    assert first["mounted"] and worker.models["props"]["readonly"] == "on"
    assert worker.models["props"]["recordsize"] == "1M"
    for check in (True, False):
        again = on(worker, "received", check)
        assert (again["action"], again["changed"]) == ("nothing", False)

    newest = more(filled, two=MIB)
    planned = on(worker, "received", check=True)
    second = on(worker, "received")
    assert planned["commands"] == second["commands"]
    assert (second["action"], second["size_bytes"], second["snapshot"]) == ("incremental", MIB, newest)
    assert worker.models["files"] == filled.models["files"]


def test_a_snapshot_that_is_named_is_received_instead_of_the_newest(filled: Node, worker: Node, on: Any) -> None:
    first = filled.snapshots[0]
    more(filled, two=MIB)
    assert on(worker, "received", snapshot=first)["snapshot"] == first
    assert on(worker, "received", snapshot=first)["changed"] is False
    assert ids(on(worker, "received", snapshot="sparkwright-none")) == ["zfs.source"]
    assert ids(on(worker, "received", snapshot="by-hand")) == ["zfs.name"]


def test_what_is_common_is_known_by_guid_not_by_name(filled: Node, worker: Node, on: Any) -> None:
    on(worker, "received")
    pool = worker.read()
    pool["datasets"][DATASET]["snapshots"][0]["name"] = "renamed"
    worker.write(pool)
    more(filled, two=MIB)
    assert on(worker, "received")["action"] == "incremental"
    pool = worker.read()
    for each in pool["datasets"][DATASET]["snapshots"]:
        each["guid"] += 1000
    worker.write(pool)
    more(filled, three=MIB)
    assert ids(on(worker, "received")) == ["zfs.foreign"], "the same names do not make them the same"


@pytest.mark.parametrize("cause", ["head stops", "connection breaks"])
def test_what_was_interrupted_goes_on(cause: str, filled: Node, worker: Node, on: Any) -> None:
    filled.set(stop=2 * MIB, lost=cause == "connection breaks")
    broken = on(worker, "received")
    assert ids(broken) == ["zfs.transfer"]
    assert ("answered 255" if cause == "connection breaks" else "answered 1: warning: cannot send") in broken["msg"]
    assert "zfs receive here answered 1: cannot receive resume stream" in broken["msg"]
    filled.set(stop=None)
    planned = on(worker, "received", check=True)
    assert (planned["action"], planned["resumed_bytes"], planned["size_bytes"]) == ("resume", 2 * MIB, MIB)
    resumed = on(worker, "received")
    assert resumed["action"] == "resume" and resumed["moved_bytes"] < 1.1 * MIB, "not everything again"
    assert resumed["commands"] == planned["commands"]
    assert resumed["mounted"] and worker.models["props"]["readonly"] == "on"
    assert worker.models["files"] == filled.models["files"]
    assert on(worker, "received")["changed"] is False


def test_what_goes_on_is_followed_by_the_newest(filled: Node, worker: Node, on: Any) -> None:
    filled.set(stop=2 * MIB)
    on(worker, "received")
    filled.set(stop=None)
    newest = more(filled, two=MIB)
    planned = on(worker, "received", check=True)
    both = on(worker, "received")
    assert both["commands"] == planned["commands"] and both["size_bytes"] == planned["size_bytes"] == 2 * MIB
    assert (both["action"], both["snapshot"]) == ("resume", newest)
    assert len(worker.snapshots) == 2


def test_a_token_whose_snapshot_is_gone_is_dropped(filled: Node, worker: Node, on: Any) -> None:
    filled.set(stop=2 * MIB)
    on(worker, "received")
    filled.set(stop=None)
    old = filled.snapshots[0]
    more(filled, two=MIB)
    filled.zfs("destroy", f"{DATASET}@{old}")
    planned = on(worker, "received", check=True)
    anew = on(worker, "received")
    assert f"the source no longer has {DATASET}@{old}" in anew["aborted"] == planned["aborted"]
    assert anew["commands"][0] == f"zfs receive -A {DATASET}" and anew["commands"] == planned["commands"]
    assert (anew["action"], worker.snapshots) == ("full", filled.snapshots)


def test_a_token_that_cannot_be_read_is_dropped(filled: Node, worker: Node, on: Any) -> None:
    filled.set(stop=2 * MIB)
    on(worker, "received")
    filled.set(stop=None)
    pool = worker.read()
    pool["datasets"][DATASET]["token"] = "1-zz"
    worker.write(pool)
    result = on(worker, "received")
    assert "cannot be read" in result["aborted"] and result["action"] == "full"


def test_a_token_of_another_source_is_not_ours_to_drop(filled: Node, worker: Node, on: Any) -> None:
    filled.set(stop=2 * MIB)
    on(worker, "received")
    (filled.directory / "zfs-serve").write_text(render(DATASET, "tank"))
    result = on(worker, "received", source={"ssh": ["ssh", "head"], "dataset": "tank"})
    assert ids(result) == ["zfs.source"], "it has no snapshot"
    filled.zfs("snapshot", "tank@sparkwright-x")
    result = on(worker, "received", source={"ssh": ["ssh", "head"], "dataset": "tank"})
    assert "zfs.token" in ids(result) and "token" in worker.models


def test_a_dataset_with_other_contents_is_refused(filled: Node, worker: Node, on: Any) -> None:
    worker.zfs("create", DATASET)
    worker.files(precious=MIB)
    worker.zfs("snapshot", f"{DATASET}@by-hand")
    before = worker.changes()
    result = on(worker, "received", force_rollback=True, destroy_newer=True)
    assert ids(result) == ["zfs.foreign"]
    for part in (DATASET, "by-hand", f"zfs destroy -r {DATASET}"):
        assert part in result["msg"]
    assert worker.changes() == before


def test_an_empty_dataset_is_filled_and_one_that_nobody_can_see_is_not(
    filled: Node, worker: Node, on: Any, tmp_path: Path
) -> None:
    mountpoint = tmp_path / "srv-worker"
    worker.zfs("create", "-o", f"mountpoint={mountpoint}", DATASET)
    mountpoint.mkdir()
    (mountpoint / "precious").touch()
    assert ids(on(worker, "received")) == ["zfs.foreign"]
    (mountpoint / "precious").unlink()
    pool = worker.read()
    pool["datasets"][DATASET]["mounted"] = False
    worker.write(pool)
    assert "not mounted, so that nobody can see" in on(worker, "received")["msg"]
    worker.zfs("mount", DATASET)
    planned = on(worker, "received", check=True)
    filled.set(stop=MIB)
    assert ids(on(worker, "received")) == ["zfs.transfer"]
    filled.set(stop=None)
    assert worker.models["props"]["readonly"] == "on", "nobody writes to it in between"
    result = on(worker, "received")
    assert result["action"] == "resume" and "receive -s -u -F" in result["commands"][0]
    assert planned["commands"][0].startswith("zfs set") and planned["commands"][2:] == result["commands"][1:]
    assert result["mounted"] and worker.models["files"] == filled.models["files"]


def test_an_empty_dataset_that_was_written_to_meanwhile_is_not_overwritten(
    filled: Node, worker: Node, on: Any, tmp_path: Path
) -> None:
    mountpoint = tmp_path / "srv-worker"
    worker.zfs("create", "-o", f"mountpoint={mountpoint}", DATASET)
    mountpoint.mkdir()
    filled.set(stop=MIB)
    assert ids(on(worker, "received")) == ["zfs.transfer"]
    filled.set(stop=None)
    worker.zfs("mount", DATASET)
    (mountpoint / "precious").touch()
    assert ids(on(worker, "received")) == ["zfs.foreign"]


def test_what_was_written_on_the_worker_is_lost_only_when_told(filled: Node, worker: Node, on: Any) -> None:
    on(worker, "received")
    worker.files(precious=MIB)
    refused = on(worker, "received")
    assert ids(refused) == ["zfs.modified"] and "1048576 bytes (0.00 GiB) written" in refused["msg"]
    assert "zfs rollback" in refused["msg"]
    planned = on(worker, "received", check=True, force_rollback=True)
    assert "precious" in worker.models["files"]
    result = on(worker, "received", force_rollback=True)
    assert result["commands"] == planned["commands"] == [f"zfs rollback {DATASET}@{filled.snapshots[0]}"]
    assert result["action"] == "rollback" and result["lost"] == [f"1048576 bytes (0.00 GiB) written to {DATASET}"]
    assert worker.models["files"] == filled.models["files"]


def test_what_mounting_wrote_on_the_worker_is_no_loss(filled: Node, worker: Node, on: Any) -> None:
    on(worker, "received")
    pool = worker.read()
    pool["datasets"][DATASET]["touched"] = 1024
    worker.write(pool)
    assert on(worker, "received")["changed"] is False
    more(filled, two=MIB)
    planned = on(worker, "received", check=True)
    result = on(worker, "received")
    assert result["commands"] == planned["commands"] and result["commands"][0].startswith("zfs rollback")
    assert result["lost"] == [] and worker.models["files"] == filled.models["files"]


def test_newer_snapshots_on_the_worker_are_lost_only_when_told(filled: Node, worker: Node, on: Any) -> None:
    on(worker, "received")
    worker.files(precious=MIB)
    worker.zfs("snapshot", f"{DATASET}@by-hand")
    worker.files(another=MIB)
    more(filled, two=MIB)
    assert ids(on(worker, "received")) == ["zfs.newer", "zfs.modified"], "all at once"
    assert ids(on(worker, "received", force_rollback=True)) == ["zfs.newer"]
    assert ids(on(worker, "received", destroy_newer=True)) == ["zfs.modified"]
    result = on(worker, "received", force_rollback=True, destroy_newer=True)
    assert result["commands"][0] == f"zfs rollback -r {DATASET}@{filled.snapshots[0]}"
    assert f"{DATASET}@by-hand" in result["lost"]
    assert worker.snapshots == filled.snapshots and worker.models["files"] == filled.models["files"]


def test_snapshots_by_others_do_not_matter_while_nothing_is_to_be_sent(filled: Node, worker: Node, on: Any) -> None:
    on(worker, "received")
    worker.zfs("snapshot", f"{DATASET}@hourly")
    assert on(worker, "received")["changed"] is False


def test_what_does_not_fit_is_refused_with_the_arithmetic(filled: Node, worker: Node, on: Any) -> None:
    worker.set(available=2 * MIB)
    for check in (True, False):
        (finding,) = on(worker, "received", check)["findings"]
        assert (finding["id"], finding["found"]) == ("zfs.space", "2097152 bytes (0.00 GiB) available in tank")
        assert "3145728 bytes (0.00 GiB) of the stream + 62914 bytes" in finding["needed"]
        assert "1111490 bytes (0.00 GiB) are missing" in finding["needed"]
    assert worker.changes() == []


def test_the_worker_keeps_what_the_policy_says(filled: Node, worker: Node, on: Any) -> None:
    for number in range(4):
        on(worker, "received", keep=2)
        more(filled, **{f"file{number}": MIB})
    planned = on(worker, "received", check=True, keep=2)
    result = on(worker, "received", keep=2)
    assert result["removed"] == planned["removed"] and len(result["removed"]) == 1
    assert worker.snapshots == filled.snapshots[-2:]


def test_the_common_snapshot_stays_whatever_the_policy_says(filled: Node, worker: Node, on: Any) -> None:
    """The head lost its newer ones: what the worker needs for the next increment is older than what it keeps."""
    on(worker, "received")
    base = filled.snapshots[0]
    lost = [more(filled, **{f"file{number}": 0}) for number in range(2)] and filled.snapshots
    for name in lost[1:]:
        filled.zfs("destroy", f"{DATASET}@{name}")
    for number in range(2):
        worker.zfs("snapshot", f"{DATASET}@sparkwright-own{number}")
    on(worker, "received", keep=1)
    assert base in worker.snapshots


def test_a_source_that_cannot_be_asked_is_told_with_what_is_wrong_here(filled: Node, worker: Node, on: Any) -> None:
    (filled.directory / "gone").touch()
    result = on(worker, "received", dataset="tonk/models")
    assert ids(result) == ["zfs.pool", "zfs.source"] and "No route to host" in result["msg"]
    (filled.directory / "gone").unlink()
    (filled.directory / "zfs-serve").write_text(render("tank/other"))
    assert (
        "the source refuses zfs-list tank/models: zfs-serve: dataset tank/models is not served"
        in (on(worker, "received")["msg"])
    )


def test_without_root_the_mount_is_left_to_root(
    filled: Node, worker: Node, on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    worker.set(root=False)
    planned = on(worker, "received", check=True)
    result = on(worker, "received")
    assert (result["mounted"], result["mount_command"]) == (False, f"zfs mount {DATASET}")
    assert [finding["severity"] for finding in result["findings"]] == ["warning"]
    assert result["commands"] == planned["commands"]
    assert on(worker, "received")["changed"] is False
    sudo = worker.directory / "sudo"
    sudo.write_text('#!/bin/sh\nshift\nexec "$@"\n')
    sudo.chmod(0o755)
    worker.set(root=True)
    result = on(worker, "received", zfs=["sudo", "-n", str(worker.directory / "zfs")])
    assert result["mounted"] and result["findings"] == []


def test_a_right_that_is_missing_is_named(filled: Node, worker: Node, on: Any) -> None:
    on(worker, "received")
    worker.zfs("set", "atime=on", DATASET)
    worker.set(forbidden=["set"])
    result = on(worker, "received")
    assert ids(result) == ["zfs.permission"] and "zfs allow" in result["msg"]


def test_a_property_that_waits_for_the_next_mount_is_told(
    filled: Node, worker: Node, on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(worker, "received")
    worker.zfs("set", "atime=on", DATASET)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    worker.set(busy=True)
    (finding,) = on(worker, "received")["findings"]
    assert finding["severity"] == "warning" and "still mounted with what it had before" in finding["found"]
    assert worker.models["props"]["atime"] == "off"


def test_a_transfer_whose_receiver_fails_names_both_ends(filled: Node, worker: Node, on: Any) -> None:
    worker.set(full=MIB)
    filled.set(slow=0.01)
    started = time.monotonic()
    result = on(worker, "received")
    assert ids(result) == ["zfs.transfer"] and time.monotonic() - started < 20
    assert "out of space" in result["msg"] and "zfs-send on the source answered" in result["msg"]


def test_a_signal_ends_the_children_and_keeps_what_came(filled: Node, worker: Node, on: Any) -> None:
    filled.set(slow=0.2)

    def interrupt() -> None:
        end = time.monotonic() + 20
        while time.monotonic() < end and "zfs-send" not in (filled.directory / "requests").read_text():
            time.sleep(0.05)
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    (filled.directory / "requests").touch()
    thread = threading.Thread(target=interrupt)
    thread.start()
    result = on(worker, "received")
    thread.join()
    assert ids(result) == ["zfs.interrupted"] and "SIGTERM" in result["msg"]
    assert signal.getsignal(signal.SIGTERM) is before
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True, env={"PATH": "/bin"})
    assert str(filled.directory) not in left.stdout and f"{worker.directory}/zfs" not in left.stdout
    filled.set(slow=None)
    assert on(worker, "received")["action"] == "resume"


# Back


def test_back_to_the_snapshot_before_and_to_a_named_one(filled: Node, on: Any) -> None:
    first = filled.snapshots[0]
    second, third = more(filled, two=MIB), more(filled, three=MIB)
    refused = on(filled, "rolled_back")
    assert ids(refused) == ["zfs.newer"] and third in refused["msg"] and "1048576 bytes" in refused["msg"]
    planned = on(filled, "rolled_back", check=True, destroy_newer=True)
    assert filled.snapshots == [first, second, third]
    result = on(filled, "rolled_back", destroy_newer=True)
    assert result["commands"] == planned["commands"] and result["lost"] == planned["lost"]
    assert (result["action"], result["snapshot"], filled.snapshots) == ("rollback", second, [first, second])
    assert filled.models["files"] == {"one": 3 * MIB, "two": MIB}
    for _ in range(2):
        result = on(filled, "rolled_back", snapshot=first, destroy_newer=True)
    assert (result["changed"], filled.snapshots) == (False, [first])


def test_what_was_written_since_is_undone_and_told(filled: Node, on: Any) -> None:
    first = filled.snapshots[0]
    filled.files(junk=MIB)
    result = on(filled, "rolled_back", snapshot=first)
    assert result["lost"] == [f"1048576 bytes (0.00 GiB) written to {DATASET} since {first}"]
    assert "junk" not in filled.models["files"]
    second = more(filled, two=MIB)
    filled.files(junk=MIB)
    result = on(filled, "rolled_back")
    assert (result["snapshot"], filled.snapshots) == (second, [first, second]), "the last step was to write junk"


def test_nowhere_to_go_back_to(filled: Node, on: Any) -> None:
    assert ids(on(filled, "rolled_back")) == ["zfs.snapshot"]
    assert ids(on(filled, "rolled_back", snapshot="sparkwright-none")) == ["zfs.snapshot"]
    assert ids(on(filled, "rolled_back", dataset="tank/none")) == ["zfs.dataset"]


# The pump


def test_the_pump_copies_everything_and_tells_the_bytes() -> None:
    class Slow(io.RawIOBase):
        """Takes a few bytes at a time, as a pipe that is nearly full does."""

        def __init__(self) -> None:
            self.got = bytearray()

        def write(self, data: Any) -> int:
            self.got += data[:100_000]
            return min(len(data), 100_000)

    content = bytes(range(256)) * 10_000
    told: list[int] = []
    slow = Slow()
    zfs_replicate.pump(io.BytesIO(content), slow, told.append)
    assert bytes(slow.got) == content and sum(told) == len(content) and max(told) == MIB


# Progress


class Told(Progress):
    """Keeps the last sample of each piece of work in place of writing any."""

    samples: dict[str, tuple[int, int]]

    def begin(self, what: str, *rest: Any) -> None:
        super().begin(what, *rest)
        self.add(0)

    def add(self, count: int) -> None:
        super().add(count)
        sample = self.sample(time.monotonic())
        self.samples[sample.what] = (sample.done_bytes, sample.total_bytes)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    Told.samples = {}
    monkeypatch.setattr(zfs_replicate, "Progress", lambda path: Told(""))
    return Told.samples


def test_bytes_are_told_while_a_stream_runs(filled: Node, worker: Node, on: Any, told: Any) -> None:
    filled.set(stop=2 * MIB)
    on(worker, "received")
    arrived, total = told[f"receiving {DATASET}"]
    assert total == 3 * MIB and 2 * MIB <= arrived < total
    filled.set(stop=None)
    more(filled, two=MIB)
    told.clear()
    on(worker, "received")
    assert told[f"receiving {DATASET}"] == (2 * MIB, 2 * MIB), "what is left of the one, and all of the next"
    told.clear()
    on(worker, "received")
    assert f"receiving {DATASET}" not in told


def test_steps_without_bytes_are_told_by_name(head: Node, on: Any, told: Any) -> None:
    on(head, "present")
    head.files(one=MIB)
    on(head, "snapshot")
    assert list(told) == ["zfs create", "flushing what was written", "zfs snapshot"]
    told.clear()
    head.files(little=1000)
    on(head, "snapshot", keep=1)
    (last,) = head.snapshots
    assert [each for each in told if each.startswith("comparing with sparkwright-")] and "zfs destroy" in told
    told.clear()
    on(head, "rolled_back", snapshot=last, check=True)
    assert "zfs rollback" not in told


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: the module writes to /run, as root")
def test_the_terminal_shows_it_also_of_a_task_that_is_delegated(filled: Node, worker: Node, tmp_path: Path) -> None:
    """A real run of Ansible, at 200 KiB/s."""
    filled.set(slow=0.3)
    args = {
        "host": "spark2",
        "state": "received",
        "dataset": DATASET,
        "mountpoint": str(tmp_path / "srv-worker"),
        "source": {"ssh": [str(worker.directory / "ssh"), "root@10.77.0.1"], "dataset": DATASET},
        "zfs": [str(worker.directory / "zfs")],
    }
    task = {"name": "Receive", "sparkwright.dsv41.zfs_replicate": args, "delegate_to": "spark2", "run_once": True}
    playbook, inventory = tmp_path / "play.yml", tmp_path / "hosts"
    playbook.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": [task]}]))
    local = f"ansible_connection=local ansible_python_interpreter={sys.executable}"
    inventory.write_text(f"spark1 {local}\nspark2 {local}\n")
    done = ansible_cli.run("playbook", "-i", inventory, playbook)
    assert done.returncode == 0, done.stdout
    shown = rf"\.\.\. Receive: spark1: receiving {DATASET} [\d.]+ of 3\.0 MiB \(\d+ %\), [\d.]+ KiB/s, \d+ s left"
    assert re.search(shown, done.stdout), done.stdout
    assert done.stdout.count("changed=1") == 1, "once, not on each node"
    assert worker.models["files"] == filled.models["files"]
    assert not list(Path("/run/sparkwright").glob("*"))


# What the head answers


@pytest.mark.parametrize(
    ("request_text", "words"),
    [
        ("zfs-list tank/other", "dataset tank/other is not served"),
        ("zfs-list tank/models/below", "is not served"),
        ("zfs-list -r", "is not served"),
        ("zfs-list tank/models tank/other", "refused"),
        ("zfs-list", "refused"),
        ("zfs-send tank/models by-hand", "snapshot by-hand is not ours"),
        ("zfs-send tank/models sparkwright-", "bad snapshot name"),
        ("zfs-send tank/models sparkwright-/x", "bad snapshot name"),
        ("zfs-send tank/other sparkwright-1", "is not served"),
        ("zfs-send tank/models sparkwright-1 tank/other", "bad name of the base"),
        ("zfs-send tank/models sparkwright-1 a b", "refused"),
        ("zfs-size tank/models@x sparkwright-1", "bad character"),
        ("zfs-send tank/models sparkwright-1;reboot", "bad character"),
        ("zfs-send tank/models $(reboot)", "bad character"),
        ("zfs-send tank/models sparkwright-*", "bad character"),
        ("zfs-list tank/models\nreboot", "bad character"),
        ("zfs-resume --help", "bad token"),
        ("zfs-resume 1-XYZ", "bad token"),
        ("zfs-destroy tank/models", "refused"),
        ("", "refused"),
    ],
)
def test_what_the_head_refuses(request_text: str, words: str, filled: Node) -> None:
    env = {"PATH": f"{filled.directory}:/usr/bin:/bin", "SSH_ORIGINAL_COMMAND": request_text}
    script = ["/bin/sh", str(filled.directory / "zfs-serve")]
    done = subprocess.run(script, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (77, "") and words in done.stderr
    assert filled.calls() == [], "zfs was not even asked"


@pytest.mark.parametrize(
    ("name", "words"),
    [("tank/secret@sparkwright-1", "dataset tank/secret is not served"), (f"{DATASET}@by-hand", "is not ours")],
)
def test_a_token_opens_nothing_else(name: str, words: str, filled: Node) -> None:
    token = json.dumps([name, 1, 0, 0]).encode().hex()
    for verb in ("zfs-resume", "zfs-size-resume"):
        env = {"PATH": f"{filled.directory}:/usr/bin:/bin", "SSH_ORIGINAL_COMMAND": f"{verb} {token}"}
        script = ["/bin/sh", str(filled.directory / "zfs-serve")]
        done = subprocess.run(script, env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (77, "") and words in done.stderr


def test_a_head_that_serves_nothing(filled: Node) -> None:
    (filled.directory / "zfs-serve").write_text(render())
    env = {"PATH": f"{filled.directory}:/usr/bin:/bin", "SSH_ORIGINAL_COMMAND": f"zfs-list {DATASET}"}
    script = ["/bin/sh", str(filled.directory / "zfs-serve")]
    assert subprocess.run(script, env=env, capture_output=True, check=False).returncode == 77
