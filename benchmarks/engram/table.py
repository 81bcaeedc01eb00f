# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""What both benchmarks use: a model directory with one Engram table of a given size, files out of the page cache."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
sys.path.insert(0, str(KERNELS / "src"))

from sparkwright_kernels.engram import build, native  # noqa: E402
from sparkwright_kernels.engram.layout import EngramLayout, column_sizes  # noqa: E402

CONFIG = {
    "engram_layer_ids": [1], "engram_max_ngram_size": 4, "engram_n_heads": 8, "engram_head_dim": 256,
    "engram_compressed_vocab_size": 99092, "engram_pad_token_id": 2,
}  # fmt: skip


def library() -> None:
    """Build the native library of this source, unless SPARKWRIGHT_ENGRAM_IO names another."""
    if not os.environ.get(native.PATH_VARIABLE):
        path = KERNELS / "build" / "benchmark" / build.LIBRARY
        print(f"{path.name}: {build.build(path)}")
        os.environ[native.PATH_VARIABLE] = str(path)


def make(directory: Path, gib: float) -> EngramLayout:
    """Layer 1's table of about so many GiB, random bytes, published as the real one is."""
    directory.mkdir(parents=True)
    vocab_size = int(gib * 2**30 / 264 / 24)
    totals = [sum(sizes) for sizes in column_sizes([1], vocab_size, 4, 8).values()]
    config = {**CONFIG, "engram_vocab_size": vocab_size, "engram_num_embeddings": totals}
    layout = EngramLayout.from_config(config)
    (directory / "config.json").write_text(json.dumps(config))
    rows = layout.total(1)
    header, at = {}, 0
    for part, dtype, width in (("weight", "F8_E4M3", 256), ("scale", "F8_E8M0", 8)):
        entry = {"dtype": dtype, "shape": [rows, width], "data_offsets": [at, at + rows * width]}
        header[f"layers.1.engram.embed.{part}"] = entry
        at += rows * width
    shard = "model-00047-of-00048.safetensors"
    raw = json.dumps(header).encode()
    rng = np.random.default_rng(1)
    with (directory / shard).open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        while at > 0:
            stream.write(rng.bytes(min(at, 2**26)))
            at -= 2**26
        os.fsync(stream.fileno())
    index = {"weight_map": dict.fromkeys(header, shard)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return layout


def drop(*paths: Path) -> None:
    """Out of the page cache, once they are on the disk."""
    for path in paths:
        with path.open("rb") as stream:
            os.fdatasync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
