# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""A small model hub for tests and for the lab: what the huggingface_hub client needs to download, and no more.

Repositories are plain folders, ``ROOT/<organisation>/<name>/``.  Each has one commit, whose id is computed from what
the folder holds, so that a recipe can pin it.  Files of ``LFS_BYTES`` or more, and every ``*.safetensors``, are LFS
files: the hub states their sha256; the others carry a git blob id.

    python3 hub.py --root DIR --commit ORG/NAME           print the commit id
    python3 hub.py --root DIR --host H --port P           serve (port 0: the system picks one, the URL is printed)
    python3 hub.py --root DIR --host H --port P --control serve, and let a test misbehave (see ``Rule``):
        POST   /_control/faults    a JSON list of rules replaces the present ones
        DELETE /_control/faults    behave well again
        GET    /_control/requests  what was asked since the start or the last DELETE
        DELETE /_control/requests  forget it
        PUT    /_control/repositories/ORG/NAME/PATH  make this file, and what leads to it, of the body
        DELETE /_control/repositories/ORG/NAME       remove this repository
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

LFS_BYTES = 1024 * 1024
CHUNK_BYTES = 64 * 1024
# These change how the bytes of a file are sent, so they act on GET of a file only.
BODY_ACTIONS = ("drop_after_bytes", "stall_after_bytes", "wrong_bytes", "short")
ACTIONS = (*BODY_ACTIONS, "status", "html", "slow", "gated", "other_file", "listing")
HTML = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body>Please sign in.</body></html>\n"


@dataclass(frozen=True)
class HubFile:
    """One file of a repository. ``size`` is in bytes, ``blob`` the git blob id, ``sha256`` set for LFS files only."""

    path: str
    size: int
    blob: str
    sha256: str | None

    @property
    def etag(self) -> str:
        return self.sha256 or self.blob


@dataclass
class Rule:
    """One way to misbehave, for every request whose path matches the regular expression ``match``.

    ``action`` is one of:

    * ``drop_after_bytes``: promise the whole file, send ``bytes`` bytes, close the connection (GET of a file only);
    * ``stall_after_bytes``: promise the whole file, send ``bytes`` bytes, nothing for ``seconds``, then close;
    * ``wrong_bytes``: the right number of bytes with the first one inverted (GET of a file only);
    * ``short``: a whole answer, by its own headers, that lacks the last ``bytes`` bytes of the file (GET only);
    * ``other_file``: answer with the file ``file`` of the repository, its size and digest in the headers;
    * ``listing``: name ``sha`` as the commit when it is given, and the files by ``names`` instead of their own;
    * ``status``: answer ``status``, with ``headers`` and, when given, ``code`` and ``message`` as the hub sends them;
    * ``html``: answer 200 with a web page, as a captive portal does;
    * ``slow``: wait ``seconds`` before answering as usual;
    * ``gated``: ``tokens`` maps a token to true (terms accepted) or false (known, terms not accepted).  Any other
      token is a bad one.  Applies to files only: a gated repository can be listed by anyone.

    ``times`` limits how often the rule acts (without it: always), ``method`` to one of GET and HEAD.
    """

    match: str
    action: str
    times: int | None = None
    method: str | None = None
    bytes: int = 0
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    code: str | None = None
    message: str | None = None
    seconds: float = 0.0
    tokens: dict[str, bool] = field(default_factory=dict)
    file: str = ""
    sha: str = ""
    names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"unknown action {self.action!r}, use one of {', '.join(ACTIONS)}")
        re.compile(self.match)

    def applies(self, method: str, path: str, is_file: bool) -> bool:
        if self.times == 0 or (self.method and self.method != method) or not re.search(self.match, path):
            return False
        if self.action in ("gated", "other_file"):
            return is_file
        if self.action == "listing":
            return not is_file
        return self.action not in BODY_ACTIONS or (is_file and method == "GET")


class Refusal(Exception):
    """An error answer: HTTP status, the hub's error code (or None) and its message."""

    def __init__(self, status: int, code: str | None, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class Repositories:
    """Reads the folders under ``root``; digests are kept as long as size and modification time stay the same."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._digests: dict[tuple[str, int, int], tuple[str, str]] = {}

    def folder(self, repo: str) -> Path:
        """The folder of ``organisation/name``. Raises Refusal 404 when there is none."""
        folder = (self.root / repo).resolve()
        if repo.count("/") != 1 or folder.parent.parent != self.root or not folder.is_dir():
            raise Refusal(404, "RepoNotFound", "Repository not found")
        return folder

    def files(self, repo: str) -> dict[str, HubFile]:
        """Every regular file by its path, hidden folders left out, sorted. Links are not followed."""
        folder = self.folder(repo)
        found: dict[str, HubFile] = {}
        for path in folder.rglob("*"):
            relative = path.relative_to(folder)
            if path.is_symlink() or not path.is_file() or any(part.startswith(".") for part in relative.parts[:-1]):
                continue
            size = path.stat().st_size
            blob, sha256 = self._digest(path)
            lfs = size >= LFS_BYTES or path.suffix == ".safetensors"
            name = relative.as_posix()
            found[name] = HubFile(name, size, blob, sha256 if lfs else None)
        return dict(sorted(found.items()))

    def commit(self, repo: str) -> str:
        """40 hexadecimal digits: sha1 over the sorted lines ``<git blob id> <path>``."""
        listing = "".join(f"{file.blob} {file.path}\n" for file in self.files(repo).values())
        return hashlib.sha1(listing.encode()).hexdigest()

    def write(self, name: str, data: bytes) -> None:
        """Make ``organisation/name/path`` in one step, its repository too. Raises Refusal 400 for no such path."""
        parts = name.split("/")
        if len(parts) < 3 or any(part in ("", ".", "..") for part in parts):
            raise Refusal(400, None, f"{name} is no file of a repository")
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.root / f".{threading.get_ident()}"
        temporary.write_bytes(data)
        temporary.replace(path)

    def _digest(self, path: Path) -> tuple[str, str]:
        stat = path.stat()
        key = (str(path), stat.st_size, stat.st_mtime_ns)
        if key not in self._digests:
            blob, sha256 = hashlib.sha1(f"blob {stat.st_size}\0".encode()), hashlib.sha256()
            with path.open("rb") as stream:
                while chunk := stream.read(1024 * 1024):
                    blob.update(chunk)
                    sha256.update(chunk)
            self._digests[key] = (blob.hexdigest(), sha256.hexdigest())
        return self._digests[key]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A request that hangs on purpose must not keep the server from closing.
    block_on_close = False

    def __init__(self, address: tuple[str, int], root: Path, control: bool) -> None:
        super().__init__(address, _Handler)
        self.repositories = Repositories(root)
        self.control = control
        self.rules: list[Rule] = []
        self.log: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is an ordinary event here."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    def take_rules(self, method: str, path: str, is_file: bool) -> list[Rule]:
        """The rules that act on this request, in their order; each is counted as used."""
        with self.lock:
            rules = [rule for rule in self.rules if rule.applies(method, path, is_file)]
            for rule in rules:
                if rule.times is not None:
                    rule.times -= 1
        return rules


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 60

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are counted in the server's log; nothing is printed."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        if self.server.control and path.startswith("/_control/"):
            self._control(path)
            return
        # No token value is kept, only whether one came.
        self.entry: dict[str, Any] = {
            "method": self.command,
            "path": path,
            "range": self.headers.get("Range"),
            "time": time.time(),
            "token": "Authorization" in self.headers,
            "status": 0,
            "bytes": 0,
        }
        with self.server.lock:
            self.server.log.append(self.entry)
        try:
            if self.command not in ("GET", "HEAD"):
                self.close_connection = True  # the body was not read
                raise Refusal(405, None, "Method not allowed")
            resolve = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            rules = self.server.take_rules(self.command, path, resolve is not None)
            if self._misbehave(rules):
                return
            if resolve:
                self._file(resolve[1], resolve[2], resolve[3], rules)
                return
            api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(?:/(.+))?)?", path)
            if not api:
                raise Refusal(404, None, "Not found")
            repo, kind, revision, folder = api.groups()
            query = {key: values[-1].lower() == "true" for key, values in parse_qs(url.query).items()}
            commit = self._commit(repo, revision or "main")
            if kind == "tree":
                self._json(self._tree(repo, (folder or "").strip("/"), query.get("recursive", False)))
            else:
                self._json(self._info(repo, commit, query.get("blobs", False), rules))
        except Refusal as refusal:
            self._refuse(refusal)

    def _misbehave(self, rules: list[Rule]) -> bool:
        """Apply the rules that replace the answer; return whether one did."""
        for rule in rules:
            if rule.action == "slow":
                time.sleep(rule.seconds)
            elif rule.action == "html":
                self._send(200, {"Content-Type": "text/html; charset=utf-8"}, HTML)
                return True
            elif rule.action == "status":
                refusal = Refusal(rule.status, rule.code, rule.message or f"fault: status {rule.status}")
                self._refuse(refusal, rule.headers)
                return True
            elif rule.action == "gated":
                self._check_access(rule.tokens)
        return False

    def _check_access(self, tokens: dict[str, bool]) -> None:
        name = "/".join(self.entry["path"].split("/")[1:3])
        given = self.headers.get("Authorization")
        if given is None:
            raise Refusal(401, "GatedRepo", f"Access to model {name} is restricted. Please log in.")
        granted = tokens.get(given.removeprefix("Bearer "))
        if granted is None:
            raise Refusal(401, None, "Invalid credentials in Authorization header")
        if not granted:
            raise Refusal(403, "GatedRepo", f"Access to model {name} is restricted: not in the authorized list.")

    def _commit(self, repo: str, revision: str) -> str:
        commit = self.server.repositories.commit(repo)
        if revision not in (commit, "main"):
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def _info(self, repo: str, commit: str, blobs: bool, rules: list[Rule]) -> dict[str, Any]:
        siblings: list[dict[str, Any]] = []
        names: dict[str, str] = {}
        for rule in rules:
            if rule.action == "listing":
                commit = rule.sha or commit
                names.update(rule.names)
        for file in self.server.repositories.files(repo).values():
            sibling: dict[str, Any] = {"rfilename": names.get(file.path, file.path)}
            if blobs:
                sibling.update(size=file.size, blobId=file.blob)
                if file.sha256:
                    sibling["lfs"] = {"size": file.size, "sha256": file.sha256, "pointerSize": 134}
            siblings.append(sibling)
        return {"id": repo, "modelId": repo, "sha": commit, "private": False, "gated": False, "siblings": siblings}

    def _tree(self, repo: str, under: str, recursive: bool) -> list[dict[str, Any]]:
        prefix = f"{under}/" if under else ""
        entries: dict[str, dict[str, Any]] = {}
        for file in self.server.repositories.files(repo).values():
            if not file.path.startswith(prefix):
                continue
            parts = file.path[len(prefix) :].split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                folder = prefix + "/".join(parts[:depth])
                oid = hashlib.sha1(folder.encode()).hexdigest()
                entries.setdefault(folder, {"type": "directory", "oid": oid, "size": 0, "path": folder})
            if recursive or len(parts) == 1:
                entry = {"type": "file", "oid": file.blob, "size": file.size, "path": file.path}
                if file.sha256:
                    entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": 134}
                entries[file.path] = entry
        if under and not entries:
            raise Refusal(404, "EntryNotFound", f"{under} does not exist")
        return list(entries.values())

    def _file(self, repo: str, revision: str, name: str, rules: list[Rule]) -> None:
        commit = self._commit(repo, revision)
        for rule in rules:
            if rule.action == "other_file":
                name = rule.file
        # Only a name from the listing is opened: no name can lead out of the folder.
        file = self.server.repositories.files(repo).get(name)
        if file is None:
            raise Refusal(404, "EntryNotFound", "Entry not found")
        headers = {
            "Content-Type": "application/octet-stream" if file.sha256 else "text/plain; charset=utf-8",
            "Content-Disposition": f"inline; filename*=UTF-8''{quote(name.rsplit('/', 1)[-1])}",
            "X-Repo-Commit": commit,
            "ETag": f'"{file.etag}"',
            "Accept-Ranges": "bytes",
        }
        if file.sha256:
            headers.update({"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(file.size)})
        start, end = 0, file.size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted:
            start = int(wanted[1])
            end = min(int(wanted[2]) + 1, file.size) if wanted[2] else file.size
            if start >= end:
                self._send(416, {"Content-Range": f"bytes */{file.size}"}, b"")
                return
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{file.size}"
        for rule in rules:
            if rule.action == "short":
                end = max(start, end - rule.bytes)
        self._head(206 if wanted else 200, headers, end - start)
        if self.command == "HEAD":
            return
        limit, stall = end - start, 0.0
        for rule in rules:
            if rule.action in ("drop_after_bytes", "stall_after_bytes"):
                limit = min(limit, rule.bytes)
                self.close_connection = True
                stall = rule.seconds
        invert = start == 0 and any(rule.action == "wrong_bytes" for rule in rules)
        with (self.server.repositories.folder(repo) / name).open("rb") as stream:
            stream.seek(start)
            while limit > 0 and (chunk := stream.read(min(CHUNK_BYTES, limit))):
                limit -= len(chunk)
                if invert:
                    chunk, invert = bytes([chunk[0] ^ 0xFF]) + chunk[1:], False
                # Counted first: once the client has the bytes, the log must have them too.
                self.entry["bytes"] += len(chunk)
                self.wfile.write(chunk)
        time.sleep(stall)

    def _refuse(self, refusal: Refusal, extra: dict[str, str] | None = None) -> None:
        headers = {"Content-Type": "application/json", "X-Error-Message": refusal.message, **(extra or {})}
        if refusal.code:
            headers["X-Error-Code"] = refusal.code
        self._send(refusal.status, headers, json.dumps({"error": refusal.message}).encode())

    def _json(self, data: Any) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(data).encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self._head(status, headers, len(body))
        if self.command != "HEAD":
            self.entry["bytes"] += len(body)
            self.wfile.write(body)

    def _head(self, status: int, headers: dict[str, str], length: int) -> None:
        self.entry["status"] = status
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(key, value)
        self.end_headers()

    def _control(self, path: str) -> None:
        self.entry = {"bytes": 0}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server = self.server
        if (self.command, path) == ("POST", "/_control/faults"):
            try:
                rules = [Rule(**rule) for rule in json.loads(body)]
            except (TypeError, ValueError, re.error) as error:
                self._refuse(Refusal(400, None, str(error)))
                return
            with server.lock:
                server.rules = rules
            self._json({"rules": len(rules)})
        elif (self.command, path) == ("DELETE", "/_control/faults"):
            with server.lock:
                server.rules = []
            self._json({"rules": 0})
        elif (self.command, path) == ("GET", "/_control/requests"):
            with server.lock:
                log = [dict(entry) for entry in server.log]
            self._json(log)
        elif (self.command, path) == ("DELETE", "/_control/requests"):
            with server.lock:
                server.log.clear()
            self._json([])
        elif path.startswith("/_control/repositories/"):
            self._control_repository(path.removeprefix("/_control/repositories/"), body)
        else:
            self._refuse(Refusal(404, None, "Not found"))

    def _control_repository(self, name: str, body: bytes) -> None:
        repositories = self.server.repositories
        try:
            if self.command == "PUT":
                repositories.write(name, body)
            elif self.command == "DELETE":
                shutil.rmtree(repositories.folder(name))
            else:
                raise Refusal(405, None, "Method not allowed")
        except Refusal as refusal:
            self._refuse(refusal)
        else:
            self._json({})


class Hub:
    """A hub in this process, for tests: ``with Hub(root) as hub: ... hub.url``. Listens on loopback only."""

    def __init__(self, root: Path, *, control: bool = False, port: int = 0) -> None:
        self._server = _Server(("127.0.0.1", port), root, control)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def commit(self, repo: str) -> str:
        """The commit id of ``organisation/name`` as the folder is now."""
        return self._server.repositories.commit(repo)

    def faults(self, *rules: Rule) -> None:
        """Replace the rules of misbehaviour; without arguments: behave well."""
        with self._server.lock:
            self._server.rules = list(rules)

    def requests(self, method: str = "", match: str = "") -> list[dict[str, Any]]:
        """What was asked so far, of this method (any) and with a path that matches the regular expression (any)."""
        with self._server.lock:
            log = [dict(entry) for entry in self._server.log]
        return [entry for entry in log if method in ("", entry["method"]) and re.search(match, entry["path"])]

    def forget(self) -> None:
        """Empty the log of requests."""
        with self._server.lock:
            self._server.log.clear()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A small model hub for tests and for the lab.")
    parser.add_argument("--root", type=Path, required=True, help="folder that holds <organisation>/<name>/")
    parser.add_argument("--commit", metavar="ORG/NAME", help="print the commit id of this repository and stop")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    parser.add_argument("--control", action="store_true", help="serve /_control/ too")
    args = parser.parse_args(argv)
    if not args.root.is_dir():
        parser.error(f"{args.root} is not a folder")
    if args.commit:
        try:
            print(Repositories(args.root).commit(args.commit))
        except Refusal as refusal:
            parser.error(f"{args.commit}: {refusal.message}")
        return 0
    server = _Server((args.host, args.port), args.root, args.control)
    print(f"http://{args.host}:{server.server_address[1]}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
