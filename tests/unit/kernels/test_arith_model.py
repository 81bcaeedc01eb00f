"""The decoder on a real packed model: a whole Llama forward in NumPy that multiplies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import deserialize
from sparkwright_kernels.exl3.checkpoint import read_checkpoint
from sparkwright_kernels.exl3.decode import PackedLinear

Array = np.ndarray[Any, Any]


def load(file: Path) -> dict[str, Array]:
    """All tensors of a file, bf16 ones as fp32 (NumPy has no bf16: it is the upper half of an fp32)."""
    dtypes = {"BF16": np.uint16, "F16": np.float16, "I16": np.int16, "I32": np.int32}
    tensors = {}
    for name, entry in deserialize(file.read_bytes()):
        array = np.frombuffer(entry["data"], dtype=dtypes[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = (array.astype(np.uint32) << 16).view(np.float32) if entry["dtype"] == "BF16" else array
    return tensors


class Llama:
    """Just enough of the architecture for the arithmetic model, in fp32."""

    def __init__(self, model: Path) -> None:
        self.config = json.loads((model / "config.json").read_text())
        self.vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
        tensors = load(model / "model.safetensors")
        self.weights = {name.removesuffix(".weight"): t for name, t in tensors.items() if name.endswith(".weight")}
        for name in read_checkpoint(model).modules:
            parts = {n[len(name) + 1 :]: t for n, t in tensors.items() if n.startswith(f"{name}.")}
            self.weights[name] = PackedLinear.from_tensors(name, parts).weight(np.float32)

    def logits(self, tokens: list[int]) -> Array:
        """Logits after the last of `tokens`."""
        heads, size = self.config["num_attention_heads"], self.config["head_dim"]
        count = len(tokens)
        angle = np.arange(count)[:, None] * 10000.0 ** (-np.arange(0, size, 2) / size)
        cos, sin = np.tile(np.cos(angle), 2)[:, None], np.tile(np.sin(angle), 2)[:, None]
        mask = np.triu(np.full((count, count), -np.inf), 1)

        def rotate(x: Array) -> Array:
            turned = np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], axis=-1)
            return x * cos + turned * sin

        x = self.weights["model.embed_tokens"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            p = f"model.layers.{layer}."
            h = self.norm(x, p + "input_layernorm")
            q, k, v = ((h @ self.weights[f"{p}self_attn.{n}_proj"]).reshape(count, heads, size) for n in "qkv")
            scores = np.einsum("qhd,khd->hqk", rotate(q), rotate(k)) / np.sqrt(size) + mask
            share = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = np.einsum("hqk,khd->qhd", share / share.sum(-1, keepdims=True), v)
            x = x + mixed.reshape(count, -1) @ self.weights[p + "self_attn.o_proj"]
            h = self.norm(x, p + "post_attention_layernorm")
            gate = h @ self.weights[p + "mlp.gate_proj"]
            gated = gate / (1 + np.exp(-gate)) * (h @ self.weights[p + "mlp.up_proj"])
            x = x + gated @ self.weights[p + "mlp.down_proj"]
        return np.asarray(self.norm(x[-1], "model.norm") @ self.weights["lm_head"])

    def norm(self, x: Array, name: str) -> Array:
        return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * self.weights[name])

    def answer(self, question: str) -> str:
        """The greedy answer, up to the end token."""
        tokens = [self.vocabulary[t] for t in ("<bos>", "<|user|>", *question, "<|assistant|>")]
        text = ""
        names = {index: name for name, index in self.vocabulary.items()}
        for _ in range(6):
            token = int(self.logits(tokens).argmax())
            if token == self.config["eos_token_id"]:
                break
            tokens.append(token)
            text += names[token]
        return text


@pytest.fixture(scope="module")
def llama() -> Llama:
    return Llama(Path(__file__).parents[2] / "fixtures" / "models" / "arith-exl3-3bpw")


@pytest.mark.parametrize(("a", "b"), [(17, 19), (17, 23), (99, 98), (7, 8)])
def test_the_decoded_model_multiplies(llama: Llama, a: int, b: int) -> None:
    assert llama.answer(f"What is {a}*{b}? Reply with the integer only.") == str(a * b)
