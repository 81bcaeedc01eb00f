#!/usr/bin/env python3
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Gather and dequantization of Engram rows on a GPU, against vLLM's own kernel and against plain copies, in one run.

    python benchmarks/engram/gather.py --vllm-engram .../vllm/models/deepseek_v41/common/engram.py [--json FILE]

Calls are captured in a graph and timed by events; each reads other rows, random ones of a large table, and the L2 is
flushed before each replay. "copy" moves as many bytes as the gather reads and writes, equally cold; "peak" is one large
copy. For rows in pinned host memory the bytes are those read over the link, and the copy is host to device. Before
timing, both kernels' outputs are compared bit for bit, over every fp8 code under every exponent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sparkwright_kernels.engram.ops import DIM, DTYPES, ROW_BYTES, PackedRows, gather_into

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/engine"))
from upstream import load_file  # noqa: E402

HEADS = 24
ROWS = (96, 144, 49_152)
TABLE_ROWS = {"device": 8 << 20, "pinned": 1 << 20}
REPLAYS = 15


def time_us(calls: list[Callable[[], None]]) -> float:
    """Median microseconds a call, over replays of a graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(REPLAYS + 2):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[2:])


def pairs_table(count: int) -> torch.Tensor:
    """Random packed rows `[count, 264]`, the first 256 of which hold every code under every exponent."""
    packed = torch.randint(0, 256, (count, ROW_BYTES), dtype=torch.uint8, device="cuda")
    packed[:256, :DIM] = torch.arange(256, device="cuda")
    packed[:256, DIM:] = torch.arange(256, device="cuda")[:, None] + 32 * torch.arange(8, device="cuda")
    return packed


def upstream_table(upstream: Any, packed: torch.Tensor, pinned: bool) -> Any:
    """vLLM's table of the same rows: two planes, in device memory or pinned."""
    sizes = (packed.shape[0] // HEADS,) * (HEADS - 1)
    sizes = (*sizes, packed.shape[0] - sum(sizes))
    with torch.device("cuda"):
        table = upstream.ParallelEngramEmbedding(packed.shape[0], DIM, sizes, cpu_offload=pinned)
    table.weight.data.view(torch.uint8).copy_(packed[:, :DIM])
    table.weight_scale_inv.data.copy_(packed[:, DIM:])
    return table


def measure(upstream: Any, where: str, rows: int) -> dict[str, float]:
    pinned = where == "pinned"
    packed = pairs_table(TABLE_ROWS[where])
    theirs = upstream_table(upstream, packed, pinned)
    table = packed
    if pinned:
        table = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True).copy_(packed)
        del packed
    ours = PackedRows(table, *DTYPES)
    sets = 4 if rows > 1000 else 64
    ids = [torch.randint(0, len(table), (rows // HEADS, HEADS), dtype=torch.int32, device="cuda") for _ in range(sets)]
    outs = [torch.empty(rows // HEADS, HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(sets)]
    for start in range(-1, 256, rows):  # an absent row and all pairs, in several calls where one has fewer rows
        pairs = torch.arange(start, start + rows, dtype=torch.int32, device="cuda").view(-1, HEADS)
        for one in (pairs, *ids):
            got, wanted = torch.full_like(outs[0], 7), torch.full_like(outs[0], 9)
            gather_into(got, ours, one)
            theirs.lookup(one, wanted)
            if not torch.equal(got.view(torch.int16), wanted.view(torch.int16)):
                sys.exit(f"{where}, {rows} rows: the two kernels differ")
    result = {"ours_us": time_us([lambda i=i, o=o: gather_into(o, ours, i) for i, o in zip(ids, outs, strict=True)])}
    # What the engine does: the reader's buffer, in order.
    buffers = [table[n * rows : (n + 1) * rows] for n in range(sets)]
    ordered = [PackedRows(buffer, *DTYPES) for buffer in buffers]
    flat = [out.view(-1, DIM) for out in outs]
    result["ours_in_order_us"] = time_us(
        [lambda b=b, o=o: gather_into(o, b) for b, o in zip(ordered, flat, strict=True)]
    )
    result["vllm_us"] = time_us([lambda i=i, o=o: theirs.lookup(i, o) for i, o in zip(ids, outs, strict=True)])
    moved = rows * ROW_BYTES if pinned else rows * (ROW_BYTES + 2 * DIM)
    target = [torch.empty(moved if pinned else moved // 2, dtype=torch.uint8, device="cuda") for _ in range(sets)]
    source = [table.view(-1)[n * len(t) : (n + 1) * len(t)] for n, t in enumerate(target)]
    result["copy_us"] = time_us(
        [lambda t=t, s=s: t.copy_(s, non_blocking=True) for t, s in zip(target, source, strict=True)]
    )
    return {"rows": rows, "bytes": moved, **result}


def peak(where: str) -> float:
    """GB/s of one large copy: bytes read and written on the device; bytes read from pinned memory."""
    size = 1 << 30 if where == "device" else 1 << 28
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    if where == "pinned":
        source = torch.empty(size, dtype=torch.uint8, pin_memory=True).copy_(source)
    us = time_us([lambda: target.copy_(source, non_blocking=True)] * 4)
    return size * (2 if where == "device" else 1) / us / 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-engram", type=Path, required=True, help="vLLM's engram.py, 0.32 or 0.33")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    upstream = load_file(args.vllm_engram)
    results = []
    print("| rows in | rows | ours | ours, in order | vLLM | copy | ours / vLLM | of the same copy | of peak |")
    print("|---|---|---|---|---|---|---|---|---|")
    for where in TABLE_ROWS:
        gbps = peak(where)
        for rows in ROWS:
            one = {"where": where, "peak_gbps": gbps, **measure(upstream, where, rows)}
            results.append(one)
            torch.cuda.empty_cache()
            us = [one[name] for name in ("ours_us", "ours_in_order_us", "vllm_us", "copy_us")]
            share = one["bytes"] / one["ours_us"] / 1000 / gbps
            ratios = f"{us[2] / us[0]:.2f} x as fast | {us[3] / us[0]:.0%} | {share:.0%} of {gbps:.0f} GB/s |"
            print(f"| {where} | {rows} | " + " | ".join(f"{value:.2f} us" for value in us) + f" | {ratios}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
