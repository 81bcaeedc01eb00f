#!/usr/bin/python
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
module: zfs_replicate
author: Sparkwright contributors (@sparkwright)
version_added: 0.1.0
short_description: Snapshots of a ZFS dataset, and copies of them on other nodes
description:
  - On the head O(state=snapshot) keeps snapshots of a dataset, on a worker O(state=received) pulls the newest one from
    there, as an increment where both have a snapshot in common.
  - Snapshots are known by their GUID. Only those whose name begins with C(sparkwright-) are sent and removed.
  - An interrupted transfer is resumed by the next run.
  - What was not sent by the source is never overwritten, unless an option says so.
  - Without root the rights of C(zfs allow) suffice for all but mounting, which Linux leaves to root; RV(mount_command)
    then says what is left to do.
attributes:
  check_mode:
    description: Asks both sides, finds all that is wrong, and changes nothing; RV(commands) says what would be done.
    support: full
  diff_mode:
    description: Shows properties and snapshots before and after.
    support: full
  idempotent:
    description: A second run changes nothing, except that O(state=rolled_back) without O(snapshot) goes back once more.
    support: partial
options:
  host:
    description: Name of this node in findings.
    type: str
    required: true
  dataset:
    description: Dataset on this node, such as V(tank/models). The one above it must exist.
    type: str
    required: true
  state:
    description:
      - V(present) makes the dataset, mounted, before anything is written to it.
      - V(snapshot) does so too, and takes a snapshot when something was written since the last one of ours.
      - V(received) makes the dataset a mounted, read-only copy of the source's.
      - V(rolled_back) brings the dataset back to a snapshot.
    type: str
    choices: [present, snapshot, received, rolled_back]
    required: true
  properties:
    description:
      - Properties of the dataset. Another V(recordsize) or V(compression) only affects what is written from then on.
    type: dict
    default: {recordsize: 1M, atime: "off", compression: lz4}
  mountpoint:
    description: Directory that the dataset is mounted at; without it that follows from the dataset above.
    type: path
  source:
    description: Where O(state=received) pulls from.
    type: dict
    suboptions:
      ssh:
        description: Command that reaches the source; one more word is added, the request to C(zfs-serve).
        type: list
        elements: str
        required: true
      dataset:
        description: Dataset on the source.
        type: str
        required: true
  snapshot:
    description:
      - Name of a snapshot, the part after the C(@). O(state=received) takes this one instead of the source's newest.
        O(state=rolled_back) goes back to it. Without it that is our newest one when something was written since, else
        the one before.
    type: str
  keep:
    description: >-
      How many of our snapshots remain on this side, V(0) for all. On a worker what builds the next increment remains in
      any case.
    type: int
    default: 3
  protect:
    description: GUIDs of snapshots that workers hold, which O(state=snapshot) keeps beyond O(keep).
    type: list
    elements: str
    default: []
  force_rollback:
    description: Lose what was written on the receiver since its newest snapshot.
    type: bool
    default: false
  destroy_newer:
    description: Lose snapshots that are newer than the one that is gone back to.
    type: bool
    default: false
  zfs:
    description:
      - The command, such as V([sudo, -n, zfs]). It is also looked for in C(/usr/sbin), and C(zpool) beside it.
    type: list
    elements: str
    default: [zfs]
  progress:
    description: File to tell in how far the run is; set by the action plugin.
    type: path
"""

EXAMPLES = r"""
- name: Snapshot the weights on the head
  sparkwright.dsv41.zfs_replicate:
    host: spark1
    state: snapshot
    dataset: tank/models
    mountpoint: /srv/models

- name: Pull them on a worker
  sparkwright.dsv41.zfs_replicate:
    host: spark2
    state: received
    dataset: tank/models
    mountpoint: /srv/models
    source:
      ssh: [ssh, -o, BatchMode=yes, -i, /etc/sparkwright/peers/id_ed25519, root@10.77.0.1]
      dataset: tank/models

- name: Go back to what was there before
  sparkwright.dsv41.zfs_replicate:
    host: spark2
    state: rolled_back
    dataset: tank/models
    destroy_newer: true
"""

RETURN = r"""
action:
  description: What was or would be done, one of nothing, snapshot, full, incremental, resume, rollback.
  returned: success
  type: str
snapshot:
  description: Our newest snapshot on this node, or the one that was gone back to; in check mode as it would be.
  returned: success
  type: str
guid:
  description: Its GUID, empty in check mode when the snapshot does not exist yet.
  returned: success
  type: str
commands:
  description: What was or would be run to change something.
  returned: always
  type: list
  elements: str
size_bytes:
  description: Bytes that the source expected to send.
  returned: success
  type: int
moved_bytes:
  description: Bytes that were received.
  returned: success
  type: int
resumed_bytes:
  description: Bytes of an interrupted transfer that did not have to be sent again.
  returned: success
  type: int
aborted:
  description: Why an interrupted transfer could not be resumed and was started anew, empty otherwise.
  returned: success
  type: str
removed:
  description: Names of snapshots that were removed by O(keep).
  returned: success
  type: list
  elements: str
lost:
  description: What a rollback destroyed, or would destroy.
  returned: success
  type: list
  elements: str
mounted:
  description: Whether the dataset is mounted; in check mode whether it is now.
  returned: success
  type: bool
mount_command:
  description: What root must run to mount it, empty when it is mounted.
  returned: success
  type: str
findings:
  description: What is wrong, as id, host, found, needed, repair, severity; the module fails when there is any error.
  returned: always
  type: list
  elements: dict
"""

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import tempfile
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, NoReturn, Optional, Sequence

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkwright.dsv41.plugins.module_utils import zfs
from ansible_collections.sparkwright.dsv41.plugins.module_utils.findings import Finding
from ansible_collections.sparkwright.dsv41.plugins.module_utils.progress import Progress

BLOCK = 1024 * 1024
# Linux; Python names it from 3.10 on.
F_SETPIPE_SZ = 1031
# What a command gets to end by itself once it was told to.
GRACE_S = 60
ADMIN = ["/usr/sbin", "/sbin", "/usr/local/sbin"]
# ssh's own failures, and the refusal of peer-serve and zfs-serve.
NO_CONNECTION = 255
REFUSED = 77
FACTS = ["type", "available", "referenced", "used", "mounted", "mountpoint", "receive_resume_token", "inconsistent"]
# Mounting alone may write as much; beyond, nobody asks what it was.
TRIFLE = 1024 * 1024


class Failed(Exception):
    """Carries everything that is wrong, as zfs.Problem."""

    def __init__(self, *problems: zfs.Problem) -> None:
        super().__init__(*problems)
        self.problems = problems


class Interrupted(Exception):
    """A signal that ends the module, by name."""


class Ends(NamedTuple):
    """How the two commands of a pipe ended: exit codes, and what they complained of."""

    sender: int
    sender_said: str
    receiver: int
    receiver_said: str


class Transfer(NamedTuple):
    """One stream: the request to the source, arguments of the local zfs, expected bytes, GUID of what arrives."""

    action: str
    request: str
    words: List[str]
    size: int
    guid: int


def pump(reader: Any, writer: Any, on_bytes: Callable[[int], None]) -> None:
    """Copy one raw stream to another, at most 1 MiB at a time, and tell the bytes of each block.

    Raises BrokenPipeError when nobody reads any more.
    """
    while True:
        block = reader.read(BLOCK)
        if not block:
            return
        rest = memoryview(block)
        while rest:
            rest = rest[writer.write(rest) :]
        on_bytes(len(block))


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Make exceptions of the signals that would end the module and leave its children."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

    def interrupt(number: int, _frame: Any) -> None:
        # Once is enough: cleaning up is not to be interrupted.
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end(child: subprocess.Popen[bytes]) -> None:
    """End a child: without input or output, else by signals."""
    for stream in (child.stdin, child.stdout):
        if stream:
            stream.close()
    for stop in (None, child.terminate, child.kill):
        if child.poll() is None:
            if stop:
                stop()
            # A receive without its input puts down what has come, for the next run to go on from.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S if child.stdin or stop else 0)


def transfer(send: Sequence[str], receive: Sequence[str], on_bytes: Callable[[int], None]) -> Ends:
    """Pipe one command into another; neither outlives this function, whatever ends it."""
    environment = {**os.environ, "LC_ALL": "C"}
    with tempfile.TemporaryFile() as sender_log, tempfile.TemporaryFile() as receiver_log:
        with contextlib.ExitStack() as stack:
            receiver = subprocess.Popen(
                receive, bufsize=0, stdin=subprocess.PIPE, stdout=receiver_log, stderr=receiver_log, env=environment
            )
            stack.callback(end, receiver)
            sender = subprocess.Popen(
                send, bufsize=0, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=sender_log, env=environment
            )
            stack.callback(end, sender)
            assert receiver.stdin and sender.stdout
            for stream in (receiver.stdin, sender.stdout):
                with contextlib.suppress(OSError):  # A user may have used up what pipes may hold.
                    fcntl.fcntl(stream, F_SETPIPE_SZ, BLOCK)
            try:
                pump(sender.stdout, receiver.stdin, on_bytes)
            except BrokenPipeError:
                end(sender)  # The receiver says why.
            # A sender that stopped in the middle leaves a stream that the receiver finds incomplete.
            sender.wait()
            receiver.stdin.close()
            receiver.wait()
        said = []
        for log in (sender_log, receiver_log):
            log.seek(0)
            said.append(" ".join(log.read().decode(errors="replace").split()))
        return Ends(sender.returncode, said[0], receiver.returncode, said[1])


class Replication:
    """One run of the module on one node."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        params: Dict[str, Any] = module.params
        self.check: bool = module.check_mode
        self.progress = Progress("" if module.check_mode else params["progress"] or "")
        self.dataset: str = params["dataset"]
        self.wanted = {name: zfs.plain(value) for name, value in params["properties"].items()}
        if params["state"] == "received":
            self.wanted["readonly"] = "on"
        if params["mountpoint"]:
            self.wanted["mountpoint"] = os.path.normpath(params["mountpoint"])
        self.problems: List[zfs.Problem] = []
        self.warnings: List[zfs.Problem] = []
        self.commands: List[str] = []
        self.facts: Dict[str, str] = {}
        self.snapshots: List[zfs.Snapshot] = []
        self.before = ""
        self.moved = 0
        self.rollback_to = ""
        self.overwrite = False
        self.result: Dict[str, Any] = {
            "action": "nothing",
            "size_bytes": 0,
            "resumed_bytes": 0,
            "aborted": "",
            "removed": [],
            "lost": [],
        }

    def run(self) -> None:
        states: Dict[str, Callable[[], Any]] = {
            "present": self.present,
            "snapshot": self.snapshot,
            "received": self.receive,
            "rolled_back": self.roll_back,
        }
        try:
            with signals():
                self.refuse_bad_names()
                self.find_zfs()
                states[self.module.params["state"]]()
                self.leave()
        except Failed as failed:
            self.fail(failed.problems)
        except zfs.ZfsError as error:
            self.fail([zfs.Problem("zfs.output", str(error), "what OpenZFS 2.x prints", "see zfs version")])
        except Interrupted as error:
            found = f"signal {error} while {self.commands[-1] if self.commands else 'looking'}"
            self.fail([zfs.Problem("zfs.interrupted", found, "a run to the end", "run again: what came is kept")])
        finally:
            self.progress.close()

    # Results

    def leave(self) -> NoReturn:
        newest = zfs.newest(self.snapshots)
        mounted = self.facts.get("mounted") == "yes"
        mount_command = "" if mounted or not self.mountable() else f"zfs mount {self.dataset}"
        header = {"before_header": self.dataset, "after_header": self.dataset}
        known = {"snapshot": newest.name if newest else "", "guid": str(newest.guid or "") if newest else ""}
        self.module.exit_json(
            changed=bool(self.commands),
            commands=self.commands,
            moved_bytes=self.moved,
            mounted=mounted,
            mount_command=mount_command,
            diff={"before": self.before, "after": self.text(), **header},
            findings=[self.finding(problem, "warning").to_dict() for problem in self.warnings],
            **{**known, **self.result},
        )
        raise AssertionError("exit_json returned")

    def fail(self, problems: Iterable[zfs.Problem]) -> NoReturn:
        found = [self.finding(problem) for problem in problems]
        self.module.fail_json(
            msg="\n".join(finding.line() for finding in found),
            commands=self.commands,
            findings=[finding.to_dict() for finding in found],
        )
        raise AssertionError("fail_json returned")

    def finding(self, problem: zfs.Problem, severity: str = "error") -> Finding:
        name, found, needed, repair = problem
        return Finding(name, self.module.params["host"], found, needed, repair, severity)

    def settle(self) -> None:
        """Everything that is wrong so far, at once."""
        if self.problems:
            raise Failed(*self.problems)

    def text(self) -> str:
        """Properties and snapshots for a diff."""
        if not self.facts:
            return ""
        lines = [f"{name}={self.facts.get(name, '-')}" for name in sorted(self.wanted)]
        return "".join(f"{line}\n" for line in [*lines, *(f"@{snapshot.name}" for snapshot in self.snapshots)])

    # Commands

    def refuse_bad_names(self) -> None:
        source = self.module.params["source"]
        for dataset in [self.dataset, *([source["dataset"]] if source else [])]:
            if not zfs.valid_dataset(dataset):
                needed = "letters, digits and _ . : - between slashes"
                self.problems.append(zfs.Problem("zfs.name", f"dataset {dataset!r}", needed, "give it another name"))
        snapshot = self.module.params["snapshot"]
        if snapshot and not zfs.valid_snapshot(snapshot):
            needed = f"{zfs.PREFIX} and letters, digits and _ . : -"
            self.problems.append(zfs.Problem("zfs.name", f"snapshot {snapshot!r}", needed, "name one of ours"))
        if self.module.params["keep"] < 0:
            found = f"keep: {self.module.params['keep']}"
            self.problems.append(zfs.Problem("zfs.keep", found, "1 or more, or 0 for all", "keep the newest snapshot"))
        self.settle()

    def find_zfs(self) -> None:
        first, *rest = self.module.params["zfs"]
        path = self.module.get_bin_path(first, opt_dirs=ADMIN)
        if not path:
            repair = "apt-get install zfsutils-linux"
            raise Failed(zfs.Problem("zfs.command", f"no command {first}", f"{first} in PATH or {ADMIN[0]}", repair))
        self.zfs = [path, *rest]
        directory, name = os.path.split(self.zfs[-1])
        self.zpool = [*self.zfs[:-1], os.path.join(directory, "zpool")] if name == "zfs" else []

    def call(self, words: Sequence[str]) -> tuple[int, str, str]:
        rc, out, err = self.module.run_command(list(words), environ_update={"LC_ALL": "C"})
        return int(rc), str(out), str(err)

    def ask(self, *words: str) -> Optional[str]:
        """What zfs says; None when the dataset does not exist."""
        rc, out, err = self.call([*self.zfs, *words])
        if rc == 0:
            return out
        if "does not exist" in err:
            return None
        raise Failed(zfs.complaint(["zfs", *words], rc, err or out))

    def change(self, *words: str, tolerate: str = "") -> bool:
        """Run a command that changes something, except in check mode.

        False when it failed with words of `tolerate` (a pattern).
        """
        self.commands.append(" ".join(["zfs", *words]))
        if self.check:
            return True
        self.progress.begin(f"zfs {words[0]}")
        rc, out, err = self.call([*self.zfs, *words])
        if rc and not (tolerate and re.search(tolerate, err)):
            raise Failed(zfs.complaint(["zfs", *words], rc, err or out))
        return not rc

    def request(self, *words: str) -> str:
        """The source's answer."""
        self.progress.begin(f"asking the source ({words[0]})")
        rc, out, err = self.call([*self.module.params["source"]["ssh"], " ".join(words)])
        if rc:
            raise Failed(self.refusal(rc, " ".join((err or out).split()), " ".join(words)))
        return out

    def refusal(self, rc: int, said: str, request: str) -> zfs.Problem:
        dataset = self.module.params["source"]["dataset"]
        short = request if len(request) < 100 else f"{request[:97]}..."
        if rc == NO_CONNECTION:
            return zfs.Problem("zfs.source", f"no connection to the source: {said}", "a login by key", "--tags peers")
        if rc == REFUSED:
            repair = f"let the source serve {dataset}, then --tags peers"
            return zfs.Problem("zfs.source", f"the source refuses {short}: {said}", f"access to {dataset}", repair)
        repair = f"make {dataset} there: state: snapshot" if "does not exist" in said else "see what it says"
        return zfs.Problem("zfs.source", f"the source answered {rc} to {short}: {said}", f"{dataset} there", repair)

    # State of this node

    def read(self) -> bool:
        """Read the dataset; False when there is none."""
        names = ",".join(dict.fromkeys([*FACTS, *sorted(self.wanted)]))
        out = self.ask("get", "-Hp", "-o", "property,value", names, self.dataset)
        self.facts = zfs.parse_properties(out) if out is not None else {}
        self.snapshots = []
        if self.facts:
            listed = self.ask("list", "-Hp", "-d", "1", "-t", "snapshot", "-o", zfs.COLUMNS, self.dataset)
            self.snapshots = zfs.parse_snapshots(listed or "", self.dataset)
            if self.facts.get("type") != "filesystem":
                found = f"{self.dataset} is a {self.facts.get('type')}"
                self.problems.append(zfs.Problem("zfs.dataset", found, "a filesystem", "name another dataset"))
        return bool(self.facts)

    @staticmethod
    def as_printed(properties: Dict[str, str]) -> Dict[str, str]:
        return {name: zfs.comparable(value) for name, value in properties.items()}

    def number(self, name: str) -> int:
        return zfs.integer(self.facts.get(name, ""), name)

    def written_since(self, snapshot: zfs.Snapshot) -> int:
        """Bytes that were written since a snapshot."""
        out = self.ask("get", "-Hp", "-o", "value", f"written@{snapshot.name}", self.dataset)
        return zfs.integer((out or "").strip(), f"written@{snapshot.name}")

    def changed_since(self, snapshot: zfs.Snapshot) -> int:
        """Bytes that were written since a snapshot, 0 when no file differs from it: to mount is to write too."""
        written = self.written_since(snapshot)
        if 0 < written <= TRIFLE:
            self.progress.begin(f"comparing with {snapshot.name}")
            # Needs a mounted dataset, and root or the right to diff.
            rc, out, _ = self.call([*self.zfs, "diff", "-H", f"{self.dataset}@{snapshot.name}"])
            if rc == 0 and not out.strip():
                return 0
        return written

    def sync(self) -> None:
        """Have what was written counted: ZFS counts only what is on the disk."""
        self.progress.begin("flushing what was written")
        os.sync()
        if self.zpool:
            self.call([*self.zpool, "sync", self.dataset.split("/")[0]])

    def mountable(self) -> bool:
        mountpoint = self.wanted.get("mountpoint") or self.facts.get("mountpoint", "-")
        return mountpoint.startswith("/")

    def empty(self) -> Optional[bool]:
        """Whether no file is in the dataset; None when nobody can see it."""
        if self.facts.get("mounted") != "yes":
            return None
        try:
            return not os.listdir(self.facts["mountpoint"])
        except OSError:
            return None

    def available_above(self) -> int:
        """Room in the dataset above ours; what is missing there is a problem."""
        above, pool = zfs.parent(self.dataset), self.dataset.split("/")[0]
        out = self.ask("get", "-Hp", "-o", "property,value", "available", above) if above else None
        if out is not None:
            return zfs.integer(zfs.parse_properties(out)["available"], "available")
        if not above or self.ask("list", "-H", "-o", "name", pool) is None:
            repair = f"zpool import {pool}, or zpool create {pool} DEVICE"
            self.problems.append(zfs.Problem("zfs.pool", f"no pool {pool}", f"pool {pool}", repair))
        else:
            repair = f"zfs create -p {above}"
            self.problems.append(zfs.Problem("zfs.dataset", f"no dataset {above}", f"{above}", repair))
        return 0

    def refuse_to_hide_files(self) -> None:
        """Files in the directory that the dataset is about to be mounted over."""
        mountpoint = self.wanted.get("mountpoint") or self.facts.get("mountpoint", "")
        mounted = self.facts.get("mounted") == "yes" and self.facts.get("mountpoint") == mountpoint
        if mounted or not mountpoint.startswith("/"):
            return
        with contextlib.suppress(OSError):
            files = sorted(os.listdir(mountpoint))
            if files:
                found = f"{mountpoint} holds {zfs.named(files)}, which a mount would hide"
                repair = f"move them away, or choose another mountpoint than {mountpoint}"
                self.problems.append(zfs.Problem("zfs.mountpoint", found, "an empty directory, or none", repair))

    # Steps

    def set_properties(self) -> None:
        lacking = zfs.differing(self.wanted, self.facts)
        if not lacking:
            return
        words = [f"{name}={value}" for name, value in sorted(lacking.items())]
        taken = self.change("set", *words, self.dataset, tolerate="may be set but unable to remount")
        if self.check:
            if self.facts["mountpoint"] in ("none", "legacy") and "mountpoint" in lacking and self.may_mount():
                self.facts["mounted"] = "yes"
            self.facts.update(self.as_printed(lacking))
            return
        self.read()
        if not taken:
            found = f"{self.dataset} is still mounted with what it had before"
            repair = f"zfs unmount {self.dataset}; zfs mount {self.dataset}"
            self.warnings.append(zfs.Problem("zfs.mount", found, f"root, for {' '.join(words)}", repair))

    def may_mount(self) -> bool:
        """Whether zfs is run by root, or by something that may be."""
        return os.geteuid() == 0 or len(self.zfs) > 1

    def mount(self) -> None:
        if self.facts.get("mounted") == "yes" or not self.mountable():
            return
        if self.may_mount():
            self.change("mount", self.dataset)
            self.facts["mounted"] = "no" if self.check else "yes"
            return
        # Not worth a try: OpenZFS has the right to mount, and Linux does not know it.
        found = f"{self.dataset} is not mounted, which Linux leaves to root"
        self.warnings.append(zfs.Problem("zfs.mount", found, "root", f"zfs mount {self.dataset}"))

    def prune(self, protected: Iterable[int]) -> None:
        keep = self.module.params["keep"]
        gone = zfs.doomed(self.snapshots, keep, protected) if keep else []
        if not gone:
            return
        names = [snapshot.name for snapshot in gone]
        self.change("destroy", f"{self.dataset}@{','.join(names)}")
        self.result["removed"] = names
        self.snapshots = [snapshot for snapshot in self.snapshots if snapshot not in gone]

    def rewind(self, name: str, newer: Sequence[zfs.Snapshot]) -> None:
        self.change("rollback", *(["-r"] if newer else []), f"{self.dataset}@{name}")
        self.snapshots = [snapshot for snapshot in self.snapshots if snapshot not in newer]

    # States

    def present(self) -> bool:
        """Have the dataset, mounted; whether it was there."""
        there = self.read()
        self.before = self.text()
        if not there:
            self.available_above()
        self.refuse_to_hide_files()
        self.settle()
        if there:
            self.set_properties()
            self.mount()
        else:
            self.create()
        return there

    def snapshot(self) -> None:
        protected = [zfs.integer(text, "protect") for text in self.module.params["protect"]]
        there = self.present()
        self.sync()
        last = zfs.newest(self.snapshots)
        written = self.changed_since(last) > 0 if last else there and self.empty() is not True
        if written:
            self.take()
        self.prune(protected)

    def create(self) -> None:
        options = [word for name, value in sorted(self.wanted.items()) for word in ("-o", f"{name}={value}")]
        # Whoever may not mount gets a dataset and an error.
        self.change("create", *options, self.dataset, tolerate="successfully created")
        if self.check:
            self.facts = {"mounted": "no", "mountpoint": "-", **self.as_printed(self.wanted)}
        else:
            self.read()
            self.mount()

    def take(self) -> None:
        name = zfs.new_name(time.time(), [snapshot.name for snapshot in self.snapshots])
        self.change("snapshot", f"{self.dataset}@{name}")
        self.result["action"] = "snapshot"
        if self.check:
            self.snapshots.append(zfs.Snapshot(name, 0, 0))
        else:
            self.read()

    def roll_back(self) -> None:
        if not self.read():
            found = f"no dataset {self.dataset}"
            self.problems.append(zfs.Problem("zfs.dataset", found, self.dataset, "zfs list shows what is there"))
        self.settle()
        self.before = self.text()
        params = self.module.params
        self.sync()
        last = zfs.newest(self.snapshots)
        dirty = bool(last and not params["snapshot"] and self.changed_since(last))
        target, newer, problems = zfs.rollback(
            self.dataset, self.snapshots, params["snapshot"] or "", params["destroy_newer"], dirty
        )
        if target is None:
            raise Failed(*problems)
        written = self.changed_since(target)
        lost = [f"{self.dataset}@{snapshot.name}" for snapshot in newer]
        if written:
            lost.append(f"{zfs.amount(written)} written to {self.dataset} since {target.name}")
        if problems:
            raise Failed(*(problem._replace(found=f"{problem.found}; lost: {'; '.join(lost)}") for problem in problems))
        if lost:
            self.result.update(action="rollback", lost=lost)
            self.rewind(target.name, newer)
        self.result.update(snapshot=target.name, guid=str(target.guid))

    def receive(self) -> None:
        there = self.read()
        self.before = self.text()
        available = self.number("available") if there else self.available_above()
        self.refuse_to_hide_files()
        params = self.module.params
        source: List[zfs.Snapshot] = []
        try:
            dataset = params["source"]["dataset"]
            source = zfs.parse_snapshots(self.request("zfs-list", dataset), dataset)
            if zfs.choose(source, [], params["snapshot"] or "") is None:
                name = params["snapshot"] or f"{zfs.PREFIX}*"
                found = f"no snapshot {name} of {dataset} on the source"
                self.problems.append(zfs.Problem("zfs.source", found, "one", "state: snapshot there"))
        except Failed as failed:
            self.problems += failed.problems
        self.settle()
        self.sync()
        choice = zfs.choose(source, self.snapshots, params["snapshot"] or "")
        assert choice
        transfers = self.resumed(choice, source)
        fresh = not there or (self.result["aborted"] and self.partial())
        if not transfers:
            transfers = self.started(choice, not fresh)
        elif transfers[0].guid != choice.target.guid:
            base = next(snapshot for snapshot in source if snapshot.guid == transfers[0].guid)
            transfers.append(self.increment(choice.target, base))
        self.result["size_bytes"] = sum(each.size for each in transfers)
        where = self.dataset if there else zfs.parent(self.dataset)
        if self.result["aborted"]:
            available += self.number("used")
        lacking = zfs.room(self.result["size_bytes"], available, where) if transfers else None
        self.problems += [lacking] if lacking else []
        self.settle()
        self.go(choice, transfers, source)

    def partial(self) -> bool:
        """Whether all that there is of the dataset is an interrupted transfer."""
        return self.facts.get("inconsistent") == "1"

    def resumed(self, choice: zfs.Choice, source: Sequence[zfs.Snapshot]) -> List[Transfer]:
        """How an interrupted receive goes on; notes in `aborted` why it cannot."""
        token = self.facts.get("receive_resume_token", "-")
        if token in ("", "-"):
            return []
        # The node has no such snapshot and says so, after it has told what the token holds.
        _, out, err = self.call([*self.zfs, "send", "-nvP", "-t", token])
        try:
            contents = zfs.parse_token(f"{out}\n{err}")
        except zfs.ZfsError as error:
            self.result["aborted"] = f"its token cannot be read: {error}"
            return []
        if contents.dataset != self.module.params["source"]["dataset"]:
            found = f"an interrupted receive of {contents.dataset}@{contents.snapshot} into {self.dataset}"
            repair = f"zfs receive -A {self.dataset}, which drops what has come of it"
            self.problems.append(zfs.Problem("zfs.token", found, "transfers from one source", repair))
            return []
        why = zfs.resumable(contents, source, choice.target)
        if not why and contents.base_guid and self.rewinds(contents, source):
            why = "the dataset was changed since"
        if not why and not contents.base_guid and not self.partial() and (self.snapshots or self.empty() is False):
            why = "the dataset was written to since"
        size = 0
        if not why:
            try:
                size = zfs.parse_size(self.request("zfs-size-resume", token))
            except Failed as failed:
                if "answered 1 " not in failed.problems[0].found:
                    raise
                why = failed.problems[0].found
        if why:
            self.result["aborted"] = why
            return []
        self.result["resumed_bytes"] = contents.received
        # Into a dataset that was there before, and empty.
        force = ["-F"] if not contents.base_guid and not self.partial() else []
        words = ["receive", "-s", "-u", *force, self.dataset]
        return [Transfer("resume", f"zfs-resume {token}", words, size, contents.guid)]

    def rewinds(self, token: zfs.Token, source: Sequence[zfs.Snapshot]) -> bool:
        """Whether this node is not as it was when the increment began."""
        base = next(snapshot for snapshot in source if snapshot.guid == token.base_guid)
        return not self.snapshots or self.snapshots[-1].guid != base.guid or self.written_since(self.snapshots[-1]) > 0

    def started(self, choice: zfs.Choice, there: bool) -> List[Transfer]:
        """What has to be sent when nothing is to be resumed, and what must happen before."""
        params = self.module.params
        below = (
            self.ask("list", "-Hp", "-d", "1", "-t", "filesystem,volume", "-o", "name", self.dataset) if there else ""
        )
        children = [name for name in (below or "").split() if name != self.dataset]
        here = zfs.Receiver(
            self.dataset, there, self.snapshots, children, self.empty(), self.number("referenced")
        )  # fmt: skip
        since_base = since_newest = 0
        touched = False
        if there and choice.base:
            base = next(snapshot for snapshot in self.snapshots if snapshot.guid == choice.base.guid)
            since_base, since_newest = self.changed_since(base), self.changed_since(self.snapshots[-1])
            touched = self.written_since(self.snapshots[-1]) > 0
        force, destroy = params["force_rollback"], params["destroy_newer"]
        plan = zfs.plan(choice, here, since_base, since_newest, force, destroy, touched)
        self.problems += plan.problems
        self.result["lost"] = list(plan.lost)
        self.rollback_to = plan.rollback_to
        if plan.action == "nothing":
            self.result["action"] = "rollback" if plan.rollback_to else "nothing"
            return []
        if plan.action == "incremental":
            assert choice.base
            return [self.increment(choice.target, choice.base)]
        self.overwrite = plan.overwrite
        if plan.overwrite:
            return [self.sized("full", choice.target, "", ["receive", "-s", "-u", "-F", self.dataset])]
        options = [word for name, value in sorted(self.wanted.items()) for word in ("-o", f"{name}={value}")]
        return [self.sized("full", choice.target, "", ["receive", "-s", "-u", *options, self.dataset])]

    def increment(self, target: zfs.Snapshot, base: zfs.Snapshot) -> Transfer:
        return self.sized("incremental", target, f" {base.name}", ["receive", "-s", "-u", self.dataset])

    def sized(self, action: str, target: zfs.Snapshot, base: str, words: List[str]) -> Transfer:
        wanted = f"{self.module.params['source']['dataset']} {target.name}{base}"
        size = zfs.parse_size(self.request(*f"zfs-size {wanted}".split()))
        return Transfer(action, f"zfs-send {wanted}", words, size, target.guid)

    def go(self, choice: zfs.Choice, transfers: Sequence[Transfer], source: Sequence[zfs.Snapshot]) -> None:
        """Change this node."""
        if self.result["aborted"]:
            self.change("receive", "-A", self.dataset)
        if self.rollback_to:
            (base,) = [snapshot for snapshot in self.snapshots if snapshot.name == self.rollback_to]
            self.rewind(self.rollback_to, zfs.after(self.snapshots, base.guid))
        if self.overwrite:
            # From here on nobody can write to it: look once more whether somebody has.
            self.set_properties()
            if not self.check and self.empty() is not True:
                raise Failed(zfs.foreign(zfs.Receiver(self.dataset, True, self.snapshots)))
        if transfers:
            self.progress.begin(f"receiving {self.dataset}", self.result["size_bytes"])
        for each in transfers:
            self.move(each)
            if self.result["action"] == "nothing":
                self.result["action"] = each.action
        if self.check:
            names = {snapshot.guid: snapshot.name for snapshot in source}
            self.snapshots += [zfs.Snapshot(names[each.guid], each.guid, 0) for each in transfers]
            if any("-F" in each.words for each in transfers):
                self.facts["mounted"] = "no"
            elif any(each.action == "full" for each in transfers):
                self.facts = {"mounted": "no", "mountpoint": "-", **self.as_printed(self.wanted)}
        elif self.commands:
            self.read()
            self.verify(choice.target)
        self.set_properties()
        self.mount()
        common = zfs.newest_common(source, self.snapshots)
        self.prune([common.guid] if common else [])

    def move(self, each: Transfer) -> None:
        self.commands.append(f"{each.request} | zfs {' '.join(each.words)}")
        if self.check:
            return
        arrived = 0

        def count(size: int) -> None:
            nonlocal arrived
            arrived += size
            self.moved += size
            self.progress.add(size)

        ends = transfer([*self.module.params["source"]["ssh"], each.request], [*self.zfs, *each.words], count)
        if ends.sender == 0 and ends.receiver == 0:
            return
        command = each.request.split()[0]
        found = (
            f"after {zfs.amount(arrived)} of {zfs.amount(each.size)} {command} on the source answered {ends.sender}: "
            f"{ends.sender_said or 'nothing'}; zfs receive here answered {ends.receiver}: "
            f"{ends.receiver_said or 'nothing'}"
        )
        repair = f"run again, which goes on from what has come; zfs receive -A {self.dataset} drops that instead"
        raise Failed(zfs.Problem("zfs.transfer", found, "a transfer to the end", repair))

    def verify(self, target: zfs.Snapshot) -> None:
        if target.guid not in [snapshot.guid for snapshot in self.snapshots]:
            has = zfs.named([f"{snapshot.name} {snapshot.guid}" for snapshot in self.snapshots]) or "no snapshot"
            found, needed = f"{self.dataset} has {has}", f"{target.name} {target.guid}, as on the source"
            raise Failed(zfs.Problem("zfs.verify", found, needed, "run again"))


def main() -> None:
    source = {
        "ssh": {"type": "list", "elements": "str", "required": True},
        "dataset": {"type": "str", "required": True},
    }
    properties = {"recordsize": "1M", "atime": "off", "compression": "lz4"}
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "required": True},
            "dataset": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "snapshot", "received", "rolled_back"], "required": True},
            "properties": {"type": "dict", "default": properties},
            "mountpoint": {"type": "path"},
            "source": {"type": "dict", "options": source},
            "snapshot": {"type": "str"},
            "keep": {"type": "int", "default": 3},
            "protect": {"type": "list", "elements": "str", "default": []},
            "force_rollback": {"type": "bool", "default": False},
            "destroy_newer": {"type": "bool", "default": False},
            "zfs": {"type": "list", "elements": "str", "default": ["zfs"]},
            "progress": {"type": "path"},
        },
        required_if=[("state", "received", ["source"])],
        supports_check_mode=True,
    )
    Replication(module).run()


if __name__ == "__main__":
    main()
