# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Weights shared by the kernel's NFS server: what the head exports, to whom, and how workers mount it. Private.

One kernel serves all exports of a host, so everything here is about our own entries: they lie in a file of their own,
and are added to and taken from the running server one by one. Mounts on workers are systemd units with our mark.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from dataclasses import dataclass
from typing import Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.sparkwright.dsv41.plugins.module_utils.findings import Finding

EXPORTS_FILE = "etc/exports.d/sparkwright.exports"
CONFIG_FILE = "etc/nfs.conf.d/sparkwright.conf"
UNITS = "etc/systemd/system"
# In the second line of our units: who wrote them.
MARK = "# Made by Sparkwright: weights of the head, read-only."
# Read-only, and whoever reads is nobody: weights are readable by all, and nothing else is exported.
EXPORT_OPTIONS = ("ro", "sync", "no_subtree_check", "all_squash", "anonuid=65534", "anongid=65534")
RDMA_PORT = 20049
# nfsd has no stable handles for files of these.
_NOT_EXPORTABLE = ("overlay", "aufs", "tmpfs", "ramfs", "proc", "sysfs")
_ETAB = re.compile(r"(?P<path>\S+)\s+(?P<client>[^\s(]+)\((?P<options>[^)]*)\)")
_OTHERWISE = "or choose another spark_weight_sync"


@dataclass(frozen=True)
class Mount:
    """A line of /proc/self/mountinfo."""

    target: str
    fstype: str
    source: str
    options: FrozenSet[str]


@dataclass(frozen=True)
class Entry:
    """One export to one client."""

    path: str
    client: str

    def __str__(self) -> str:
        return f"{self.client}:{self.path}"


@dataclass(frozen=True)
class Changes:
    """What makes the running server export what is wanted of ours; everybody else's entries stay as they are."""

    add: Tuple[Entry, ...]
    remove: Tuple[Entry, ...]


@dataclass(frozen=True)
class Server:
    """What runs on the head now: the kernel's server threads, and whether the system's own unit has them."""

    threads: int
    unit_active: bool


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def parse_mountinfo(text: str) -> List[Mount]:
    """The mounts of /proc/self/mountinfo, in order."""
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) >= 6 and len(right) >= 2:
            options = frozenset([*left[5].split(","), *(right[2].split(",") if len(right) > 2 else [])])
            mounts.append(Mount(_unescape(left[4]), right[0], _unescape(right[1]), options))
    return mounts


def mount_of(path: str, mounts: Sequence[Mount]) -> Optional[Mount]:
    """The mount that a path is on: the last one with the longest target."""
    best: Optional[Mount] = None
    for mount in mounts:
        inside = mount.target == "/" or path == mount.target or path.startswith(f"{mount.target}/")
        if inside and (best is None or len(mount.target) >= len(best.target)):
            best = mount
    return best


def parse_etab(text: str) -> Dict[Entry, FrozenSet[str]]:
    """What the server exports now, by /var/lib/nfs/etab: each entry with its options."""
    found: Dict[Entry, FrozenSet[str]] = {}
    for line in text.splitlines():
        match = _ETAB.match(line)
        if match:
            options = frozenset(match.group("options").split(","))
            found[Entry(_unescape(match.group("path")), match.group("client"))] = options
    return found


def exports_text(paths: Sequence[str], clients: Sequence[str]) -> str:
    """Our file in /etc/exports.d."""
    options = ",".join(EXPORT_OPTIONS)
    lines = [f"{path} {' '.join(f'{client}({options})' for client in clients)}" for path in sorted(paths)]
    return "\n".join(["# Made by Sparkwright: weights, read-only, to the workers alone.", *lines, ""])


def config_text() -> str:
    """Our file in /etc/nfs.conf.d: the server listens for RDMA after its next start, too."""
    return f"# Made by Sparkwright.\n[nfsd]\nrdma=y\nrdma-port={RDMA_PORT}\n"


def parse_exports(text: str) -> List[Entry]:
    """The entries of a file that exports_text made; other lines are left out."""
    entries = []
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0].startswith("/"):
            entries += [Entry(words[0], word.partition("(")[0]) for word in words[1:]]
    return entries


def changes(
    paths: Sequence[str], clients: Sequence[str], before: str, exported: Mapping[Entry, FrozenSet[str]]
) -> Changes:
    """What to add to the running server and what to take from it.

    ``before`` is our file as it was: only what it names was ours, and may be taken away.
    """
    wanted = [Entry(path, client) for path in sorted(paths) for client in clients]
    asked = frozenset(EXPORT_OPTIONS)
    return Changes(
        add=tuple(entry for entry in wanted if not asked <= exported.get(entry, frozenset())),
        remove=tuple(entry for entry in parse_exports(before) if entry not in wanted and entry in exported),
    )


def listens_for_rdma(portlist: str) -> bool:
    """Whether /proc/fs/nfsd/portlist has our listener."""
    return f"rdma {RDMA_PORT}" in portlist.splitlines()


def unreadable(path: str) -> Optional[str]:
    """The first file or directory, at or below a path or above it, that nobody else than its owner may read."""
    above = path
    while above != "/":
        above = os.path.dirname(above)
        if not os.stat(above).st_mode & stat.S_IXOTH:
            return above
    if not _open_to_all(path):
        return path
    for folder, folders, names in os.walk(path):
        for name in sorted([*folders, *names]):
            if not _open_to_all(os.path.join(folder, name)):
                return os.path.join(folder, name)
    return None


def _open_to_all(path: str) -> bool:
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return True
    needed = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
    return mode & needed == needed


def export_problems(
    host: str,
    paths: Sequence[str],
    clients: Sequence[str],
    mounts: Sequence[Mount],
    server: Server,
    exported: Mapping[Entry, FrozenSet[str]],
) -> List[Finding]:
    """Why the head must not export: everything at once."""
    found = []

    def add(name: str, seen: str, needed: str, repair: str) -> None:
        found.append(Finding(f"nfs.{name}", host, seen, needed, repair))

    if not clients:
        add(
            "clients",
            "no fabric address of a worker",
            "one of each, since nobody else may read",
            "set spark_fabric_address of each worker, or look at the fabric with playbooks/doctor.yml",
        )
    for client in clients:
        try:
            address = ipaddress.IPv4Address(client)
            wrong = address.is_unspecified or address.is_loopback or address.is_multicast
        except ValueError:
            wrong = True
        if wrong:
            add("clients", f"client {client!r}", "the IPv4 address of a worker", "set its spark_fabric_address")
    for path in paths:
        mount = mount_of(path, mounts)
        fstype = mount.fstype if mount else "no file system"
        if fstype in _NOT_EXPORTABLE or fstype.startswith(("fuse", "nfs", "cifs")):
            add(
                "filesystem",
                f"{path} on {fstype}",
                "the file system of a disk (ext4, xfs, btrfs, zfs), which the kernel can export",
                f"move it with spark_data_dir or spark_weights_paths, {_OTHERWISE}",
            )
    if server.threads > 0 and not server.unit_active:
        add(
            "server",
            f"an NFS server with {server.threads} threads that nfs-server.service did not start",
            "none, or the system's own: one kernel has one server",
            f"stop the container that serves (docker ps), {_OTHERWISE}",
        )
    for entry, options in exported.items():
        if "fsid=0" in options:
            add(
                "root",
                f"{entry.path} exported to {entry.client} as the root of all exports (fsid=0)",
                "no such export: it hides all paths that are not below it",
                f"take fsid=0 (or fsid=root) out of that line of /etc/exports, {_OTHERWISE}",
            )
    return found


def unit_name(path: str) -> str:
    """Name of the systemd mount unit of a directory, as `systemd-escape --path --suffix=mount` has it."""

    def escaped(index: int, char: str) -> str:
        if char == "/":
            return "-"
        if (char.isascii() and char.isalnum()) or char in ":_" or (char == "." and index):
            return char
        return "".join(f"\\x{byte:02x}" for byte in char.encode())

    text = "/".join(part for part in path.split("/") if part)
    return f"{''.join(escaped(index, char) for index, char in enumerate(text)) or '-'}.mount"


def mount_options(rdma: bool, connections: int) -> List[str]:
    """Options of the mount on a worker; over RDMA there is one connection."""
    common = ["ro", "vers=4.2", "hard", "timeo=600", "rsize=1048576", "nosuid", "nodev", "noexec"]
    return [*common, "proto=rdma", f"port={RDMA_PORT}"] if rdma else [*common, "proto=tcp", f"nconnect={connections}"]


def unit_text(path: str, source: str, options: Sequence[str]) -> str:
    """Our unit that mounts a source (host:path) on a directory, at each start of the machine."""
    return "\n".join(
        [
            MARK,
            "[Unit]",
            f"Description=Weights of the head in {path}",
            "Wants=network-online.target",
            "After=network-online.target",
            "",
            "[Mount]",
            f"What={source}",
            f"Where={path}",
            "Type=nfs4",
            f"Options={','.join(options)}",
            "TimeoutSec=90",
            "",
            "[Install]",
            "WantedBy=remote-fs.target",
            "",
        ]
    )


def where(unit: str) -> str:
    """The directory that one of our units mounts on."""
    return next((line[6:] for line in unit.splitlines() if line.startswith("Where=")), "")


def obstacle(host: str, path: str, source: str, ours: bool, mounts: Sequence[Mount], files: int) -> Optional[Finding]:
    """Why the head's directory cannot be mounted on a worker's.

    ``ours``: a unit of ours is there for it. ``files`` counts what the directory holds while nothing is mounted on it,
    which a mount would hide and leave on the disk.
    """
    mount = mount_of(path, mounts)
    if mount is not None and mount.target == path:
        if ours or (mount.source == source and mount.fstype.startswith("nfs")):
            return None
        seen = f"{mount.source} ({mount.fstype}) mounted on {path}"
        return Finding("nfs.mount", host, seen, f"nothing, or {source}", f"umount {path}, {_OTHERWISE}")
    if files:
        seen = f"{path} holds {files} file(s) or directories of its own"
        repair = f"rm -r {path} if the head's are wanted, else spark_weight_sync=rsync or local"
        return Finding("nfs.mount", host, seen, f"an empty directory to mount {source} on", repair)
    return None


def mount_problem(host: str, path: str, source: str, rdma: bool, mounts: Sequence[Mount]) -> Optional[Finding]:
    """Why a worker's directory does not show the head's: not mounted, or another source or transport."""
    mount = mount_of(path, mounts)
    if mount is None or mount.target != path:
        return Finding("nfs.mount", host, f"{path} is not mounted", source, "run with --tags weight_sync")
    if mount.source != source or not mount.fstype.startswith("nfs"):
        return Finding("nfs.mount", host, f"{mount.source} ({mount.fstype}) on {path}", source, f"umount {path}")
    needed = f"proto={'rdma' if rdma else 'tcp'}"
    if needed not in mount.options:
        proto = next((option for option in mount.options if option.startswith("proto=")), "no proto")
        repair = "run playbooks/stop.yml, then site.yml with --tags weight_sync"
        return Finding("nfs.transport", host, f"{proto} on {path}", needed, repair)
    return None
