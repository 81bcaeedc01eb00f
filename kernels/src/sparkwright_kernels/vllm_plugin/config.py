# SPDX-License-Identifier: Apache-2.0
"""Exl3Config: which modules of the checkpoint are packed, and which method serves each vLLM layer."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from sparkwright_kernels import __version__
from sparkwright_kernels.exl3.checkpoint import read_checkpoint
from sparkwright_kernels.exl3.layout import Exl3FormatError, Exl3Module
from sparkwright_kernels.vllm_plugin.linear import Exl3LinearMethod
from sparkwright_kernels.vllm_plugin.moe import Exl3MoEMethod

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own name only

# What vLLM's model classes fuse without always saying so in packed_modules_mapping (Qwen3-MoE's dense MLP does not).
FUSED_PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class Exl3Config(QuantizationConfig):
    """Quantization config of an EXL3 checkpoint.

    `modules` maps a packed module's name, as the vLLM model spells it, to how it is stored. It comes from the
    safetensors headers, never from `bits` in config.json (an average over layers of different K).
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: dict[str, Exl3Module] = {}
        self.summary = "no checkpoint read"

    def __repr__(self) -> str:
        # the version is here because vLLM's compile cache does not know of this package's code
        return f"Exl3Config(sparkwright-kernels {__version__}: {self.summary})"

    def get_name(self) -> str:
        return "exl3"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quantization_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Exl3Config:
        """Make an empty config; vLLM calls `maybe_update_config` next. Raises ValueError on a platform but CPU."""
        if not current_platform.is_cpu():
            found, version = current_platform.device_name, __version__
            raise ValueError(f"sparkwright-kernels {version}: found platform {found}, needed cpu (no GPU kernels yet)")
        return cls()

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read the headers in directory `model_name`; raise Exl3FormatError for anything wrong with the files."""
        checkpoint = read_checkpoint(model_name)
        self.modules = checkpoint.modules
        counts = f"modules by K {checkpoint.k_histogram}, by codebook {checkpoint.codebooks}"
        self.summary = f"{len(self.modules)} packed modules, {counts}"
        logger.info_once("EXL3 (sparkwright-kernels %s): %s", __version__, self.summary)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename `modules` the way the model renames the checkpoint's tensors."""
        # mappers match tensor names: some of their patterns end in "." or need a suffix
        suffix = ".trellis"
        renamed = hf_to_vllm_mapper.apply_dict({name + suffix: module for name, module in self.modules.items()})
        self.modules = {name.removesuffix(suffix): module for name, module in renamed.items()}

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method for `layer`: EXL3 if all its parts are packed, vLLM's own if none; raise if some are."""
        if isinstance(layer, RoutedExperts):
            projections = (layer.ckpt_gate_proj_name, layer.ckpt_down_proj_name, layer.ckpt_up_proj_name)
            experts = range(layer.moe_config.num_logical_experts)
            parts = self._packed_parts(prefix, [f"{prefix}.{expert}.{p}" for expert in experts for p in projections])
            return Exl3MoEMethod(layer.moe_config, parts) if parts else None
        if isinstance(layer, ParallelLMHead):
            parts = self._packed_parts(prefix, [prefix])
            return Exl3LinearMethod(parts) if parts else None
        if isinstance(layer, LinearBase):
            parts = self._packed_parts(prefix, self._part_names(prefix))
            return Exl3LinearMethod(parts) if parts else UnquantizedLinearMethod()
        return None

    def _part_names(self, prefix: str) -> list[str]:
        parent, dot, leaf = prefix.rpartition(".")
        names = {**FUSED_PARTS, **self.packed_modules_mapping}.get(leaf, [leaf])
        return [parent + dot + name for name in names]

    def _packed_parts(self, layer_name: str, part_names: list[str]) -> list[Exl3Module]:
        """The stored parts of a layer, in order; none if the layer is native. Raises Exl3FormatError if mixed."""
        if part_names != [layer_name] and layer_name in self.modules:
            needed = f"its parts {', '.join(part_names[:3])} stored one by one"
            raise Exl3FormatError("fused-on-disk", layer_name, "one fused packed tensor", needed)
        packed = [self.modules[name] for name in part_names if name in self.modules]
        if packed and len(packed) != len(part_names):
            native = [name for name in part_names if name not in self.modules]
            found = f"{len(packed)} packed parts beside native ones ({', '.join(native[:3])})"
            raise Exl3FormatError("mixed-parts", layer_name, found, "all parts packed, or none")
        return packed
