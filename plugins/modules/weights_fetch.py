#!/usr/bin/python
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Fetch the weights of one commit of a model repository, and verify every file."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: weights_fetch
short_description: Fetch and verify the weights of one commit of a model repository
version_added: 0.1.0
description:
  - Makes a directory hold the files of one commit of a model repository, each one verified against the digest that
    the hub states (SHA-256 for LFS files, the git blob id for small ones).
  - Only files that are missing or wrong are fetched. Each is fetched whole, so resuming is per file, and a file that
    does not verify is fetched once more before it is reported.
  - When all files are verified, a receipt is written into the directory. As long as size and modification time of the
    files match it, further runs read no file and need neither network nor C(huggingface_hub).
  - Every missing or bad file is reported at once, with what was found and what is needed.
  - Nothing outside of the directory is written. Links in it by which that could happen are refused.
  - When the file system fills up meanwhile, the run stops and says how much is missing; finished files are kept.
attributes:
  check_mode:
    support: full
    description: Can run in check mode and say what would change, without changing anything.
    details:
      - The hub is asked, files without a receipt are hashed, and access and free space are checked, so that a run that
        would fail for these reasons fails in check mode too.
  diff_mode:
    support: full
    description: Can say in diff mode what differs.
    details:
      - Before and after list the files to fetch and the commit, not file contents.
  idempotent:
    support: full
    description: A second run with the same options changes nothing.
    details:
      - When only modification times differ from the receipt, the files are hashed and the receipt is brought up to
        date; this is not reported as a change.
options:
  repo:
    description: The repository, as C(organisation/name).
    type: str
    required: true
  revision:
    description: The commit, 40 hexadecimal digits. A branch or tag is refused, since it can come to mean other files.
    type: str
    required: true
  dest:
    description:
      - The directory for the files, laid out as in the repository. It is made when missing.
      - Other files in it are left alone.
    type: path
    required: true
  include:
    description:
      - Shell patterns of the files to have; C(*) also matches C(/), and C(folder/) means all below that folder.
        Empty means all files.
      - A pattern that matches no file is an error.
    type: list
    elements: str
    default: []
  must_exist:
    description: Paths that must be among the files, checked before anything is fetched.
    type: list
    elements: str
    default: []
  endpoint:
    description:
      - URL of the hub or of a mirror.
      - Without it C(huggingface_hub) decides, which also honours E(HF_ENDPOINT).
    type: str
  token:
    description:
      - Access token for a gated or private repository.
      - Handed to the client in memory only. Tokens that a login left on the node or in its environment are not used.
    type: str
  join:
    description:
      - Files that the repository stores as C(NAME.partNN) are joined, and the parts removed. Each joined file is
        verified against its SHA-256 in this file of the repository, which is in the format of C(sha256sum).
      - Joining takes little room besides the parts themselves. Stopped anywhere, the next run goes on.
      - Without it parts are files like others.
    type: str
  keep_parts:
    description: Keep the parts after joining. Then the room for a second copy of the joined files is needed.
    type: bool
    default: false
  verify:
    description:
      - V(quick) hashes only files that the receipt does not vouch for.
      - V(full) hashes every file, which reads the whole directory.
      - V(size) hashes nothing that has the right size, and leaves it to the caller to compare RV(need_bytes) with
        RV(free_bytes). It is for check mode, to know soon what a run would fetch.
    type: str
    choices: [quick, full, size]
    default: quick
  workers:
    description: How many files are fetched or hashed at the same time.
    type: int
    default: 4
  peer:
    description:
      - Another node that has the files, instead of the hub. Files are copied over as many connections as O(workers),
        each taken up where it was broken off, and verified here against the other node's receipt.
      - The key of O(peer.ssh) must be answered by C(peer-serve) of the role C(peers).
    type: dict
    suboptions:
      ssh:
        description: The command that reaches the other node, up to its name.
        type: list
        elements: str
        required: true
      name:
        description: What the other node calls the directory.
        type: str
        required: true
  progress:
    description: File to tell in how far the run is; set by the action plugin.
    type: path
  source_dir:
    description:
      - For a node without a hub. A directory on the node that this module filled elsewhere, receipt included; files
        are copied from it and verified, and no network is used.
      - When it is O(dest) itself, the files are verified in place.
    type: path
requirements:
  - huggingface_hub 2.4 or newer, in the interpreter that runs the module; not when O(source_dir) or O(peer) is set or
    the receipt is intact
  - rsync 3.1.3 or newer, on both nodes, when O(peer) is set
notes:
  - Run it with the virtual environment that has C(huggingface_hub), by setting C(ansible_python_interpreter) for the
    task.
  - With SSH pipelining the token is not written to the node's disk by Ansible either.
author:
  - Sparkwright contributors (@sparkwright)
"""

EXAMPLES = r"""
- name: Fetch a model
  sparkwright.dsv41.weights_fetch:
    repo: example-org/example-model
    revision: 0123456789abcdef0123456789abcdef01234567
    dest: /srv/models/example-model
    include: ["*.safetensors", "*.json"]
    must_exist: [config.json, model.safetensors]
    token: "{{ hub_token | default(omit) }}"
  vars:
    ansible_python_interpreter: /opt/weights-venv/bin/python

- name: Read every file again and compare its digest
  sparkwright.dsv41.weights_fetch:
    repo: example-org/example-model
    revision: 0123456789abcdef0123456789abcdef01234567
    dest: /srv/models/example-model
    verify: full

- name: Fetch a model whose large files are stored in parts
  sparkwright.dsv41.weights_fetch:
    repo: example-org/example-model
    revision: 0123456789abcdef0123456789abcdef01234567
    dest: /srv/models/example-model
    join: sha256-manifest.txt
  vars:
    ansible_python_interpreter: /opt/weights-venv/bin/python

- name: Take the files from a disk that was filled elsewhere
  sparkwright.dsv41.weights_fetch:
    repo: example-org/example-model
    revision: 0123456789abcdef0123456789abcdef01234567
    dest: /srv/models/example-model
    source_dir: /media/transfer/example-model
"""

RETURN = r"""
repo:
  description: The repository.
  returned: always
  type: str
revision:
  description: The commit.
  returned: always
  type: str
path:
  description: The directory of the files.
  returned: always
  type: str
files:
  description: Number of files that the commit has for these patterns.
  returned: success
  type: int
bytes:
  description: Their size together.
  returned: success
  type: int
fetched:
  description: The files fetched; in check mode, those that would be. Parts of joined files are named one by one.
  returned: always
  type: list
  elements: str
fetch_bytes:
  description: Size of the files in RV(fetched) together.
  returned: success
  type: int
need_bytes:
  description: Room that the run needs at its fullest, besides what the directory holds already.
  returned: success
  type: int
free_bytes:
  description: Free space of the directory's file system before fetching.
  returned: success
  type: int
filesystem:
  description: Mount point of that file system.
  returned: success
  type: str
receipt:
  description: Path of the receipt.
  returned: success
  type: str
findings:
  description: The files that are missing or bad, or named and not there.
  returned: when files are the reason of the failure
  type: list
  elements: dict
  contains:
    path:
      description: The file, relative to the directory.
      type: str
    found:
      description: What was found.
      type: str
    needed:
      description: What is needed.
      type: str
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ansible.module_utils.basic import AnsibleModule, missing_required_lib
from ansible_collections.sparkwright.dsv41.plugins.module_utils import join
from ansible_collections.sparkwright.dsv41.plugins.module_utils.progress import Progress
from ansible_collections.sparkwright.dsv41.plugins.module_utils.weight_sources import (
    SCRATCH,
    DirectorySource,
    HubSource,
    Missing,
    NoRoom,
    PeerSource,
    Source,
    Trouble,
    remove,
    scratch_file,
)
from ansible_collections.sparkwright.dsv41.plugins.module_utils.weights import (
    RECEIPT_NAME,
    Checked,
    FileEntry,
    FileFinding,
    Manifest,
    Receipt,
    ReceiptError,
    absent_names,
    assemble,
    check_file,
    filled_up,
    flush,
    is_commit,
    is_full,
    is_repo,
    leave_memory,
    links_in_the_way,
    read_receipt,
    receipt_size,
    select,
    too_small,
    write_receipt,
)

ATTEMPTS = 2


class Failure(Exception):
    """The end of the run, with what ``fail_json`` gets besides the message."""

    def __init__(self, message: str, **result: Any) -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class Request:
    """The module's options."""

    repo: str
    revision: str
    dest: str
    include: tuple[str, ...]
    must_exist: tuple[str, ...]
    endpoint: str | None
    token: str | None = field(repr=False)
    verify: str
    workers: int
    source_dir: str | None
    peer: dict[str, Any] | None
    join: str | None
    keep_parts: bool
    progress: str


class Run:
    """One run: find out what is needed, look at what is there, fetch the difference."""

    def __init__(self, module: AnsibleModule, request: Request) -> None:
        self.module = module
        self.request = request
        self.fetched: list[str] = []
        self.progress = Progress("" if module.check_mode else request.progress)
        self._source: Source | None = None
        self._ends = contextlib.ExitStack()
        self._ends.callback(self.progress.close)

    @property
    def source(self) -> Source:
        """Made at the first use: a run that needs no network needs no client."""
        if self._source is None:
            request = self.request
            commit = (request.dest, request.repo, request.revision, request.include)
            if request.source_dir is not None:
                self._source = DirectorySource(request.source_dir, *commit)
            elif request.peer is not None:
                peer = request.peer
                self._source = PeerSource(peer["ssh"], peer["name"], not self.module.check_mode, *commit)
            else:
                self._source = self._hub()
            self._ends.callback(self._source.close)
        return self._source

    def _hub(self) -> HubSource:
        request = self.request
        scratch = self._ends.enter_context(tempfile.TemporaryDirectory(prefix="weights-", dir=self.module.tmpdir))
        try:
            return HubSource(
                request.repo,
                request.revision,
                request.dest,
                request.endpoint,
                request.token,
                scratch,
                self.progress.begin,
            )
        except Missing as missing:
            reason = (
                "to fetch weights. Set ansible_python_interpreter of this task to the virtual environment that has it"
            )
            raise Failure(missing_required_lib(str(missing), reason=reason)) from missing

    def close(self) -> None:
        self._ends.close()

    def __call__(self) -> dict[str, Any]:
        request = self.request
        receipt = self._receipt(request.dest)
        manifest = self._manifest(receipt)
        checked = self._examine(manifest, receipt)
        todo = [item for item in checked if item.finding]
        filesystem = _mount_point(request.dest)
        free = shutil.disk_usage(filesystem).free
        fetch, need = self._needs(todo)
        if todo:
            self._refuse_links(todo, fetch)
        if todo and self.module.check_mode:
            self._may_fetch(todo, fetch, need, free)
        elif todo:
            os.makedirs(request.dest, exist_ok=True)
            with _alone_in(request.dest, lambda: self._begin_fetching("waiting for an earlier run,", fetch)) as at_once:
                if at_once:
                    _remove_leftovers(request.dest)
                    free = shutil.disk_usage(request.dest).free
                    self._may_fetch(todo, fetch, need, free)
                    if receipt and not receipt.manifest.answers(request.repo, request.revision, request.include):
                        # From here on the directory is neither the old commit nor the new one.
                        os.unlink(os.path.join(request.dest, RECEIPT_NAME))
                    done = self._fetch_all(todo, fetch)
                    checked = [done.get(item.entry.path, item) for item in checked]
            if not at_once:
                return self()
        changed = bool(todo) or receipt is None or receipt.manifest != manifest
        if not self.module.check_mode:
            self._record(manifest, receipt, checked)
            if receipt:
                self._mention_stale(manifest, receipt)
        result: dict[str, Any] = {
            "changed": changed,
            "files": len(manifest.files),
            "bytes": manifest.size,
            "fetched": [entry.path for entry in fetch],
            "fetch_bytes": sum(entry.size for entry in fetch),
            "need_bytes": need,
            "free_bytes": free,
            "filesystem": filesystem,
            "receipt": os.path.join(request.dest, RECEIPT_NAME),
        }
        if self.module._diff:
            result["diff"] = _diff(manifest, receipt, todo)
        return result

    def _receipt(self, directory: str) -> Receipt | None:
        try:
            return read_receipt(directory)
        except ReceiptError as error:
            self.module.warn(f"{error}. Files are verified as if there were no receipt.")
            return None

    def _manifest(self, receipt: Receipt | None) -> Manifest:
        """What the directory must hold: by the receipt if it is for this request, else by the source."""
        request = self.request
        if receipt and self._is_for_this(receipt.manifest):
            absent = absent_names(request.must_exist, receipt.manifest)
            if not absent:
                return receipt.manifest
            if not request.include:
                raise _named_but_absent(absent)
            # The receipt does not know what include left out; a source that knows gives the better message.
        try:
            files = self.source.files()
            selected, unmatched = select(files, request.include)
            where = f"{request.repo} at {request.revision}"
            findings = [
                FileFinding(pattern, f"no file in {where} that matches", "one at least") for pattern in unmatched
            ]
            if request.join and not findings:
                selected = self._joined(selected)
        except Trouble as trouble:
            raise Failure(str(trouble)) from trouble
        manifest = Manifest(request.repo, request.revision, tuple(sorted(set(request.include))), selected)
        findings += absent_names(request.must_exist, manifest, [entry.path for entry in files])
        if findings:
            raise _named_but_absent(findings)
        if not selected:
            raise Failure(f"{where} has no files.")
        return manifest

    def _is_for_this(self, manifest: Manifest) -> bool:
        request = self.request
        whole = not (request.join and _in_parts(manifest.files))
        return whole and manifest.answers(request.repo, request.revision, request.include)

    def _joined(self, files: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
        """The files after joining. Raises Failure when the parts or their digests cannot be used, and Trouble."""
        try:
            parts = join.group_parts(entry.path for entry in files)
            # Where parts were joined before the files came here, nothing is left to join.
            digests = join.parse_sha256_manifest(self._text(str(self.request.join))) if parts else {}
        except join.JoinError as error:
            raise Failure(str(error), findings=[finding.as_dict() for finding in error.findings]) from error
        after = assemble(files, parts, digests)
        findings = [item for item in after if isinstance(item, FileFinding)]
        if findings:
            raise _failure("Files in parts cannot be verified:", findings)
        return tuple(item for item in after if isinstance(item, FileEntry))

    def _text(self, path: str) -> str:
        try:
            return self.source.read(path).decode()
        except UnicodeDecodeError as error:
            raise Trouble(f"{path} is no text: {error}", stop=True) from error

    def _examine(self, manifest: Manifest, receipt: Receipt | None) -> list[Checked]:
        request = self.request
        self.progress.begin("verifying", manifest.size)

        def look(entry: FileEntry) -> Checked:
            try:
                return check_file(
                    request.dest,
                    entry,
                    receipt,
                    rehash=request.verify == "full",
                    size_only=request.verify == "size",
                    on_bytes=self.progress.add,
                )
            except OSError as error:
                return Checked(
                    entry, FileFinding(entry.path, f"a file that cannot be read ({error})", "a readable one")
                )

        with ThreadPoolExecutor(request.workers) as pool:
            return list(pool.map(look, manifest.files))

    def _needs(self, todo: Sequence[Checked]) -> tuple[list[FileEntry], int]:
        """The files to fetch, parts in the place of what they make, and the room in bytes to fetch and join them."""
        request = self.request
        fetch, freed, joining = [], 0, 0
        size_only = request.verify == "size"
        for item in todo:
            entry = item.entry
            if not entry.parts:
                fetch.append(entry)
                freed += item.size
                continue
            pairs = _pairs(entry)
            state = join.pending(request.dest, entry.path, pairs, entry.digest)
            # What is there by that name is wrong, and in the way of nothing but itself.
            needed = [part.path for part in entry.parts] if state.complete else state.needed
            missing = []
            for part in entry.parts:
                # A part that is appended half has lost its beginning: that it is there is all that can be said.
                there = os.path.join(request.dest, part.path)
                if part.path == state.partial and os.path.isfile(there):
                    continue
                if part.path in needed and check_file(request.dest, part, size_only=size_only).finding:
                    missing.append(part)
            fetch += missing
            joining = max(joining, join.room_needed(pairs, request.keep_parts, state.joined))
            freed += item.size if state.complete else 0
        # What a broken transfer left is on the disk already: it is gone on with, or written over.
        for entry in fetch:
            with suppress(OSError):
                freed += min(entry.size, os.path.getsize(scratch_file(request.dest, entry.path)))
        return fetch, sum(entry.size for entry in fetch) + joining - freed

    def _refuse_links(self, todo: Sequence[Checked], fetch: Sequence[FileEntry]) -> None:
        """Raises Failure when writing into the directory would write, or remove, something outside of it."""
        paths = [*(entry.path for entry in fetch), *(item.entry.path for item in todo)]
        findings = links_in_the_way(self.request.dest, paths)
        if findings:
            raise _failure(f"Links lead out of {self.request.dest}; remove them and run again:", findings)

    def _may_fetch(self, todo: Sequence[Checked], fetch: Sequence[FileEntry], need: int, free: int) -> None:
        """Raises Failure when fetching cannot succeed: not enough space, or no access."""
        request = self.request
        if request.source_dir is not None and _same(request.source_dir, request.dest):
            raise _bad_files([item.finding for item in todo if item.finding], request, "source_dir is dest itself.")
        size = sum(entry.size for entry in fetch)
        message = too_small(size, size - need, free, request.dest, len(fetch))
        if message and request.verify != "size":
            raise Failure(message)
        if not fetch or (request.peer is not None and self.module.check_mode):
            return
        try:
            self.source.probe(fetch[0].path)
        except Trouble as trouble:
            if trouble.stop:
                raise Failure(str(trouble)) from trouble
            # Of this file alone, or passing: fetching tries again and reports all files.

    def _fetch_all(self, todo: Sequence[Checked], fetch: Sequence[FileEntry]) -> dict[str, Checked]:
        """Fetch, join and verify; returns the files by path. Raises Failure naming every file that is still bad."""
        request = self.request
        halt, full = threading.Event(), threading.Event()
        self._begin_fetching("fetching", fetch)

        def bring(entry: FileEntry) -> Checked | str | None:
            """The verified or still bad file, the reason for all to stop, or None when another one stopped."""
            target = os.path.join(request.dest, entry.path)
            for _attempt in range(ATTEMPTS):
                if halt.is_set():
                    return None
                try:
                    # The client would keep a file that is there, right or wrong.
                    remove(target)
                    digest = self.source.fetch(entry)
                    result = check_file(request.dest, entry, rehash=True, digest=digest)
                    if result.finding is None:
                        flush(target)
                        leave_memory(target)
                        return result
                except Trouble as trouble:
                    if trouble.stop:
                        halt.set()
                        if isinstance(trouble, NoRoom):
                            full.set()
                            # Said once for all files, with the arithmetic.
                            return None
                        return str(trouble)
                    result = Checked(entry, FileFinding(entry.path, str(trouble), entry.digest))
                except OSError as error:
                    if is_full(error):
                        halt.set()
                        full.set()
                        return None
                    result = Checked(entry, FileFinding(entry.path, f"{type(error).__name__}: {error}", entry.digest))
            # A file known to be bad must not be there for an engine to load.
            with suppress(OSError):
                remove(target)
            return result

        with ThreadPoolExecutor(request.workers) as pool:
            results = list(pool.map(bring, fetch))
        reasons = sorted({result for result in results if isinstance(result, str)})
        done = {r.entry.path: r for r in results if isinstance(r, Checked) and r.finding is None}
        bad = [r.finding for r in results if isinstance(r, Checked) and r.finding]
        self.fetched = list(done)
        if full.is_set():
            # Files that were bad are removed by now: they give nothing back any more.
            left_to_do = [
                item if os.path.exists(os.path.join(request.dest, item.entry.path)) else replace(item, size=0)
                for item in todo
                if item.entry.path not in done
            ]
            needed = self._needs(left_to_do)[1]
            free = shutil.disk_usage(request.dest).free
            reasons.append(filled_up(needed, len(fetch) - len(done), free, request.dest))
        if reasons:
            left = len(fetch) - len(done)
            found = {item.entry.path: item.finding for item in todo}
            nothing = [
                found.get(entry.path) or FileFinding(entry.path, "nothing", f"{entry.size} bytes")
                for entry, result in zip(fetch, results)
                if not isinstance(result, Checked)
            ]
            bad += nothing
            reasons.append(f"{left} of {len(fetch)} file(s) are still to fetch; the others are kept.")
        if bad:
            raise _bad_files(bad, request, *reasons)
        shutil.rmtree(os.path.join(request.dest, SCRATCH), ignore_errors=True)
        done.update(self._join_all([item.entry for item in todo if item.entry.parts]))
        return done

    def _begin_fetching(self, what: str, fetch: Sequence[FileEntry]) -> None:
        """What the client and rsync write is seen in the sizes of their files."""
        request = self.request
        paths = [os.path.join(request.dest, entry.path) for entry in fetch]

        def measure() -> int:
            size = sum(os.path.getsize(path) for path in paths if os.path.exists(path))
            for folder, _folders, names in os.walk(os.path.join(request.dest, ".cache")):
                growing = [n for n in names if n.endswith(".incomplete") or folder.endswith(SCRATCH)]
                with suppress(FileNotFoundError):
                    size += sum(os.path.getsize(os.path.join(folder, name)) for name in growing)
            return size

        self.progress.begin(what, sum(entry.size for entry in fetch), measure)

    def _join_all(self, entries: Sequence[FileEntry]) -> dict[str, Checked]:
        """Join one after the other, which needs the least room. Raises Failure naming every file that is not joined."""
        request = self.request
        done: dict[str, Checked] = {}
        bad: list[FileFinding] = []
        self.progress.begin("joining", sum(entry.size for entry in entries))
        for entry in entries:
            arguments = (request.dest, entry.path, _pairs(entry), entry.digest, request.keep_parts, self.progress.add)
            try:
                join.join(*arguments)
            except join.DigestMismatch as error:
                # The parts were verified one by one, so what an earlier run joined is bad: they are fetched anew.
                join.discard(request.dest, entry.path)
                bad += error.findings
            except join.JoinError as error:
                bad += error.findings or [FileFinding(entry.path, str(error), entry.digest)]
            else:
                status = os.stat(os.path.join(request.dest, entry.path))
                done[entry.path] = Checked(entry, None, status.st_size, status.st_mtime_ns)
        if bad:
            raise _bad_files(bad, request, "Joining failed; run again to go on.")
        return done

    def _record(self, manifest: Manifest, receipt: Receipt | None, checked: Sequence[Checked]) -> None:
        fresh = Receipt(manifest, {item.entry: item.mtime_ns for item in checked if item.mtime_ns is not None})
        if fresh != receipt:
            try:
                write_receipt(self.request.dest, fresh)
            except OSError as error:
                if not is_full(error):
                    raise
                free = shutil.disk_usage(self.request.dest).free
                raise Failure(
                    f"The file system of {self.request.dest} is full: all {len(manifest.files)} file(s) are there and "
                    f"verified, but not the receipt, {receipt_size(fresh)} bytes; {free} are free. Make room and run "
                    "again."
                ) from error

    def _mention_stale(self, manifest: Manifest, receipt: Receipt) -> None:
        now = {entry.path for entry in manifest.files}
        stale = [
            entry.path
            for entry in receipt.manifest.files
            if entry.path not in now and os.path.exists(os.path.join(self.request.dest, entry.path))
        ]
        if stale:
            self.module.warn(
                f"{self.request.dest} still holds {len(stale)} file(s) of {receipt.manifest.repo} at "
                f"{receipt.manifest.revision} that are no longer part of it: {', '.join(stale)}"
            )


def _pairs(entry: FileEntry) -> list[tuple[str, int]]:
    return [(part.path, part.size) for part in entry.parts]


def _in_parts(files: Sequence[FileEntry]) -> bool:
    """Whether some of these are parts that wait to be joined."""
    try:
        return bool(join.group_parts(entry.path for entry in files))
    except join.JoinError:
        return True


def _failure(head: str, findings: Sequence[FileFinding]) -> Failure:
    lines = "".join(f"\n  {finding}" for finding in findings)
    return Failure(head + lines, findings=[finding.as_dict() for finding in findings])


def _named_but_absent(findings: Sequence[FileFinding]) -> Failure:
    return _failure("Files that are named do not exist:", findings)


def _bad_files(findings: Sequence[FileFinding], request: Request, *reasons: str) -> Failure:
    head = "\n".join([*reasons, f"{len(findings)} file(s) in {request.dest} are missing or bad:"])
    return _failure(head, findings)


def _diff(manifest: Manifest, receipt: Receipt | None, todo: Sequence[Checked]) -> dict[str, Any]:
    before = {item.entry.path: item.finding.found for item in todo if item.finding}
    after = {item.entry.path: item.entry.digest for item in todo}
    old = f"{receipt.manifest.repo} at {receipt.manifest.revision}" if receipt else None
    return {
        "before": {"verified": old, "files": before},
        "after": {"verified": f"{manifest.repo} at {manifest.revision}", "files": after},
    }


def _mount_point(path: str) -> str:
    """Mount point of the file system that a path is on, or will be once its directories are made."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    path = os.path.realpath(path)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _remove_leftovers(dest: str) -> None:
    """Remove what a killed run left: the client gives each attempt its own name and never takes one up again."""
    for folder, _folders, names in os.walk(os.path.join(dest, ".cache", "huggingface", "download")):
        for name in names:
            if name.endswith(".incomplete"):
                remove(os.path.join(folder, name))


@contextmanager
def _alone_in(dest: str, on_wait: Callable[[], None]) -> Iterator[bool]:
    """Keep two runs from working in one directory; yields whether this one could begin at once.

    A run outlives a controller that was killed, so the next one meets it: it tells so by ``on_wait``, waits, and then
    has to look again at what is there.
    """
    descriptor = os.open(dest, os.O_RDONLY)
    at_once = True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            at_once = False
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            # Some network file systems cannot lock a directory; every file is verified all the same.
            pass
        yield at_once
    finally:
        os.close(descriptor)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "repo": {"type": "str", "required": True},
            "revision": {"type": "str", "required": True},
            "dest": {"type": "path", "required": True},
            "include": {"type": "list", "elements": "str", "default": []},
            "must_exist": {"type": "list", "elements": "str", "default": []},
            "endpoint": {"type": "str"},
            "token": {"type": "str", "no_log": True},
            "join": {"type": "str"},
            "keep_parts": {"type": "bool", "default": False},
            "verify": {"type": "str", "choices": ["quick", "full", "size"], "default": "quick"},
            "workers": {"type": "int", "default": 4},
            "source_dir": {"type": "path"},
            "peer": {
                "type": "dict",
                "options": {
                    "ssh": {"type": "list", "elements": "str", "required": True},
                    "name": {"type": "str", "required": True},
                },
            },
            "progress": {"type": "path"},
        },
        mutually_exclusive=[("source_dir", "peer")],
        supports_check_mode=True,
    )
    params = module.params
    request = Request(
        repo=params["repo"],
        revision=params["revision"],
        dest=params["dest"],
        include=tuple(params["include"]),
        must_exist=tuple(params["must_exist"]),
        endpoint=params["endpoint"] or None,
        token=params["token"] or None,
        verify=params["verify"],
        workers=params["workers"],
        source_dir=params["source_dir"] or None,
        peer=params["peer"],
        join=params["join"] or None,
        keep_parts=params["keep_parts"],
        progress=params["progress"] or "",
    )
    same = {"repo": request.repo, "revision": request.revision, "path": request.dest}
    run = Run(module, request)
    try:
        _refuse_bad_options(request, module.check_mode)
        result = run()
    except Failure as failure:
        module.fail_json(msg=str(failure), fetched=run.fetched, **same, **failure.result)
    except OSError as error:
        module.fail_json(msg=f"{request.dest}: {type(error).__name__}: {error}", fetched=run.fetched, **same)
    finally:
        run.close()
    module.exit_json(**same, **result)


def _refuse_bad_options(request: Request, check_mode: bool) -> None:
    if not is_repo(request.repo):
        raise Failure(f"repo must be organisation/name, not {request.repo!r}.")
    if not is_commit(request.revision):
        raise Failure(
            f"revision must be a commit id of 40 lower-case hexadecimal digits, not {request.revision!r}: a branch or "
            "tag can come to mean other files."
        )
    if not os.path.isabs(request.dest):
        raise Failure(f"dest must be an absolute path, not {request.dest!r}.")
    if request.verify == "size" and not check_mode:
        raise Failure("verify: size proves nothing, so it is for check mode only; needed quick or full.")
    if request.workers < 1:
        raise Failure(f"workers must be 1 or more, not {request.workers}.")


if __name__ == "__main__":
    main()
