# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""torch operators that gather packed Engram rows and dequantize them, on CPU and CUDA, and under torch.compile.

A packed row is 264 bytes: 256 weights in fp8 e4m3fn, then one e8m0 exponent for each 32 of them. Out come 256 bf16,
bit for bit what vLLM's own lookup kernel writes: weight times the float whose exponent field is the exponent's byte (so
0 is 0.0 and 255 infinity), rounded to nearest even; every NaN is 0x7FFF.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sparkwright_kernels.engram.errors import EngramError, raise_all
from sparkwright_kernels.engram.gather_native import load

DIM = 256
SCALE_BLOCK = 32
ROW_BYTES = DIM + DIM // SCALE_BLOCK
DTYPES = ("F8_E4M3", "F8_E8M0")
"""What weights and scales are, in safetensors' words. Bytes alone do not say: another fp8 reads as fluent nonsense."""

_NAN = 0x7FFF
_ALIGNMENT = 8  # bytes; what one load of the kernel takes


@dataclass(frozen=True)
class PackedRows:
    """Rows in memory, and what their bytes are, as the file's header or the checkpoint declares it.

    `data`: uint8, `[n, 264]` or, for pages of rows, `[pages, rows a page, 264]`; rows and pages may be any distance
    apart. Row i of a paged tensor is row i mod (rows a page) of page i div (rows a page).
    """

    data: torch.Tensor
    weights: str
    scales: str


def gather(rows: PackedRows, index: torch.Tensor | None = None) -> torch.Tensor:
    """Return bf16 `[*index.shape, 256]`: row index[i], zeros for -1; without an index, every row, `[n, 256]`.

    `index`: int32 or int64, contiguous. On CUDA rows and index may also be in pinned host memory. An index outside
    -1..n-1 raises IndexError on CPU and gives a row of NaN on CUDA, which cannot raise. Raises EngramError for tensors
    that do not fit.
    """
    out: torch.Tensor = torch.ops.sparkwright.engram_gather(rows.data, index, rows.weights, rows.scales)
    return out


def gather_into(out: torch.Tensor, rows: PackedRows, index: torch.Tensor | None = None, max_blocks: int = 0) -> None:
    """As `gather`, into `out`, contiguous and aligned to 16 bytes. Allocates nothing and may be captured in a graph.

    `max_blocks` limits the thread blocks on CUDA, to leave multiprocessors to other work; 0: no limit.
    """
    torch.ops.sparkwright.engram_gather_out(rows.data, index, rows.weights, rows.scales, out, max_blocks)


def _shape(rows: torch.Tensor, index: torch.Tensor | None) -> list[int]:
    return [rows.shape[:-1].numel(), DIM] if index is None else [*index.shape, DIM]


def _check(rows: torch.Tensor, index: torch.Tensor | None, declared: tuple[str, str], out: torch.Tensor | None) -> None:
    errors = []

    def need(good: bool, subject: str, found: object, needed: str) -> None:
        if not good:
            errors.append(EngramError(f"Engram gather: {subject}", str(found), needed))

    need(declared == DTYPES, "declared dtypes of weights and scales", declared, " and ".join(DTYPES))
    need(rows.dtype == torch.uint8, "rows", rows.dtype, "torch.uint8")
    shape = tuple(rows.shape)
    if rows.ndim not in (2, 3) or shape[-1] != ROW_BYTES or 0 in shape[1:-1]:
        need(False, "rows", f"shape {shape}", f"[n, {ROW_BYTES}] or [pages, rows a page, {ROW_BYTES}]")
    elif rows.stride(-1) != 1:
        need(False, "rows", f"strides {rows.stride()}", "the bytes of a row side by side")
    if index is not None:
        need(index.dtype in (torch.int32, torch.int64), "index", index.dtype, "torch.int32 or torch.int64")
        need(index.is_contiguous(), "index", f"strides {index.stride()}", "a contiguous tensor")
    if out is not None:
        need(out.dtype == torch.bfloat16, "out", out.dtype, "torch.bfloat16")
        need(list(out.shape) == _shape(rows, index), "out", f"shape {tuple(out.shape)}", f"{_shape(rows, index)}")
        need(out.is_contiguous(), "out", f"strides {out.stride()}", "a contiguous tensor")
    raise_all(errors)


def _dequantize(packed: torch.Tensor) -> torch.Tensor:
    """uint8 `[..., 264]` to bf16 `[..., 256]`."""
    values = packed[..., :DIM].view(torch.float8_e4m3fn).float().unflatten(-1, (-1, SCALE_BLOCK))
    scales = (packed[..., DIM:].int() << 23).view(torch.float32)
    product = (values * scales.unsqueeze(-1)).flatten(-2)
    bits = product.bfloat16().view(torch.int16)
    return bits.masked_fill_(product.isnan(), _NAN).view(torch.bfloat16)


def _gather_cpu(rows: torch.Tensor, index: torch.Tensor | None, weights: str, scales: str) -> torch.Tensor:
    _check(rows, index, (weights, scales), None)
    count = rows.shape[:-1].numel()
    if index is None:
        return _dequantize(rows).reshape(count, DIM)
    least, most = (int(index.min()), int(index.max())) if index.numel() else (-1, -1)
    if least < -1 or most >= count:
        raise IndexError(f"Engram gather: found index {least} to {most}, needed -1 to {count - 1}")
    if not count:
        return torch.zeros(_shape(rows, index), dtype=torch.bfloat16)
    at = index.long().clamp(min=0)
    packed = rows[at] if rows.ndim == 2 else rows[at // rows.shape[1], at % rows.shape[1]]
    return _dequantize(packed).masked_fill_((index == -1).unsqueeze(-1), 0)


def _gather_out_cpu(
    rows: torch.Tensor, index: torch.Tensor | None, weights: str, scales: str, out: torch.Tensor, max_blocks: int = 0
) -> None:
    _check(rows, index, (weights, scales), out)
    out.copy_(_gather_cpu(rows, index, weights, scales))


def _readable(lib: Any, name: str, tensor: torch.Tensor, device: torch.device) -> int:
    """The address at which `device` reads `tensor`."""
    if tensor.device == device:
        return int(tensor.data_ptr())
    address = int(lib.sparkwright_device_pointer(tensor.data_ptr())) if tensor.device.type == "cpu" else 0
    if not address and tensor.numel():
        found = "pageable host memory" if tensor.device.type == "cpu" else str(tensor.device)
        raise EngramError(f"Engram gather: {name}", found, f"{device} or pinned host memory")
    return address


def _gather_out_cuda(
    rows: torch.Tensor, index: torch.Tensor | None, weights: str, scales: str, out: torch.Tensor, max_blocks: int = 0
) -> None:
    _check(rows, index, (weights, scales), out)
    if not out.is_cuda:
        raise EngramError("Engram gather: out", str(out.device), "a CUDA device, as the other tensors")
    lib = load()
    group, stride, row_stride = (1, rows.stride(0), 0) if rows.ndim == 2 else (rows.shape[1], *rows.stride()[:2])
    with torch.cuda.device(out.device):
        base = _readable(lib, "rows", rows, out.device)
        at = 0 if index is None else _readable(lib, "index", index, out.device)
        if any(number % _ALIGNMENT for number in (base, stride, row_stride)) or out.data_ptr() % 16:
            found = f"rows at {base:#x}, {rows.stride()} bytes apart, out at {out.data_ptr():#x}"
            raise EngramError("Engram gather: alignment", found, f"rows on multiples of {_ALIGNMENT}, out of 16 bytes")
        error = lib.sparkwright_gather(
            base,
            rows.shape[:-1].numel(),
            group,
            stride,
            row_stride,
            at,
            0 if index is None else index.element_size(),
            out.numel() // DIM,
            out.data_ptr(),
            max_blocks,
            torch.cuda.current_stream().cuda_stream,
        )
    if error:
        raise RuntimeError(f"Engram gather: CUDA error {error}: {lib.sparkwright_cuda_error(error).decode()}")


def _gather_cuda(rows: torch.Tensor, index: torch.Tensor | None, weights: str, scales: str) -> torch.Tensor:
    device = rows.device if index is None or not index.is_cuda else index.device
    _check(rows, index, (weights, scales), None)
    out = torch.empty(_shape(rows, index), dtype=torch.bfloat16, device=device)
    _gather_out_cuda(rows, index, weights, scales, out)
    return out


def _gather_fake(rows: torch.Tensor, index: torch.Tensor | None, weights: str, scales: str) -> torch.Tensor:
    _check(rows, index, (weights, scales), None)
    device = rows.device if index is None or not index.is_cuda else index.device
    return torch.empty(_shape(rows, index), dtype=torch.bfloat16, device=device)


def _gather_out_fake(
    rows: torch.Tensor, index: torch.Tensor | None, weights: str, scales: str, out: torch.Tensor, max_blocks: int = 0
) -> None:
    _check(rows, index, (weights, scales), out)


_IMPLEMENTATIONS = {
    "engram_gather(Tensor rows, Tensor? index, str weights, str scales) -> Tensor": (
        _gather_cpu,
        _gather_cuda,
        _gather_fake,
    ),
    "engram_gather_out(Tensor rows, Tensor? index, str weights, str scales, Tensor(a!) out, int max_blocks=0) -> ()": (
        _gather_out_cpu,
        _gather_out_cuda,
        _gather_out_fake,
    ),
}
for _schema, (_cpu, _cuda, _fake) in _IMPLEMENTATIONS.items():
    _name = f"sparkwright::{_schema.partition('(')[0]}"
    torch.library.define(_name, _schema.partition(_name.partition("::")[2])[2])
    torch.library.impl(_name, "cpu")(_cpu)
    torch.library.impl(_name, "cuda")(_cuda)
    torch.library.register_fake(_name)(_fake)
