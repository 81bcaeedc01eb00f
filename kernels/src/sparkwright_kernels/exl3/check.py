# SPDX-License-Identifier: Apache-2.0
"""`sparkwright-exl3-check MODEL_DIR --tp N`: tell, from headers alone, whether a model can be served at that tp.

All findings at once: JSON on standard output, one line each on standard error; exit status 1 if there are any. Only the
standard library is imported, so that it answers at once and runs on a node without the engine's environment.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparkwright_kernels.exl3.checkpoint import Checkpoint, scan_checkpoint
from sparkwright_kernels.exl3.layout import Exl3FormatError, Exl3Module
from sparkwright_kernels.exl3.shards import split

# How engines split the projections of llama-like and DeepSeek models, by the end of the module's name. First match
# wins; a name that matches none is replicated. "kv" is a column split over at most as many ranks as there are key-value
# heads, "vocab" one over the vocabulary rounded up to 64.
SPLITS = (
    ("vocab", re.compile(r"(^|\.)(lm_head|head)$")),
    ("replicated", re.compile(r"\.(indexer|compressor)\.\w+$")),
    ("kv", re.compile(r"\.(k_proj|v_proj)$")),
    ("column", re.compile(r"\.(q_proj|gate_proj|up_proj|q_b_proj|kv_b_proj|w1|w3|wq_b|engram\.wkv)$")),
    ("row", re.compile(r"\.(o_proj|down_proj|w2|wo_b)$")),
)
_VOCAB_PADDING = 64


def tp_findings(checkpoint: Checkpoint, config: dict[str, Any], tp: int) -> Iterator[Exl3FormatError]:
    """Yield one error per packed module that cannot be split over `tp` ranks; `config` is the model's config.json."""
    config = {**config, **(config.get("text_config") or {})}
    for module in checkpoint.modules.values():
        features, parts = _split_of(module, config, tp)
        tensor = f"{module.name}.trellis"
        try:
            split(tensor, features, parts)
        except Exl3FormatError as error:
            yield Exl3FormatError(error.id, tensor, error.found, error.needed, checkpoint.tensors[tensor].file)


def _split_of(module: Exl3Module, config: dict[str, Any], tp: int) -> tuple[int, int]:
    kind = next((kind for kind, pattern in SPLITS if pattern.search(module.name)), "replicated")
    if kind == "vocab":
        return -(-config.get("vocab_size", module.out_features) // _VOCAB_PADDING) * _VOCAB_PADDING, tp
    if kind == "kv":
        return module.out_features, min(tp, config.get("num_key_value_heads") or tp)
    if kind == "row":
        return module.in_features, tp
    return module.out_features, tp if kind == "column" else 1


def _read_config(model_dir: Path) -> dict[str, Any]:
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}  # for the engine to report; here heads and vocabulary are then taken as stored
    return config if isinstance(config, dict) else {}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sparkwright-exl3-check", description="Check an EXL3 checkpoint's headers for a tensor-parallel size."
    )
    parser.add_argument("model_dir", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size (default 1)")
    args = parser.parse_args(argv)
    if args.tp < 1:
        parser.error(f"--tp: found {args.tp}, needed 1 or more")

    checkpoint = scan_checkpoint(args.model_dir)
    findings = [*checkpoint.errors, *tp_findings(checkpoint, _read_config(args.model_dir), args.tp)]
    if not findings and not checkpoint.modules:
        findings = [Exl3FormatError("not-exl3", str(args.model_dir), "no packed module", "at least one *.trellis")]
    report = {
        "model": str(args.model_dir),
        "tp": args.tp,
        "modules": len(checkpoint.modules),
        "k_histogram": checkpoint.k_histogram,
        "codebooks": checkpoint.codebooks,
        "findings": [
            {"id": f.id, "tensor": f.tensor, "file": f.file, "found": f.found, "needed": f.needed} for f in findings
        ],
    }
    print(json.dumps(report, indent=2))
    for finding in findings:
        print(f"{finding.id}: {finding}", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
