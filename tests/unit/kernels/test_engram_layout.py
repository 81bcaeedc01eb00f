# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Where rows are: golden numbers, vLLM's own class, and rules that hold for any model."""

from __future__ import annotations

import ast
import importlib.util
import os
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engram_support import GOLDEN, GOLDEN_ROWS, REAL, small_config
from hypothesis import given, settings
from hypothesis import strategies as st
from sparkwright_kernels.engram.errors import EngramError
from sparkwright_kernels.engram.layout import EngramLayout, is_prime

LAYOUT = EngramLayout.from_config(REAL)


@pytest.mark.parametrize("rule, golden", [("heads", GOLDEN), ("rows", GOLDEN_ROWS)])
def test_golden_ranges(rule: Any, golden: dict[tuple[int, int], tuple[list[int], list[int]]]) -> None:
    for (layer, ranks), (bounds, _) in golden.items():
        ranges = [LAYOUT.shard(layer, rule, rank, ranks) for rank in range(ranks)]
        assert [r.lo for r in ranges] + [ranges[-1].hi] == bounds
        assert [r.hi for r in ranges] == bounds[1:]
        assert {r.total for r in ranges} == {bounds[-1]}


def test_golden_primes_and_multipliers() -> None:
    first, last = LAYOUT.primes[1], LAYOUT.primes[14]
    assert first[:3] == (16000057, 16000079, 16000081) and first[-1] == 16000463
    assert last[:3] == (16000477, 16000487, 16000499) and last[-1] == 16000889
    assert LAYOUT.multipliers == {
        1: (76632096046245, 4839876093313, 35959672319349, 73987337458391),
        14: (67716810739261, 51510806800915, 30921347202721, 82619226485591),
    }
    assert LAYOUT.row_bytes == 264 and LAYOUT.columns == 24


def vllm_layout() -> Any:
    """vLLM's EngramLayout, its class statement alone where vLLM cannot be imported as a whole."""
    path = os.environ.get("SPARKWRIGHT_VLLM_ENGRAM", "")
    if not path:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            pytest.skip(
                "NOT TESTED: vLLM's EngramLayout; install vllm, or give models/deepseek_v41/common/engram.py of its "
                "wheel in SPARKWRIGHT_VLLM_ENGRAM"
            )
        path = str(Path(spec.submodule_search_locations[0]) / "models/deepseek_v41/common/engram.py")
    wanted = ("_is_prime", "find_next_prime", "compute_hash_multipliers", "EngramLayout")
    tree = ast.parse(Path(path).read_text())
    body = [node for node in tree.body if getattr(node, "name", "") in wanted]
    assert len(body) == len(wanted)
    # The tensors it makes are only carried; arrays do as well.
    torch = types.SimpleNamespace(tensor=np.asarray, stack=np.stack, Tensor=np.ndarray)
    names: dict[str, Any] = {"np": np, "torch": torch}
    exec(compile(ast.Module(body, []), path, "exec"), names)
    return names


@pytest.mark.parametrize("config", [REAL, small_config(1000), small_config(97, (0, 3, 7))], ids=["real", "small", "3"])
def test_equal_to_vllm(config: dict[str, Any]) -> None:
    theirs = vllm_layout()
    other = theirs["EngramLayout"](types.SimpleNamespace(**config))
    ours = EngramLayout.from_config(config)
    assert other.n_hash_cols == ours.columns
    for number, layer in enumerate(ours.layer_ids):
        assert tuple(prime for sizes in other.primes[number] for prime in sizes) == ours.primes[layer]
        assert tuple(other.offsets[number]) == ours.offsets[layer][:-1]
    multipliers = theirs["compute_hash_multipliers"](ours.layer_ids, ours.max_ngram_size, ours.compressed_vocab_size)
    assert [tuple(row) for row in multipliers.tolist()] == list(ours.multipliers.values())


def test_hash_rows_step_by_step() -> None:
    """Against the definition, one Python integer at a time."""
    layout = EngramLayout.from_config(small_config(1000))
    tokens = [5, 99091, -1, 7, 7, 8, 0, 12345]
    rows = layout.hash_rows(14, np.array(tokens))
    for position in range(len(tokens)):
        hashed, blocked = 0, False
        for back in range(4):
            token = tokens[position - back] if position >= back else -1
            blocked = blocked or token == -1
            hashed ^= (layout.pad_token_id if blocked else token) * layout.multipliers[14][back]
            for head in range(8) if back else ():
                column = (back - 1) * 8 + head
                expected = hashed % layout.primes[14][column] + layout.offsets[14][column]
                assert rows[position, column] == expected
    assert layout.hash_rows(1, np.array([], np.int64)).shape == (0, 24)
    assert layout.hash_rows(1, np.array([3])).shape == (1, 24)


def test_is_prime() -> None:
    sieve = np.ones(20000, bool)
    sieve[:2] = False
    for n in range(2, 142):
        sieve[n * n :: n] = False
    assert [n for n in range(20000) if is_prime(n)] == np.flatnonzero(sieve).tolist()
    # The least strong pseudoprimes to the first one, two and three bases.
    assert not any(map(is_prime, (2047, 1373653, 25326001)))
    assert is_prime(3215031743) == all(3215031743 % n for n in range(2, 56702))


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 3000), st.integers(1, 40), st.data())
def test_shards_cover_a_table_once(vocab_size: int, ranks: int, data: st.DataObject) -> None:
    layout = EngramLayout.from_config(small_config(vocab_size))
    rule = data.draw(st.sampled_from(("heads", "rows")))
    layer = data.draw(st.sampled_from(layout.layer_ids))
    each = -(-24 // ranks)
    if rule == "heads" and (ranks - 1) * each >= 24:
        with pytest.raises(EngramError, match="use rule rows"):
            layout.shard(layer, rule, 0, ranks)
        return
    shards = [layout.shard(layer, rule, rank, ranks) for rank in range(ranks)]
    assert [shard.lo for shard in shards] == [0, *(shard.hi for shard in shards[:-1])]
    assert shards[-1].hi == layout.total(layer)
    assert min(shard.rows for shard in shards) > 0
    if rule == "rows":
        assert max(shard.rows for shard in shards) - min(shard.rows for shard in shards) <= 1
    else:
        assert {shard.lo for shard in shards} <= set(layout.offsets[layer])


@pytest.mark.parametrize(
    "change, told",
    [
        ({"engram_num_embeddings": [384006168, 384016683]}, "found 384016683, needed 384016682, the sum of layer 14"),
        ({"engram_num_embeddings": [384006168]}, "one for each layer"),
        ({"engram_layer_ids": [1, 1]}, "distinct layer numbers"),
        ({"engram_layer_ids": []}, "distinct layer numbers"),
        ({"engram_layer_ids": None}, "a list of integers"),
        ({"engram_n_heads": None}, "an integer"),
        ({"engram_n_heads": True}, "an integer"),
        ({"engram_n_heads": 10**9}, "at most 1024"),
        ({"engram_n_heads": 0}, "at least 1"),
        ({"engram_head_dim": 250}, "a multiple of 32"),
        ({"engram_vocab_size": 3_215_031_700}, "less than 3215031751"),
    ],
)
def test_configs_that_are_none(change: dict[str, Any], told: str) -> None:
    with pytest.raises(EngramError, match=told):
        EngramLayout.from_config({**REAL, **change})


def test_the_text_config_counts(tmp_path: Path) -> None:
    assert EngramLayout.from_config({"text_config": REAL}) == LAYOUT
    for content, told in (
        (None, "No such file"),
        ("[]", "an object"),
        ("{", "Expecting"),
        ("{}", "config.json: engram"),
    ):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(EngramError, match=told):
            EngramLayout.from_model(tmp_path)


def test_ranks_that_are_none() -> None:
    for rank, ranks, told in ((2, 2, "0 to 1"), (-1, 2, "0 to 1"), (0, 0, "at least 1")):
        for rule in ("heads", "rows"):
            with pytest.raises(EngramError, match=told):
                LAYOUT.shard(1, rule, rank, ranks)  # type: ignore[arg-type]
    with pytest.raises(EngramError, match="one of 1, 14"):
        LAYOUT.shard(2, "heads", 0, 2)
    with pytest.raises(EngramError, match="one of heads, rows"):
        LAYOUT.shard(1, "columns", 0, 2)  # type: ignore[arg-type]
