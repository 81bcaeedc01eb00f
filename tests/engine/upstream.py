# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's own Engram module: the installed one, or its source file alone where vLLM cannot be installed.

The file needs torch and Triton; the rest of vLLM it imports is stood in for here: one rank, no data parallelism, no
graph breaks. Kernels and classes are vLLM's.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

NAME = "vllm.models.deepseek_v41.common.engram"


class _Anything:
    """Stands for a class or function that is imported and not used."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("a part of vLLM that this stand-in does not have")


class _Linear(torch.nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def _set_weight_attrs(weight: torch.Tensor, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(weight, name, value)


def load(max_tokens: int) -> ModuleType:
    """The installed vLLM's module, or else the file that SPARKWRIGHT_VLLM_ENGRAM names; ImportError if neither is."""
    path = os.environ.get("SPARKWRIGHT_VLLM_ENGRAM")
    return load_file(Path(path), max_tokens) if path else importlib.import_module(NAME)


def load_file(path: Path, max_tokens: int = 8192, cpu_offload: bool = True) -> ModuleType:
    """Load vLLM's `models/deepseek_v41/common/engram.py`, as module `NAME`, without vLLM."""
    import triton
    import triton.language as tl

    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_tokens),
        engram_config=SimpleNamespace(cpu_offload=cpu_offload, dp_shared_memory=False, use_thp=False),
        additional_config={},
    )
    platform = SimpleNamespace(
        is_cuda=lambda: True, is_rocm=lambda: False, is_device_capability_family=lambda *_: False
    )
    names: dict[str, Any] = {
        "eager_break_during_capture": lambda function: function,
        "get_current_vllm_config": lambda: config,
        "get_engram_dp_group": lambda: None,
        "get_engram_dp_size": lambda: 1,
        "get_tensor_model_parallel_rank": lambda: 0,
        "get_tensor_model_parallel_world_size": lambda: 1,
        "is_forward_context_available": lambda: False,
        "init_logger": logging.getLogger,
        "set_weight_attrs": _set_weight_attrs,
        "current_platform": platform,
        "triton": triton,
        "tl": tl,
        "is_uva_available": lambda: True,
        "get_accelerator_view_from_cpu_tensor": lambda tensor: tensor,  # Triton reads pinned memory as it is
        "ColumnParallelLinear": _Linear,
    }

    class StandIn(ModuleType):
        __path__: list[str] = []

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return names.get(name, _Anything)

    modules = [
        "vllm", "vllm.compilation.breakable_cudagraph", "vllm.config", "vllm.distributed", "vllm.forward_context",
        "vllm.distributed.device_communicators.shm_broadcast", "vllm.distributed.parallel_state", "vllm.logger",
        "vllm.model_executor.layers.fusion.quant_activation", "vllm.model_executor.layers.linear",
        "vllm.model_executor.layers.quantization.utils.quant_utils", "vllm.model_executor.utils",
        "vllm.models.deepseek_v41.common.ops.query_quant", "vllm.platforms", "vllm.triton_utils",
        "vllm.utils.platform_utils", "vllm.utils.torch_utils",
    ]  # fmt: skip
    for module in modules:
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), StandIn(".".join(parts[:end])))
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec and spec.loader, path
    loaded = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    # `from vllm.models.deepseek_v41.common import engram` finds it too
    sys.modules[NAME.rpartition(".")[0]].engram = loaded  # type: ignore[attr-defined]
    return loaded
