# SPDX-License-Identifier: Apache-2.0
"""Read a checkpoint's safetensors headers: which modules are packed, at how many bits, and what is wrong with it.

No weight is read, and no library outside the standard one is loaded. The headers are the only source of truth: the
config's `bits` is an average and its `tensor_storage` may be incomplete.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from sparkwright_kernels.exl3.layout import PACKED_TENSORS, Exl3FormatError, Exl3Module, TensorSpec, describe, problems

INDEX_NAME = "model.safetensors.index.json"

_MAX_HEADER = 100_000_000  # bytes; the safetensors library's own limit
_DTYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16,
    "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """What the headers of one model directory say; `errors` holds everything wrong with it, in file order."""

    tensors: dict[str, TensorSpec]
    modules: dict[str, Exl3Module]
    errors: list[Exl3FormatError] = field(default_factory=list)

    @property
    def k_histogram(self) -> dict[str, int]:
        """Bits per weight (such as "3" or "2.5") to number of packed modules, ascending."""
        counts = Counter(module.bits for module in self.modules.values())
        return {f"{bits:g}": counts[bits] for bits in sorted(counts)}

    @property
    def codebooks(self) -> dict[str, int]:
        """Codebook to number of packed modules."""
        return dict(sorted(Counter(str(module.codebook) for module in self.modules.values()).items()))


def read_checkpoint(model_dir: str | os.PathLike[str]) -> Checkpoint:
    """Read the checkpoint in `model_dir`; raise the first Exl3FormatError found, if any."""
    checkpoint = scan_checkpoint(model_dir)
    if checkpoint.errors:
        raise checkpoint.errors[0]
    return checkpoint


def scan_checkpoint(model_dir: str | os.PathLike[str]) -> Checkpoint:
    """Read the checkpoint in `model_dir`, collecting every error instead of raising."""
    directory = Path(model_dir)
    errors: list[Exl3FormatError] = []
    weight_map: dict[str, str] | None = None
    files: list[str] = []
    try:
        weight_map = _read_index(directory)
        files = sorted(set(weight_map.values())) if weight_map is not None else _list_files(directory)
    except Exl3FormatError as error:
        errors.append(error)

    tensors: dict[str, TensorSpec] = {}
    read: set[str] = set()
    for file in files:
        header, wrong = read_header(directory / file)
        errors.extend(wrong)
        if header:
            read.add(file)
        for name, spec in header.items():
            if name in tensors:
                found = f"{name} in both {tensors[name].file} and {file}"
                errors.append(Exl3FormatError("duplicate-tensor", name, found, "each tensor in one file only", file))
            tensors[name] = spec
    for name, file in (weight_map or {}).items():
        if file in read and (name not in tensors or tensors[name].file != file):
            found = f"the index names {file} for it, which does not hold it"
            errors.append(Exl3FormatError("missing-tensor", name, found, f"the tensor in {file}", file))

    modules: dict[str, Exl3Module] = {}
    for name, parts in _packed_groups(tensors):
        found_wrong = list(problems(name, parts))
        if found_wrong:
            errors.extend(found_wrong)
        else:
            modules[name] = describe(name, parts)
    return Checkpoint(tensors, modules, errors)


def read_header(path: Path) -> tuple[dict[str, TensorSpec], list[Exl3FormatError]]:
    """Read one safetensors header: its tensors, and what is wrong with the file (missing, cut short, inconsistent)."""
    errors: list[Exl3FormatError] = []

    def wrong(id: str, found: str, needed: str, tensor: str = path.name) -> None:
        errors.append(Exl3FormatError(id, tensor, found, needed, path.name))

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            raw = file.read(min(length, _MAX_HEADER))
    except OSError as reason:
        wrong("missing-file", f"no readable file ({reason.strerror})", "the file in the model directory")
        return {}, errors
    if length > _MAX_HEADER:
        wrong("bad-header", f"header length {length}", f"at most {_MAX_HEADER}")
        return {}, errors
    if size < 8 + max(length, 2):
        wrong("truncated-file", f"{size} bytes", f"at least {8 + max(length, 2)} bytes (the header alone)")
        return {}, errors
    spans: list[tuple[int, int, str]] = []
    specs: dict[str, TensorSpec] = {}
    try:
        for name, entry in json.loads(raw, object_pairs_hook=_no_duplicates).items():
            if name != "__metadata__":
                start, stop = map(int, entry["data_offsets"])
                shape = tuple(map(int, entry["shape"]))
                specs[name] = TensorSpec(str(entry["dtype"]), shape, path.name, 8 + length + start)
                spans.append((start, stop, name))
    except (ValueError, KeyError, TypeError, AttributeError) as reason:
        wrong("bad-header", f"a header that does not parse ({reason!r})", "a safetensors header")
        return {}, errors

    end = 0
    for start, stop, name in sorted(spans):
        spec = specs[name]
        if start != end or stop < start:
            wrong("bad-header", f"bytes {start} to {stop}", f"bytes from {end} on, without gap or overlap", name)
        bits = prod(spec.shape) * _DTYPE_BITS.get(spec.dtype, 0)
        if spec.dtype in _DTYPE_BITS and bits != 8 * (stop - start):
            wrong("bad-header", f"{stop - start} bytes", f"{bits // 8} bytes for {spec.dtype} {list(spec.shape)}", name)
        end = max(end, stop)
    if size != 8 + length + end:
        id = "truncated-file" if size < 8 + length + end else "bad-header"
        wrong(id, f"{size} bytes", f"{8 + length + end} bytes, as its header says")
    return specs, errors


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(name for name, _ in pairs)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]} is listed twice")
    return dict(pairs)


def _read_index(directory: Path) -> dict[str, str] | None:
    path = directory / INDEX_NAME
    if not path.is_file():
        return None
    try:
        return {str(name): str(file) for name, file in json.loads(path.read_bytes())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as reason:
        found = f"an index that does not parse: {reason!r}"
        raise Exl3FormatError("bad-index", INDEX_NAME, found, "an object with weight_map", INDEX_NAME) from None


def _list_files(directory: Path) -> list[str]:
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    if not files:
        found = "no *.safetensors file" if directory.is_dir() else "no such directory"
        raise Exl3FormatError("missing-file", str(directory), found, "a local model directory with safetensors files")
    return files


def _packed_groups(tensors: dict[str, TensorSpec]) -> Iterator[tuple[str, dict[str, TensorSpec]]]:
    groups: defaultdict[str, dict[str, TensorSpec]] = defaultdict(dict)
    for name, spec in tensors.items():
        module, _, suffix = name.rpartition(".")
        groups[module][suffix] = spec
    return ((name, parts) for name, parts in groups.items() if not parts.keys().isdisjoint(PACKED_TENSORS))
