# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Where weights come from: a hub, a directory that was filled elsewhere, or another node. Private.

Each source lists the files of one commit and brings them one by one; verifying is the caller's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

from ansible_collections.sparkwright.dsv41.plugins.module_utils.weights import (
    RECEIPT_NAME,
    FileEntry,
    Receipt,
    ReceiptError,
    explain_status,
    file_digest,
    is_full,
    leave_memory,
    parse_receipt,
    read_receipt,
)

# Seconds for the one answer that lists the files; file transfers have the client's own limits.
LIST_TIMEOUT = 30
# Answers that pass, and the seconds before each new try, unless the hub says how many: as the client has it for files.
_PASSING = (429, 500, 502, 503, 504)
_AGAIN_S = (1, 2, 4, 8, 8)
# More than these seconds are for the user to wait.
_PATIENCE_S = 600
# Seconds without a byte after which a copy from another node is given up.
_STALL_S = 120
# Seconds that another node's server gets to end.
_END_S = 10
# Below the destination: nothing in it is a file of the repository.
SCRATCH = os.path.join(".cache", "sparkwright")


class Source(Protocol):
    """What a run needs of a source. All methods raise Trouble."""

    def files(self) -> tuple[FileEntry, ...]:
        """All files of the commit that the source has."""

    def read(self, path: str) -> bytes:
        """A small file."""

    def probe(self, path: str) -> None:
        """Find out whether files may be had at all, before each is tried."""

    def fetch(self, entry: FileEntry) -> str | None:
        """Bring one file to its place, which is empty. The digest of its bytes, where they were read on the way."""

    def close(self) -> None:
        """End what the source started, remove what it needed."""


class Missing(Exception):
    """The Python package that a source needs is not there."""


class Trouble(Exception):
    """One file could not be had; ``stop`` says that trying others is of no use."""

    def __init__(self, message: str, stop: bool) -> None:
        super().__init__(message)
        self.stop = stop


class NoRoom(Trouble):
    """The file system takes no more. ``said`` is what told so."""

    def __init__(self, said: str) -> None:
        super().__init__(f"No space left on device ({said})", stop=True)


class WebPage(Exception):
    """A web page came where a file or a listing was asked for."""


class HubSource:
    """The few calls to huggingface_hub, with its many exceptions turned into Trouble.

    ``scratch`` is a private directory for all that the client would otherwise keep in the user's home. ``tell`` is told
    what is being done, or waited for, before files come.
    """

    def __init__(
        self,
        repo: str,
        revision: str,
        dest: str,
        endpoint: str | None,
        token: str | None,
        scratch: str,
        tell: Callable[[str], None],
    ) -> None:
        self.repo, self.revision, self.dest, self.scratch = repo, revision, dest, scratch
        self.token, self.tell = token, tell
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
        if endpoint:
            os.environ["HF_ENDPOINT"] = endpoint
        try:
            import huggingface_hub
            from huggingface_hub import constants, get_session, set_client_factory
        except ImportError as error:
            raise Missing("huggingface_hub (2.4 or newer)") from error
        self.hub = huggingface_hub
        self.endpoint = (endpoint or str(constants.ENDPOINT)).rstrip("/")
        session = get_session()
        client_class, hooks = type(session), {**session.event_hooks, "response": [_refuse_web_page]}
        set_client_factory(lambda: client_class(event_hooks=hooks, follow_redirects=True, timeout=None))

    def files(self) -> tuple[FileEntry, ...]:
        api = self.hub.HfApi(endpoint=self.endpoint, token=self.token or False)

        def ask() -> Any:
            self.tell("asking the hub")
            return api.model_info(self.repo, revision=self.revision, files_metadata=True, timeout=LIST_TIMEOUT)

        info = self._patiently(ask)
        if info.sha != self.revision:
            raise Trouble(f"{self.endpoint} answers with commit {info.sha} instead of {self.revision}", stop=True)
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
        url = self.hub.hf_hub_url(self.repo, path, revision=self.revision, endpoint=self.endpoint)

        def ask() -> None:
            self.tell("asking the hub")
            self.hub.get_hf_file_metadata(url, token=self.token or False, timeout=LIST_TIMEOUT)

        self._patiently(ask, path)

    def _patiently(self, ask: Callable[[], Any], path: str = "") -> Any:
        """What the hub answers; it is asked again while it is busy, as the client does by itself for downloads only."""
        for seconds in (*_AGAIN_S, 0):
            try:
                return ask()
            except Exception as error:
                responses = [getattr(link, "response", None) for link in _chain(error)]
                response = next((each for each in responses if each is not None), None)
                if not seconds or response is None or response.status_code not in _PASSING:
                    raise self._trouble(error, path) from error
                wait = _wait_s(response.headers, seconds)
                if wait > _PATIENCE_S:
                    raise self._trouble(error, path) from error
                self.tell(f"the hub answers {response.status_code}, asking again in {wait} s")
                time.sleep(wait)
        raise AssertionError("the last try returns or raises")

    def fetch(self, entry: FileEntry) -> None:
        self._download(entry.path, self.dest)

    def read(self, path: str) -> bytes:
        folder = os.path.join(self.scratch, "files")
        self._download(path, folder)
        with open(os.path.join(folder, path), "rb") as stream:
            return stream.read()

    def _download(self, path: str, folder: str) -> None:
        try:
            self.hub.hf_hub_download(
                self.repo,
                path,
                revision=self.revision,
                local_dir=folder,
                endpoint=self.endpoint,
                token=self.token or False,
                cache_dir=os.path.join(self.scratch, "hub"),
            )
        except Exception as error:
            raise self._trouble(error, path) from error

    def close(self) -> None:
        pass

    def _trouble(self, error: BaseException, path: str = "") -> Trouble:
        """Say what went wrong in words that lead somewhere; the client wraps causes, so the chain is searched."""
        for link in _chain(error):
            if is_full(link):
                return NoRoom(str(link))
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
                    repo=self.repo,
                    revision=self.revision,
                    endpoint=self.endpoint,
                    path=path,
                    has_token=bool(self.token),
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


def _chain(error: BaseException | None) -> list[Any]:
    """The error and its causes."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__
    return chain


def _wait_s(headers: Any, otherwise: int) -> int:
    """Seconds that an answer asks to wait: in Retry-After, or as the hub has it, `RateLimit: "api";r=0;t=55`."""
    match = re.fullmatch(r"\s*(\d{1,6})\s*", headers.get("Retry-After", ""), re.ASCII)
    match = match or re.search(r";\s*r=0;\s*t=(\d{1,6})", headers.get("RateLimit", ""), re.ASCII)
    # One more, since they are rounded.
    return int(match[1]) + 1 if match else otherwise


def _refuse_web_page(response: Any) -> None:
    """Called for each answer, before its body is read, so that no page is ever stored as a file."""
    content_type = response.headers.get("Content-Type", "")
    wanted = response.url.path.endswith((".html", ".htm"))
    if response.status_code in (200, 206) and content_type.startswith("text/html") and not wanted:
        raise WebPage(str(response.url))


def remove(path: str) -> None:
    """Remove a file that may not be there. Raises OSError."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def _filled(receipt: Receipt, repo: str, revision: str, include: Sequence[str], where: str) -> tuple[FileEntry, ...]:
    """The files of another directory's receipt, if it is of this commit and has all that is wanted."""
    manifest = receipt.manifest
    if (manifest.repo, manifest.revision) != (repo, revision):
        raise Trouble(f"{where} holds {manifest.repo} at {manifest.revision}, needed {repo} at {revision}.", stop=True)
    if manifest.include and set(manifest.include) != set(include):
        raise Trouble(
            f"{where} was filled with include {', '.join(manifest.include)}; "
            f"needed {', '.join(include) or 'all files'}.",
            stop=True,
        )
    return manifest.files


class DirectorySource:
    """A directory on this node that was filled elsewhere, receipt included."""

    def __init__(self, path: str, dest: str, repo: str, revision: str, include: Sequence[str]) -> None:
        self.path, self.dest = path, dest
        self.wanted = (repo, revision, include)

    def files(self) -> tuple[FileEntry, ...]:
        repo, revision, include = self.wanted
        try:
            receipt = read_receipt(self.path)
        except ReceiptError as error:
            raise Trouble(f"source_dir: {error}", stop=True) from error
        if receipt is None:
            raise Trouble(
                f"source_dir {self.path} has no receipt ({RECEIPT_NAME}), so nothing says what its files must be: "
                f"fetch {repo} at {revision} with this module where a hub can be reached, and bring all of it.",
                stop=True,
            )
        return _filled(receipt, repo, revision, include, f"source_dir {self.path}")

    def read(self, path: str) -> bytes:
        try:
            with open(os.path.join(self.path, path), "rb") as stream:
                return stream.read()
        except OSError as error:
            raise Trouble(f"cannot be read from source_dir ({error})", stop=False) from error

    def probe(self, path: str) -> None:
        if os.path.realpath(self.path) == os.path.realpath(self.dest):
            raise Trouble("source_dir is dest itself.", stop=True)

    def fetch(self, entry: FileEntry) -> None:
        part = _begun(self.dest, entry.path)
        source = os.path.join(self.path, entry.path)
        try:
            shutil.copyfile(source, part)
            leave_memory(source)
            _put(part, self.dest, entry.path)
        except OSError as error:
            with suppress(OSError):
                remove(part)
            if is_full(error):
                raise NoRoom(str(error)) from error
            raise Trouble(f"cannot be copied from source_dir ({error})", stop=False) from error

    def close(self) -> None:
        pass


class PeerSource:
    """Another node, asked over SSH; the bytes come in the clear from an rsync server that lives as long as the run.

    ``ssh`` is the command up to the host, ``name`` what the other node calls the directory. The answer to `receipt
    NAME` is the receipt; that to `weights NAME` one line, `ADDRESS PORT PASSWORD`, after which the server runs until
    standard input ends.
    """

    def __init__(
        self, ssh: Sequence[str], name: str, fetches: bool, dest: str, repo: str, revision: str, include: Sequence[str]
    ) -> None:
        """``fetches``: files will be asked for, not just what there is."""
        self.ssh, self.name, self.fetches, self.dest = list(ssh), name, fetches, dest
        self.wanted = (repo, revision, include)
        self.server: subprocess.Popen[bytes] | None = None
        self.url, self.password = "", ""

    def files(self) -> tuple[FileEntry, ...]:
        if self.fetches:
            # Meanwhile: each login takes its time.
            self._start()
        result = subprocess.run([*self.ssh, f"receipt {self.name}"], capture_output=True, check=False, text=True)
        if result.returncode != 0:
            raise Trouble(
                f"The head does not tell what {self.name} holds: {_last(result.stderr)}. It must be there and "
                "verified: run with --tags weights, and --tags peers where the key is refused.",
                stop=True,
            )
        try:
            receipt = parse_receipt(result.stdout, "The head's receipt")
        except ReceiptError as error:
            raise Trouble(str(error), stop=True) from error
        return _filled(receipt, *self.wanted, "The head")

    def read(self, path: str) -> bytes:
        raise Trouble(f"{path} is joined already where it comes from", stop=True)

    def _start(self) -> subprocess.Popen[bytes]:
        if self.server is None:
            pipe = subprocess.PIPE
            self.server = subprocess.Popen([*self.ssh, f"weights {self.name}"], stdin=pipe, stdout=pipe, stderr=pipe)
        return self.server

    def probe(self, path: str) -> None:
        if self.url:
            return
        server = self._start()
        assert server.stdout is not None and server.stderr is not None
        answer = server.stdout.readline().decode(errors="replace").split()
        if len(answer) != 3:
            said = _last(server.stderr.read().decode(errors="replace"))
            raise Trouble(f"The head does not serve {self.name}: {said}", stop=True)
        address, port, self.password = answer
        self.url = f"rsync://sparkwright@{address}:{port}/weights"

    def fetch(self, entry: FileEntry) -> str | None:
        part = _begun(self.dest, entry.path)
        with open(part, "ab") as stream:
            begun = stream.tell() > 0
        # Appending goes on where a broken transfer ended, even one that was killed. Without one a file is written once,
        # front to back, so that it can be hashed as it grows; rsync's own checksum would prove nothing more.
        how = ["--append"] if begun else ["--whole-file", "--checksum-choice=none"]
        # Without NODELAY at both ends each file waits three times for an acknowledgement, 40 ms each.
        options = ["--times", "--inplace", "--sockopts=TCP_NODELAY", f"--timeout={_STALL_S}"]
        argv = ["rsync", *options, *how, f"{self.url}/{entry.path}", part]
        env = {**os.environ, "RSYNC_PASSWORD": self.password}
        whole = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            kind = entry.digest.split(":")[0]
            reading = None if begun else pool.submit(file_digest, part, kind, entry.size, whole=whole)
            try:
                result = subprocess.run(argv, capture_output=True, check=False, text=True, env=env)
            finally:
                whole.set()
        if result.returncode != 0:
            said = f"rsync from the head failed (exit code {result.returncode})"
            # 11: error in file input or output, which is how rsync says that the disk is full.
            if "No space left" in result.stderr or "quota" in result.stderr.lower():
                raise NoRoom(said)
            raise Trouble(f"{said}: {_last(result.stderr)}", stop=False)
        try:
            _put(part, self.dest, entry.path)
            return reading.result() if reading else None
        except OSError as error:
            if is_full(error):
                raise NoRoom(str(error)) from error
            raise Trouble(f"cannot be put in place ({error})", stop=False) from error

    def close(self) -> None:
        if self.server is None:
            return
        try:
            # It ends by itself, and cleans up, once its input has ended.
            self.server.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self.server.terminate()
            self.server.communicate()


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def scratch_file(dest: str, path: str) -> str:
    """Where a file grows before it is put in place, when it does not come from a hub."""
    return os.path.join(dest, SCRATCH, path.replace("/", "--"))


def _begun(dest: str, path: str) -> str:
    """``scratch_file``, for which there is a folder. Raises OSError."""
    part = scratch_file(dest, path)
    os.makedirs(os.path.dirname(part), exist_ok=True)
    return part


def _put(part: str, dest: str, path: str) -> None:
    target = os.path.join(dest, path)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.replace(part, target)
