"""Golden EXL3 cases and small checkpoints for the kernels tests."""

from __future__ import annotations

import hashlib
import json
import os
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


@pytest.fixture(scope="session", autouse=True)
def engram_library() -> Path | None:
    """The native library of this source, built once for each state of it; None where it cannot be built."""
    from sparkwright_kernels.engram import build, native

    if os.environ.get(native.PATH_VARIABLE):
        return native.library_path()
    source = hashlib.sha256(Path(build.__file__).read_bytes())
    for path in sorted(build.SOURCE.parent.glob("engram_io.*")):
        source.update(path.read_bytes())
    path = FIXTURES.parents[1] / "kernels/build" / f"engram-{source.hexdigest()[:12]}" / build.LIBRARY
    if not path.exists():
        try:
            build.build(path)
        except OSError:
            return None
    os.environ[native.PATH_VARIABLE] = str(path)
    return path
