# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""What several unit tests share: an isolated hub client, a small model repository and a hub that serves it."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from hub import Hub

# Read by huggingface_hub when it is imported. A test that forgets its endpoint meets a closed port of this machine.
os.environ.update(
    HF_ENDPOINT="http://127.0.0.1:9",
    HF_HUB_DISABLE_IMPLICIT_TOKEN="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    HF_HUB_DISABLE_TELEMETRY="1",
)

REPO = "acme/tiny"


def safetensors(size: int, fill: bytes = b"w") -> bytes:
    """A whole safetensors file with one tensor of ``size`` bytes."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + fill * size


@pytest.fixture
def hub_root(tmp_path: Path) -> Path:
    """A hub's folder with one repository: two small files (one in a folder) and three shards."""
    root = tmp_path / "hub-root"
    repo = root / REPO
    (repo / "tokens").mkdir(parents=True)
    (repo / "config.json").write_text('{"layers": 2}\n')
    (repo / "tokens" / "vocab.txt").write_text("a\nb\n")
    for number in (1, 2, 3):
        (repo / f"model-{number}.safetensors").write_bytes(safetensors(200_000 + number, b"%d" % number))
    return root


@pytest.fixture
def hub(hub_root: Path) -> Iterator[Hub]:
    with Hub(hub_root) as running:
        yield running


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's waits between its attempts take no time (the attempts stay)."""
    no_wait = SimpleNamespace(sleep=lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.utils._http.time", no_wait)
    monkeypatch.setattr("huggingface_hub.file_download.time", no_wait)


@pytest.fixture(scope="session")
def engram_library() -> Path | None:
    """The native library of this source, built once for each state of it; None where it cannot be built."""
    from sparkwright_kernels.engram import build, native

    if os.environ.get(native.PATH_VARIABLE):
        return native.library_path()
    source = hashlib.sha256(Path(build.__file__).read_bytes())
    for path in sorted(build.SOURCE.parent.glob("engram_io.*")):
        source.update(path.read_bytes())
    path = Path(__file__).parents[2] / "kernels/build" / f"engram-{source.hexdigest()[:12]}" / build.LIBRARY
    if not path.exists():
        try:
            build.build(path)
        except OSError:
            return None
    os.environ[native.PATH_VARIABLE] = str(path)
    return path
