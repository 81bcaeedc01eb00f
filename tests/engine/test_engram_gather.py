# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The gather of packed Engram rows: exact for every code and exponent, from every layout, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from sparkwright_kernels.engram.errors import EngramError
from sparkwright_kernels.engram.ops import DTYPES, PackedRows, gather, gather_into

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED: no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU), pytest.param("pinned", marks=NEEDS_GPU)]


@pytest.fixture(params=DEVICES)
def place(request: pytest.FixtureRequest) -> Callable[[torch.Tensor], torch.Tensor]:
    """Puts rows where the gather reads them: host memory, the GPU's, or pinned host memory read by the GPU."""
    return {"cpu": lambda t: t, "cuda": lambda t: t.cuda(), "pinned": lambda t: t.pin_memory()}[request.param]


def on(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return index.cuda() if rows.is_cuda or rows.is_pinned() else index


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().view(torch.int16).numpy().view(np.uint16)


def e4m3fn(code: int) -> Fraction | None:
    """The number a code stands for; None for NaN."""
    sign, exponent, mantissa = -1 if code >> 7 else 1, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return None
    steps = mantissa if exponent == 0 else (8 + mantissa) << (exponent - 1)
    return sign * Fraction(steps, 512)


def bf16_bits(value: Fraction, negative: bool) -> int:
    """The bf16 nearest to a number, ties to even, from the definition alone."""
    sign, size = 0x8000 if negative else 0, abs(value)
    if size == 0:
        return sign
    exponent = max(size.numerator.bit_length() - size.denominator.bit_length(), -126)
    while exponent > -126 and size < Fraction(2) ** exponent:
        exponent -= 1
    steps = round(size / Fraction(2) ** (exponent - 7))  # Python rounds ties to even
    return sign + min(((exponent + 126) << 7) + steps, 0x7F80)  # a carry moves into the exponent by itself


def expected(code: int, exponent: int) -> int:
    value, negative = e4m3fn(code), code >> 7 == 1
    if value is None or (exponent == 255 and value == 0):
        return 0x7FFF
    if exponent == 255:
        return 0xFF80 if negative else 0x7F80
    return bf16_bits(value * (Fraction(2) ** (exponent - 127) if exponent else 0), negative)


def every_pair() -> tuple[torch.Tensor, np.ndarray]:
    """Rows that hold each of the 256 codes under each of the 256 exponents, and what must come out, as bits."""
    packed = np.empty((256, 264), np.uint8)
    exponents = np.arange(256, dtype=np.uint8)
    rng = np.random.default_rng(0)
    wanted = np.empty((256, 256), np.uint16)
    table = np.array([[expected(code, exponent) for code in range(256)] for exponent in range(256)], np.uint16)
    for row in range(256):
        # row r: block b has exponent (r + 32 b) mod 256 and codes 32 b..; over all rows each pair comes once
        packed[row, :256] = np.arange(256)
        packed[row, 256:] = (exponents[row] + 32 * np.arange(8)).astype(np.uint8)
        wanted[row] = table[packed[row, 256:].repeat(32), packed[row, :256]]
    order = rng.permutation(256)
    return torch.from_numpy(packed[order]), wanted[order]


def random_rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (count, 264), np.uint8))


def declared(rows: torch.Tensor) -> PackedRows:
    return PackedRows(rows, *DTYPES)


def test_every_code_under_every_exponent(place: Callable[[torch.Tensor], torch.Tensor]) -> None:
    packed, wanted = every_pair()
    rows = place(packed)
    got = gather(declared(rows), on(rows, torch.arange(256)))
    np.testing.assert_array_equal(bits(got), wanted)
    assert 0x7FFF in wanted and 0x7F80 in wanted and 0x0001 in wanted  # NaN, infinity, the least denormal


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [1, 3, 96, 144, 20_001])
def test_rows_come_in_the_order_of_the_index(
    place: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, count: int
) -> None:
    packed = random_rows(777)
    index = torch.from_numpy(np.random.default_rng(count).integers(-1, 777, (count, 2))).to(dtype)
    index[0] = torch.tensor([776, -1])
    rows = place(packed)
    got = bits(gather(declared(rows), on(rows, index)))
    every = bits(gather(declared(packed)))
    wanted = np.where((index == -1).numpy()[..., None], 0, every[index.numpy()])
    np.testing.assert_array_equal(got, wanted)


def test_pages_and_strides(place: Callable[[torch.Tensor], torch.Tensor]) -> None:
    packed = random_rows(45)
    pages = np.zeros((3, 4096), np.uint8)
    pages[:, : 15 * 264] = packed.numpy().reshape(3, -1)
    paged = place(torch.from_numpy(pages)).as_strided((3, 15, 264), (4096, 264, 1))
    wide = place(torch.nn.functional.pad(packed, (0, 8)))[:, :264]
    index = torch.tensor([44, 0, 14, 15, -1, 29, 30])
    wanted = bits(gather(declared(packed), index))
    for rows in (paged, wide):
        np.testing.assert_array_equal(bits(gather(declared(rows), on(rows, index))), wanted)
        out = torch.full((45, 256), 7, dtype=torch.bfloat16, device=on(rows, index).device)
        gather_into(out, declared(rows))
        np.testing.assert_array_equal(bits(out), bits(gather(declared(packed))))


def test_no_rows_and_no_index(place: Callable[[torch.Tensor], torch.Tensor]) -> None:
    rows = place(random_rows(2))
    assert gather(declared(rows), on(rows, torch.empty(0, 12, dtype=torch.int32))).shape == (0, 12, 256)
    nothing = gather(declared(rows[:0]), on(rows, torch.tensor([-1])))
    assert nothing.shape == (1, 256) and not nothing.any()


def test_a_wrong_index_never_reads_as_zeros() -> None:
    rows = declared(random_rows(4))
    for wrong in (4, -2):
        with pytest.raises(IndexError, match=rf"found index {min(wrong, 0)} to {max(wrong, 0)}, needed -1 to 3"):
            gather(rows, torch.tensor([0, wrong]))


@NEEDS_GPU
def test_a_wrong_index_gives_nan_on_the_gpu() -> None:
    rows = declared(random_rows(4).cuda())
    got = gather(rows, torch.tensor([4, -2, 1 << 40, -1], device="cuda"))
    assert got[:3].isnan().all() and not got[3].any()


def test_what_does_not_fit_is_refused_with_all_findings() -> None:
    packed = random_rows(4)
    with pytest.raises(EngramError, match=r"declared dtypes .*: found \('U8', 'F8_E8M0'\), needed F8_E4M3 and F8_E8M0"):
        gather(PackedRows(packed, "U8", "F8_E8M0"))
    out = torch.empty(2, 255)
    with pytest.raises(EngramError) as error:
        gather_into(out, PackedRows(packed[:, :263].int(), "F8_E5M2", "U8"), torch.tensor([[0.0], [1.0]]).T)
    found = str(error.value)
    for part in ("F8_E5M2", "torch.int32", "(4, 263)", "torch.float32, needed torch.int32", "(2, 255)", "bfloat16"):
        assert part in found, found
    with pytest.raises(EngramError, match=r"rows: found strides \(1, 4\), needed the bytes of a row side by side"):
        gather(declared(packed.T.contiguous().T))
    with pytest.raises(EngramError, match=r"rows: found shape \(264,\)"):
        gather(declared(packed[0]))


@NEEDS_GPU
def test_memory_the_gpu_cannot_read_is_refused() -> None:
    packed, index = random_rows(4), torch.tensor([0], device="cuda")
    with pytest.raises(EngramError, match="rows: found pageable host memory, needed cuda:0 or pinned host memory"):
        gather(declared(packed), index)
    with pytest.raises(EngramError, match="index: found pageable host memory"):
        gather(declared(packed.cuda()), index.cpu())
    with pytest.raises(EngramError, match="out: found cpu"):
        gather_into(torch.empty(1, 256, dtype=torch.bfloat16), declared(packed.cuda()), index)
    askew = torch.empty(4 * 264 + 1, dtype=torch.uint8, device="cuda")[1:].view(4, 264)
    with pytest.raises(EngramError, match="needed rows on multiples of 8"):
        gather(declared(askew), index)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_the_operators_hold_torchs_contract(device: str) -> None:
    rows = (random_rows(9) % 120).to(device)  # no NaN, which equals nothing
    index = torch.tensor([[3, -1], [8, 0]], device=device)
    torch.library.opcheck(torch.ops.sparkwright.engram_gather, (rows, index, *DTYPES))
    out = torch.empty(2, 2, 256, dtype=torch.bfloat16, device=device)
    torch.library.opcheck(torch.ops.sparkwright.engram_gather_out, (rows, index, *DTYPES, out))


@NEEDS_GPU
@pytest.mark.parametrize("count", [96, 49_152])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_captured_graph_follows_its_inputs(pinned: bool, count: int) -> None:
    rows = random_rows(count).pin_memory() if pinned else random_rows(count).cuda()
    index = torch.arange(count, device="cuda")
    out = torch.empty(count, 256, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_allocated()
        gather_into(out, declared(rows), index)
        assert torch.cuda.memory_allocated() == before
    for seed in range(3):
        packed = random_rows(count, seed)
        rows.copy_(packed)
        index.copy_(torch.from_numpy(np.random.default_rng(seed).integers(-1, count, count)))
        out.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        np.testing.assert_array_equal(bits(out), bits(gather(declared(packed), index.cpu())))
