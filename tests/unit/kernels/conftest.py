"""Golden EXL3 cases and small checkpoints for the kernels tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))

from kernels_support import FIXTURES, Tensors


@pytest.fixture(scope="session")
def golden() -> dict[str, Tensors]:
    """Golden case name to its tensors, `{suffix: array}`."""
    tensors = load_file(FIXTURES / "exl3" / "exl3_golden.safetensors")
    cases = json.loads((FIXTURES / "exl3" / "exl3_golden.json").read_text())
    return {case: {n[len(case) + 1 :]: t for n, t in tensors.items() if n.startswith(f"{case}.")} for case in cases}


@pytest.fixture
def arith() -> Path:
    """The real 3-bit checkpoint."""
    return FIXTURES / "models" / "arith-exl3-3bpw"


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """Write a model directory: `make({"model.safetensors": {module: tensors}}, config=..., index=...)`."""

    def make(files: dict[str, dict[str, Tensors]], config: Any = None, index: dict[str, str] | None = None) -> Path:
        for file, modules in files.items():
            save_file({f"{m}.{s}": t for m, parts in modules.items() for s, t in parts.items()}, tmp_path / file)
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        if index is not None:
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        return tmp_path

    return make


@pytest.fixture(autouse=True)
def with_engram_library(engram_library: Path | None) -> None:
    """Each test finds the native library."""
