"""Where the fixtures are, and random packed layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

FIXTURES = Path(__file__).parents[2] / "fixtures"

Tensors = dict[str, np.ndarray[Any, Any]]


def packed(in_features: int, out_features: int, bits: float, marker: str | None = "mul1", seed: int = 0) -> Tensors:
    """Random tensors of one packed layer: any int16 content is a valid trellis."""
    rng = np.random.default_rng(seed)
    shape = (in_features // 16, out_features // 16, int(16 * bits))
    tensors: Tensors = {
        "trellis": rng.integers(-(1 << 15), 1 << 15, size=shape).astype(np.int16),
        "suh": rng.normal(size=in_features).astype(np.float16),
        "svh": rng.normal(size=out_features).astype(np.float16),
    }
    if marker:
        tensors[marker] = np.array(0, dtype=np.int32)
    return tensors
