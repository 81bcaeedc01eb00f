# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The small hub against the unmodified huggingface_hub client."""

from __future__ import annotations

import hashlib
import http.client
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hub as hub_module
import pytest
from hub import Hub, Rule

huggingface_hub = pytest.importorskip("huggingface_hub")

REPO = "acme/tiny"
SHARD = "model-1.safetensors"


@pytest.fixture
def api(hub: Hub) -> Any:
    return huggingface_hub.HfApi(endpoint=hub.url, token=False)


@pytest.fixture
def download(hub: Hub, tmp_path: Path) -> Callable[..., Path]:
    def fetch(name: str, **options: Any) -> Path:
        options = {"token": False, "cache_dir": tmp_path / "cache", "endpoint": hub.url, **options}
        return Path(huggingface_hub.hf_hub_download(REPO, name, **options))

    return fetch


def raw(hub: Hub, method: str, path: str, headers: dict[str, str] | None = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", hub.port, timeout=10)
    connection.request(method, path, headers=headers or {})
    return connection.getresponse()


def test_model_info_lists_files_with_their_digests(hub: Hub, hub_root: Path, api: Any) -> None:
    info = api.model_info(REPO, revision="main", files_metadata=True)
    assert info.sha == hub.commit(REPO)
    files = {sibling.rfilename: sibling for sibling in info.siblings}
    assert sorted(files) == [
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model-3.safetensors",
        "tokens/vocab.txt",
    ]
    shard = (hub_root / REPO / SHARD).read_bytes()
    assert files[SHARD].lfs.sha256 == hashlib.sha256(shard).hexdigest()
    assert files[SHARD].size == len(shard)
    # git's own way: echo '{"layers": 2}' | git hash-object --stdin
    assert files["config.json"].lfs is None
    assert files["config.json"].blob_id == "70c7e957c13decd9e2629de84619bbbf2e3b9def"


def test_tree_recursive_and_by_folder(hub: Hub, api: Any) -> None:
    everything = {entry.path for entry in api.list_repo_tree(REPO, recursive=True)}
    assert everything == {"config.json", "tokens", "tokens/vocab.txt", *(f"model-{n}.safetensors" for n in (1, 2, 3))}
    top = {entry.path for entry in api.list_repo_tree(REPO)}
    assert top == everything - {"tokens/vocab.txt"}
    assert [entry.path for entry in api.list_repo_tree(REPO, "tokens")] == ["tokens/vocab.txt"]


@pytest.mark.parametrize("local", [True, False])
def test_snapshot_download_brings_every_byte(hub: Hub, hub_root: Path, tmp_path: Path, local: bool) -> None:
    where = {"local_dir": tmp_path / "out"} if local else {}
    got = Path(
        huggingface_hub.snapshot_download(
            REPO, endpoint=hub.url, token=False, cache_dir=tmp_path / "cache", max_workers=2, **where
        )
    )
    source = hub_root / REPO
    for path in source.rglob("*"):
        if path.is_file():
            assert (got / path.relative_to(source)).read_bytes() == path.read_bytes()


def test_a_file_of_the_present_commit_is_not_asked_for_twice(hub: Hub, download: Callable[..., Path]) -> None:
    download(SHARD, revision=hub.commit(REPO))
    hub.forget()
    download(SHARD, revision=hub.commit(REPO))
    assert hub.requests() == []


def test_large_files_are_lfs_whatever_their_name(hub: Hub, hub_root: Path, api: Any) -> None:
    (hub_root / REPO / "big.bin").write_bytes(bytes(hub_module.LFS_BYTES))
    (hub_root / REPO / "almost.bin").write_bytes(bytes(hub_module.LFS_BYTES - 1))
    files = {entry.path: entry for entry in api.list_repo_tree(REPO)}
    assert files["big.bin"].lfs is not None
    assert files["almost.bin"].lfs is None


def test_commit_follows_content_and_names(hub: Hub, hub_root: Path) -> None:
    first = hub.commit(REPO)
    config = hub_root / REPO / "config.json"
    old = config.read_text()
    config.write_text('{"layers": 3}\n')
    second = hub.commit(REPO)
    config.rename(config.with_name("other.json"))
    third = hub.commit(REPO)
    assert len({first, second, third}) == 3
    config.write_text(old)
    config.with_name("other.json").unlink()
    assert hub.commit(REPO) == first


def test_command_line_prints_the_commit_and_serves(hub: Hub, hub_root: Path) -> None:
    command = [sys.executable, hub_module.__file__, "--root", str(hub_root)]
    printed = subprocess.run([*command, "--commit", REPO], capture_output=True, text=True, check=True)
    assert printed.stdout == hub.commit(REPO) + "\n"
    wrong = subprocess.run([*command, "--commit", "acme/none"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "Repository not found" in wrong.stderr
    server = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        with urllib.request.urlopen(f"{url}/api/models/{REPO}") as response:
            assert json.load(response)["sha"] == hub.commit(REPO)
    finally:
        server.kill()
        server.wait()
        if server.stdout:
            server.stdout.close()


def test_unknown_repository_revision_and_file(api: Any, download: Callable[..., Path]) -> None:
    with pytest.raises(huggingface_hub.errors.RepositoryNotFoundError):
        api.model_info("acme/none")
    with pytest.raises(huggingface_hub.errors.RevisionNotFoundError):
        api.model_info(REPO, revision="0" * 40)
    with pytest.raises(huggingface_hub.errors.RemoteEntryNotFoundError):
        download("none.json")


def test_gated_repository(hub: Hub, api: Any, download: Callable[..., Path]) -> None:
    hub.faults(Rule(match=f"^/{REPO}/", action="gated", tokens={"good": True, "known": False}))
    assert api.model_info(REPO).sha  # the listing of a gated repository is public
    for token, status in ((False, 401), ("known", 403)):
        with pytest.raises(huggingface_hub.errors.GatedRepoError) as refused:
            download("config.json", token=token)
        assert refused.value.response.status_code == status
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="Invalid credentials") as invalid:
        download("config.json", token="other")
    assert invalid.value.response.status_code == 401
    assert download("config.json", token="good").is_file()
    assert "good" not in json.dumps(hub.requests())


def test_a_dropped_connection_is_resumed_where_it_broke(
    hub: Hub, hub_root: Path, download: Callable[..., Path], impatient: None
) -> None:
    # The client keeps whole chunks only: what came after the last one is fetched again.
    chunk = huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE
    content = bytes(chunk) + b"tail" * 1000
    (hub_root / REPO / "big.bin").write_bytes(content)
    hub.faults(Rule(match="big.bin", action="drop_after_bytes", bytes=chunk + 7, times=1))
    assert download("big.bin").read_bytes() == content
    first, second = hub.requests("GET", "big.bin")
    assert (first["status"], first["bytes"], first["range"]) == (200, chunk + 7, None)
    assert (second["status"], second["bytes"], second["range"]) == (206, 4000, f"bytes={chunk}-")


def test_a_dropped_connection_is_closed(hub: Hub) -> None:
    hub.faults(Rule(match=SHARD, action="drop_after_bytes", bytes=10))
    answer = raw(hub, "GET", f"/{REPO}/resolve/main/{SHARD}")
    with pytest.raises(http.client.IncompleteRead) as incomplete:
        answer.read()
    assert len(incomplete.value.partial) == 10


def test_wrong_bytes_have_the_right_size(hub: Hub, hub_root: Path, download: Callable[..., Path]) -> None:
    hub.faults(Rule(match=SHARD, action="wrong_bytes", times=1))
    good = (hub_root / REPO / SHARD).read_bytes()
    assert download(SHARD).read_bytes() == bytes([good[0] ^ 0xFF]) + good[1:]
    assert download(SHARD, force_download=True).read_bytes() == good


def test_a_short_answer_is_whole_by_its_own_headers(hub: Hub, hub_root: Path, download: Callable[..., Path]) -> None:
    size = (hub_root / REPO / SHARD).stat().st_size
    hub.faults(Rule(match=SHARD, action="short", bytes=7))
    answer = raw(hub, "GET", f"/{REPO}/resolve/main/{SHARD}")
    assert (int(answer.headers["Content-Length"]), len(answer.read())) == (size - 7, size - 7)
    assert raw(hub, "HEAD", f"/{REPO}/resolve/main/{SHARD}").headers["X-Linked-Size"] == str(size)
    with pytest.raises(OSError, match=f"should be of size {size} but has size {size - 7}"):
        download(SHARD)


def test_a_stalled_answer_ends_after_a_while(hub: Hub) -> None:
    hub.faults(Rule(match=SHARD, action="stall_after_bytes", bytes=10, seconds=0.3))
    started = time.monotonic()
    with pytest.raises(http.client.IncompleteRead) as incomplete:
        raw(hub, "GET", f"/{REPO}/resolve/main/{SHARD}").read()
    assert len(incomplete.value.partial) == 10
    assert time.monotonic() - started >= 0.3


def test_another_file_comes_with_its_own_digest(hub: Hub, hub_root: Path, download: Callable[..., Path]) -> None:
    other = (hub_root / REPO / "model-2.safetensors").read_bytes()
    hub.faults(Rule(match=SHARD, action="other_file", file="model-2.safetensors"))
    assert download(SHARD).read_bytes() == other
    headers = raw(hub, "HEAD", f"/{REPO}/resolve/main/{SHARD}").headers
    assert headers["ETag"] == f'"{hashlib.sha256(other).hexdigest()}"'


def test_a_listing_with_other_names_and_another_commit(hub: Hub, api: Any) -> None:
    hub.faults(Rule(match="/api/", action="listing", sha="0" * 40, names={"config.json": "../config.json"}))
    info = api.model_info(REPO)
    assert info.sha == "0" * 40
    assert [file.rfilename for file in info.siblings][:2] == ["../config.json", SHARD]


def test_status_html_and_slow(hub: Hub, api: Any, download: Callable[..., Path], impatient: None) -> None:
    hub.faults(Rule(match="/api/", action="status", status=503, times=2))
    assert len(list(api.list_repo_tree(REPO, "tokens"))) == 1
    assert [entry["status"] for entry in hub.requests("GET", "/api/")] == [503, 503, 200]

    hub.faults(Rule(match="/resolve/", action="status", status=429, headers={"Retry-After": "1"}, times=1))
    assert download("config.json").is_file()

    hub.faults(Rule(match="/api/", action="html"))
    with pytest.raises(json.JSONDecodeError):
        api.model_info(REPO)

    hub.faults(Rule(match="/api/", action="slow", seconds=0.5))
    with pytest.raises(Exception, match="timed out"):
        api.model_info(REPO, timeout=0.1)


@pytest.mark.parametrize(
    ("asked", "status", "sent"),
    [
        ("bytes=0-3", 206, 4),
        ("bytes=4-", 206, 10),
        ("bytes=4-999", 206, 10),
        ("bytes=99-", 416, 0),
        ("lines=1-2", 200, 14),
    ],
)
def test_ranges(hub: Hub, asked: str, status: int, sent: int) -> None:
    answer = raw(hub, "GET", f"/{REPO}/resolve/main/config.json", {"Range": asked})
    assert (answer.status, len(answer.read())) == (status, sent)
    if status == 206:
        start = int(asked[6])
        assert answer.headers["Content-Range"] == f"bytes {start}-{start + sent - 1}/14"


def test_head_states_the_file_and_sends_nothing(hub: Hub, hub_root: Path) -> None:
    content = (hub_root / REPO / SHARD).read_bytes()
    answer = raw(hub, "HEAD", f"/{REPO}/resolve/main/{SHARD}")
    digest = f'"{hashlib.sha256(content).hexdigest()}"'
    assert answer.headers["ETag"] == answer.headers["X-Linked-Etag"] == digest
    assert answer.headers["X-Linked-Size"] == answer.headers["Content-Length"] == str(len(content))
    assert answer.headers["X-Repo-Commit"] == hub.commit(REPO)
    assert answer.read() == b""
    assert hub.requests("HEAD")[0]["bytes"] == 0


@pytest.mark.parametrize(
    "path",
    [
        "/acme/tiny/resolve/main/../../secret.txt",
        "/acme/tiny/resolve/main/%2e%2e/%2e%2e/secret.txt",
        "/acme/tiny/resolve/main//etc/passwd",
        "/acme/tiny/resolve/main/link.txt",
        "/acme/tiny/resolve/main/.git/config",
        "/api/models/../secret",
        "/api/models/acme/..",
        "/api/models/./acme",
    ],
)
def test_nothing_outside_a_repository_is_served(hub: Hub, hub_root: Path, path: str) -> None:
    (hub_root / "secret.txt").write_text("secret")
    (hub_root / REPO / "link.txt").symlink_to(hub_root / "secret.txt")
    (hub_root / REPO / ".git").mkdir()
    (hub_root / REPO / ".git" / "config").write_text("secret")
    answer = raw(hub, "GET", path)
    assert answer.status == 404
    assert b"secret" not in answer.read()


def test_control_endpoint(hub_root: Path) -> None:
    def control(method: str, what: str, data: Any = None) -> Any:
        body = None if data is None else json.dumps(data).encode()
        with urllib.request.urlopen(
            urllib.request.Request(f"{hub.url}/_control/{what}", data=body, method=method)
        ) as answer:
            return json.load(answer)

    with Hub(hub_root, control=True) as hub:
        assert control("POST", "faults", [{"match": "config", "action": "status", "status": 500, "times": 1}])
        path = f"/{REPO}/resolve/main/config.json"
        for status in (500, 200):
            answer = raw(hub, "GET", path)
            assert answer.read()
            assert answer.status == status
        assert [(entry["status"], entry["bytes"] > 0) for entry in control("GET", "requests")] == [
            (500, True),
            (200, True),
        ]
        control("DELETE", "requests")
        control("POST", "faults", [{"match": "config", "action": "html"}])
        control("DELETE", "faults")
        assert raw(hub, "GET", path).status == 200
        assert [entry["path"] for entry in control("GET", "requests")] == [path]
        with pytest.raises(urllib.error.HTTPError, match="400"):
            control("POST", "faults", [{"match": "config", "action": "explode"}])
        control("PUT", "repositories/acme/new/folder/a.json", {})
        assert (hub_root / "acme/new/folder/a.json").read_text() == "{}"
        for path in ("acme/new", "../out/new/a", "acme/../../a", "acme//a/b"):
            with pytest.raises(urllib.error.HTTPError, match="400"):
                control("PUT", f"repositories/{path}", {})
        control("DELETE", "repositories/acme/new")
        assert not (hub_root / "acme/new").exists()
        for path in ("acme/new", "..", "acme", "acme/.."):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                control("DELETE", f"repositories/{path}")


def test_without_control_there_is_no_control_endpoint(hub: Hub) -> None:
    assert raw(hub, "GET", "/_control/requests").status == 404
