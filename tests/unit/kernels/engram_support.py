# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The real model's Engram constants, and small models of the same structure."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from sparkwright_kernels.engram.formats import EngramFile
from sparkwright_kernels.engram.layout import EngramLayout

REAL = {
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_vocab_size": 16_000_000,
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_compressed_vocab_size": 99092,
    "engram_pad_token_id": 2,
}
"""What config.json of DeepSeek-V4.1-Flash says, revision fb2764a5."""

GOLDEN = {  # (layer, tensor-parallel size): boundaries of the ranks, then bytes of each dsv41en1 file; rule heads
    (1, 2): ([0, 192001740, 384006168], [50688463456, 50689173088]),
    (1, 3): ([0, 128000880, 256002934, 384006168], [33792236416, 33792546352, 33792857872]),
    (1, 4): (
        [0, 96000564, 192001740, 288003654, 384006168],
        [25344152992, 25344314560, 25344509392, 25344667792],
    ),
    (14, 2): ([0, 192007016, 384016682], [50689856320, 50690555920]),
    (14, 3): ([0, 128004290, 256009984, 384016682], [33793136656, 33793507312, 33793772368]),
    (14, 4): (
        [0, 96003054, 192007016, 288011564, 384016682],
        [25344810352, 25345050064, 25345204768, 25345355248],
    ),
}
GOLDEN_ROWS = {  # the same for rule rows
    (1, 2): ([0, 192003084, 384006168], [50688818272] * 2),
    (1, 3): ([0, 128002056, 256004112, 384006168], [33792546880] * 3),
    (1, 4): ([0, 96001542, 192003084, 288004626, 384006168], [25344411184] * 4),
    (14, 4): (
        [0, 96004170, 192008341, 288012511, 384016682],
        [25345104976, 25345105240, 25345104976, 25345105240],
    ),
}


def small_config(vocab_size: int = 1000, layers: tuple[int, ...] = (1, 14)) -> dict[str, Any]:
    """A config of the real structure, 24 columns of a little more than `vocab_size` rows each."""
    config = {**REAL, "engram_vocab_size": vocab_size, "engram_layer_ids": list(layers)}
    config["engram_num_embeddings"] = [0] * len(layers)
    primes = EngramLayout.__new__(EngramLayout)  # the sums of the primes are not known before they are found
    for name, value in config.items():
        object.__setattr__(primes, name.removeprefix("engram_"), value)
    config["engram_num_embeddings"] = [sum(primes.primes[layer]) for layer in layers]
    return config


@dataclass(frozen=True)
class Tables:
    """A model directory with Engram tables, and what is in them: layer to `[rows, 264]` bytes."""

    directory: Path
    layout: EngramLayout
    rows: dict[int, np.ndarray[Any, Any]]


def make_tables(directory: Path, vocab_size: int = 1000, seed: int = 0) -> Tables:
    """Tables as published: one shard a layer with both planes, after a small tensor so that no plane is aligned."""
    directory.mkdir(parents=True, exist_ok=True)
    config = small_config(vocab_size)
    layout = EngramLayout.from_config(config)
    rng = np.random.default_rng(seed)
    rows, weight_map = {}, {}
    for number, layer in enumerate(layout.layer_ids, 47):
        rows[layer] = rng.integers(0, 256, (layout.total(layer), layout.row_bytes), np.uint8)
        name = f"model-{number:05}-of-00048.safetensors"
        planes = {"weight": rows[layer][:, :256], "scale": rows[layer][:, 256:]}
        tensors = {f"layers.{layer}.engram.embed.{part}": np.ascontiguousarray(t) for part, t in planes.items()}
        save_planes(directory / name, tensors)
        weight_map.update(dict.fromkeys(tensors, name))
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return Tables(directory, layout, rows)


DTYPES = {"weight": "F8_E4M3", "scale": "F8_E8M0"}


def save_planes(path: Path, tensors: dict[str, np.ndarray[Any, Any]], dtypes: dict[str, str] | None = None) -> None:
    """A safetensors file of these byte arrays, with the dtypes that NumPy has not."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in {"layers.0.attn_norm.bias": np.zeros(7, np.uint8), **tensors}.items():
        dtype = (dtypes or DTYPES).get(name.rpartition(".")[2], "U8")
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    raw = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw + bytes(7))
        for tensor in tensors.values():
            stream.write(tensor.tobytes())


def reference_bytes(file: EngramFile, rows: np.ndarray[Any, Any], chunk_pages: int = 2048) -> bytes:
    """A whole file as the specification says it, from this rank's rows `[n, row_bytes]`: NumPy only."""
    if file.format == "dsv41en1":
        return file.header() + rows.tobytes()
    per_page = 4096 // file.row_bytes
    pages = np.zeros((-(-len(rows) // per_page), 4096), np.uint8)
    padded = np.zeros((len(pages) * per_page, file.row_bytes), np.uint8)
    padded[: len(rows)] = rows
    pages[:, : per_page * file.row_bytes] = padded.reshape(len(pages), -1)
    payload = pages.tobytes()
    chunk = chunk_pages * 4096
    sums = [xxh64(payload[at : at + chunk]) for at in range(0, len(payload), chunk)]
    table = b"".join(value.to_bytes(8, "little") for value in sums)
    header = replace(file, table_digest=hashlib.sha256(table).digest()).header()
    return header + payload + table.ljust(-(-len(table) // 4096) * 4096, b"\0")


def xxh64(data: bytes) -> int:
    """XXH64 with seed 0, from its specification."""
    p1, p2, p3, p4, p5 = (
        0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
    )  # fmt: skip
    mask = 2**64 - 1

    def rotl(x: int, bits: int) -> int:
        return (x << bits | x >> (64 - bits)) & mask

    def mix(lane: int, x: int) -> int:
        return rotl((lane + x * p2) & mask, 31) * p1 & mask

    stripes = len(data) // 32
    digest = p5
    if stripes:
        lanes = [(p1 + p2) & mask, p2, 0, -p1 & mask]
        words = struct.unpack_from(f"<{stripes * 4}Q", data)
        for at in range(0, len(words), 4):
            lanes = [mix(lane, word) for lane, word in zip(lanes, words[at : at + 4], strict=True)]
        digest = sum(map(rotl, lanes, (1, 7, 12, 18))) & mask
        for lane in lanes:
            digest = ((digest ^ mix(0, lane)) * p1 + p4) & mask
    digest = (digest + len(data)) & mask
    at = stripes * 32
    for size in (8, 4, 1):
        while at + size <= len(data):
            word = int.from_bytes(data[at : at + size], "little")
            at += size
            if size == 8:
                digest = (rotl(digest ^ mix(0, word), 27) * p1 + p4) & mask
            elif size == 4:
                digest = (rotl(digest ^ word * p1 & mask, 23) * p2 + p3) & mask
            else:
                digest = rotl(digest ^ word * p5 & mask, 11) * p1 & mask
    digest = (digest ^ digest >> 33) * p2 & mask
    digest = (digest ^ digest >> 29) * p3 & mask
    return digest ^ digest >> 32
