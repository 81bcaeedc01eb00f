# SPDX-License-Identifier: Apache-2.0
"""How a packed layer splits over tensor-parallel ranks. Pure functions on feature counts; no array is touched.

A column split cuts the out features: trellis dim 1 and svh, with suh whole. A row split cuts the in features: trellis
dim 0 and suh, with svh whole; the ranks' outputs are summed, so only rank 0 may add the bias. Storage would allow cuts
at every 16 features, but the Hadamard transform mixes blocks of 128: any other cut gives silently wrong output.
"""

from __future__ import annotations

from typing import Literal

from sparkwright_kernels.exl3.layout import HADAMARD, TILE, Exl3FormatError, pad

Kind = Literal["column", "row", "replicated"]

_WHOLE = slice(None)
_MAX_LISTED_TP = 64


def allowed_tp(features: int) -> list[int]:
    """The tensor-parallel sizes up to 64 that cut `features` at multiples of 128 only, ascending."""
    return [tp for tp in range(1, _MAX_LISTED_TP + 1) if tp == 1 or features % (HADAMARD * tp) == 0]


def split(tensor: str, features: int, tp: int, rank: int = 0) -> tuple[int, int]:
    """Return the features `[start, stop)` that `rank` of `tp` owns of a layer with `features`, as stored.

    The last rank's range includes the padding that storage adds. Raises Exl3FormatError, naming `tensor`, unless each
    rank gets the same whole number of 128-feature blocks.
    """
    if tp != 1 and features % (HADAMARD * tp):
        found = f"{features} features over tp {tp} = {features / tp:g} each"
        allowed = ", ".join(map(str, allowed_tp(features)))
        raise Exl3FormatError("tp-split", tensor, found, f"a multiple of {HADAMARD} each: tp one of {allowed}")
    size = features // tp
    return rank * size, pad((rank + 1) * size)


def slices(kind: Kind, start: int, stop: int, rank: int = 0) -> dict[str, tuple[slice, ...]]:
    """Index per tensor of a module that selects rank `rank`'s features `[start, stop)` of the dimension `kind` cuts.

    Both must be multiples of 128. There is no "bias" entry where the rank must not add it. Works on NumPy arrays and
    torch tensors alike; "replicated" selects everything.
    """
    features, tiles = slice(start, stop), slice(start // TILE, stop // TILE)
    cut_in, cut_out = kind == "row", kind == "column"
    result = {
        "trellis": (tiles if cut_in else _WHOLE, tiles if cut_out else _WHOLE),
        "suh": (features if cut_in else _WHOLE,),
        "svh": (features if cut_out else _WHOLE,),
        "su": (tiles if cut_in else _WHOLE,),
        "sv": (tiles if cut_out else _WHOLE,),
    }
    if not cut_in or rank == 0:
        result["bias"] = (features if cut_out else _WHOLE,)
    return result
