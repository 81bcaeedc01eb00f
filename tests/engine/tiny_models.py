"""Small random models, each written twice: packed as EXL3, and dense with the weights the packed one stands for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from sparkwright_kernels.exl3.decode import PackedLinear

HIDDEN, LAYERS, VOCAB = 256, 2, 500  # the engine pads the vocabulary to 512; so does the packed head
MARKERS = {"mul1": 0x83DCD12D - (1 << 32), "mcg": 0xCBAC1FED - (1 << 32)}
QUANTIZATION = {"quant_method": "exl3", "version": "1.6.5", "bits": 3.0, "head_bits": 6, "codebook": "mul1"}
COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Of different K inside one fused layer, and half rates, which exist for the mul1 codebook only.
BITS = {"q": 3, "k": 4, "v": 5, "o": 2, "gate": 3, "up": 2.5, "down": 3.5}


class Twins:
    """Collects the tensors of a packed model and of its dense twin."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.packed: dict[str, torch.Tensor] = {}
        self.dense: dict[str, torch.Tensor] = {}

    def native(self, name: str, *shape: int, scale: float = 1.0) -> None:
        tensor = torch.from_numpy(self.rng.normal(size=shape).astype(np.float32) * np.float32(scale))
        self.packed[name], self.dense[name] = tensor, tensor.clone()

    def ones(self, name: str, size: int) -> None:
        self.packed[name], self.dense[name] = torch.ones(size), torch.ones(size)

    def linear(
        self, name: str, k: int, n: int, bits: float, codebook: str, bias: bool = False, old: bool = False
    ) -> None:
        """A packed layer `name`, k to n features; `old` stores signs only, as the first EXL3 files did."""
        bits = bits if codebook == "mul1" else int(bits)
        stored = -(-n // 128) * 128
        rng = self.rng
        words = rng.integers(-(1 << 15), 1 << 15, size=(k // 16, stored // 16, int(16 * bits))).astype(np.int16)
        # scaled so that the layer keeps the size of its input
        suh = rng.choice([-1, 1], k) * rng.uniform(0.8, 1.2, k) * k**-0.5 / (1.0 if codebook == "mul1" else 1.24)
        parts: dict[str, Any] = {"trellis": words, "suh": suh.astype(np.float16)}
        if old:
            parts["sv"] = rng.integers(-(1 << 15), 1 << 15, size=stored // 16).astype(np.int16)
        else:
            parts["svh"] = (rng.choice([-1, 1], stored) * rng.uniform(0.8, 1.2, stored)).astype(np.float16)
        if codebook in MARKERS:
            parts[codebook] = np.array(MARKERS[codebook], dtype=np.int32)
        weight = PackedLinear.from_tensors(name, parts).weight()[:, :n].T
        self.packed.update({f"{name}.{suffix}": torch.from_numpy(array) for suffix, array in parts.items()})
        self.dense[f"{name}.weight"] = torch.from_numpy(weight.astype(np.float32)).contiguous()
        if bias:
            self.native(f"{name}.bias", n, scale=0.5)

    def mlp(self, name: str, codebook: str, bits: dict[str, float] = BITS, bias: bool = False) -> None:
        for projection, k, n in (("gate", HIDDEN, 256), ("up", HIDDEN, 256), ("down", 256, HIDDEN)):
            self.linear(f"{name}.{projection}_proj", k, n, bits[projection], codebook, bias)

    def write(self, directory: Path, config: dict[str, Any]) -> tuple[Path, Path]:
        """Write `directory`-exl3 (several files and an index) and `directory`-dense; return both."""
        packed, dense = (directory.with_name(f"{directory.name}-{kind}") for kind in ("exl3", "dense"))
        for path in (packed, dense):
            path.mkdir()
        (packed / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}))
        (dense / "config.json").write_text(json.dumps(config))
        save_file(self.dense, dense / "model.safetensors")
        files = {name: f"model-{index % 2 + 1}.safetensors" for index, name in enumerate(sorted(self.packed))}
        for file in sorted(set(files.values())):
            save_file({n: t for n, t in self.packed.items() if files[n] == file}, packed / file)
        (packed / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
        return packed, dense


def _layers(twins: Twins, kv_features: int, bias: bool = False, qk_norm: int = 0) -> Iterator[tuple[str, str]]:
    """Write everything but the MLPs; yield each layer's MLP name and codebook."""
    twins.native("model.embed_tokens.weight", VOCAB, HIDDEN)
    twins.ones("model.norm.weight", HIDDEN)
    twins.linear("lm_head", HIDDEN, VOCAB, 6, "mul1")
    for layer, codebook in enumerate(("mul1", "mcg")):
        name = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            twins.ones(f"{name}.{norm}.weight", HIDDEN)
        for projection, features in (("q", HIDDEN), ("k", kv_features), ("v", kv_features), ("o", HIDDEN)):
            # the last codebook needs no marker
            book = "3inst" if (layer, projection) == (1, "v") else codebook
            twins.linear(f"{name}.self_attn.{projection}_proj", HIDDEN, features, BITS[projection], book, bias)
        if qk_norm:
            for norm in ("q_norm", "k_norm"):
                twins.ones(f"{name}.self_attn.{norm}.weight", qk_norm)
        yield f"{name}.mlp", codebook


def qwen3(directory: Path) -> tuple[Path, Path]:
    """Dense MLPs; one projection left native, one in the older sign form."""
    twins = Twins(1)
    for mlp, codebook in _layers(twins, kv_features=256, qk_norm=64):
        twins.mlp(mlp, codebook)
    twins.linear("model.layers.0.self_attn.o_proj", HIDDEN, HIDDEN, 4, "3inst", old=True)
    for suffix in ("svh", "mul1"):
        del twins.packed[f"model.layers.0.self_attn.o_proj.{suffix}"]
    for suffix in ("trellis", "suh", "svh", "mcg"):
        del twins.packed[f"model.layers.1.mlp.down_proj.{suffix}"]
    twins.native("model.layers.1.mlp.down_proj.weight", HIDDEN, 256, scale=1 / 16)
    return twins.write(directory, {**COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})


def qwen3_moe(directory: Path) -> tuple[Path, Path]:
    """A dense MLP in layer 0, four experts in layer 1, each projection of its own K and codebook."""
    twins = Twins(2)
    for mlp, codebook in _layers(twins, kv_features=256, qk_norm=64):
        if mlp == "model.layers.0.mlp":
            twins.mlp(mlp, codebook)
            continue
        twins.native(f"{mlp}.gate.weight", 4, HIDDEN, scale=HIDDEN**-0.5)
        for expert, book in enumerate(("mul1", "mcg", "3inst", "mul1")):
            twins.mlp(f"{mlp}.experts.{expert}", book, {"gate": 2 + expert, "up": 5 - expert, "down": 3.5})
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
    sparse = {"decoder_sparse_step": 1, "mlp_only_layers": [0]}
    names = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    return twins.write(directory, {**COMMON, **moe, **sparse, **names})


def llama_with_biases(directory: Path) -> tuple[Path, Path]:
    """Biases everywhere, those of row-parallel layers included, and one key-value head for all ranks."""
    twins = Twins(3)
    for mlp, codebook in _layers(twins, kv_features=128, bias=True):
        twins.mlp(mlp, codebook, bias=True)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
    biases = {"attention_bias": True, "mlp_bias": True}
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return twins.write(directory, {**COMMON, **heads, **biases, **names})
