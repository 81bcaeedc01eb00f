"""Packed models give what their dense twins give, on one rank and on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models

BUILDERS: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    "qwen3": tiny_models.qwen3,
    "qwen3-moe": tiny_models.qwen3_moe,
    "llama-biases": tiny_models.llama_with_biases,
}
# fp32 throughout; the sums differ in order only
LOGPROB_TOLERANCE = 1e-4

Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    root = tmp_path_factory.mktemp("twins")
    return {name: build(root / name) for name, build in BUILDERS.items()}


def run(out: Path, models: list[Path], tp: int) -> Results:
    """Run generate.py, in a process of its own: an engine leaves much behind in the one it ran in."""
    script = Path(__file__).with_name("generate.py")
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    subprocess.run([sys.executable, script, out, str(tp), *models], env=env, check=True, timeout=200)
    results: Results = json.loads(out.read_text())
    return {Path(model).name: result for model, result in results.items()}


@pytest.fixture(scope="module")
def one_rank(twins: dict[str, tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(tmp_path_factory.mktemp("tp1") / "out.json", [path for pair in twins.values() for path in pair], 1)


@pytest.fixture(scope="module")
def two_ranks(twins: dict[str, tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(tmp_path_factory.mktemp("tp2") / "out.json", [packed for packed, _ in twins.values()], 2)


@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
@pytest.mark.parametrize("name", BUILDERS)
def test_packed_equals_dense(name: str, ranks: str, one_rank: Results, request: pytest.FixtureRequest) -> None:
    packed = request.getfixturevalue(ranks)[f"{name}-exl3"]
    dense = one_rank[f"{name}-dense"]
    assert [sequence["tokens"] for sequence in packed] == [sequence["tokens"] for sequence in dense]
    for ours, theirs in zip(packed, dense, strict=True):
        assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=LOGPROB_TOLERANCE)


def test_the_models_say_different_things(one_rank: Results) -> None:
    said = {json.dumps(result[0]["tokens"]) for name, result in one_rank.items() if name.endswith("-dense")}
    assert len(said) == len(BUILDERS)
    assert all(len(set(result[0]["tokens"])) > 3 for result in one_rank.values())
