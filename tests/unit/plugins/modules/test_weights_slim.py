# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The module as Ansible runs it; what it does is tested with module_utils/slim.py."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.modules import weights_slim

Run = Callable[..., dict[str, Any]]
INDEX = "model.safetensors.index.json"
TENSORS = ["layers.1.engram.embed.scale", "layers.1.engram.embed.weight"]
MARKER = {"slim": [".engram.embed.weight", ".engram.embed.scale"], "source_revision": "abc"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "model"
    source.mkdir()
    header = {name: {"dtype": "U8", "shape": [8], "data_offsets": [8 * i, 8 * i + 8]} for i, name in enumerate(TENSORS)}
    text = json.dumps(header).encode()
    (source / "2.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    index = {"metadata": {}, "weight_map": {"a": "1.safetensors", **dict.fromkeys(TENSORS, "2.safetensors")}}
    (source / INDEX).write_text(json.dumps(index))
    (source / "config.json").write_text("{}")
    return source


def test_check_then_make_then_nothing(source: Path, tmp_path: Path, run_module: Run) -> None:
    dest = tmp_path / "slim"
    options = {"source": str(source), "dest": str(dest), "revision": "abc", "_ansible_diff": True}
    planned = run_module(weights_slim.main, check=True, **options)
    assert not dest.exists()
    made = run_module(weights_slim.main, **options)
    # Ansible adds what is known of the directory.
    assert {name: made[name] for name in planned} == planned
    assert made["changed"] and made["path"] == str(dest)
    assert (made["shards"], made["placed"], made["tensors"]) == (["2.safetensors"], ["2.safetensors"], TENSORS)
    assert (made["written"], made["removed"], made["copied_bytes"]) == (["config.json", INDEX], [], 0)
    assert made["bytes"] == (source / "2.safetensors").stat().st_size
    assert made["before"] == {"index": None, "shards": {}}
    assert made["after"]["index"] == json.loads((dest / INDEX).read_text())
    assert made["after"]["index"]["metadata"] == {"sparkwright": MARKER}
    assert made["diff"] == {"before": made["before"], "after": made["after"]}
    assert (dest / "2.safetensors").samefile(source / "2.safetensors")
    again = run_module(weights_slim.main, **options)
    assert not again["changed"] and again["placed"] == again["written"] == [] and again["before"] == again["after"]


def test_copies(source: Path, tmp_path: Path, run_module: Run) -> None:
    options = {"source": str(source), "dest": str(tmp_path / "slim"), "copy": True}
    made = run_module(weights_slim.main, **options)
    assert made["copied_bytes"] == made["bytes"] > 0 and "diff" not in made
    assert not (tmp_path / "slim/2.safetensors").samefile(source / "2.safetensors")
    assert not run_module(weights_slim.main, **options)["changed"]


def test_all_that_is_wrong_is_reported_and_nothing_changed(source: Path, tmp_path: Path, run_module: Run) -> None:
    os.unlink(source / "config.json")
    os.unlink(source / "2.safetensors")
    for check in True, False:
        result = run_module(weights_slim.main, check=check, source=str(source), dest=str(tmp_path / "slim"))
        assert result["failed"] and str(source) in result["msg"]
        assert [finding["path"] for finding in result["findings"]] == ["config.json", "2.safetensors"]
        assert all(finding["found"] == "nothing" and finding["needed"] for finding in result["findings"])
    assert not (tmp_path / "slim").exists()


def test_paths_are_absolute(source: Path, run_module: Run) -> None:
    result = run_module(weights_slim.main, source=str(source), dest="slim")
    assert result["failed"] and "dest must be an absolute path, not 'slim'" in result["msg"]
    assert "findings" not in result


def test_errors_of_the_system_are_told(
    source: Path, tmp_path: Path, run_module: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(plan: Any) -> None:
        raise PermissionError(13, "Permission denied", "x")

    monkeypatch.setattr(weights_slim, "apply", fail)
    result = run_module(weights_slim.main, source=str(source), dest=str(tmp_path / "slim"))
    assert result["failed"] and "PermissionError" in result["msg"]
