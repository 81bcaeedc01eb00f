# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""What ZFS says, and what follows from it: which snapshot is sent to whom, on top of what, and which ones go.

Nothing here runs a command. Texts are outputs of OpenZFS 2.x commands; sizes are in bytes, times in seconds since the
epoch. Snapshots are known by their GUID, which a receive keeps; a name says nothing, anyone may give it again.
"""

from __future__ import annotations

import re
import time
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

# Snapshots with this prefix are ours: only they are sent and removed.
PREFIX = "sparkwright-"
# Columns of `zfs list -Hp -t snapshot -o ...`, here and in roles/peers/templates/zfs-serve.j2.
COLUMNS = "name,guid,createtxg,creation,userrefs,clones"
# Share of a stream's size that is asked for on top of it, for what a pool writes besides the data.
RESERVE = 50

_DATASET = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*(/[A-Za-z0-9_.:-]+)*", re.ASCII)
_SNAPSHOT = re.compile(r"[A-Za-z0-9_.:-]+", re.ASCII)
_UNITS = {unit: 1024**power for power, unit in enumerate("BKMGTPE")}


class ZfsError(ValueError):
    """A text that is not what the command is documented to say."""


class Problem(NamedTuple):
    """Something that is wrong: the finding's id, what was found, what is needed, what repairs it."""

    id: str
    found: str
    needed: str
    repair: str


class Snapshot(NamedTuple):
    """A snapshot of one dataset; `name` is what comes after the @. Order of `createtxg` is order of creation."""

    name: str
    guid: int
    createtxg: int
    creation_s: int = 0
    holds: int = 0
    clones: str = ""

    @property
    def ours(self) -> bool:
        return self.name.startswith(PREFIX)

    @property
    def requestable(self) -> bool:
        """Whether its name can be a word of a request to the source."""
        return bool(_SNAPSHOT.fullmatch(self.name))


class Token(NamedTuple):
    """What a `receive_resume_token` holds: what was being sent, and the bytes that have arrived."""

    dataset: str
    snapshot: str
    guid: int
    base_guid: int  # 0: a full stream
    received: int


class Receiver(NamedTuple):
    """The dataset that receives. `empty` is None where nobody can tell, since it is not mounted."""

    dataset: str
    exists: bool
    snapshots: Sequence[Snapshot] = ()
    children: Sequence[str] = ()
    empty: Optional[bool] = None
    referenced: int = 0


class Choice(NamedTuple):
    """What is to be sent, and the newest snapshot before it that the receiver has too (names are the source's)."""

    target: Snapshot
    base: Optional[Snapshot]


class Plan(NamedTuple):
    """What a receiver does: `action` is nothing, full or incremental; `rollback_to` comes before it ("": does not).

    `overwrite` is for a full stream into a dataset that is there and empty. `lost` names what a rollback destroys.
    """

    action: str
    rollback_to: str = ""
    overwrite: bool = False
    lost: Tuple[str, ...] = ()
    problems: Tuple[Problem, ...] = ()


def amount(size: int) -> str:
    """A size in bytes and GiB."""
    return f"{size} bytes ({size / 2**30:.2f} GiB)"


def named(names: Sequence[str], limit: int = 5) -> str:
    """Names for a message, the first ones when there are many."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


# Texts


def valid_dataset(name: str) -> bool:
    """Whether a name can be one word of a request and of a command (ZFS itself allows blanks)."""
    return bool(_DATASET.fullmatch(name)) and ".." not in name.split("/") and "." not in name.split("/")


def valid_snapshot(name: str) -> bool:
    """Whether a name may be one of our snapshots."""
    return name.startswith(PREFIX) and bool(_SNAPSHOT.fullmatch(name))


def parent(dataset: str) -> str:
    """The dataset above, "" for the first one of a pool."""
    return dataset.rpartition("/")[0]


def integer(text: str, what: str) -> int:
    """A number as `-p` prints it; `-` and nothing are 0. Raises ZfsError."""
    if text in ("", "-"):
        return 0
    try:
        return int(text, 0)
    except ValueError:
        raise ZfsError(f"{what} is {text!r}, not a number") from None


def parse_snapshots(text: str, dataset: str) -> List[Snapshot]:
    """`zfs list -Hp -d 1 -t snapshot -o COLUMNS DATASET`, oldest first. Raises ZfsError."""
    found = []
    for line in text.splitlines():
        words = line.split("\t")
        if len(words) != len(COLUMNS.split(",")):
            raise ZfsError(f"{len(words)} columns, not {COLUMNS}: {line!r}")
        owner, _, name = words[0].partition("@")
        if owner == dataset and name:
            guid, createtxg, creation, holds = (integer(word, words[0]) for word in words[1:5])
            found.append(Snapshot(name, guid, createtxg, creation, holds, "" if words[5] == "-" else words[5]))
    return sorted(found, key=lambda snapshot: snapshot.createtxg)


def parse_properties(text: str) -> Dict[str, str]:
    """`zfs get -Hp -o property,value ...`. Raises ZfsError."""
    found = {}
    for line in text.splitlines():
        name, tab, value = line.partition("\t")
        if not tab:
            raise ZfsError(f"no property and value: {line!r}")
        found[name] = value
    return found


def parse_size(text: str) -> int:
    """Size in bytes that `zfs send -nvP` expects of a stream. Raises ZfsError."""
    for line in text.splitlines():
        words = line.split("\t")
        if words[0] == "size" and len(words) == 2:
            return integer(words[1], "size")
    raise ZfsError(f"no size in {text.strip()[:200]!r}")


def parse_token(text: str) -> Token:
    """`zfs send -nvP -t TOKEN`, also from a node that has no such snapshot. Raises ZfsError."""
    found = dict(re.findall(r"^\s*(\w+) = (.+?)\s*$", text, re.MULTILINE))
    dataset, _, snapshot = found.get("toname", "").partition("@")
    if not dataset or not snapshot or "toguid" not in found:
        raise ZfsError(f"no snapshot in {text.strip()[:200]!r}")
    guid, base, received = (integer(found.get(key, ""), key) for key in ("toguid", "fromguid", "bytes"))
    return Token(dataset, snapshot, guid, base, received)


# Properties


def plain(value: Any) -> str:
    """A value as a property has it; YAML makes booleans of on and off."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def comparable(value: str) -> str:
    """A value as `-p` prints it: sizes without their unit."""
    match = re.fullmatch(r"(\d+)([BKMGTPE])(?:iB|B)?", value, re.IGNORECASE)
    return str(int(match[1]) * _UNITS[match[2].upper()]) if match else value


def differing(wanted: Mapping[str, str], actual: Mapping[str, str]) -> Dict[str, str]:
    """The wanted properties that a dataset lacks; where it has them from does not matter."""
    return {
        name: value
        for name, value in wanted.items()
        # A quota that is none is printed as 0.
        if comparable(value) != actual.get(name) and (value, actual.get(name)) != ("none", "0")
    }


# Snapshots


def new_name(now_s: float, taken: Iterable[str]) -> str:
    """Name of a snapshot that is taken now (UTC), a second later when that name is taken."""
    names = set(taken)
    while True:
        name = PREFIX + time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
        if name not in names:
            return name
        now_s += 1


def newest(snapshots: Sequence[Snapshot]) -> Optional[Snapshot]:
    """The newest of our snapshots."""
    return next((snapshot for snapshot in reversed(snapshots) if snapshot.ours), None)


def newest_common(source: Sequence[Snapshot], receiver: Sequence[Snapshot]) -> Optional[Snapshot]:
    """The source's newest snapshot that the receiver has too, by GUID, whatever its name there."""
    held = {snapshot.guid for snapshot in receiver}
    return next((each for each in reversed(source) if each.guid in held and each.requestable), None)


def doomed(snapshots: Sequence[Snapshot], keep: int, protected: Iterable[int] = ()) -> List[Snapshot]:
    """Ours beyond the newest `keep` (1 or more), less those with a protected GUID, a hold or a clone."""
    ours = [snapshot for snapshot in snapshots if snapshot.ours]
    spared = set(protected)
    old = ours[: max(0, len(ours) - max(1, keep))]
    return [each for each in old if each.guid not in spared and not each.holds and not each.clones]


# Decisions


def choose(source: Sequence[Snapshot], receiver: Sequence[Snapshot], name: str = "") -> Optional[Choice]:
    """What the source is asked for: the snapshot of that name, else its newest of ours. None: there is none."""
    ours = [each for each in source if each.ours and each.requestable and name in ("", each.name)]
    if not ours:
        return None
    target = ours[-1]
    return Choice(target, newest_common([each for each in source if each.createtxg <= target.createtxg], receiver))


def resumable(token: Token, source: Sequence[Snapshot], target: Snapshot) -> str:
    """Why an interrupted receive cannot go on ("": it can)."""
    held = {snapshot.guid: snapshot for snapshot in source}
    if token.guid not in held:
        return f"the source no longer has {token.dataset}@{token.snapshot}"
    if token.base_guid and token.base_guid not in held:
        return f"the source no longer has what {token.dataset}@{token.snapshot} builds on"
    if held[token.guid].createtxg > target.createtxg:
        return f"{token.snapshot} is newer than {target.name}"
    return ""


def after(snapshots: Sequence[Snapshot], guid: int) -> List[Snapshot]:
    """The snapshots that are newer than the one with this GUID."""
    (index,) = [number for number, snapshot in enumerate(snapshots) if snapshot.guid == guid]
    return list(snapshots[index + 1 :])


def plan(
    choice: Choice,
    here: Receiver,
    since_base: int,
    since_newest: int,
    force_rollback: bool,
    destroy_newer: bool,
    touched: bool = False,
) -> Plan:
    """How the receiver comes to have `choice.target`.

    `since_base` and `since_newest` are the bytes that were written on the receiver since the common snapshot and since
    its own newest one. `touched`: not a file differs from the newest one, and ZFS wants a rollback all the same.
    """
    name = here.dataset
    if not here.exists:
        return Plan("full")
    if choice.base is None:
        if not here.snapshots and not here.children and here.empty:
            return Plan("full", overwrite=True)
        return Plan("full", problems=(foreign(here),))
    base = next(snapshot for snapshot in here.snapshots if snapshot.guid == choice.base.guid)
    same = choice.base.guid == choice.target.guid
    if same and since_base == 0:
        return Plan("nothing")
    newer = [snapshot.name for snapshot in after(here.snapshots, base.guid)]
    problems = []
    if newer and not destroy_newer:
        problems.append(
            Problem(
                "zfs.newer",
                f"{name} has snapshots newer than {base.name}, the newest one that the source has too: {named(newer)}",
                f"{base.name} as its newest snapshot",
                f"keep what you need of them, then zfs destroy {name}@{newer[0]}"
                f"{'%' + newer[-1] if len(newer) > 1 else ''}, or destroy_newer: true",
            )
        )
    if since_newest and not force_rollback:
        last = here.snapshots[-1].name
        problems.append(
            Problem(
                "zfs.modified",
                f"{amount(since_newest)} written to {name} since {last}",
                "a dataset that only receives",
                f"see zfs diff {name}@{last}, keep what you need, then zfs rollback {name}@{last}, "
                "or force_rollback: true",
            )
        )
    lost = tuple(f"{name}@{each}" for each in newer)
    if since_newest:
        lost += (f"{amount(since_newest)} written to {name}",)
    action = "nothing" if same else "incremental"
    return Plan(action, base.name if newer or since_newest or touched else "", False, lost, tuple(problems))


def foreign(here: Receiver) -> Problem:
    """A dataset with contents that did not come from the source, which no receive may replace."""
    parts = [f"{amount(here.referenced)} in {here.dataset}"]
    if here.snapshots:
        parts.append(f"snapshots that the source does not have: {named([each.name for each in here.snapshots])}")
    if here.children:
        parts.append(f"datasets below it: {named(here.children)}")
    if not here.snapshots and not here.children and here.empty is None:
        parts.append("not mounted, so that nobody can see whether it is empty")
    return Problem(
        "zfs.foreign",
        "; ".join(parts),
        "a dataset that does not exist, is mounted and empty, or has a snapshot of the source",
        f"name another dataset, or remove this one with all that it holds: zfs destroy -r {here.dataset}",
    )


def room(size: int, available: int, where: str) -> Optional[Problem]:
    """What is wrong when a stream of `size` bytes does not fit into `available` bytes."""
    reserve = size // RESERVE
    lacking = size + reserve - available
    if lacking <= 0:
        return None
    return Problem(
        "zfs.space",
        f"{amount(available)} available in {where}",
        f"{amount(size)} of the stream + {amount(reserve)} of reserve = {amount(size + reserve)}; "
        f"{amount(lacking)} are missing",
        f"free them or enlarge the pool; zfs list -o space -r {where.split('/')[0]} shows what takes room",
    )


def rollback(
    dataset: str, snapshots: Sequence[Snapshot], name: str, destroy_newer: bool, dirty: bool = False
) -> Tuple[Optional[Snapshot], List[Snapshot], Tuple[Problem, ...]]:
    """Where a rollback goes, what it destroys, what is wrong with it.

    Without a name it undoes the last step: what was written since our newest snapshot (`dirty`), else that snapshot.
    """
    ours = [snapshot for snapshot in snapshots if snapshot.ours]
    if name:
        target = next((snapshot for snapshot in snapshots if snapshot.name == name), None)
    else:
        back = 1 if dirty else 2
        target = ours[-back] if len(ours) >= back else None
    if target is None:
        has = named([snapshot.name for snapshot in ours]) or "none"
        needed = f"{dataset}@{name}" if name else "two of them, to go back from the newest to the one before"
        found = f"snapshots of {dataset} with our prefix: {has}"
        return (
            None,
            [],
            (Problem("zfs.snapshot", found, needed, f"zfs list -t snapshot {dataset} shows what is there"),),
        )
    newer = after(snapshots, target.guid)
    problems: Tuple[Problem, ...] = ()
    if newer and not destroy_newer:
        names = named([snapshot.name for snapshot in newer])
        found = f"snapshots of {dataset} newer than {target.name}, which a rollback destroys: {names}"
        problems = (Problem("zfs.newer", found, "none, or the will to lose them", "destroy_newer: true"),)
    return target, newer, problems


# Complaints of ZFS


def complaint(words: Sequence[str], code: int, text: str) -> Problem:
    """A command that failed, told with what repairs it."""
    # What follows is the manual.
    said = " ".join(text.split("usage:")[0].split()) or "nothing"
    command = " ".join(words)
    lowered = said.lower()
    if "modules cannot be auto-loaded" in lowered or "failed to initialize the libzfs" in lowered:
        return Problem("zfs.module", f"no ZFS in the kernel: {said}", "the kernel module zfs", "modprobe zfs")
    if "permission denied" in lowered or "insufficient privileges" in lowered:
        verb = next((word for word in words if word in ("create", "receive", "rollback", "destroy", "set")), "")
        verb = verb or ("snapshot" if "snapshot" in words else "send")
        right = {"set": "the property's name", "create": "create,mount", "receive": "create,mount,receive"}
        allowed = right.get(verb, f"{verb},mount" if verb in ("rollback", "destroy", "snapshot") else verb)
        return Problem(
            "zfs.permission",
            f"{command} answered {code}: {said}",
            f"root, or the right to {verb}",
            f"zfs allow USER {allowed} DATASET as root, or zfs: [sudo, -n, zfs]",
        )
    return Problem("zfs.command", f"{command} answered {code}: {said}", "success", f"see what it says: {command}")
