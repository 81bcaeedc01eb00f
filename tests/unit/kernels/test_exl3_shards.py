"""Tensor-parallel shards give the unsplit result, and cuts inside a Hadamard block are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels_support import Tensors, packed
from sparkwright_kernels.exl3.decode import PackedLinear
from sparkwright_kernels.exl3.layout import Exl3FormatError
from sparkwright_kernels.exl3.shards import Kind, allowed_tp, slices, split


def shard(tensors: Tensors, kind: Kind, features: int, tp: int, rank: int) -> tuple[PackedLinear, Any]:
    start, stop = split("layer.trellis", features, tp, rank)
    index = slices(kind, start, stop, rank)
    cut = {s: t[index.get(s, ...)] for s, t in tensors.items() if s != "bias"}
    bias = tensors["bias"][index["bias"]] if "bias" in index else None
    return PackedLinear.from_tensors(f"rank {rank}", cut), bias


@pytest.mark.parametrize(("bits", "marker"), [(3, "mul1"), (2.5, "mul1"), (4, "mcg"), (5, None)])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shards_recombine_to_the_unsplit_result(tp: int, bits: float, marker: str | None) -> None:
    tensors = packed(512, 1024, bits, marker)
    tensors["bias"] = np.random.default_rng(7).normal(size=1024).astype(np.float16)
    x = np.random.default_rng(8).normal(size=(3, 512))
    whole = PackedLinear.from_tensors("whole", {s: t for s, t in tensors.items() if s != "bias"})
    expected = whole.forward(x, tensors["bias"])
    tolerance = 1e-12 * np.abs(expected).max()

    columns = [shard(tensors, "column", 1024, tp, rank) for rank in range(tp)]
    y = np.concatenate([layer.forward(x, bias) for layer, bias in columns], axis=-1)
    np.testing.assert_allclose(y, expected, rtol=0, atol=tolerance)
    inner = np.concatenate([layer.inner_weight() for layer, _ in columns], axis=1)
    np.testing.assert_array_equal(inner.view(np.uint16), whole.inner_weight().view(np.uint16))

    rows = [shard(tensors, "row", 512, tp, rank) for rank in range(tp)]
    assert [bias is not None for _, bias in rows] == [True] + [False] * (tp - 1)
    parts = np.split(x, tp, axis=-1)
    y = sum(layer.forward(part, bias) for (layer, bias), part in zip(rows, parts, strict=True))
    np.testing.assert_allclose(y, expected, rtol=0, atol=tolerance)

    replicated, bias = shard(tensors, "replicated", 1024, 1, 0)
    np.testing.assert_array_equal(replicated.forward(x, bias), expected)


def test_a_real_layer_recombines(golden: dict[str, Tensors]) -> None:
    tensors = {s: golden["mul1_K3_512x128"][s] for s in ("trellis", "suh", "svh", "mul1")}
    x = golden["mul1_K3_512x128"]["x5"].astype(np.float64)
    tensors["bias"] = np.zeros(128, np.float16)
    halves = [shard(tensors, "row", 512, 2, rank)[0].forward(x[:, 256 * rank : 256 * rank + 256]) for rank in (0, 1)]
    whole = shard(tensors, "replicated", 512, 1, 0)[0].forward(x)
    np.testing.assert_allclose(sum(halves), whole, rtol=0, atol=1e-12 * np.abs(whole).max())


def test_older_sign_words_are_cut_too() -> None:
    new = packed(256, 256, 3)
    words = np.arange(16, dtype=np.int16)
    old = {"trellis": new["trellis"], "mul1": new["mul1"], "su": words, "sv": words, "bias": np.zeros(256, np.float16)}
    whole = PackedLinear.from_tensors("whole", {s: t for s, t in old.items() if s != "bias"}).weight()
    np.testing.assert_allclose(shard(old, "column", 256, 2, 1)[0].weight(), whole[:, 128:])
    # cutting the in side changes which weights a rank holds, not their values: the output transform acts per column
    np.testing.assert_allclose(shard(old, "row", 256, 2, 1)[0].weight(), whole[128:])


@pytest.mark.parametrize(("features", "tp"), [(2304, 4), (576, 2), (384, 2), (129280, 4), (192, 2), (100, 3)])
def test_a_cut_inside_a_hadamard_block_is_refused(features: int, tp: int) -> None:
    with pytest.raises(Exl3FormatError) as error:
        split("model.layers.3.mlp.down_proj.trellis", features, tp)
    text = str(error.value)
    assert "model.layers.3.mlp.down_proj.trellis" in text
    assert f"{features} features over tp {tp}" in text
    assert ", ".join(map(str, allowed_tp(features))) in error.value.needed


def test_the_sizes_this_project_serves() -> None:
    assert allowed_tp(2304) == [1, 2, 3, 6, 9, 18]
    assert split("w2", 2304, 2, 1) == (1152, 2304)
    assert split("lm_head", 129280, 2, 1) == (64640, 129280)


def test_an_unsplit_layer_may_be_narrower_than_stored() -> None:
    assert split("narrow", 200, 1) == (0, 256)
