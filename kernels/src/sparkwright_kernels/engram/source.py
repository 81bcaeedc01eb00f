# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The published tables: for each layer a plane of weights and a plane of scales, in safetensors files."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkwright_kernels.engram.errors import EngramError, raise_all
from sparkwright_kernels.engram.layout import SCALE_BLOCK, EngramLayout
from sparkwright_kernels.exl3.checkpoint import INDEX_NAME, read_header

RECEIPT_NAME = ".sparkwright-weights.json"
"""What the role weights leaves in a model directory; it names the revision."""


@dataclass(frozen=True)
class Plane:
    """Rows of `row_bytes` bytes, end to end from byte `offset` of a file on."""

    path: Path
    offset: int
    row_bytes: int


@dataclass(frozen=True)
class Source:
    """One layer's table as published."""

    layer: int
    rows: int
    weight: Plane
    scale: Plane

    def identity(self) -> list[Any]:
        """Equal as long as the files are: names, sizes, times, places. For a run that goes on where another ended."""

        def of(plane: Plane) -> list[Any]:
            found = plane.path.stat()
            return [plane.path.name, found.st_size, found.st_mtime_ns, plane.offset, plane.row_bytes]

        return [self.layer, self.rows, of(self.weight), of(self.scale)]


def find_source(model_dir: Path, layout: EngramLayout, layer: int) -> Source:
    """Find a layer's planes by the index; raises every reason why they cannot be this model's tables."""
    path = model_dir / INDEX_NAME
    again = "fetch the model's Engram files again"
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        files = {part: str(weight_map[tensor_name(layer, part)]) for part in ("weight", "scale")}
    except KeyError as reason:
        raise EngramError(path, f"no {reason}", f"the Engram tables of layer {layer}", again) from None
    except (OSError, ValueError, TypeError) as reason:
        raise EngramError(path, str(reason), "an index with weight_map", again) from None

    rows = layout.total(layer)
    needed = {"weight": ("F8_E4M3", layout.head_dim), "scale": ("F8_E8M0", layout.head_dim // SCALE_BLOCK)}
    errors: list[EngramError] = []
    headers = {}
    for file in sorted(set(files.values())):
        headers[file], wrong = read_header(model_dir / file)
        errors += [EngramError(model_dir / file, error.found, error.needed, again) for error in wrong]
    planes = {}
    for part, (dtype, row_bytes) in needed.items():
        name = tensor_name(layer, part)
        spec = headers[files[part]].get(name)
        subject = f"{model_dir / files[part]}: {name}"
        if spec is None:
            if headers[files[part]]:
                errors.append(EngramError(subject, "no such tensor", "the one that the index names", again))
            continue
        if (spec.dtype, spec.shape) != (dtype, (rows, row_bytes)):
            # Read as anything else (uint8, say) a table gives fluent nonsense.
            told = f"{spec.dtype} {list(spec.shape)}"
            errors.append(EngramError(subject, told, f"{dtype} {[rows, row_bytes]}, as config.json says", again))
        planes[part] = Plane(model_dir / files[part], spec.offset, row_bytes)
    raise_all(errors)
    return Source(layer, rows, planes["weight"], planes["scale"])


def tensor_name(layer: int, part: str) -> str:
    return f"layers.{layer}.engram.embed.{part}"


def source_revision(model_dir: Path) -> str:
    """The commit that the directory's files were fetched at, "" where nothing says so."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((model_dir / RECEIPT_NAME).read_bytes())["revision"])
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(
            json.loads((model_dir / INDEX_NAME).read_bytes())["metadata"]["sparkwright"]["source_revision"] or ""
        )
    return ""
