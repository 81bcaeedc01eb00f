# SPDX-License-Identifier: Apache-2.0
"""EXL3 for vLLM's linear layers (column, row, merged, QKV, replicated) and for ParallelLMHead.

On CPU: a rank's tensors are collected while vLLM streams the weights, decoded once to a dense fp32 matrix, and `apply`
is one fp32 matmul.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.utils import set_weight_attrs

from sparkwright_kernels.exl3.decode import PackedLinear
from sparkwright_kernels.exl3.layout import Exl3FormatError, Exl3Module, pad
from sparkwright_kernels.exl3.shards import Kind, slices, split

_QKV_PARTS = {"q": 0, "k": 1, "v": 2}
_DTYPES = {
    "trellis": torch.int16,
    "suh": torch.float16,
    "svh": torch.float16,
    "su": torch.int16,
    "sv": torch.int16,
    "mcg": torch.int32,
    "mul1": torch.int32,
}


class PartCollector:
    """Gathers this rank's slices of one packed module while the weights stream by, and decodes them.

    `kind` says which dimension is cut; this rank owns the `rank`-th of `tp` equal parts. The layer is `in_features` x
    `out_features` before the cut, its out features padded by the engine to `padded_out` if that is given (the
    vocabulary). Raises Exl3FormatError if that is not how it is stored or if it cannot be cut so.
    """

    def __init__(
        self,
        module: Exl3Module,
        kind: Kind,
        in_features: int,
        out_features: int,
        tp: int = 1,
        rank: int = 0,
        padded_out: int | None = None,
    ) -> None:
        tensor = f"{module.name}.trellis"
        if (module.in_features, module.out_features) != (pad(in_features), pad(out_features)):
            found, needed = (module.in_features, module.out_features), (pad(in_features), pad(out_features))
            raise Exl3FormatError("shape", tensor, f"{found} in and out features", f"{needed}")
        start, stop = split(tensor, in_features if kind == "row" else padded_out or out_features, tp, rank)
        self._module = module
        self._slices = slices(kind, start, stop)  # a slice past the end of what is stored is cut short by itself
        self._tensors: dict[str, torch.Tensor] = {}

    def load(self, suffix: str, tensor: torch.Tensor) -> None:
        """Take this rank's part of `NAME.suffix`; a copy, so that the checkpoint's mapping can go."""
        self._tensors[suffix] = tensor[self._slices.get(suffix, ...)].clone()

    def decode(self, in_features: int, out_features: int) -> torch.Tensor:
        """Return the dense shard, fp32 `[out_features, in_features]`, storage padding dropped and missing rows zero.

        Raises Exl3FormatError if a tensor never came or does not fit the others.
        """
        arrays = {suffix: tensor.numpy() for suffix, tensor in self._tensors.items()}
        self._tensors.clear()
        dense = torch.zeros(out_features, in_features, dtype=torch.float32)  # the default dtype is the model's here
        weight = PackedLinear.from_tensors(self._module.name, arrays).weight(np.float32).T[:out_features, :in_features]
        dense[: weight.shape[0]] = torch.from_numpy(weight)
        return dense


def register_placeholders(layer: torch.nn.Module, prefix: str, load: Any) -> None:
    """Give `layer` an empty parameter per packed tensor, `prefix` + suffix, whose weight_loader is `load(suffix, ...)`.

    vLLM hands the checkpoint's tensors, whole, to the weight_loader of the parameter of that name.
    """
    for suffix, dtype in _DTYPES.items():
        parameter = Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        set_weight_attrs(parameter, {"weight_loader": partial(load, suffix)})
        layer.register_parameter(prefix + suffix, parameter)


def remove_placeholders(layer: torch.nn.Module, prefix: str) -> None:
    for suffix in _DTYPES:
        delattr(layer, prefix + suffix)


class Exl3LinearMethod(LinearMethodBase):
    """Serves one vLLM linear layer made of `parts`, in output order; each part may have its own K and codebook."""

    def __init__(self, parts: list[Exl3Module]) -> None:
        self.parts = parts
        self.collectors: list[PartCollector] = []

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        if len(self.parts) != len(output_partition_sizes):
            found = f"{len(self.parts)} stored parts"
            raise Exl3FormatError("parts", self.parts[0].name, found, f"{len(output_partition_sizes)} output parts")
        self.in_features, self.out_features = input_size_per_partition, output_partition_sizes
        for index, (module, size) in enumerate(zip(self.parts, output_partition_sizes, strict=True)):
            kind: Kind = "column"
            tp, rank = layer.tp_size, layer.tp_rank
            if isinstance(layer, ReplicatedLinear):
                kind, tp, rank = "replicated", 1, 0
            elif isinstance(layer, RowParallelLinear):
                kind = "row"
            elif isinstance(layer, QKVParallelLinear) and index > 0:
                # with fewer key-value heads than ranks, neighbouring ranks hold the same head
                tp, rank = tp // layer.num_kv_head_replicas, rank // layer.num_kv_head_replicas
            padded_out = size * tp if kind == "column" else size
            out_features = layer.org_vocab_size if isinstance(layer, ParallelLMHead) else padded_out
            self.collectors.append(PartCollector(module, kind, input_size, out_features, tp, rank, padded_out))

        def load(suffix: str, parameter: Parameter, weight: torch.Tensor, shard_id: Any = None) -> None:
            index = 0 if shard_id is None else _QKV_PARTS.get(shard_id, shard_id)
            self.collectors[index].load(suffix, weight)

        register_placeholders(layer, "", load)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Decode the collected parts into `layer.weight`, fp32 `[sum of this rank's out features, in features]`."""
        remove_placeholders(layer, "")
        sizes = zip(self.collectors, self.out_features, strict=True)
        weight = torch.cat([collector.decode(self.in_features, size) for collector, size in sizes])
        layer.register_parameter("weight", Parameter(weight, requires_grad=False))
        self.collectors.clear()

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """y = x @ W^T + bias in fp32, for x `[..., in]`; y `[..., out]` in x's dtype."""
        y = torch.nn.functional.linear(x.float(), layer.weight, None if bias is None else bias.float())
        return y.to(x.dtype)

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        name = self.parts[0].name
        raise Exl3FormatError("tied-head", name, "a packed head and tie_word_embeddings true", "one of the two")
