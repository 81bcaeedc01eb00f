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
  verify:
    description:
      - V(quick) hashes only files that the receipt does not vouch for.
      - V(full) hashes every file, which reads the whole directory.
    type: str
    choices: [quick, full]
    default: quick
  workers:
    description: How many files are fetched or hashed at the same time.
    type: int
    default: 4
  source_dir:
    description:
      - For a node without a hub. A directory on the node that this module filled elsewhere, receipt included; files
        are copied from it and verified, and no network is used.
      - When it is O(dest) itself, the files are verified in place.
    type: path
requirements:
  - huggingface_hub 2.4 or newer, in the interpreter that runs the module; not when O(source_dir) is set or the receipt
    is intact
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
  description: The files fetched; in check mode, those that would be.
  returned: always
  type: list
  elements: str
fetch_bytes:
  description: Size of the files in RV(fetched) together.
  returned: success
  type: int
free_bytes:
  description: Free space of the directory's file system before fetching.
  returned: success
  type: int
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

import errno
import fcntl
import json
import os
import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ansible.module_utils.basic import AnsibleModule, missing_required_lib
from ansible_collections.sparkwright.dsv41.plugins.module_utils.weights import (
    RECEIPT_NAME,
    Checked,
    FileEntry,
    FileFinding,
    Manifest,
    Receipt,
    ReceiptError,
    absent_names,
    check_file,
    explain_status,
    flush,
    is_commit,
    is_repo,
    read_receipt,
    select,
    too_small,
    write_receipt,
)

# Seconds for the one answer that lists the files; file transfers have the client's own limits.
LIST_TIMEOUT = 30
ATTEMPTS = 2


class Failure(Exception):
    """The end of the run, with what ``fail_json`` gets besides the message."""

    def __init__(self, message: str, **result: Any) -> None:
        super().__init__(message)
        self.result = result


class Trouble(Exception):
    """One file could not be had; ``stop`` says that trying others is of no use."""

    def __init__(self, message: str, stop: bool) -> None:
        super().__init__(message)
        self.stop = stop


class WebPage(Exception):
    """A web page came where a file or a listing was asked for."""


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
    full: bool
    workers: int
    source_dir: str | None


class HubClient:
    """The few calls to huggingface_hub, with its many exceptions turned into Trouble.

    ``scratch`` is a private directory for all that the client would otherwise keep in the user's home.
    """

    def __init__(self, request: Request, scratch: str) -> None:
        self.request = request
        self.scratch = scratch
        # The token is an argument of each call. Nothing that others left on the node may take its place, none is
        # stored, and nobody but the endpoint is told about this run.
        for name in "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE":
            os.environ.pop(name, None)
        os.environ.update(
            HF_HOME=scratch,
            HF_HUB_CACHE=os.path.join(scratch, "hub"),
            HF_TOKEN_PATH=os.path.join(scratch, "token"),
            HF_XET_CACHE=os.path.join(scratch, "xet"),
            # Each byte is read once; a cache of chunks would only fill the node's temporary directory.
            HF_XET_CHUNK_CACHE_SIZE_BYTES="0",
            HF_XET_TELEMETRY_ENABLED="0",
            HF_HUB_DISABLE_IMPLICIT_TOKEN="1",
            HF_HUB_DISABLE_TELEMETRY="1",
            HF_HUB_DISABLE_PROGRESS_BARS="1",
            HF_HUB_VERBOSITY="error",
        )
        if request.endpoint:
            os.environ["HF_ENDPOINT"] = request.endpoint
        try:
            import huggingface_hub
            from huggingface_hub import constants, get_session, set_client_factory
        except ImportError:
            raise Failure(
                missing_required_lib(
                    "huggingface_hub (2.4 or newer)",
                    reason="to fetch weights. Set ansible_python_interpreter of this task to the virtual environment "
                    "that has it",
                ),
                exception=traceback.format_exc(),
            ) from None
        self.hub = huggingface_hub
        self.endpoint = (request.endpoint or str(constants.ENDPOINT)).rstrip("/")
        session = get_session()
        client_class, hooks = type(session), {**session.event_hooks, "response": [_refuse_web_page]}
        set_client_factory(lambda: client_class(event_hooks=hooks, follow_redirects=True, timeout=None))

    def list_files(self) -> tuple[FileEntry, ...]:
        """All files of the commit. Raises Trouble."""
        request = self.request
        try:
            api = self.hub.HfApi(endpoint=self.endpoint, token=request.token or False)
            info = api.model_info(request.repo, revision=request.revision, files_metadata=True, timeout=LIST_TIMEOUT)
        except Exception as error:
            raise self._trouble(error) from error
        if info.sha != request.revision:
            raise Trouble(f"{self.endpoint} answers with commit {info.sha} instead of {request.revision}", stop=True)
        try:
            return tuple(
                FileEntry(
                    sibling.rfilename,
                    -1 if sibling.size is None else sibling.size,
                    f"sha256:{sibling.lfs.sha256}" if sibling.lfs else f"git-sha1:{sibling.blob_id}",
                )
                for sibling in info.siblings or ()
            )
        except ValueError as error:
            raise Trouble(f"The listing of {self.endpoint} cannot be used: {error}", stop=True) from error

    def probe(self, path: str) -> None:
        """Ask for one file's headers, to know whether files may be had at all before trying each. Raises Trouble."""
        request = self.request
        try:
            url = self.hub.hf_hub_url(request.repo, path, revision=request.revision, endpoint=self.endpoint)
            self.hub.get_hf_file_metadata(url, token=request.token or False, timeout=LIST_TIMEOUT)
        except Exception as error:
            raise self._trouble(error, path) from error

    def fetch(self, path: str) -> None:
        """Fetch one file into the destination. Raises Trouble."""
        request = self.request
        try:
            self.hub.hf_hub_download(
                request.repo,
                path,
                revision=request.revision,
                local_dir=request.dest,
                endpoint=self.endpoint,
                token=request.token or False,
                cache_dir=os.path.join(self.scratch, "hub"),
            )
        except Exception as error:
            raise self._trouble(error, path) from error

    def _trouble(self, error: BaseException, path: str = "") -> Trouble:
        """Say what went wrong in words that lead somewhere; the client wraps causes, so the chain is searched."""
        chain: list[BaseException] = []
        link: BaseException | None = error
        while link is not None and link not in chain:
            chain.append(link)
            link = link.__cause__
        for link in chain:
            if isinstance(link, WebPage):
                return Trouble(
                    f"{self.endpoint} answers with a web page instead of {path or 'the list of files'}: "
                    "a proxy or a login page stands between this node and the hub",
                    stop=True,
                )
            response = getattr(link, "response", None)
            if response is not None:
                message, stop = explain_status(
                    response.status_code,
                    response.headers.get("X-Error-Code", ""),
                    response.headers.get("X-Error-Message", ""),
                    repo=self.request.repo,
                    revision=self.request.revision,
                    endpoint=self.endpoint,
                    path=path,
                    has_token=bool(self.request.token),
                )
                return Trouble(message, stop)
            # By name: the HTTP library under the client was replaced twice, the names stayed.
            names = {kind.__name__ for kind in type(link).__mro__}
            if names & {"ConnectError", "ConnectTimeout", "ProxyError", "UnsupportedProtocol"}:
                return Trouble(
                    f"Cannot reach the hub at {self.endpoint} ({link}): check the network, the proxy and the endpoint, "
                    "or fetch elsewhere and use source_dir",
                    stop=True,
                )
            if "TransportError" in names:
                return Trouble(
                    f"the connection to {self.endpoint} was dropped ({link}): run again, finished files are kept",
                    stop=False,
                )
            if isinstance(link, json.JSONDecodeError) or "FileMetadataError" in names:
                return Trouble(f"{self.endpoint} does not answer as a model hub does ({link})", stop=True)
        return Trouble(f"{type(error).__name__}: {error}", stop=False)


def _refuse_web_page(response: Any) -> None:
    """Called for each answer, before its body is read, so that no page is ever stored as a file."""
    content_type = response.headers.get("Content-Type", "")
    wanted = response.url.path.endswith((".html", ".htm"))
    if response.status_code in (200, 206) and content_type.startswith("text/html") and not wanted:
        raise WebPage(str(response.url))


class Run:
    """One run: find out what is needed, look at what is there, fetch the difference."""

    def __init__(self, module: AnsibleModule, request: Request) -> None:
        self.module = module
        self.request = request
        self.fetched: list[str] = []
        self._client: HubClient | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @property
    def client(self) -> HubClient:
        """Made at the first use: a run that needs no network needs no client."""
        if self._client is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="weights-", dir=self.module.tmpdir)
            self._client = HubClient(self.request, self._scratch.name)
        return self._client

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()

    def __call__(self) -> dict[str, Any]:
        request = self.request
        receipt = self._receipt(request.dest)
        manifest = self._manifest(receipt)
        checked = self._examine(manifest, receipt)
        todo = [item for item in checked if item.finding]
        free = shutil.disk_usage(_existing_parent(request.dest)).free
        if todo:
            if self.module.check_mode:
                self._may_fetch(todo, free)
            else:
                os.makedirs(request.dest, exist_ok=True)
                with _alone_in(request.dest):
                    _remove_leftovers(request.dest)
                    free = shutil.disk_usage(request.dest).free
                    self._may_fetch(todo, free)
                    if receipt and not receipt.manifest.answers(request.repo, request.revision, request.include):
                        # From here on the directory is neither the old commit nor the new one.
                        os.unlink(os.path.join(request.dest, RECEIPT_NAME))
                    fetched = self._fetch_all(todo)
                    checked = [fetched.get(item.entry.path, item) for item in checked]
        changed = bool(todo) or receipt is None or receipt.manifest != manifest
        if not self.module.check_mode:
            self._record(manifest, receipt, checked)
            if receipt:
                self._mention_stale(manifest, receipt)
        result: dict[str, Any] = {
            "changed": changed,
            "files": len(manifest.files),
            "bytes": manifest.size,
            "fetched": [item.entry.path for item in todo],
            "fetch_bytes": sum(item.entry.size for item in todo),
            "free_bytes": free,
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
        """What the directory must hold: by the receipt if it is for this request, else by the source or the hub."""
        request = self.request
        if receipt and receipt.manifest.answers(request.repo, request.revision, request.include):
            absent = absent_names(request.must_exist, receipt.manifest)
            if not absent:
                return receipt.manifest
            if not request.include:
                raise _named_but_absent(absent)
            # The receipt does not know what include left out; a source that knows gives the better message.
        files = self._source_files() if request.source_dir is not None else self._hub_files()
        selected, unmatched = select(files, request.include)
        manifest = Manifest(request.repo, request.revision, tuple(sorted(set(request.include))), selected)
        where = f"{request.repo} at {request.revision}"
        findings = [FileFinding(pattern, f"no file in {where} that matches", "one at least") for pattern in unmatched]
        findings += absent_names(request.must_exist, manifest, [entry.path for entry in files])
        if findings:
            raise _named_but_absent(findings)
        if not selected:
            raise Failure(f"{where} has no files.")
        return manifest

    def _hub_files(self) -> tuple[FileEntry, ...]:
        try:
            return self.client.list_files()
        except Trouble as trouble:
            raise Failure(str(trouble)) from trouble

    def _source_files(self) -> tuple[FileEntry, ...]:
        request = self.request
        source = str(request.source_dir)
        wanted = f"{request.repo} at {request.revision}"
        try:
            receipt = read_receipt(source)
        except ReceiptError as error:
            raise Failure(f"source_dir: {error}") from error
        if receipt is None:
            raise Failure(
                f"source_dir {source} has no receipt ({RECEIPT_NAME}), so nothing says what its files must be: fetch "
                f"{wanted} with this module where a hub can be reached, and bring the whole directory."
            )
        manifest = receipt.manifest
        if (manifest.repo, manifest.revision) != (request.repo, request.revision):
            raise Failure(f"source_dir {source} holds {manifest.repo} at {manifest.revision}, needed {wanted}.")
        if manifest.include and set(manifest.include) != set(request.include):
            raise Failure(
                f"source_dir {source} was filled with include {', '.join(manifest.include)}; "
                f"needed {', '.join(request.include) or 'all files'}."
            )
        return manifest.files

    def _examine(self, manifest: Manifest, receipt: Receipt | None) -> list[Checked]:
        request = self.request

        def look(entry: FileEntry) -> Checked:
            try:
                return check_file(request.dest, entry, receipt, rehash=request.full)
            except OSError as error:
                return Checked(
                    entry, FileFinding(entry.path, f"a file that cannot be read ({error})", "a readable one")
                )

        with ThreadPoolExecutor(request.workers) as pool:
            return list(pool.map(look, manifest.files))

    def _may_fetch(self, todo: Sequence[Checked], free: int) -> None:
        """Raises Failure when fetching cannot succeed: not enough space, or no access."""
        request = self.request
        if request.source_dir is not None and _same(request.source_dir, request.dest):
            raise _bad_files([item.finding for item in todo if item.finding], request, "source_dir is dest itself.")
        need = sum(item.entry.size for item in todo)
        message = too_small(need, sum(item.size for item in todo), free, request.dest, len(todo))
        if message:
            raise Failure(message)
        if request.source_dir is None:
            try:
                self.client.probe(todo[0].entry.path)
            except Trouble as trouble:
                if trouble.stop:
                    raise Failure(str(trouble)) from trouble
                # Of this file alone, or passing: fetching tries again and reports all files.

    def _fetch_all(self, todo: Sequence[Checked]) -> dict[str, Checked]:
        """Fetch and verify each file; returns them by path. Raises Failure naming every file that is still bad."""
        request = self.request
        obtain: Callable[[str], None] = self._copy if request.source_dir is not None else self.client.fetch
        halt = threading.Event()

        def fetch(item: Checked) -> Checked | str | None:
            """The verified or still bad file, the reason for all to stop, or None when another one stopped."""
            entry = item.entry
            target = os.path.join(request.dest, entry.path)
            for _attempt in range(ATTEMPTS):
                if halt.is_set():
                    return None
                try:
                    # The client would keep a file that is there, right or wrong.
                    _remove(target)
                    obtain(entry.path)
                    result = check_file(request.dest, entry, rehash=True)
                    if result.finding is None:
                        flush(target)
                        return result
                except Trouble as trouble:
                    if trouble.stop:
                        halt.set()
                        return str(trouble)
                    result = Checked(entry, FileFinding(entry.path, str(trouble), entry.digest))
                except OSError as error:
                    result = Checked(entry, FileFinding(entry.path, f"{type(error).__name__}: {error}", entry.digest))
            # A file known to be bad must not be there for an engine to load.
            with suppress(OSError):
                _remove(target)
            return result

        with ThreadPoolExecutor(request.workers) as pool:
            results = list(pool.map(fetch, todo))
        reasons = sorted({result for result in results if isinstance(result, str)})
        done = {r.entry.path: r for r in results if isinstance(r, Checked) and r.finding is None}
        bad = [r.finding for r in results if isinstance(r, Checked) and r.finding]
        self.fetched = list(done)
        if reasons:
            left = len(todo) - len(done)
            bad += [i.finding for i, result in zip(todo, results) if i.finding and not isinstance(result, Checked)]
            reasons.append(f"{left} of {len(todo)} file(s) are still to fetch; the others are kept.")
        if bad:
            raise _bad_files(bad, request, *reasons)
        return done

    def _copy(self, path: str) -> None:
        target = os.path.join(self.request.dest, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        part = f"{target}.part"
        try:
            shutil.copyfile(os.path.join(str(self.request.source_dir), path), part)
            os.replace(part, target)
        except OSError as error:
            _remove(part)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise Trouble(f"cannot be copied from source_dir ({error})", stop=full) from error

    def _record(self, manifest: Manifest, receipt: Receipt | None, checked: Sequence[Checked]) -> None:
        fresh = Receipt(manifest, {item.entry: item.mtime_ns for item in checked if item.mtime_ns is not None})
        if fresh != receipt:
            write_receipt(self.request.dest, fresh)

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


def _named_but_absent(findings: Sequence[FileFinding]) -> Failure:
    return Failure(
        "Files that are named do not exist:" + "".join(f"\n  {finding}" for finding in findings),
        findings=[finding.as_dict() for finding in findings],
    )


def _bad_files(findings: Sequence[FileFinding], request: Request, *reasons: str) -> Failure:
    head = "\n".join([*reasons, f"{len(findings)} file(s) in {request.dest} are missing or bad:"])
    return Failure(
        head + "".join(f"\n  {finding}" for finding in findings), findings=[finding.as_dict() for finding in findings]
    )


def _diff(manifest: Manifest, receipt: Receipt | None, todo: Sequence[Checked]) -> dict[str, Any]:
    before = {item.entry.path: item.finding.found for item in todo if item.finding}
    after = {item.entry.path: item.entry.digest for item in todo}
    old = f"{receipt.manifest.repo} at {receipt.manifest.revision}" if receipt else None
    return {
        "before": {"verified": old, "files": before},
        "after": {"verified": f"{manifest.repo} at {manifest.revision}", "files": after},
    }


def _existing_parent(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _remove_leftovers(dest: str) -> None:
    """Remove what a killed run left: the client gives each attempt its own name and never takes one up again."""
    for folder, _folders, names in os.walk(os.path.join(dest, ".cache", "huggingface", "download")):
        for name in names:
            if name.endswith(".incomplete"):
                _remove(os.path.join(folder, name))


@contextmanager
def _alone_in(dest: str) -> Iterator[None]:
    """Keep a second run out of the directory. Raises Failure when one is at work there."""
    descriptor = os.open(dest, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failure(f"Another run is fetching into {dest}: wait for it to end.") from None
        except OSError:
            # Some network file systems cannot lock a directory; every file is verified all the same.
            pass
        yield
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
            "verify": {"type": "str", "choices": ["quick", "full"], "default": "quick"},
            "workers": {"type": "int", "default": 4},
            "source_dir": {"type": "path"},
        },
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
        full=params["verify"] == "full",
        workers=params["workers"],
        source_dir=params["source_dir"] or None,
    )
    same = {"repo": request.repo, "revision": request.revision, "path": request.dest}
    run = Run(module, request)
    try:
        _refuse_bad_options(request)
        result = run()
    except Failure as failure:
        module.fail_json(msg=str(failure), fetched=run.fetched, **same, **failure.result)
    except OSError as error:
        module.fail_json(msg=f"{request.dest}: {type(error).__name__}: {error}", fetched=run.fetched, **same)
    finally:
        run.close()
    module.exit_json(**same, **result)


def _refuse_bad_options(request: Request) -> None:
    if not is_repo(request.repo):
        raise Failure(f"repo must be organisation/name, not {request.repo!r}.")
    if not is_commit(request.revision):
        raise Failure(
            f"revision must be a commit id of 40 lower-case hexadecimal digits, not {request.revision!r}: a branch or "
            "tag can come to mean other files."
        )
    if not os.path.isabs(request.dest):
        raise Failure(f"dest must be an absolute path, not {request.dest!r}.")
    if request.workers < 1:
        raise Failure(f"workers must be 1 or more, not {request.workers}.")


if __name__ == "__main__":
    main()
