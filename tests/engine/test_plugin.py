"""The plugin's seams: registration, refusals, and what happens to shards that are narrower than stored."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sparkwright_kernels import __version__
from sparkwright_kernels.exl3.decode import PackedLinear
from sparkwright_kernels.exl3.layout import Exl3FormatError, Exl3Module
from sparkwright_kernels.vllm_plugin import register
from sparkwright_kernels.vllm_plugin.config import Exl3Config
from sparkwright_kernels.vllm_plugin.linear import Exl3LinearMethod, PartCollector
from vllm import LLM
from vllm.model_executor.layers.linear import ColumnParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from vllm.model_executor.models.utils import WeightsMapper


def test_registering_twice_is_harmless() -> None:
    # the config module is imported above: as in a spawned worker, before register() ran
    for _ in range(2):
        register()
        assert QUANTIZATION_METHODS.count("exl3") == 1
        assert get_quantization_config("exl3") is Exl3Config


def test_vllm_finds_the_plugin_once() -> None:
    found = [point for point in entry_points(group="vllm.general_plugins") if point.value.startswith("sparkwright")]
    assert [point.load() for point in found] == [register]


@pytest.fixture
def config(fixtures: Path) -> Exl3Config:
    config = Exl3Config.from_config({"quant_method": "exl3", "bits": 9.75})
    config.maybe_update_config(str(fixtures / "models" / "arith-exl3-3bpw"))
    return config


def test_the_config_reads_the_files_and_not_bits(config: Exl3Config) -> None:
    assert config.modules["lm_head"].bits == 6
    text = repr(config)
    assert __version__ in text and "{'3': 42, '6': 1}" in text and "{'mul1': 43}" in text


def test_names_follow_the_models_renaming(config: Exl3Config) -> None:
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.": "language_model.model."}))
    assert "language_model.model.layers.0.self_attn.q_proj" in config.modules
    assert "lm_head" in config.modules and len(config.modules) == 43


def method(config: Exl3Config, prefix: str) -> Any:
    layer = ColumnParallelLinear.__new__(ColumnParallelLinear)  # only its type is looked at
    return config.get_quant_method(layer, prefix)


def test_fused_layers_take_their_parts_in_order(config: Exl3Config) -> None:
    parts = method(config, "model.layers.0.self_attn.qkv_proj").parts
    assert [part.name.rpartition(".")[2] for part in parts] == ["q_proj", "k_proj", "v_proj"]
    config.packed_modules_mapping = {"both": ["up_proj", "gate_proj"]}
    parts = method(config, "model.layers.0.mlp.both").parts
    assert [part.name.rpartition(".")[2] for part in parts] == ["up_proj", "gate_proj"]


def test_native_layers_stay_vllms_own(config: Exl3Config) -> None:
    assert isinstance(method(config, "model.layers.9.self_attn.qkv_proj"), UnquantizedLinearMethod)
    assert isinstance(method(config, "model.layers.0.self_attn.qkv_proj"), Exl3LinearMethod)


def test_packed_and_native_parts_in_one_layer_are_refused(config: Exl3Config) -> None:
    del config.modules["model.layers.0.self_attn.k_proj"]
    with pytest.raises(Exl3FormatError) as error:
        method(config, "model.layers.0.self_attn.qkv_proj")
    assert str(error.value) == (
        "model.layers.0.self_attn.qkv_proj: found 2 packed parts beside native ones "
        "(model.layers.0.self_attn.k_proj), needed all parts packed, or none"
    )


def test_a_layer_fused_on_disk_is_refused(config: Exl3Config) -> None:
    config.modules["m.qkv_proj"] = Exl3Module("m.qkv_proj", 128, 384, 3.0, "mul1")
    with pytest.raises(Exl3FormatError, match=r"m\.qkv_proj: found one fused packed tensor, needed its parts"):
        method(config, "m.qkv_proj")


def random_layer(in_features: int, out_features: int) -> tuple[Exl3Module, dict[str, torch.Tensor], torch.Tensor]:
    rng = np.random.default_rng(0)
    shape = (in_features // 16, out_features // 16, 48)
    arrays = {
        "trellis": rng.integers(-(1 << 15), 1 << 15, size=shape).astype(np.int16),
        "suh": rng.normal(size=in_features).astype(np.float16),
        "svh": rng.normal(size=out_features).astype(np.float16),
    }
    layer = PackedLinear.from_tensors("m", arrays)
    dense = torch.from_numpy(layer.weight(np.float32).T.copy())
    return layer.module, {suffix: torch.from_numpy(array) for suffix, array in arrays.items()}, dense


def collect(collector: PartCollector, tensors: dict[str, torch.Tensor]) -> PartCollector:
    for suffix, tensor in tensors.items():
        collector.load(suffix, tensor)
    return collector


def test_storage_padding_is_dropped() -> None:
    module, tensors, dense = random_layer(256, 384)
    decoded = collect(PartCollector(module, "column", 200, 300), tensors).decode(200, 300)
    torch.testing.assert_close(decoded, dense[:300, :200])
    assert decoded.dtype == torch.float32


def test_a_vocabulary_padded_beyond_storage_gets_zero_rows() -> None:
    module, tensors, dense = random_layer(128, 384)
    for rank in (0, 1):
        collector = PartCollector(module, "column", 128, 300, tp=2, rank=rank, padded_out=512)
        decoded = collect(collector, tensors).decode(128, 256)
        rows = dense[256 * rank : 256 * rank + 256]
        torch.testing.assert_close(decoded[: len(rows)], rows)
        assert not decoded[len(rows) :].any()


def test_a_layer_of_another_size_is_refused() -> None:
    module, _, _ = random_layer(256, 384)
    with pytest.raises(Exl3FormatError, match=r"m\.trellis: found \(256, 384\) .*, needed \(256, 256\)"):
        PartCollector(module, "column", 256, 256)


def test_a_cut_inside_a_block_is_refused() -> None:
    module, _, _ = random_layer(256, 384)
    with pytest.raises(Exl3FormatError, match=r"m\.trellis: found 384 features over tp 2 = 192 each, needed .* 1, 3"):
        PartCollector(module, "column", 256, 384, tp=2)


def test_a_tensor_that_never_came_is_named() -> None:
    module, tensors, _ = random_layer(128, 128)
    del tensors["svh"]
    with pytest.raises(Exl3FormatError, match=r"m\.svh: found no svh and no sv"):
        collect(PartCollector(module, "row", 128, 128), tensors).decode(128, 128)


def _truncate(model: Path) -> str:
    size = (model / "model.safetensors").stat().st_size
    os.truncate(model / "model.safetensors", size - 1000)
    return f"model.safetensors: found {size - 1000} bytes, needed {size} bytes, as its header says"


def _point_elsewhere(model: Path) -> str:
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.trellis": "gone.safetensors"}}')
    return (
        "gone.safetensors: found no readable file (No such file or directory), needed the file in the model directory"
    )


@pytest.mark.parametrize("harm", [_truncate, _point_elsewhere])
def test_a_damaged_checkpoint_is_a_clear_error_to_the_user(
    harm: Callable[[Path], str], fixtures: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(fixtures / "models" / "arith-exl3-3bpw", model)
    message = harm(model)
    # raised before any weight is read and any process is started
    with pytest.raises(ValueError, match=re.escape(message)):
        LLM(model=str(model), enforce_eager=True, max_model_len=128)
