# SPDX-License-Identifier: Apache-2.0
"""Reference decoder for EXL3 weights in NumPy: exact, unhurried, and the yardstick for every faster path.

With H the 128x128 Sylvester Hadamard matrix divided by sqrt(128), applied block by block, and Q the decoded matrix:

    W = diag(suh) . H . Q . H . diag(svh)          [in_features, out_features]
    y = H(H(x * suh) @ Q) * svh + bias             the same, without forming W

Each 16x16 tile is a ring of 256*K bits. Position i of the ring adds K bits (K = n + 1/2: n bits where i is even, n + 1
where it is odd) and looks at the 16 bits that end there, wrapping around; those 16 bits pick an fp16 value from the
codebook. Hence any content at all is a valid trellis. Format: see `layout`; source: exllamav3 1.6.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkwright_kernels.exl3.layout import HADAMARD, TILE, Codebook, Exl3Module, TensorSpec, describe

Half = npt.NDArray[np.float16]
Array = npt.NDArray[Any]

_POSITIONS = TILE * TILE
_DTYPE_CODES = {np.dtype(np.int16): "I16", np.dtype(np.float16): "F16", np.dtype(np.int32): "I32"}


@cache
def codebook_table(codebook: Codebook) -> Half:
    """All 65,536 values of `codebook`, indexed by state: fp16 `[65536]`, read-only, bit exact."""
    table: Half
    state = np.arange(1 << 16, dtype=np.uint32)  # uint32 products wrap modulo 2^32, as the format wants
    if codebook == "mul1":
        mixed = state * np.uint32(0x83DCD12D)
        total = mixed.view(np.uint8).reshape(-1, 4).sum(axis=1, dtype=np.uint32)  # 0..1020
        scale, offset = np.array([0x1EEE, 0xC931], dtype=np.uint16).view(np.float16).astype(np.float64)
        # the GPU does one fp16 fused multiply-add; fp64 holds product and sum exactly, so this too rounds once
        table = ((1024.0 + total) * scale + offset).astype(np.float16)
    else:
        if codebook == "mcg":
            mixed = state * np.uint32(0xCBAC1FED)
        else:
            mixed = state * np.uint32(89226354) + np.uint32(64248484)
        mixed = (mixed & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)
        halves = mixed.view(np.float16).reshape(-1, 2)
        table = halves[:, 0] + halves[:, 1]
    table.setflags(write=False)
    return table


def _steps(bits: float) -> npt.NDArray[np.int64]:
    """New bits that each of the 256 ring positions takes, `[256]`."""
    whole = int(bits)
    return np.where((np.arange(_POSITIONS) % 2 == 1) & (bits != whole), whole + 1, whole)


def ring_states(trellis: Array) -> npt.NDArray[np.uint16]:
    """Unpack int16 `[..., 16*K]` bit rings into their 16-bit states, uint16 `[..., 256]`."""
    # little-endian 32-bit words, most significant bit first
    words = np.ascontiguousarray(trellis).view("<u4").astype(np.uint64)
    count = words.shape[-1]
    start = (np.cumsum(_steps(trellis.shape[-1] / TILE)) - 16) % (32 * count)
    first, shift = start // 32, (48 - start % 32).astype(np.uint64)
    window = (words[..., first] << np.uint64(32)) | words[..., (first + 1) % count]
    states: npt.NDArray[np.uint16] = (window >> shift).astype(np.uint16)
    return states


def pack_states(states: npt.NDArray[np.uint16], bits: float) -> npt.NDArray[np.int16]:
    """Inverse of `ring_states`: uint16 `[..., 256]` to int16 `[..., 16*K]`.

    Only the new bits of every state are kept; they determine the rest where the states really form a ring.
    """
    steps = _steps(bits)
    position = np.repeat(np.arange(_POSITIONS), steps)
    significance = np.cumsum(steps)[position] - 1 - np.arange(position.size)
    ring = (states[..., position] >> significance.astype(np.uint16)) & np.uint16(1)
    words: npt.NDArray[np.int16] = np.packbits(ring.astype(np.uint8), axis=-1).view(">u4").astype("<u4").view("<i2")
    return words


@cache
def tile_order() -> npt.NDArray[np.int64]:
    """Ring position to row-major index in its 16x16 (in, out) tile, `[256]`: the tensor cores' B-fragment order."""
    lane, item = np.divmod(np.arange(_POSITIONS), 8)
    row = 2 * (lane % 4) + item % 2 + 8 * (item // 2 % 2)
    column = lane // 4 + 8 * (item // 4)
    order: npt.NDArray[np.int64] = row * TILE + column
    return order


def inner_weight(trellis: Array, codebook: Codebook) -> Half:
    """Decode int16 `[k/16, n/16, 16*K]` to Q, fp16 `[k, n]`, in the rotated basis. Bit exact."""
    rows, columns = trellis.shape[:2]
    tiles = np.empty((rows, columns, _POSITIONS), dtype=np.float16)
    tiles[..., tile_order()] = codebook_table(codebook)[ring_states(trellis)]
    return tiles.reshape(rows, columns, TILE, TILE).transpose(0, 2, 1, 3).reshape(rows * TILE, columns * TILE)


@cache
def _hadamard_matrix() -> npt.NDArray[np.float64]:
    matrix = np.ones((1, 1))
    while len(matrix) < HADAMARD:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    scaled: npt.NDArray[np.float64] = matrix / np.sqrt(HADAMARD)
    return scaled


def hadamard(x: Array, axis: int = -1) -> Array:
    """Apply H to every block of 128 along `axis` (its length a multiple of 128), in x's own floating-point type."""
    moved = np.moveaxis(x, axis, -1)
    blocks: Array = moved.reshape(*moved.shape[:-1], -1, HADAMARD) @ _hadamard_matrix().astype(x.dtype)
    return np.moveaxis(blocks.reshape(moved.shape), -1, axis)


def unpack_signs(packed: Array) -> Half:
    """Expand the older su/sv, int16 `[k/16]`, to +1 and -1, fp16 `[k]`: bit j of word i is element 16*i + j, 1 is -."""
    bits = np.unpackbits(np.ascontiguousarray(packed).astype("<i2").view(np.uint8), bitorder="little")
    return np.where(bits == 1, np.float16(-1), np.float16(1))


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A validated packed layer, or the shard of one: trellis `[k/16, n/16, 16*K]`, suh fp16 `[k]`, svh fp16 `[n]`."""

    module: Exl3Module
    trellis: Array
    suh: Half
    svh: Half

    @classmethod
    def from_tensors(cls, name: str, tensors: Mapping[str, Array]) -> PackedLinear:
        """Build from `{suffix: array}`; raise Exl3FormatError, naming `name`, for what the format does not allow."""
        specs = {s: TensorSpec(_DTYPE_CODES.get(t.dtype, str(t.dtype)), t.shape) for s, t in tensors.items()}
        module = describe(name, specs)
        suh = tensors["suh"] if "suh" in tensors else unpack_signs(tensors["su"])
        svh = tensors["svh"] if "svh" in tensors else unpack_signs(tensors["sv"])
        return cls(module, tensors["trellis"], suh, svh)

    def inner_weight(self) -> Half:
        """Q, fp16 `[k, n]`. Bit exact."""
        return inner_weight(self.trellis, self.module.codebook)

    def weight(self, dtype: npt.DTypeLike = np.float64) -> Array:
        """W, `dtype` `[k, n]`, computed in that floating-point type throughout."""
        rotated = hadamard(self.inner_weight().astype(dtype), axis=0) * self.suh.astype(dtype)[:, None]
        dense: Array = hadamard(rotated, axis=1) * self.svh.astype(dtype)
        return dense

    def forward(self, x: Array, bias: Array | None = None) -> Array:
        """y = x @ W + bias for x `[..., k]`, without forming W: float64 `[..., n]`, in the order the kernels use."""
        rotated = hadamard(x.astype(np.float64) * self.suh.astype(np.float64))
        y = hadamard(rotated @ self.inner_weight().astype(np.float64)) * self.svh.astype(np.float64)
        return y if bias is None else y + bias
