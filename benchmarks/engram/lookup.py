#!/usr/bin/env python3
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""A whole Engram lookup on a GPU, ids to bf16 rows: vLLM's class with the table in a file, and in pinned memory.

    python benchmarks/engram/lookup.py --vllm-engram .../vllm/models/deepseek_v41/common/engram.py --directory DIR

"cached": every row is in the reader's memory, which leaves the way there and back; "disk": none is. Host time from the
call to a synchronized GPU, median. The file holds about a million rows, in our page format, read with direct I/O.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/engine"))
from upstream import load_file  # noqa: E402

HEADS = 24
TOKENS = (4, 6, 2048)


def time_us(lookup: Callable[[torch.Tensor], None], ids: list[torch.Tensor]) -> float:
    times = []
    for one in ids:
        torch.cuda.synchronize()
        start = time.perf_counter()
        lookup(one)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-engram", type=Path, required=True, help="vLLM's engram.py, 0.32 or 0.33")
    parser.add_argument("--directory", type=Path, required=True, help="where to put the file, on the disk to read from")
    args = parser.parse_args()
    upstream = load_file(args.vllm_engram, max_tokens=max(TOKENS))

    from sparkwright_kernels.engram.formats import PAGE, directory_name, planned
    from sparkwright_kernels.vllm_plugin.engram import EngramFiles, file_backed

    config = {
        "engram_layer_ids": [1], "engram_num_embeddings": [0], "engram_vocab_size": 40_000, "engram_max_ngram_size": 4,
        "engram_n_heads": 8, "engram_head_dim": 256, "engram_compressed_vocab_size": 300, "engram_pad_token_id": 2,
    }  # fmt: skip
    theirs = upstream.EngramLayout(SimpleNamespace(**config))
    config["engram_num_embeddings"] = theirs.num_embeddings = [sum(map(sum, theirs.primes[0]))]
    files = EngramFiles.from_config({"sparkwright_engram": {"directory": str(args.directory)}}, config)
    assert files
    file = planned(files.layout, "pages", 1, "heads", 0, 1)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 0x7F, (file.rows.rows, file.row_bytes), np.uint8)
    data = np.zeros(file.file_bytes, np.uint8)
    data[:PAGE] = np.frombuffer(file.header(), np.uint8)
    whole = file.rows.rows // file.rows_per_page
    pages = data[PAGE : PAGE + file.payload_bytes].reshape(-1, PAGE)
    used = file.rows_per_page * file.row_bytes
    pages[:whole, :used] = rows[: whole * file.rows_per_page].reshape(whole, used)
    rest = rows[whole * file.rows_per_page :]
    pages[whole:, : rest.size] = rest.reshape(1, -1)
    path = args.directory / directory_name("pages", "heads", 1) / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.tobytes())

    with torch.device("cuda"):
        pinned = upstream.Engram._create_embedding(None, theirs, 0)
        pinned.weight.data.view(torch.uint8).copy_(torch.from_numpy(rows[:, :256]))
        pinned.weight_scale_inv.data.copy_(torch.from_numpy(rows[:, 256:]))
        with file_backed(files):
            ours = upstream.Engram._create_embedding(None, theirs, 0)
    print(f"reader: {ours.reader.backend}, direct I/O {ours.reader.direct}")
    print("| rows | file, cached | file, disk | vLLM, pinned table | cached / vLLM |\n|---|---|---|---|---|")
    offsets = np.array(files.layout.offsets[1])
    for tokens in TOKENS:
        fresh = [
            torch.from_numpy(rng.integers(offsets[:-1], offsets[1:], (tokens, HEADS))).int().cuda()
            for _ in range(5 if tokens > 100 else 50)
        ]
        out = torch.empty(tokens, HEADS, 256, dtype=torch.bfloat16, device="cuda")
        check = torch.empty_like(out)
        disk = time_us(lambda ids, out=out: ours.lookup(ids, out, background=True), fresh)
        same = [fresh[-1]] * 30
        cached = time_us(lambda ids, out=out: ours.lookup(ids, out, background=True), same)
        vllm = time_us(lambda ids, out=check: pinned.lookup(ids, out, background=True), [*same[:2], *fresh])
        if not torch.equal(out, check):
            sys.exit("the rows differ")
        ratio = f"{cached / vllm:.2f}"
        print(f"| {tokens * HEADS} | {cached:.0f} us | {disk:.0f} us | {vllm:.0f} us | {ratio} |", flush=True)
    path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
