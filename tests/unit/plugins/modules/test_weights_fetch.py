# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The module against a real hub in this process, through the unmodified client."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args
from ansible_collections.sparkwright.dsv41.plugins.module_utils import join, progress, weight_sources, weights
from ansible_collections.sparkwright.dsv41.plugins.module_utils.weights import RECEIPT_NAME
from ansible_collections.sparkwright.dsv41.plugins.modules import weights_fetch
from hub import Hub, Rule

huggingface_hub = pytest.importorskip("huggingface_hub")
default_client_factory = pytest.importorskip("huggingface_hub.utils._http").default_client_factory

REPO = "acme/tiny"
ALL = ["config.json", "model-1.safetensors", "model-2.safetensors", "model-3.safetensors", "tokens/vocab.txt"]
SHARD = "model-2.safetensors"
TOKEN = "hf_averysecrettoken"

Result = dict[str, Any]
Runner = Callable[..., Result]


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.fixture
def waits() -> list[float]:
    """The seconds that were waited between attempts, which here take no time."""
    return []


@pytest.fixture
def run(
    hub: Hub,
    dest: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    impatient: None,
    waits: list[float],
) -> Iterator[Runner]:
    """Run the module once; its options default to the whole repository. Keeps the process's environment as it was."""
    work = tmp_path / "ansible-tmp"
    work.mkdir()
    monkeypatch.setattr(weight_sources, "time", SimpleNamespace(sleep=waits.append))
    revision = hub.commit(REPO)

    def once(check: bool = False, diff: bool = False, **options: Any) -> Result:
        params = {
            "repo": REPO,
            "revision": revision,
            "dest": str(dest),
            "endpoint": hub.url,
            "_ansible_check_mode": check,
            "_ansible_diff": diff,
            "_ansible_tmpdir": str(work),
            **options,
        }
        warned: list[str] = []
        with (
            mock.patch.dict(os.environ),
            # Ansible keeps warnings for the life of the process; here they are those of one run.
            mock.patch.object(AnsibleModule, "warn", lambda self, text: warned.append(text)),
            patch_module_args(params),
            pytest.raises(SystemExit) as stop,
        ):
            weights_fetch.main()
        out = capsys.readouterr().out
        result: Result = {**json.loads(out), "warnings": warned}
        assert bool(stop.value.code) == bool(result.get("failed"))
        assert TOKEN not in out
        assert os.listdir(work) == [], "the client's scratch directory is left"
        return result

    yield once
    # The module sets up the client for its process, which here goes on with other tests.
    huggingface_hub.set_client_factory(default_client_factory)


@pytest.fixture
def offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, asking the hub or reading a file fails the test."""

    def cut() -> None:
        hub.forget()
        monkeypatch.setattr(weights_fetch, "HubSource", lambda *args: pytest.fail("the hub was asked"))
        monkeypatch.setattr(weights, "file_digest", lambda *args: pytest.fail("a file was read"))

    return cut


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were hashed."""
    names: list[str] = []
    digest = weights.file_digest

    def count(path: str, kind: str, size: int, on_bytes: object = None) -> str:
        names.append(os.path.basename(path))
        return digest(path, kind, size)

    monkeypatch.setattr(weights, "file_digest", count)
    return names


def content(root: Path) -> dict[str, bytes]:
    """What is under a directory, without the client's and our own bookkeeping."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != RECEIPT_NAME and path.relative_to(root).parts[0] != ".cache"
    }


def same_mtime(path: Path, data: bytes) -> None:
    """Write other bytes into a file and set its modification time back."""
    before = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def flipped(path: Path) -> bytes:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0xFF
    return bytes(data)


# --- fetching, and not fetching again ---------------------------------------------------------------------------------


def test_fetches_everything_and_the_second_run_needs_no_hub(
    hub: Hub, hub_root: Path, dest: Path, run: Runner, offline: Callable[[], None]
) -> None:
    planned = run(check=True)
    assert not dest.exists()
    assert planned["changed"]
    assert planned["fetched"] == ALL
    assert planned["free_bytes"] > planned["fetch_bytes"] == planned["bytes"] > 600_000
    assert hub.requests("GET", "/resolve/") == []

    first = run()
    for key in "changed", "repo", "revision", "path", "files", "bytes", "fetched", "fetch_bytes", "receipt":
        assert first[key] == planned[key]
    assert content(dest) == content(hub_root / REPO)
    assert first["files"] == 5
    assert first["path"] == str(dest)
    assert first["receipt"] == str(dest / RECEIPT_NAME)
    assert len(hub.requests("GET", "/resolve/")) == 5

    offline()
    receipt = (dest / RECEIPT_NAME).read_bytes()
    for check in (True, False):
        again = run(check=check, diff=True)
        assert not again["changed"]
        assert again["fetched"] == []
        assert again["diff"]["before"] == again["diff"]["after"]
    assert hub.requests() == []
    assert (dest / RECEIPT_NAME).read_bytes() == receipt


def test_check_mode_writes_nothing_into_a_damaged_directory(dest: Path, run: Runner) -> None:
    run()
    (dest / SHARD).write_bytes(b"half")
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in dest.rglob("*")}
    result = run(check=True)
    assert result["changed"]
    assert result["fetched"] == [SHARD]
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in dest.rglob("*")} == before


def test_diff_shows_what_is_there_and_what_will_be(hub: Hub, dest: Path, run: Runner) -> None:
    diff = run(diff=True, include=["config.json"])["diff"]
    assert diff["before"] == {"verified": None, "files": {"config.json": "nothing"}}
    assert diff["after"]["verified"] == f"{REPO} at {hub.commit(REPO)}"
    assert diff["after"]["files"]["config.json"].startswith("git-sha1:70c7e957")
    assert "diff" not in run(include=["config.json"])


def test_only_missing_and_bad_files_are_fetched(hub: Hub, hub_root: Path, dest: Path, run: Runner) -> None:
    run()
    hub.forget()
    (dest / "config.json").unlink()
    (dest / SHARD).write_bytes(flipped(dest / SHARD))
    (dest / "model-3.safetensors").write_bytes(b"half")
    result = run()
    assert result["changed"]
    assert result["fetched"] == ["config.json", SHARD, "model-3.safetensors"]
    assert content(dest) == content(hub_root / REPO)
    assert len(hub.requests("GET", "/resolve/")) == 3
    assert hub.requests("GET", "/api/") == []  # the receipt knows the digests
    assert not run()["changed"]


def test_a_changed_file_of_same_size_and_time_needs_verify_full(hub_root: Path, dest: Path, run: Runner) -> None:
    run()
    same_mtime(dest / SHARD, flipped(dest / SHARD))
    assert not run()["changed"]
    full = run(verify="full")
    assert full["fetched"] == [SHARD]
    assert content(dest) == content(hub_root / REPO)
    assert not run(verify="full")["changed"]


def test_verify_full_of_a_good_directory_needs_no_hub(run: Runner, hub: Hub, read: list[str]) -> None:
    run()
    hub.forget()
    read.clear()
    assert not run(verify="full")["changed"]
    assert sorted(read) == [*ALL[:4], "vocab.txt"]
    assert hub.requests() == []


def test_other_modification_times_are_hashed_once_and_are_no_change(
    hub: Hub, dest: Path, run: Runner, read: list[str]
) -> None:
    run()
    os.utime(dest / SHARD, ns=(0, 0))
    hub.forget()
    read.clear()
    for _ in range(2):
        assert not run()["changed"]
        assert read == [SHARD]
    assert hub.requests() == []


def test_files_that_are_there_without_a_receipt_are_verified_not_fetched(
    hub: Hub, hub_root: Path, dest: Path, run: Runner
) -> None:
    for name, data in content(hub_root / REPO).items():
        (dest / name).parent.mkdir(parents=True, exist_ok=True)
        (dest / name).write_bytes(data)
    result = run()
    assert result["changed"]
    assert result["fetched"] == []
    assert hub.requests("", "/resolve/") == []
    assert not run()["changed"]


def test_an_unreadable_receipt_is_said_and_replaced(dest: Path, run: Runner) -> None:
    run()
    (dest / RECEIPT_NAME).write_text("{")
    result = run()
    (warning,) = result["warnings"]
    assert "as if there were no receipt" in warning
    assert result["fetched"] == []
    assert not run()["changed"]


def test_a_killed_run_is_taken_up_after_the_finished_files(
    hub: Hub, hub_root: Path, dest: Path, run: Runner, tmp_path: Path
) -> None:
    hub.faults(Rule(match="model-3", action="slow", method="GET", seconds=60))
    options = {"repo": REPO, "revision": hub.commit(REPO), "dest": str(dest), "endpoint": hub.url, "workers": 1}
    options["_ansible_remote_tmp"] = str(tmp_path)
    script = (
        "import json, sys\n"
        "from ansible.module_utils.testing import patch_module_args\n"
        "from ansible_collections.sparkwright.dsv41.plugins.modules import weights_fetch\n"
        "with patch_module_args(json.load(sys.stdin)): weights_fetch.main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, env=environment)
    assert child.stdin is not None
    child.stdin.write(json.dumps(options).encode())
    child.stdin.close()
    deadline = time.monotonic() + 30
    while not hub.requests("GET", "model-3") and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    finished = ["config.json", "model-1.safetensors", SHARD]
    assert sorted(content(dest)) == finished
    leftovers = list((dest / ".cache").rglob("*.incomplete"))
    assert leftovers
    assert not (dest / RECEIPT_NAME).exists()

    hub.faults()
    hub.forget()
    result = run()
    assert result["fetched"] == ["model-3.safetensors", "tokens/vocab.txt"]
    assert sorted(entry["path"].rsplit("/", 1)[1] for entry in hub.requests("GET", "/resolve/")) == [
        "model-3.safetensors",
        "vocab.txt",
    ]
    assert content(dest) == content(hub_root / REPO)
    assert not any(path.exists() for path in leftovers)


def test_a_run_waits_for_an_earlier_one_and_does_nothing_twice(
    dest: Path, run: Runner, hub: Hub, tmp_path: Path
) -> None:
    dest.mkdir()
    descriptor = os.open(dest, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    path = tmp_path / "run/progress.json"
    told: list[str] = []

    def earlier() -> None:
        """Fetches one file, as a run whose controller was killed, and ends once the other one waits for it."""
        shutil.copy(hub_file(hub, SHARD), dest / SHARD)
        end = time.monotonic() + 20
        while not told and time.monotonic() < end:
            with contextlib.suppress(OSError):
                told.extend(line for line in [path.read_text()] if "waiting for an earlier run" in line)
        os.close(descriptor)

    thread = threading.Thread(target=earlier)
    thread.start()
    result = run(progress=str(path))
    thread.join()
    assert told
    assert sorted(result["fetched"]) == sorted(set(ALL) - {SHARD})
    assert not hub.requests("GET", f"/resolve/.*{SHARD}")


def hub_file(hub: Hub, path: str) -> Path:
    return Path(hub._server.repositories.folder(REPO)) / path


def test_another_commit_replaces_the_files_that_differ(hub: Hub, hub_root: Path, dest: Path, run: Runner) -> None:
    run()
    old = hub.commit(REPO)
    (hub_root / REPO / "config.json").write_text('{"layers": 3}\n')
    (hub_root / REPO / "model-3.safetensors").unlink()
    hub.forget()
    result = run(revision=hub.commit(REPO))
    assert result["fetched"] == ["config.json"]
    assert len(hub.requests("GET", "/resolve/")) == 1
    (warning,) = result["warnings"]
    assert f"1 file(s) of {REPO} at {old} that are no longer part of it: model-3.safetensors" in warning
    assert (dest / "model-3.safetensors").exists()
    again = run(revision=hub.commit(REPO))
    assert not again["changed"]
    assert again["warnings"] == []


def test_while_another_commit_is_fetched_there_is_no_receipt(hub: Hub, hub_root: Path, dest: Path, run: Runner) -> None:
    run()
    (hub_root / REPO / "config.json").write_text('{"layers": 3}\n')
    hub.faults(Rule(match="config", action="status", status=500, method="GET"))
    assert run(revision=hub.commit(REPO))["failed"]
    assert not (dest / RECEIPT_NAME).exists()


# --- what to have -----------------------------------------------------------------------------------------------------


def test_include(dest: Path, run: Runner) -> None:
    assert run(include=["*.json", "tokens/"])["fetched"] == ["config.json", "tokens/vocab.txt"]
    assert not run(include=["tokens/", "*.json"])["changed"]
    assert run(include=["*.json", "tokens/", "*-1.*"])["fetched"] == ["model-1.safetensors"]
    narrower = run(include=["*.json"])
    assert narrower["changed"]
    assert narrower["fetched"] == []


def test_names_that_do_not_exist_are_reported_together_before_fetching(hub: Hub, dest: Path, run: Runner) -> None:
    result = run(include=["*.json", "*.gguf"], must_exist=["config.json", "tokenizer.json", SHARD])
    assert result["failed"]
    assert [(finding["path"], finding["found"].split(" in ")[0]) for finding in result["findings"]] == [
        ("*.gguf", "no file"),
        ("tokenizer.json", "no such file"),
        (SHARD, "a file that include leaves out"),
    ]
    assert all(finding["path"] in result["msg"] for finding in result["findings"])
    assert not dest.exists()
    assert hub.requests("", "/resolve/") == []


def test_must_exist_is_checked_against_an_intact_receipt_too(run: Runner, offline: Callable[[], None]) -> None:
    run()
    offline()
    result = run(must_exist=["tokenizer.json"])
    assert "tokenizer.json: found no such file" in result["msg"]


def test_must_exist_that_include_leaves_out_is_told_with_a_receipt(run: Runner) -> None:
    run(include=["*.json"])
    assert f"{SHARD}: found a file that include leaves out" in run(include=["*.json"], must_exist=[SHARD])["msg"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"revision": "main"}, "revision must be a commit id of 40"),
        ({"revision": "0123456"}, "revision must be a commit id of 40"),
        ({"repo": "tiny"}, "repo must be organisation/name"),
        ({"dest": "weights"}, "dest must be an absolute path"),
        ({"workers": 0}, "workers must be 1 or more"),
        ({"verify": "never"}, "value of verify must be one of"),
    ],
)
def test_refused_options(hub: Hub, run: Runner, options: Result, message: str) -> None:
    result = run(**options)
    assert message in result["msg"]
    assert hub.requests() == []


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_wrong_bytes_are_fetched_once_more(hub: Hub, hub_root: Path, dest: Path, run: Runner) -> None:
    hub.faults(Rule(match=SHARD, action="wrong_bytes", times=1))
    assert run()["fetched"] == ALL
    assert content(dest) == content(hub_root / REPO)
    assert len(hub.requests("GET", SHARD)) == 2


def test_every_bad_file_is_named_with_both_digests(hub: Hub, hub_root: Path, dest: Path, run: Runner) -> None:
    hub.faults(Rule(match="model-[12]|config", action="wrong_bytes"))
    result = run()
    assert result["failed"]
    assert [finding["path"] for finding in result["findings"]] == ["config.json", "model-1.safetensors", SHARD]
    for finding in result["findings"]:
        data = (hub_root / REPO / finding["path"]).read_bytes()
        wrong = bytes([data[0] ^ 0xFF]) + data[1:]
        if finding["path"] == "config.json":
            digests = [f"git-sha1:{hashlib.sha1(b'blob 14' + bytes(1) + text).hexdigest()}" for text in (wrong, data)]
        else:
            digests = [f"sha256:{hashlib.sha256(text).hexdigest()}" for text in (wrong, data)]
        assert [finding["found"], finding["needed"]] == digests
        assert f"{finding['path']}: found {digests[0]}, needed {digests[1]}" in result["msg"]
    assert result["fetched"] == ["model-3.safetensors", "tokens/vocab.txt"]
    assert sorted(content(dest)) == result["fetched"], "a bad file is left for an engine to load"
    assert len(hub.requests("GET", SHARD)) == 2
    assert not (dest / RECEIPT_NAME).exists()
    hub.faults()
    assert run()["fetched"] == ["config.json", "model-1.safetensors", SHARD]


def test_half_a_file_in_the_repository_itself(hub: Hub, hub_root: Path, run: Runner) -> None:
    path = hub_root / REPO / SHARD
    path.write_bytes(path.read_bytes()[:-1000])
    (finding,) = run(revision=hub.commit(REPO))["findings"]
    assert finding["path"] == SHARD
    assert finding["found"] == f"{path.stat().st_size} bytes where its header promises {path.stat().st_size + 1000}"
    assert "repository's own copy is damaged" in finding["needed"]


def test_a_dropped_connection_is_resumed_by_the_client(hub: Hub, hub_root: Path, dest: Path, run: Runner) -> None:
    hub.faults(Rule(match=SHARD, action="drop_after_bytes", bytes=1000, times=3))
    assert run()["fetched"] == ALL
    assert content(dest) == content(hub_root / REPO)


def test_a_connection_that_always_drops(hub: Hub, dest: Path, run: Runner) -> None:
    hub.faults(Rule(match=SHARD, action="drop_after_bytes", bytes=0))
    result = run()
    (finding,) = result["findings"]
    assert finding["path"] == SHARD
    assert f"the connection to {hub.url} was dropped" in finding["found"]
    assert "finished files are kept" in finding["found"]
    assert result["fetched"] == [name for name in ALL if name != SHARD]
    hub.faults()
    hub.forget()
    assert run()["fetched"] == [SHARD]
    assert len(hub.requests("GET", "/resolve/")) == 1


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([Rule(match="/api/", action="html")], "answers with a web page instead of the list of files"),
        ([Rule(match="/resolve/", action="html")], "answers with a web page instead of config.json"),
        ([Rule(match=SHARD, action="html", method="GET")], f"answers with a web page instead of {SHARD}"),
        ([Rule(match="/api/", action="status", status=429)], "no more requests for now (429)"),
        ([Rule(match="/resolve/", action="status", status=429)], "no more requests for now (429)"),
        ([Rule(match="/api/", action="status", status=500)], "The hub answers 500"),
        ([Rule(match=SHARD, action="status", status=500)], f"{SHARD}: found The hub answers 500"),
        ([Rule(match=SHARD, action="status", status=500, method="GET")], f"{SHARD}: found The hub answers 500"),
        ([Rule(match=SHARD, action="status", status=404, code="EntryNotFound")], f"{SHARD}: found no such file at"),
        ([Rule(match="/api/", action="status", status=401)], "There is no repository acme/tiny"),
    ],
)
def test_messages(hub: Hub, dest: Path, run: Runner, rules: list[Rule], message: str) -> None:
    hub.faults(*rules)
    assert message in run()["msg"]
    assert not (dest / RECEIPT_NAME).exists()
    assert not any(b"<html" in data for data in content(dest).values())
    hub.faults()
    assert run()["changed"]


@pytest.mark.parametrize(
    ("headers", "status", "waited"),
    [
        ({"Retry-After": "30"}, 429, [31, 31]),
        ({"RateLimit": '"api";r=0;t=55'}, 429, [56, 56]),
        ({"RateLimit": '"api";r=9;t=55', "Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 429, [1, 2]),
        ({}, 503, [1, 2]),
        ({"Retry-After": "5"}, 503, [6, 6]),
    ],
)
@pytest.mark.parametrize("what", ["/api/", "/resolve/.*config.json"])
def test_a_busy_hub_is_asked_again(
    hub: Hub,
    run: Runner,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    headers: dict[str, str],
    status: int,
    waited: list[float],
) -> None:
    """For the list of files, and when it is found out whether files may be had."""
    told: list[str] = []
    monkeypatch.setattr(progress.Progress, "begin", lambda self, what, *rest: told.append(what))
    method = "GET" if what == "/api/" else "HEAD"
    hub.faults(Rule(what, "status", status=status, headers=headers, times=2, method=method))
    assert run()["fetched"] == ALL
    assert waits == waited
    said = [f"the hub answers {status}, asking again in {seconds} s" for seconds in waited]
    assert [line for line in told if line.startswith("the hub")] == said


def test_a_hub_that_stays_busy_is_not_asked_for_ever(hub: Hub, run: Runner, waits: list[float]) -> None:
    hub.faults(Rule("/api/", "status", status=429))
    assert "no more requests for now (429)" in run()["msg"]
    assert waits == [1, 2, 4, 8, 8] and len(hub.requests("GET", "/api/")) == 6
    hub.faults(Rule("/api/", "status", status=429, headers={"Retry-After": "3600"}))
    waits.clear()
    assert "no more requests for now (429)" in run()["msg"] and waits == []
    hub.faults(Rule("/api/", "status", status=404, code="RepoNotFound"))
    hub.forget()
    waits.clear()
    run()
    assert waits == [] and len(hub.requests("GET", "/api/")) == 1


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    ("token", "message"),
    [
        (None, f"{REPO} is gated and no token was given: accept its terms at"),
        ("hf_unknown", "The hub refuses the token (401)"),
        ("hf_known", f"The token is valid but its account has no access to {REPO}"),
    ],
)
def test_gated(hub: Hub, dest: Path, run: Runner, token: str | None, message: str, check: bool) -> None:
    hub.faults(Rule(match=f"^/{REPO}/", action="gated", tokens={TOKEN: True, "hf_known": False}))
    result = run(check=check, **({"token": token} if token else {}))
    assert message in result["msg"]
    assert hub.requests("GET", "/resolve/") == []


def test_the_token_is_used_and_kept_nowhere(
    hub: Hub, dest: Path, run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults(Rule(match=f"^/{REPO}/", action="gated", tokens={TOKEN: True}))
    monkeypatch.setenv("HF_TOKEN", "hf_left_by_a_login")
    environments: list[str] = []
    fetch = weights_fetch.HubSource.fetch

    def watch(self: Any, entry: weights.FileEntry) -> None:
        environments.append(str(os.environ) + Path("/proc/self/cmdline").read_text())
        fetch(self, entry)

    monkeypatch.setattr(weights_fetch.HubSource, "fetch", watch)
    assert run(token=TOKEN)["fetched"] == ALL
    assert len(environments) == 5
    assert all(TOKEN not in text and "hf_left_by_a_login" not in text for text in environments)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_a_login_on_the_node_is_not_used(hub: Hub, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_left_by_a_login")
    run()
    assert not any(entry["token"] for entry in hub.requests())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repo": "acme/none"}, "There is no repository acme/none at"),
        ({"revision": "0" * 40}, f"{REPO} has no commit {'0' * 40} at"),
        ({"endpoint": "http://127.0.0.1:9"}, "Cannot reach the hub at http://127.0.0.1:9"),
        ({"endpoint": "hub.example"}, "Cannot reach the hub at hub.example"),
        ({"endpoint": None}, "Cannot reach the hub at http://127.0.0.1:9"),  # the client's own, see conftest.py
    ],
)
def test_where_there_is_nothing(dest: Path, run: Runner, options: Result, message: str) -> None:
    result = run(**options)
    assert message in result["msg"]
    assert result["fetched"] == []
    assert not dest.exists()


def test_a_repository_without_files(hub: Hub, hub_root: Path, run: Runner) -> None:
    (hub_root / "acme" / "empty").mkdir()
    assert "has no files" in run(repo="acme/empty", revision=hub.commit("acme/empty"))["msg"]


def test_a_mirror_that_answers_with_another_commit(hub: Hub, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.commit(REPO)
    monkeypatch.setattr("hub._Handler._commit", lambda self, repo, revision: commit)
    assert f"answers with commit {commit} instead of {'0' * 40}" in run(revision="0" * 40)["msg"]


def test_complete_files_without_receipt_do_not_pass_without_a_hub(dest: Path, run: Runner) -> None:
    run()
    (dest / RECEIPT_NAME).unlink()
    assert "Cannot reach the hub" in run(endpoint="http://127.0.0.1:9")["msg"]


def test_a_hub_that_goes_away_stops_all_files_and_says_which_are_left(
    hub: Hub, dest: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = weights_fetch.HubSource.fetch
    tried: list[str] = []

    def leave(self: Any, entry: weights.FileEntry) -> None:
        tried.append(entry.path)
        if entry.path == "model-1.safetensors":
            self.endpoint = "http://127.0.0.1:9"
        fetch(self, entry)

    monkeypatch.setattr(weights_fetch.HubSource, "fetch", leave)
    result = run(workers=1)
    assert "Cannot reach the hub at http://127.0.0.1:9" in result["msg"]
    assert "4 of 5 file(s) are still to fetch" in result["msg"]
    assert [finding["path"] for finding in result["findings"]] == ALL[1:]
    assert result["fetched"] == ["config.json"]
    assert tried == ALL[:2]


@pytest.mark.parametrize("check", [False, True])
def test_a_disk_too_small_is_refused_before_fetching(
    hub: Hub, hub_root: Path, dest: Path, run: Runner, monkeypatch: pytest.MonkeyPatch, check: bool
) -> None:
    need = sum(len(data) for data in content(hub_root / REPO).values())
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=need - 1))
    result = run(check=check)
    assert f"5 file(s) to fetch need {need} bytes" in result["msg"]
    assert f"{need} - 0 - {need - 1} = 1 bytes" in result["msg"]
    assert hub.requests("", "/resolve/") == []
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=need))
    assert run(check=check)["changed"]


def test_a_replaced_file_gives_its_space_back(dest: Path, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    (dest / SHARD).write_bytes(flipped(dest / SHARD))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.warns(UserWarning, match="Not enough free disk space"):  # the client does not know
        assert run()["fetched"] == [SHARD]


def test_without_the_client_library_the_message_says_where_it_belongs(
    run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = run()["msg"]
    assert "huggingface_hub (2.4 or newer)" in message
    assert "ansible_python_interpreter" in message


def test_a_folder_in_the_place_of_a_file(dest: Path, run: Runner) -> None:
    (dest / SHARD).mkdir(parents=True)
    (finding,) = run()["findings"]
    assert finding["path"] == SHARD
    assert "directory" in finding["found"]


def outside(tmp_path: Path) -> Path:
    """A directory beside dest that a link may lead to, with a file that must stay."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in "vocab.txt", "vocab.txt.metadata", "old.incomplete", "receipt":
        (folder / name).write_text("precious")
    return folder


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    "link",
    [
        "tokens",
        ".cache",
        ".cache/huggingface",
        ".cache/huggingface/download",
        ".cache/huggingface/download/tokens",
        ".cache/huggingface/download/tokens/vocab.txt.metadata",
        ".cache/sparkwright",
    ],
)
def test_links_that_lead_out_are_refused(
    hub: Hub, dest: Path, run: Runner, tmp_path: Path, link: str, check: bool
) -> None:
    folder = outside(tmp_path)
    before = content(folder)
    (dest / link).parent.mkdir(parents=True)
    target = folder / "vocab.txt.metadata" if link.endswith(".metadata") else folder
    (dest / link).symlink_to(target)
    result = run(check=check)
    assert f"Links lead out of {dest}; remove them and run again" in result["msg"]
    assert f"{link}: found a link to {target}" in result["msg"]
    assert hub.requests("", "/resolve/") == []
    assert content(folder) == before
    (dest / link).unlink()
    assert run(check=check)["changed"]
    assert content(folder) == before


def test_a_link_in_the_place_of_a_file_is_replaced(hub_root: Path, dest: Path, run: Runner, tmp_path: Path) -> None:
    folder = outside(tmp_path)
    (dest / "tokens").mkdir(parents=True)
    (dest / "tokens/vocab.txt").symlink_to(folder / "vocab.txt")
    (dest / f"{RECEIPT_NAME}.tmp").symlink_to(folder / "receipt")
    assert run()["changed"]
    assert content(dest) == content(hub_root / REPO)
    assert not (dest / "tokens/vocab.txt").is_symlink() and not (dest / RECEIPT_NAME).is_symlink()
    assert set(content(folder).values()) == {b"precious"}


# --- without a hub ----------------------------------------------------------------------------------------------------


@pytest.fixture
def source(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that a node with a hub filled; after it was made there is no hub."""
    path = tmp_path / "transfer"
    assert run(dest=str(path))["changed"]
    monkeypatch.setattr(weights_fetch, "HubSource", lambda *args: pytest.fail("the hub was asked"))
    return path


def test_source_dir_is_copied_and_verified(source: Path, dest: Path, run: Runner) -> None:
    assert run(source_dir=str(source), check=True)["fetched"] == ALL
    assert not dest.exists()
    assert run(source_dir=str(source))["fetched"] == ALL
    assert content(dest) == content(source)
    assert not run(source_dir=str(source))["changed"]
    assert not run()["changed"]
    (dest / SHARD).unlink()
    assert run(source_dir=str(source), include=["*2*"])["fetched"] == [SHARD]


def test_source_dir_with_bad_files_names_them_all(source: Path, dest: Path, run: Runner) -> None:
    (source / "config.json").unlink()
    same_mtime(source / SHARD, flipped(source / SHARD))
    result = run(source_dir=str(source))
    found = {finding["path"]: finding["found"] for finding in result["findings"]}
    assert sorted(found) == ["config.json", SHARD]
    assert "cannot be copied from source_dir" in found["config.json"]
    assert found[SHARD].startswith("sha256:")
    assert sorted(content(dest)) == ["model-1.safetensors", "model-3.safetensors", "tokens/vocab.txt"]


def test_source_dir_in_place(source: Path, run: Runner) -> None:
    assert not run(dest=str(source), source_dir=str(source))["changed"]
    same_mtime(source / SHARD, flipped(source / SHARD))
    (source / "config.json").unlink()
    result = run(dest=str(source), source_dir=str(source), verify="full")
    assert "source_dir is dest itself" in result["msg"]
    assert [finding["path"] for finding in result["findings"]] == ["config.json", SHARD]
    assert (source / SHARD).exists()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda source: (source / RECEIPT_NAME).unlink(), {}, "has no receipt"),
        (lambda source: (source / RECEIPT_NAME).write_text("{"), {}, "cannot be read"),
        (lambda source: None, {"revision": "0" * 40}, "needed acme/tiny at 000"),
        (lambda source: None, {"repo": "acme/other"}, "needed acme/other at"),
        (lambda source: None, {"must_exist": ["tokenizer.json"]}, "tokenizer.json: found no such file"),
    ],
)
def test_source_dir_that_does_not_answer_the_request(
    source: Path, dest: Path, run: Runner, change: Callable[[Path], Any], options: Result, message: str
) -> None:
    change(source)
    assert message in run(source_dir=str(source), **options)["msg"]
    assert not dest.exists()


def test_source_dir_filled_with_fewer_files(run: Runner, tmp_path: Path) -> None:
    source = tmp_path / "transfer"
    run(dest=str(source), include=["*.json"])
    message = run(source_dir=str(source))["msg"]
    assert "was filled with include *.json; needed all files" in message
    assert run(source_dir=str(source), include=["*.json"])["fetched"] == ["config.json"]


# --- from another node ------------------------------------------------------------------------------------------------


@pytest.fixture
def head(
    run: Runner, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Result]]:
    """Pulls from a node that fetched the weights: its own peer-serve, run as sshd would, and a real rsync server."""
    if os.geteuid() != 0 or not shutil.which("rsync") or not shutil.which("ss"):
        pytest.skip("needs root, rsync and iproute2: the server reads files of root")
    shared = tmp_path / "shared"
    assert run(dest=str(shared / "tiny"))["changed"]
    monkeypatch.setattr(weights_fetch, "HubSource", lambda *args: pytest.fail("the hub was asked"))
    serve = (Path(__file__).parents[3] / "render/golden/peer-serve").read_text()
    there = "/var/lib/sparkwright/weights/model"
    assert there in serve
    script = tmp_path / "ssh"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n'
        'export SSH_ORIGINAL_COMMAND="$1" SSH_CONNECTION="127.0.0.1 4242 127.0.0.1 22"\n'
        + serve.replace(there, str(shared / "tiny")).partition("\n")[2]
    )
    script.chmod(0o755)

    def pull(**options: Any) -> Result:
        return run(**{"peer": {"ssh": [str(script)], "name": "model"}, **options})

    # One at a time among the processes of this run, as each counts the servers of the machine.
    with open(tmp_path_factory.getbasetemp().parent / "head.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield pull
        assert not [line for line in listening() if "127.0.0.1:187" in line], "a server is left"
        assert not list(Path("/run").glob("sparkwright-serve.*"))


def listening() -> list[str]:
    command = ["ss", "-Hltn"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def asked(tmp_path: Path) -> list[str]:
    return (tmp_path / "asked").read_text().splitlines() if (tmp_path / "asked").exists() else []


def test_pulls_all_files_and_a_second_run_asks_nobody(head: Callable[..., Result], dest: Path, tmp_path: Path) -> None:
    first = head()
    assert first["fetched"] == ALL
    assert content(dest) == content(tmp_path / "shared/tiny")
    assert not (dest / ".cache/sparkwright").exists()
    assert sorted(asked(tmp_path)) == ["receipt model", "weights model"]
    assert not head()["changed"]
    assert len(asked(tmp_path)) == 2


def test_check_mode_pulls_nothing(head: Callable[..., Result], dest: Path, tmp_path: Path) -> None:
    planned = head(check=True)
    assert planned["changed"] and planned["fetched"] == ALL
    assert planned["need_bytes"] == planned["fetch_bytes"] == planned["bytes"]
    assert not dest.exists()
    assert asked(tmp_path) == ["receipt model"]


def test_a_broken_transfer_goes_on_where_it_ended(
    head: Callable[..., Result], dest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (tmp_path / "shared/tiny" / SHARD).read_bytes()
    partial = dest / ".cache/sparkwright" / SHARD
    partial.parent.mkdir(parents=True)
    partial.write_bytes(whole[: len(whole) // 2])
    run_command, said = subprocess.run, []

    def watch(argv: list[str], **options: Any) -> Any:
        argv = ["rsync", "--stats", *argv[1:]] if argv[0] == "rsync" and argv[-1].endswith(SHARD) else argv
        done = run_command(argv, **options)
        said.extend(line for line in str(done.stdout).splitlines() if line.startswith("Literal data:"))
        return done

    monkeypatch.setattr(subprocess, "run", watch)
    assert head()["fetched"] == ALL
    assert (dest / SHARD).read_bytes() == whole
    (sent,) = (int(line.split()[2].replace(",", "")) for line in said)
    assert 0 < sent <= len(whole) - len(whole) // 2


def test_what_is_pulled_whole_is_hashed_on_the_way_and_what_goes_on_is_read_again(
    head: Callable[..., Result], dest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = dest / ".cache/sparkwright" / SHARD
    partial.parent.mkdir(parents=True)
    partial.write_bytes((tmp_path / "shared/tiny" / SHARD).read_bytes()[:1000])
    digest = weights.file_digest
    again: list[str] = []

    def read(path: str, *rest: Any) -> str:
        again.append(path)
        return digest(path, *rest)

    monkeypatch.setattr(weights, "file_digest", read)
    assert head()["fetched"] == ALL
    assert again == [str(dest / SHARD)]
    assert content(dest) == content(tmp_path / "shared/tiny")


def test_a_wrong_beginning_is_pulled_again(head: Callable[..., Result], dest: Path, tmp_path: Path) -> None:
    whole = (tmp_path / "shared/tiny" / SHARD).read_bytes()
    partial = dest / ".cache/sparkwright" / SHARD
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"\0" * (len(whole) // 2))
    assert head()["fetched"] == ALL
    assert (dest / SHARD).read_bytes() == whole


def test_wrong_bytes_on_the_head_are_not_taken(head: Callable[..., Result], dest: Path, tmp_path: Path) -> None:
    bad = tmp_path / "shared/tiny" / SHARD
    same_mtime(bad, flipped(bad))
    result = head()
    assert [finding["path"] for finding in result["findings"]] == [SHARD]
    assert result["findings"][0]["found"].startswith("sha256:")
    assert not (dest / SHARD).exists() and not (dest / RECEIPT_NAME).exists()
    # What was good is kept, and only the bad file is pulled once it is right.
    same_mtime(bad, flipped(bad))
    assert head()["fetched"] == [SHARD]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"peer": {"ssh": ["/bin/false"], "name": "model"}},
            "The head does not tell what model holds: no reason given",
        ),
        ({"revision": "0" * 40}, "The head holds acme/tiny at"),
        ({"must_exist": ["tokenizer.json"]}, "tokenizer.json: found no such file"),
    ],
)
def test_a_head_that_does_not_answer_the_request(
    head: Callable[..., Result], dest: Path, options: Result, message: str
) -> None:
    assert message in head(**options)["msg"]
    assert not dest.exists()


def test_a_head_without_verified_weights(head: Callable[..., Result], tmp_path: Path, dest: Path) -> None:
    (tmp_path / "shared/tiny" / RECEIPT_NAME).unlink()
    assert "holds no verified weights" in head()["msg"]
    assert not dest.exists()


def test_the_password_is_in_no_command_line(
    head: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_command, seen = subprocess.run, []

    def watch(argv: list[str], **options: Any) -> Any:
        if argv[0] == "rsync":
            password = options["env"]["RSYNC_PASSWORD"]
            seen.append(password)
            lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if readable(path)]
            assert len(password) == 32 and not any(password.encode() in line for line in lines)
            (state,) = Path("/run").glob("sparkwright-serve.*")
            assert state.stat().st_mode & 0o777 == 0o700
            refused = run_command(argv, env={**os.environ, "RSYNC_PASSWORD": "x"}, capture_output=True, check=False)
            assert refused.returncode != 0 and b"auth failed" in refused.stderr
        return run_command(argv, **options)

    monkeypatch.setattr(subprocess, "run", watch)
    assert head()["fetched"] == ALL
    assert len(seen) == len(ALL)


def readable(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


# --- files in parts ---------------------------------------------------------------------------------------------------

BIG = "big.safetensors"


@pytest.fixture
def parts(hub: Hub, hub_root: Path, run: Runner) -> Callable[..., Result]:
    """Fetches a repository that stores one file in three parts."""
    folder = hub_root / "acme/parts"
    folder.mkdir(parents=True)
    whole = safetensors(b"x" * 3_000_000)
    for number in range(3):
        size = len(whole) // 3 + 1
        (folder / f"{BIG}.part{number:02}").write_bytes(whole[number * size : (number + 1) * size])
    (folder / "config.json").write_text("{}")
    (folder / "sha256-manifest.txt").write_text(f"{hashlib.sha256(whole).hexdigest()}  {BIG}\n")

    def fetch(**options: Any) -> Result:
        join = {"join": "sha256-manifest.txt", "repo": "acme/parts", "revision": hub.commit("acme/parts")}
        return run(**{**join, **options})

    return fetch


def safetensors(data: bytes) -> bytes:
    header = json.dumps({"t": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    return len(header).to_bytes(8, "little") + header + data


PIECES = [f"{BIG}.part{number:02}" for number in range(3)]


def test_parts_are_joined_and_a_second_run_needs_no_hub(
    parts: Callable[..., Result], hub: Hub, dest: Path, offline: Callable[[], None]
) -> None:
    planned = parts(check=True)
    assert planned["fetched"] == [*PIECES, "config.json", "sha256-manifest.txt"]
    assert not dest.exists()
    first = parts(must_exist=[BIG])
    assert first["fetched"] == planned["fetched"]
    assert sorted(content(dest)) == [BIG, "config.json", "sha256-manifest.txt"]
    # Room: the whole, and one part at most while joining.
    sizes = [(entry["path"], entry["bytes"]) for entry in hub.requests("GET", r"/resolve/.*part")]
    assert planned["need_bytes"] == planned["fetch_bytes"] + join.room_needed(sizes) < planned["fetch_bytes"] * 1.5
    revision = first["revision"]
    offline()
    assert not parts(revision=revision)["changed"]


def test_a_joined_file_that_broke_is_made_again(parts: Callable[..., Result], hub: Hub, dest: Path) -> None:
    parts()
    good = (dest / BIG).read_bytes()
    (dest / BIG).write_bytes(good[:-5] + b"wrong")
    hub.forget()
    assert parts()["fetched"] == PIECES
    assert (dest / BIG).read_bytes() == good


def test_parts_that_are_there_are_not_fetched_again(parts: Callable[..., Result], dest: Path, hub_root: Path) -> None:
    parts(keep_parts=True)
    assert sorted(content(dest)) == [BIG, *PIECES, "config.json", "sha256-manifest.txt"]
    (dest / BIG).unlink()
    assert parts()["fetched"] == []
    assert sorted(content(dest)) == [BIG, "config.json", "sha256-manifest.txt"]


def test_a_part_that_broke_is_fetched_again_and_no_other(parts: Callable[..., Result], dest: Path) -> None:
    parts(keep_parts=True)
    (dest / BIG).unlink()
    flip = (dest / PIECES[1]).read_bytes()
    (dest / PIECES[1]).write_bytes(flip[:-1] + bytes([flip[-1] ^ 1]))
    assert parts(check=True, verify="size")["fetched"] == []
    assert parts(check=True)["fetched"] == [PIECES[1]]
    assert parts()["fetched"] == [PIECES[1]]
    assert sorted(content(dest)) == [BIG, "config.json", "sha256-manifest.txt"]


def test_what_the_manifest_does_not_know_is_named(parts: Callable[..., Result], hub_root: Path, dest: Path) -> None:
    (hub_root / "acme/parts/sha256-manifest.txt").write_text(f"{'0' * 64}  other.bin\n")
    assert f"{BIG}: found no digest in the repository's manifest" in parts()["msg"]
    (hub_root / "acme/parts/sha256-manifest.txt").write_text("no digest at all\n")
    assert "found 'no digest at all'" in parts()["msg"]
    assert not dest.exists()


def test_a_wrong_whole_is_never_put_in_place(parts: Callable[..., Result], hub_root: Path, dest: Path) -> None:
    (hub_root / "acme/parts/sha256-manifest.txt").write_text(f"{'0' * 64}  {BIG}\n")
    result = parts()
    assert f"sha256:{'0' * 64}" in result["msg"] and not (dest / BIG).exists()
    assert not (dest / RECEIPT_NAME).exists()


# --- planning ---------------------------------------------------------------------------------------------------------


def test_size_only_hashes_nothing_and_is_for_check_mode(run: Runner, dest: Path, read: list[str]) -> None:
    run()
    (dest / RECEIPT_NAME).unlink()
    (dest / SHARD).write_bytes(b"short")
    read.clear()
    assert run(check=True, verify="size")["fetched"] == [SHARD]
    assert read == []
    assert "for check mode only" in run(verify="size")["msg"]


def test_progress_is_told_while_fetching(run: Runner, hub: Hub, dest: Path, tmp_path: Path) -> None:
    path = tmp_path / "run/progress.json"
    hub.faults(Rule("/resolve/.*safetensors", "slow", seconds=1.5))
    seen: list[str] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            with contextlib.suppress(OSError):
                seen.append(path.read_text())

    thread = threading.Thread(target=watch)
    thread.start()
    result = run(progress=str(path))
    ended.set()
    thread.join()
    samples = [sample for text in seen if (sample := progress.parse(text))]
    assert {sample.what for sample in samples} >= {"fetching"}
    assert all(sample.total_bytes == result["bytes"] for sample in samples if sample.what != "asking the hub")
    assert not path.exists()
