# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Engram rows from files: what replaces vLLM's in-memory table, and the one name that is swapped for it, for a while.

vLLM makes its n-gram tables by the global name `ParallelEngramEmbedding` of one module and has no hook there. Within
`file_backed` that name makes `FileEngramEmbedding` instead, which keeps no table: on vLLM's prefetch stream the ids go
to pinned memory, a host function reads their rows from the rank's file, and the GPU dequantizes them from there. vLLM
starts the lookups of all layers before the first decoder layer, so that layer 14's run behind the layers before it.

This module and deepseek_v41.py hold all that the project asks of vLLM's Engram.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.models.deepseek_v41.common import engram as upstream

from sparkwright_kernels.engram import native
from sparkwright_kernels.engram.errors import EngramError
from sparkwright_kernels.engram.formats import FORMATS, Format, directory_name, planned
from sparkwright_kernels.engram.gather_native import Read, load
from sparkwright_kernels.engram.layout import EngramLayout
from sparkwright_kernels.engram.ops import DTYPES, PackedRows, gather_into
from sparkwright_kernels.engram.reader import EngramReader

CONFIG_KEY = "sparkwright_engram"
"""Key of vLLM's `--additional-config` under which EngramFiles is described: `{"directory": ..., "format": ...}`."""

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM configures loggers below its own name only


@dataclass(frozen=True)
class EngramFiles:
    """Where a model's packed tables are: where `sparkwright-engram pack --directory` put them."""

    directory: Path
    layout: EngramLayout
    format: Format = "pages"

    @classmethod
    def from_config(cls, additional: object, model_config: Mapping[str, Any]) -> EngramFiles | None:
        """What `--additional-config` asks for; None if it says nothing of it. Raises EngramError for nonsense."""
        asked = additional.get(CONFIG_KEY) if isinstance(additional, Mapping) else None
        if asked is None:
            return None
        known = isinstance(asked, Mapping) and asked.keys() <= {"directory", "format"}
        if not known or not isinstance(asked.get("directory"), str):
            raise EngramError(CONFIG_KEY, repr(asked), "an object with directory (text) and, perhaps, format")
        chosen = asked.get("format", "pages")
        if chosen not in FORMATS:
            raise EngramError(f"{CONFIG_KEY}.format", repr(chosen), f"one of {', '.join(FORMATS)}")
        return cls(Path(asked["directory"]), EngramLayout.from_config(model_config), chosen)

    def open(self, head_sizes: tuple[int, ...], rank: int, ranks: int, cache_bytes: int) -> EngramReader:
        """The reader of a rank's file of the table whose columns have these sizes (no two tables' are the same)."""
        layer = next((layer for layer, sizes in self.layout.primes.items() if sizes == head_sizes), None)
        if layer is None:
            needed = " or ".join(f"layer {layer}'s {sizes[0]}, .." for layer, sizes in self.layout.primes.items())
            raise EngramError("Engram table", f"columns of {head_sizes[0]}, .. rows", needed)
        expected = planned(self.layout, self.format, layer, "heads", rank, ranks)
        path = self.directory / directory_name(self.format, "heads", ranks) / expected.name
        return EngramReader(path, expected, cache_bytes=cache_bytes)


class FileEngramEmbedding(upstream.ParallelEngramEmbedding):
    """vLLM's Engram table of this rank's hash heads, whose rows stay in a file.

    On a GPU a row that cannot be read ends the process with a message: its consumers are enqueued by then. On CPU
    `lookup` raises.
    """

    def __init__(
        self, files: EngramFiles, num_embeddings: int, dim: int, head_sizes: tuple[int, ...], **options: Any
    ) -> None:
        # What makes vLLM look rows up on a side stream, outside of graphs that can be broken.
        options.update(cpu_offload=True, use_thp=False)
        super().__init__(num_embeddings, dim, head_sizes, **options)
        if self.dp_size > 1 or self.dp_shared_memory:
            raise EngramError("Engram files", "data parallelism", "tensor parallelism only")
        tokens = upstream.get_current_vllm_config().scheduler_config.max_num_batched_tokens
        heads, row_bytes = self.part_n_hash_cols, dim + dim // self.block_size
        self._heads = slice(self.head_start, min(self.head_start + heads, self.n_hash_cols))
        # Room for the rows of this step and the next.
        cache_bytes = 2 * tokens * heads * row_bytes
        self.reader = files.open(tuple(head_sizes), self.head_start // heads, self.tp_size, cache_bytes)
        held = self.reader.file.rows
        if (held.lo, held.hi) != (self.vocab_start_idx, self.vocab_end_idx):
            needed = f"rows {self.vocab_start_idx} to {self.vocab_end_idx}, as this vLLM splits tables"
            raise EngramError(self.reader.path, f"rows {held.lo} to {held.hi}", needed)
        pin = torch.cuda.is_available()
        # A column that only pads the last rank's share stays -1, which reads as zeros.
        self._ids = torch.full((tokens, heads), -1, dtype=torch.int32, device="cpu", pin_memory=pin)
        self._rows = torch.empty(tokens * heads, row_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin)
        self._reads: dict[int, tuple[Any, ...]] = {}
        self.after_lookup: Callable[[], None] | None = None
        """Called once, by another thread, when the rows of the next lookup have been read."""
        self._background = ThreadPoolExecutor(1, "engram-read-ahead")
        self._running: Future[None] | None = None
        _log.info("Engram layer %d: rows from %s", self.reader.file.layer, self.reader.path)

    def _allocate_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(0, self.dim, dtype=torch.float8_e4m3fn), torch.empty(0, 8, dtype=torch.uint8)

    @staticmethod
    def _weight_loader(param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """Leave the checkpoint's table where it is."""

    def lookup(self, indices: torch.Tensor, out: torch.Tensor, background: bool = False) -> None:
        """Rows of `indices`, int32 `[T, columns]`, to `out`, bf16 `[T, this rank's heads, dim]`.

        Only enqueues, on the current stream, and may be captured in a graph. `background`: on few multiprocessors.
        """
        tokens = indices.shape[0]
        if not tokens:
            return
        mine = indices[:, self._heads]
        if mine.dtype != torch.int32 or mine.stride(1) != 1 or tokens > len(self._ids):
            found = f"{tokens} tokens, {mine.dtype}, strides {mine.stride()}"
            raise EngramError("Engram ids", found, f"at most {len(self._ids)} tokens, int32, a token's side by side")
        if out.dtype != torch.bfloat16:
            raise EngramError("Engram rows", f"a request for {out.dtype}", "bfloat16 (packed rows serve DP only)")
        ids, rows = self._ids[:tokens], self._rows[: tokens * self.part_n_hash_cols]
        if indices.is_cuda:
            self._enqueue_read(mine, ids)
        else:
            ids[:, : mine.shape[1]] = mine
            self.reader.read(ids.numpy(), rows.numpy())
        max_blocks = self._num_sms // 2 if background else 0
        gather_into(out.view(-1, self.dim), PackedRows(rows, *DTYPES), max_blocks=max_blocks)
        self._start_background(indices)

    def _enqueue_read(self, mine: torch.Tensor, ids: torch.Tensor) -> None:
        if len(ids) not in self._reads:
            job, keep = self.reader.job(ids.numpy(), self._rows.data_ptr())
            run = ctypes.cast(native.library().engram_run, ctypes.c_void_p)
            status = ctypes.addressof(job) + native.Job.status.offset
            read = Read(run, ctypes.addressof(job), status, f"sparkwright: {self.reader.path}".encode())
            self._reads[len(ids)] = read, job, keep
        lib, size = load(), ids.element_size()
        error = lib.sparkwright_read(
            ids.data_ptr(),
            ids.stride(0) * size,
            mine.data_ptr(),
            mine.stride(0) * size,
            mine.shape[1] * size,
            len(ids),
            self._reads[len(ids)][0],
            torch.cuda.current_stream().cuda_stream,
        )
        if error:
            raise RuntimeError(f"Engram read: CUDA error {error}: {lib.sparkwright_cuda_error(error).decode()}")

    def _start_background(self, indices: torch.Tensor) -> None:
        task, self.after_lookup = self.after_lookup, None
        if task is None or (self._running and not self._running.done()):
            return  # a read-ahead that is still busy is late already; another would only be later
        done = None
        if indices.is_cuda:
            done = torch.cuda.Event()
            done.record()

        def work() -> None:
            if done:
                done.synchronize()
            try:
                task()
            except Exception:  # costs time only: the lookup reads again what is missing, and fails where it counts
                _log.warning("Engram read-ahead failed", exc_info=True)

        self._running = self._background.submit(work)


@contextmanager
def file_backed(files: EngramFiles | None) -> Iterator[None]:
    """While this lasts, Engram layers are made with `files`; with None, as ever. Restored whatever happens."""
    original = upstream.ParallelEngramEmbedding
    if files is not None:
        upstream.ParallelEngramEmbedding = partial(FileEngramEmbedding, files)
    try:
        yield
    finally:
        upstream.ParallelEngramEmbedding = original


class ReadAhead:
    """Reads the rows of prompts' next chunks while the GPU works on this one, into the readers' caches.

    A wrong guess costs a read and nothing else: rows come from the same readers by the same ids in any case.
    `token_map`: token id to compressed id; `pad_id`: the compressed id of the pad token.
    """

    def __init__(
        self, tables: list[FileEngramEmbedding], layout: EngramLayout, token_map: np.ndarray[Any, Any], pad_id: int
    ) -> None:
        self._tables = tables
        self._layout = replace(layout, pad_token_id=pad_id)
        self._token_map = np.append(
            token_map.astype(np.int32), np.int32(-1)
        )  # ids past the vocabulary are in no n-gram
        self._prompts: dict[int, np.ndarray[Any, Any]] = {}
        self._scratch = np.empty(0, np.uint8)

    def add_request(self, index: int, tokens: list[int]) -> None:
        """Take the prompt of the request in slot `index`, in place of the last one there."""
        ids = np.asarray(tokens, np.int64)
        last = len(self._token_map) - 1
        self._prompts[index] = self._token_map[np.where((ids >= 0) & (ids < last), ids, last)]

    def next_rows(self, slots: np.ndarray[Any, Any], ends: np.ndarray[Any, Any], counts: np.ndarray[Any, Any]) -> Any:
        """Rows `[T, columns]` per table of the tokens after this step: for each slot `counts` more from `ends` on."""
        back = self._layout.max_ngram_size - 1
        found: list[list[np.ndarray[Any, Any]]] = [[] for _ in self._tables]
        for slot, end, count in zip(slots.tolist(), ends.tolist(), counts.tolist(), strict=True):
            prompt = self._prompts.get(slot, self._token_map[:0])
            begin = max(end - back, 0)
            tokens = prompt[begin : end + count]
            if end < len(prompt):
                for rows, table in zip(found, self._tables, strict=True):
                    rows.append(self._layout.hash_rows(table.reader.file.layer, tokens)[end - begin :, table._heads])
        return [np.concatenate(rows) if rows else np.empty((0, 0), np.int64) for rows in found]

    def start(self, slots: np.ndarray[Any, Any], ends: np.ndarray[Any, Any], counts: np.ndarray[Any, Any]) -> None:
        """After the last table's lookup of this step, read the rows of the next; hashing is off this thread too."""
        if any(end < len(self._prompts.get(slot, ())) for slot, end in zip(slots.tolist(), ends.tolist(), strict=True)):
            self._tables[-1].after_lookup = partial(self._read, slots.copy(), ends.copy(), counts.copy())

    def _read(self, slots: np.ndarray[Any, Any], ends: np.ndarray[Any, Any], counts: np.ndarray[Any, Any]) -> None:
        for table, rows in zip(self._tables, self.next_rows(slots, ends, counts), strict=True):
            needed = rows.size * table.reader.file.row_bytes
            if self._scratch.nbytes < needed:
                self._scratch = np.empty(needed, np.uint8)
            table.reader.read(rows, self._scratch)
