# SPDX-License-Identifier: Apache-2.0
"""EXL3 for vLLM's routed experts, on CPU: decoded to dense at load, then one small matmul per expert in use."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter
from torch.nn.functional import linear, silu
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from sparkwright_kernels.exl3.layout import Exl3Module
from sparkwright_kernels.vllm_plugin.linear import PartCollector, register_placeholders, remove_placeholders

_SHARDS = ("w1", "w2", "w3")  # vLLM's names for gate, down and up projection


class Exl3MoEMethod(FusedMoEMethodBase):
    """Serves one layer's routed experts; `parts` holds gate, down and up projection of expert 0, then of 1, and so on.

    Each may have its own K and codebook. Tensor parallelism cuts the intermediate features; the caller sums the ranks.
    """

    def __init__(self, moe: Any, parts: list[Exl3Module]) -> None:
        super().__init__(moe)
        self.parts = parts
        self.collectors: dict[tuple[int, str], PartCollector] = {}

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Plan the split; raise Exl3FormatError if it cannot be, ValueError for a layer this does not serve."""
        self._refuse_unserved(layer)
        self.hidden, self.intermediate = hidden_size, intermediate_size_per_partition
        tp, rank = self.moe.tp_size, self.moe.tp_rank
        whole = intermediate_size_per_partition * tp
        for position, module in enumerate(self.parts):
            expert, shard = divmod(position, len(_SHARDS))
            self.collectors[expert, _SHARDS[shard]] = (
                PartCollector(module, "row", whole, hidden_size, tp, rank)
                if _SHARDS[shard] == "w2"
                else PartCollector(module, "column", hidden_size, whole, tp, rank)
            )

        def load(
            suffix: str,
            param: Parameter,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            self.collectors[expert_id, shard_id].load(suffix, loaded_weight)
            return True if return_success else None

        register_placeholders(layer, "w13_", load)
        register_placeholders(layer, "w2_", load)

    def _refuse_unserved(self, layer: torch.nn.Module) -> None:
        limits = {
            "expert parallelism": (layer.use_ep, False),
            "activation": (layer.activation, MoEActivation.SILU),
            "expert biases": (self.moe.has_bias, False),
            "SwiGLU limit": (layer.swiglu_limit, None),
            "router weight on the input": (layer.apply_router_weight_on_input, False),
        }
        for what, (found, needed) in limits.items():
            if found != needed:
                raise ValueError(f"{layer.layer_name}: EXL3 experts: {what}: found {found}, needed {needed}")

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        return None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Decode into fp32 `layer.w13_weight` `[experts, 2 * intermediate, hidden]` (gate first) and `layer.w2_weight`
        `[experts, hidden, intermediate]`, of this rank's intermediate features."""
        remove_placeholders(layer, "w13_")
        remove_placeholders(layer, "w2_")
        experts = range(len(self.parts) // len(_SHARDS))
        gate_up, down = (self.hidden, self.intermediate), (self.intermediate, self.hidden)
        w13 = [torch.cat([self.collectors[e, shard].decode(*gate_up) for shard in ("w1", "w3")]) for e in experts]
        w2 = [self.collectors[e, "w2"].decode(*down) for e in experts]
        layer.register_parameter("w13_weight", Parameter(torch.stack(w13), requires_grad=False))
        layer.register_parameter("w2_weight", Parameter(torch.stack(w2), requires_grad=False))
        self.collectors.clear()

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Weighted sum over each token's experts: x `[tokens, hidden]`, topk `[tokens, k]`; the result is x's shape and
        dtype. vLLM runs shared experts itself."""
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in topk_ids.unique().tolist():
            token, choice = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = linear(x[token].float(), layer.w13_weight[expert]).chunk(2, dim=-1)
            y = linear(silu(gate) * up, layer.w2_weight[expert])
            out.index_add_(0, token, y * topk_weights[token, choice].float()[:, None])
        return out.to(x.dtype)
