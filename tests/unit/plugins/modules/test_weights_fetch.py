# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The module against a real hub in this process, through the unmodified client."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args
from ansible_collections.sparkwright.dsv41.plugins.module_utils import weights
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
def run(hub: Hub, dest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], impatient: None) -> Iterator[Runner]:
    """Run the module once; its options default to the whole repository. Keeps the process's environment as it was."""
    work = tmp_path / "ansible-tmp"
    work.mkdir()
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
        monkeypatch.setattr(weights_fetch, "HubClient", lambda *args: pytest.fail("the hub was asked"))
        monkeypatch.setattr(weights, "file_digest", lambda *args: pytest.fail("a file was read"))

    return cut


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were hashed."""
    names: list[str] = []
    digest = weights.file_digest

    def count(path: str, kind: str, size: int) -> str:
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


def test_a_second_run_at_the_same_time_is_refused(dest: Path, run: Runner) -> None:
    dest.mkdir()
    descriptor = os.open(dest, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert "Another run is fetching into" in run()["msg"]
    finally:
        os.close(descriptor)
    assert run()["changed"]


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
    fetch = weights_fetch.HubClient.fetch

    def watch(self: Any, path: str) -> None:
        environments.append(str(os.environ) + Path("/proc/self/cmdline").read_text())
        fetch(self, path)

    monkeypatch.setattr(weights_fetch.HubClient, "fetch", watch)
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
    fetch = weights_fetch.HubClient.fetch
    tried: list[str] = []

    def leave(self: Any, path: str) -> None:
        tried.append(path)
        if path == "model-1.safetensors":
            self.endpoint = "http://127.0.0.1:9"
        fetch(self, path)

    monkeypatch.setattr(weights_fetch.HubClient, "fetch", leave)
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


# --- without a hub ----------------------------------------------------------------------------------------------------


@pytest.fixture
def source(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that a node with a hub filled; after it was made there is no hub."""
    path = tmp_path / "transfer"
    assert run(dest=str(path))["changed"]
    monkeypatch.setattr(weights_fetch, "HubClient", lambda *args: pytest.fail("the hub was asked"))
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
