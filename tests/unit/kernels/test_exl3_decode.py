"""The NumPy decoder against exllamav3's own output, and against a bit-by-bit reading of the format."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from kernels_support import FIXTURES, Tensors, packed
from sparkwright_kernels.exl3.decode import (
    PackedLinear,
    codebook_table,
    hadamard,
    pack_states,
    ring_states,
    tile_order,
    unpack_signs,
)
from sparkwright_kernels.exl3.layout import Exl3FormatError

CASES = sorted(json.loads((FIXTURES / "exl3" / "exl3_golden.json").read_text()))
RATES = [1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8]

# exllamav3 computes W and y on the GPU in fp16; against exact arithmetic that is 4.1e-4 to 4.2e-4 (W) and 4.0e-4 to
# 5.7e-4 (y) of relative RMS over all cases. One fp16 rounding alone is about 2e-4.
WEIGHT_TOLERANCE = 5e-4
FORWARD_TOLERANCE = 7e-4


def golden_layer(tensors: Tensors) -> PackedLinear:
    return PackedLinear.from_tensors("g", {s: t for s, t in tensors.items() if s in PACKED})


PACKED = ("trellis", "suh", "svh", "mcg", "mul1")


def relative_rms(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    exact = expected.astype(np.float64)
    return float(np.linalg.norm(actual - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("case", CASES)
def test_inner_weight_is_exllamav3s_bit_for_bit(case: str, golden: dict[str, Tensors]) -> None:
    decoded = golden_layer(golden[case]).inner_weight()
    np.testing.assert_array_equal(decoded.view(np.uint16), golden[case]["inner_weight"].view(np.uint16))


@pytest.mark.parametrize("case", CASES)
def test_weight_and_forward_agree_with_exllamav3(case: str, golden: dict[str, Tensors]) -> None:
    tensors, layer = golden[case], golden_layer(golden[case])
    weight = layer.weight()
    assert relative_rms(weight, tensors["weight"]) < WEIGHT_TOLERANCE
    assert relative_rms(layer.weight(np.float32), weight) < 1e-6
    for rows in (1, 5, 33):
        x = tensors[f"x{rows}"]
        y = layer.forward(x)
        assert relative_rms(y, tensors[f"y{rows}"]) < FORWARD_TOLERANCE
        np.testing.assert_allclose(y, x.astype(np.float64) @ weight, rtol=0, atol=1e-10 * np.abs(y).max())


@pytest.mark.parametrize("case", CASES)
def test_bits_and_codebook_come_from_the_tensors(case: str, golden: dict[str, Tensors]) -> None:
    module = golden_layer(golden[case]).module
    codebook, bits, _ = case.split("_")
    assert (module.codebook, f"K{module.bits:g}") == (codebook, bits)


@pytest.mark.parametrize("bits", RATES)
def test_ring_states_match_a_bit_by_bit_reading(bits: float) -> None:
    trellis = packed(32, 16, bits)["trellis"]
    for tile, states in zip(trellis.reshape(-1, trellis.shape[-1]), ring_states(trellis).reshape(-1, 256), strict=True):
        ring = "".join(f"{word:032b}" for word in tile.view("<u4"))
        end = 0
        for position in range(256):
            end += int(bits) + (position % 2 if bits != int(bits) else 0)
            window = "".join(ring[(end - 16 + i) % len(ring)] for i in range(16))
            assert states[position] == int(window, 2)
        assert end == len(ring)


@pytest.mark.parametrize("bits", RATES)
def test_pack_is_the_inverse_of_ring_states(bits: float) -> None:
    trellis = packed(48, 32, bits)["trellis"]
    np.testing.assert_array_equal(pack_states(ring_states(trellis), bits), trellis)


def test_codebooks_have_their_known_statistics() -> None:
    for codebook, distinct, deviation in (("3inst", 10598, 1.24371), ("mcg", 10746, 1.24411), ("mul1", 913, 1.00031)):
        table = codebook_table(codebook)  # type: ignore[arg-type]
        assert table.dtype == np.float16 and table.shape == (65536,)
        assert len(np.unique(table)) == distinct
        assert table.astype(np.float64).std() == pytest.approx(deviation, abs=1e-5)


def test_tile_order_visits_every_element_once() -> None:
    order = tile_order()
    assert sorted(order) == list(range(256))
    # lane 5 holds rows 2, 3, 10, 11 of column 1, then of column 9
    assert [divmod(int(i), 16) for i in order[40:48]] == [
        (2, 1), (3, 1), (10, 1), (11, 1), (2, 9), (3, 9), (10, 9), (11, 9),
    ]  # fmt: skip


def test_hadamard_is_its_own_inverse_and_keeps_blocks_apart() -> None:
    x = np.random.default_rng(1).normal(size=(3, 256))
    np.testing.assert_allclose(hadamard(hadamard(x)), x, atol=1e-12)
    np.testing.assert_allclose(hadamard(x.T, axis=0), hadamard(x).T)
    only_first = np.where(np.arange(256) < 128, x, 0)
    assert not hadamard(only_first)[:, 128:].any()


def test_older_sign_words_unpack_least_significant_bit_first() -> None:
    signs = unpack_signs(np.array([0b0000_0000_0000_0101, -32768], dtype=np.int16))
    assert [i for i, sign in enumerate(signs) if sign == -1] == [0, 2, 31]
    assert signs.dtype == np.float16 and set(signs.tolist()) == {1.0, -1.0}


def test_older_su_and_sv_stand_for_signs() -> None:
    new = packed(128, 256, 3, None)
    rng = np.random.default_rng(3)
    su, sv = (rng.integers(-(1 << 15), 1 << 15, size=n // 16).astype(np.int16) for n in (128, 256))
    old = PackedLinear.from_tensors("old", {"trellis": new["trellis"], "su": su, "sv": sv})
    same = PackedLinear.from_tensors("new", {**new, "suh": unpack_signs(su), "svh": unpack_signs(sv)})
    np.testing.assert_array_equal(old.weight(), same.weight())


def test_bias_is_added_once() -> None:
    layer = PackedLinear.from_tensors("b", packed(128, 128, 2))
    x, bias = np.ones((2, 128)), np.arange(128.0)
    np.testing.assert_allclose(layer.forward(x, bias) - layer.forward(x), np.tile(bias, (2, 1)))


@pytest.mark.parametrize(
    ("change", "tensor", "found", "needed"),
    [
        ({"trellis": np.zeros((8, 8, 144), np.int16)}, "m.trellis", "K = 144/16 = 9", "1, 1.5, 2, 2.5, 3, 3.5, 4, 5"),
        ({"trellis": np.zeros((8, 8, 72), np.int16)}, "m.trellis", "K = 72/16 = 4.5", "7, 8"),
        ({"trellis": np.zeros((8, 8, 50), np.int16)}, "m.trellis", "K = 50/16 = 3.125", "3.5, 4"),
        ({"trellis": np.zeros((8, 8, 48), np.float16)}, "m.trellis", "dtype F16", "dtype I16"),
        ({"trellis": np.zeros((64, 48), np.int16)}, "m.trellis", "[64, 48]", "[in/16, out/16, 16*K]"),
        ({"trellis": np.zeros((9, 8, 48), np.int16)}, "m.trellis", "144 in features", "a multiple of 128"),
        ({"suh": np.zeros(64, np.float16)}, "m.suh", "shape [64]", "shape [128]"),
        ({"svh": np.zeros(128, np.float32)}, "m.svh", "dtype float32", "dtype F16"),
        ({"suh": None}, "m.suh", "no suh and no su", "exactly one"),
        ({"svh": None}, "m.svh", "no svh and no sv", "exactly one"),
        ({"su": np.zeros(8, np.int16)}, "m.suh", "both suh and su", "exactly one"),
        ({"mcg": np.array(0, np.int32)}, "m.mul1", "both mcg and mul1", "at most one"),
        ({"scale": np.zeros(1, np.float16)}, "m.scale", "obsolete", "none"),
        ({"bias": np.zeros(256, np.float16)}, "m.bias", "[256]", "at most 128"),
        ({"trellis": None}, "m.trellis", "no trellis", "I16"),
    ],
)
def test_what_the_format_does_not_allow_is_refused(change: Any, tensor: str, found: str, needed: str) -> None:
    tensors = {s: t for s, t in {**packed(128, 128, 3), **change}.items() if t is not None}
    with pytest.raises(Exl3FormatError) as error:
        PackedLinear.from_tensors("m", tensors)
    assert error.value.tensor == tensor
    assert found in error.value.found and needed in error.value.needed
    assert str(error.value) == f"{tensor}: found {error.value.found}, needed {error.value.needed}"


def test_half_rates_exist_for_mul1_only() -> None:
    assert PackedLinear.from_tensors("m", packed(128, 128, 3.5, "mul1")).module.bits == 3.5
    for marker in ("mcg", None):
        with pytest.raises(Exl3FormatError, match=r"K = 56/16 = 3.5 with codebook .*, needed K one of 1, 2, 3, 4"):
            PackedLinear.from_tensors("m", packed(128, 128, 3.5, marker))
