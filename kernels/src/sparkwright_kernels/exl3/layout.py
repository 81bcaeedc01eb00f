# SPDX-License-Identifier: Apache-2.0
"""What an EXL3 module consists of, and every rule a stored one must obey.

A linear layer `NAME` with `in_features` k and `out_features` n is stored as

| tensor         | dtype | shape                 |                                                       |
|----------------|-------|-----------------------|-------------------------------------------------------|
| `NAME.trellis` | I16   | `[k/16, n/16, 16*K]`  | packed weights, K bits each                           |
| `NAME.suh`     | F16   | `[k]`                 | input side: signs, channel scale and global scale     |
| `NAME.svh`     | F16   | `[n]`                 | output side: signs and channel scale                  |
| `NAME.su`      | I16   | `[k/16]`              | older files: packed signs in place of `suh`           |
| `NAME.sv`      | I16   | `[n/16]`              | older files: packed signs in place of `svh`           |
| `NAME.mcg`     |       |                       | codebook marker; only its presence counts             |
| `NAME.mul1`    |       |                       | codebook marker; neither of the two means `3inst`     |
| `NAME.bias`    |       | `[<= n]`              | optional                                              |

k and n are multiples of 128 (a narrower layer is padded). Source: exllamav3 1.6.5, checked against its own output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Codebook = Literal["3inst", "mcg", "mul1"]

TILE = 16
"""Edge of a weight tile, in features."""

HADAMARD = 128
"""Edge of a Hadamard block, in features: no shard boundary may fall inside one."""

MARKERS: tuple[Codebook, ...] = ("mcg", "mul1")
PACKED_TENSORS = ("trellis", "suh", "svh", "su", "sv", *MARKERS)
"""Suffixes of the tensors that only a packed module has."""

_WHOLE_BITS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
_HALF_BITS = (1.5, 2.5, 3.5)


class Exl3FormatError(ValueError):
    """One thing that cannot be an EXL3 checkpoint, or cannot be split as asked.

    Attributes name the tensor (or file) concerned, the value found and the value needed; `id` is a stable word for
    programs, `file` the file it was found in ("" where there is none).
    """

    def __init__(self, id: str, tensor: str, found: str, needed: str, file: str = "") -> None:
        super().__init__(id, tensor, found, needed, file)  # all of them: exceptions are pickled through their args
        self.id, self.tensor, self.found, self.needed, self.file = id, tensor, found, needed, file

    def __str__(self) -> str:
        where = f" (in {self.file})" if self.file and self.file != self.tensor else ""
        return f"{self.tensor}{where}: found {self.found}, needed {self.needed}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """dtype (safetensors code, such as "I16"), shape, file name and first byte in that file of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]
    file: str = ""
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Exl3Module:
    """One packed linear layer: features as stored (multiples of 128), bits per weight and codebook."""

    name: str
    in_features: int
    out_features: int
    bits: float
    codebook: Codebook


def pad(features: int) -> int:
    """Round `features` up to whole Hadamard blocks: the width at which a layer is stored."""
    return -(-features // HADAMARD) * HADAMARD


def allowed_bits(codebook: Codebook) -> tuple[float, ...]:
    """Bits per weight that exist for `codebook`, ascending."""
    return tuple(sorted(_WHOLE_BITS + _HALF_BITS)) if codebook == "mul1" else _WHOLE_BITS


def codebook_of(suffixes: Mapping[str, object]) -> Codebook:
    """The codebook that the markers among a module's tensor suffixes stand for."""
    return next((marker for marker in MARKERS if marker in suffixes), "3inst")


def problems(name: str, tensors: Mapping[str, TensorSpec]) -> Iterator[Exl3FormatError]:
    """Yield everything wrong with packed module `name`; `tensors` maps suffix ("trellis", "suh", ...) to spec."""

    def problem(id: str, suffix: str, found: str, needed: str) -> Exl3FormatError:
        spec = tensors.get(suffix) or next(iter(tensors.values()), None)
        return Exl3FormatError(id, f"{name}.{suffix}", found, needed, spec.file if spec else "")

    if all(marker in tensors for marker in MARKERS):
        yield problem("two-codebooks", "mul1", "both mcg and mul1", "at most one codebook marker")
    if "scale" in tensors:
        yield problem("obsolete-scale", "scale", "an obsolete scale tensor", "none (convert the model anew)")
    for new, old in (("suh", "su"), ("svh", "sv")):
        if (new in tensors) == (old in tensors):
            id, found = ("double", f"both {new} and {old}") if new in tensors else ("missing", f"no {new} and no {old}")
            yield problem(f"{id}-{new}", new, found, "exactly one of them")

    trellis = tensors.get("trellis")
    if trellis is None:
        yield problem("missing-trellis", "trellis", "no trellis", "an I16 tensor [in/16, out/16, 16*K]")
        return
    if trellis.dtype != "I16":
        yield problem("dtype", "trellis", f"dtype {trellis.dtype}", "dtype I16")
    if len(trellis.shape) != 3 or 0 in trellis.shape:
        yield problem("shape", "trellis", f"shape {list(trellis.shape)}", "shape [in/16, out/16, 16*K], none of it 0")
        return
    rows, columns, words = trellis.shape
    codebook = codebook_of(tensors)
    if words / TILE not in allowed_bits(codebook):
        allowed = ", ".join(f"{bits:g}" for bits in allowed_bits(codebook))
        found = f"K = {words}/16 = {words / TILE:g} with codebook {codebook}"
        yield problem("impossible-k", "trellis", found, f"K one of {allowed}")
    for side, tiles in (("in", rows), ("out", columns)):
        if tiles * TILE % HADAMARD:
            yield problem("shape", "trellis", f"{tiles * TILE} {side} features", f"a multiple of {HADAMARD}")

    lengths = {"suh": ("F16", rows * TILE), "svh": ("F16", columns * TILE), "su": ("I16", rows), "sv": ("I16", columns)}
    for suffix, (dtype, length) in lengths.items():
        spec = tensors.get(suffix)
        if spec is not None and spec.dtype != dtype:
            yield problem("dtype", suffix, f"dtype {spec.dtype}", f"dtype {dtype}")
        if spec is not None and spec.shape != (length,):
            yield problem("shape", suffix, f"shape {list(spec.shape)}", f"shape [{length}]")
    bias = tensors.get("bias")
    if bias is not None and (len(bias.shape) != 1 or bias.shape[0] > columns * TILE):
        yield problem("shape", "bias", f"shape {list(bias.shape)}", f"one dimension of at most {columns * TILE}")


def describe(name: str, tensors: Mapping[str, TensorSpec]) -> Exl3Module:
    """Return module `name` as stored in `tensors` (suffix to spec); raise the first of its `problems`."""
    for error in problems(name, tensors):
        raise error
    rows, columns, words = tensors["trellis"].shape
    return Exl3Module(name, rows * TILE, columns * TILE, words / TILE, codebook_of(tensors))
