# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The module as Ansible runs it, with the packer's own command line; that is tested with the kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.modules import engram_pack

sys.path.insert(0, str(Path(__file__).parents[3] / "support"))

from engram_tables import make_tables

KERNELS = Path(__file__).parents[4] / "kernels/src"
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engram_library: Path | None) -> dict[str, Any]:
    if engram_library is None:
        pytest.skip("NOT TESTED: packing needs a C++ compiler")
    monkeypatch.setenv("PYTHONPATH", str(KERNELS))
    make_tables(tmp_path / "model", vocab_size=100)
    return {
        "host": "spark2",
        "command": [sys.executable, "-m", "sparkwright_kernels.engram.cli"],
        "source": str(tmp_path / "model"),
        "path": str(tmp_path / "engram"),
        "rank": 1,
        "ranks": 2,
    }


def files(options: dict[str, Any]) -> list[str]:
    root = Path(options["path"])
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_check_then_pack_then_nothing(options: dict[str, Any], run_module: Run) -> None:
    planned = run_module(engram_pack.main, check=True, **options, _ansible_diff=True)
    assert planned["changed"] and not Path(options["path"]).exists()
    assert [file["state"] for file in planned["files"]] == ["missing", "missing"]
    assert planned["need_bytes"] == sum(planned["diff"]["after"].values()) > 0
    made = run_module(engram_pack.main, **options, verify="all")
    assert made["changed"] and made["files"] == planned["files"]
    assert files(options) == ["pages-heads-tp2/engram-l1-r1of2.bin", "pages-heads-tp2/engram-l14-r1of2.bin"]
    assert len(made["verified"]) == 2 and min(made["verified"].values()) > 1000
    again = run_module(engram_pack.main, **options, _ansible_diff=True)
    assert not again["changed"] and again["need_bytes"] == 0
    assert again["diff"]["before"] == again["diff"]["after"] == planned["diff"]["after"]


def test_every_wrong_file_is_told_and_nothing_changed(options: dict[str, Any], run_module: Run) -> None:
    run_module(engram_pack.main, **options)
    first, second = (Path(options["path"]) / name for name in files(options))
    other = {**options, "rank": 0}
    run_module(engram_pack.main, **other)
    swapped = first.with_name("engram-l1-r0of2.bin")
    swapped.write_bytes(first.read_bytes())
    second.write_bytes(second.read_bytes()[:-1])
    first.unlink()
    for check in (True, False):
        result = run_module(engram_pack.main, check=check, **options)
        assert result["failed"] and not first.exists()
        (finding,) = result["findings"]
        assert finding["host"] == "spark2" and str(second) in finding["found"]
        result = run_module(engram_pack.main, check=check, **other)
        assert any(str(swapped) in finding["found"] for finding in result["findings"])
        assert f"spark2: [engram.pages] found {swapped}" in result["msg"]


def test_a_source_that_is_none_is_told(options: dict[str, Any], run_module: Run) -> None:
    (Path(options["source"]) / "config.json").write_text("{")
    result = run_module(engram_pack.main, **options)
    assert result["failed"] and "config.json" in result["msg"] and not Path(options["path"]).exists()


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["/nonexistent/sparkwright-engram"], "No such file"),
        (["sh", "-c", "echo broken >&2; exit 3"], "plan ended with 3: broken"),
    ],
)
def test_a_packer_that_does_not_run_is_told(
    command: list[str], found: str, options: dict[str, Any], run_module: Run
) -> None:
    result = run_module(engram_pack.main, **{**options, "command": command})
    assert result["failed"] and found in result["msg"] and "repair: --tags engram" in result["msg"]
