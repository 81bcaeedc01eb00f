#!/usr/bin/env python3
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Small Engram tables of the real structure, always the same bytes. `engram_tables.py DIRECTORY` makes the lab's."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels/src"))

from sparkwright_kernels.engram.layout import EngramLayout, column_sizes

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


def small_config(vocab_size: int = 1000, layers: tuple[int, ...] = (1, 14)) -> dict[str, Any]:
    """A config of the real structure, 24 columns of a little more than `vocab_size` rows each."""
    config = {**REAL, "engram_vocab_size": vocab_size, "engram_layer_ids": list(layers)}
    config["engram_num_embeddings"] = [sum(sizes) for sizes in column_sizes(layers, vocab_size, 4, 8).values()]
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


if __name__ == "__main__":
    make_tables(Path(sys.argv[1]), vocab_size=200)
