"""Reading and checking safetensors headers, and the command line on top of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sparkwright_kernels
from kernels_support import packed
from sparkwright_kernels.exl3.check import main
from sparkwright_kernels.exl3.checkpoint import read_checkpoint, scan_checkpoint
from sparkwright_kernels.exl3.layout import Exl3FormatError, Exl3Module

Make = Callable[..., Path]
DENSE = {"weight": np.zeros((4, 4), np.float32)}


def check(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any], list[str]]:
    """Run the command line; return its exit status, its JSON and its lines on standard error."""
    status = main(list(argv))
    out, err = capsys.readouterr()
    return status, json.loads(out), err.splitlines()


def test_the_arithmetic_model(arith: Path) -> None:
    checkpoint = read_checkpoint(arith)
    assert len(checkpoint.modules) == 43
    assert checkpoint.k_histogram == {"3": 42, "6": 1}
    assert checkpoint.codebooks == {"mul1": 43}
    assert checkpoint.modules["lm_head"] == Exl3Module("lm_head", 256, 256, 6.0, "mul1")
    assert checkpoint.modules["model.layers.5.mlp.down_proj"].in_features == 768
    assert "model.embed_tokens" not in checkpoint.modules


def test_k_and_codebook_are_per_module(make_model: Make) -> None:
    files = {
        "a.safetensors": {"m.q_proj": packed(128, 128, 2.5), "m.k_proj": packed(128, 128, 4, "mcg"), "m.norm": DENSE},
        "b.safetensors": {"m.v_proj": packed(128, 256, 4, None)},
    }
    index = {f"{m}.{s}": file for file, modules in files.items() for m, parts in modules.items() for s in parts}
    checkpoint = read_checkpoint(make_model(files, index=index))
    assert {m.name: (m.bits, m.codebook) for m in checkpoint.modules.values()} == {
        "m.q_proj": (2.5, "mul1"),
        "m.k_proj": (4.0, "mcg"),
        "m.v_proj": (4.0, "3inst"),
    }
    assert checkpoint.k_histogram == {"2.5": 1, "4": 2}
    assert checkpoint.codebooks == {"3inst": 1, "mcg": 1, "mul1": 1}


def test_a_module_may_be_spread_over_files(make_model: Make) -> None:
    parts = packed(128, 128, 3)
    suh = {"suh": parts.pop("suh")}
    assert "m" in read_checkpoint(make_model({"a.safetensors": {"m": parts}, "b.safetensors": {"m": suh}})).modules


@pytest.mark.parametrize("cut", [1, 20_000])
def test_a_truncated_file_is_named_with_both_sizes(make_model: Make, cut: int) -> None:
    model = make_model({"model.safetensors": {"m": packed(256, 256, 3)}})
    file = model / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - cut)
    with pytest.raises(Exl3FormatError) as error:
        read_checkpoint(model)
    assert str(error.value) == f"model.safetensors: found {size - cut} bytes, needed {size} bytes, as its header says"
    assert error.value.id == "truncated-file"


@pytest.mark.parametrize(
    ("content", "id", "found"),
    [
        (b"", "truncated-file", "0 bytes"),
        (b"\x40\0\0\0\0\0\0\0{", "truncated-file", "9 bytes"),
        (b"\x02\0\0\0\0\0\0\0{}x", "bad-header", "11 bytes"),
        (b"\x02\0\0\0\0\0\0\0[]", "bad-header", "does not parse"),
        (b"\xff" * 16, "bad-header", "header length"),
        (b'\x1e\0\0\0\0\0\0\0{"a": {"dtype": 1, "shape": 2}}'[:38], "bad-header", "does not parse"),
    ],
)
def test_a_file_that_is_no_safetensors_file(tmp_path: Path, content: bytes, id: str, found: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    [error] = scan_checkpoint(tmp_path).errors
    assert error.id == id and found in error.found


def header_file(path: Path, entries: str, data: int) -> None:
    path.write_bytes(len(entries).to_bytes(8, "little") + entries.encode() + bytes(data))


@pytest.mark.parametrize(
    ("entries", "data", "found"),
    [
        ('{"a":{"dtype":"F16","shape":[2],"data_offsets":[0,2]}}', 2, "2 bytes"),
        ('{"a":{"dtype":"F16","shape":[2],"data_offsets":[2,6]}}', 6, "bytes 2 to 6"),
        ('{"a":{"dtype":"F16","shape":[1],"data_offsets":[0,2]},"a":{}}', 2, "listed twice"),
    ],
)
def test_a_header_that_contradicts_itself(tmp_path: Path, entries: str, data: int, found: str) -> None:
    header_file(tmp_path / "model.safetensors", entries, data)
    assert found in str(scan_checkpoint(tmp_path).errors[0])


def test_an_index_that_names_a_missing_file(make_model: Make) -> None:
    model = make_model({"a.safetensors": {"m": packed(128, 128, 3)}}, index={"m.suh": "a.safetensors", "x": "b.st"})
    [error] = scan_checkpoint(model).errors
    assert (error.id, error.tensor, error.file) == ("missing-file", "b.st", "b.st")


def test_an_index_that_does_not_match_its_files(make_model: Make) -> None:
    model = make_model({"a.safetensors": {"m": packed(128, 128, 3)}}, index={"m.gone": "a.safetensors"})
    [error] = scan_checkpoint(model).errors
    assert (error.id, error.tensor) == ("missing-tensor", "m.gone")
    (model / "model.safetensors.index.json").write_text("[]")
    assert [error.id for error in scan_checkpoint(model).errors] == ["bad-index"]


def test_a_tensor_in_two_files(make_model: Make) -> None:
    model = make_model({"a.safetensors": {"m": packed(128, 128, 3)}, "b.safetensors": {"m": packed(128, 128, 3)}})
    errors = scan_checkpoint(model).errors
    assert {error.id for error in errors} == {"duplicate-tensor"} and len(errors) == 4
    assert "both a.safetensors and b.safetensors" in errors[0].found


def test_no_model_directory(tmp_path: Path) -> None:
    for directory, found in ((tmp_path, "no *.safetensors file"), (tmp_path / "nowhere", "no such directory")):
        with pytest.raises(Exl3FormatError) as error:
            read_checkpoint(directory)
        assert found in error.value.found


def test_the_command_accepts_a_good_model(arith: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tp in ("1", "2"):
        status, report, lines = check(capsys, str(arith), "--tp", tp)
        assert (status, lines) == (0, [])
        assert report == {
            "model": str(arith),
            "tp": int(tp),
            "modules": 43,
            "k_histogram": {"3": 42, "6": 1},
            "codebooks": {"mul1": 43},
            "findings": [],
        }


def test_the_command_refuses_a_cut_inside_a_block(arith: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report, lines = check(capsys, str(arith), "--tp", "4")
    assert status == 1 and len(lines) == len(report["findings"])
    by_tensor = {finding["tensor"]: finding for finding in report["findings"]}
    # 256 features over 4 ranks: every projection that is cut at 64, except the 768 in features of down_proj at 192
    assert {name.split(".")[-2] for name in by_tensor} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head",
    }  # fmt: skip
    assert by_tensor["model.layers.0.mlp.down_proj.trellis"] == {
        "id": "tp-split",
        "tensor": "model.layers.0.mlp.down_proj.trellis",
        "file": "model.safetensors",
        "found": "768 features over tp 4 = 192 each",
        "needed": "a multiple of 128 each: tp one of 1, 2, 3, 6",
    }


def test_the_command_reports_everything_at_once(make_model: Make, capsys: pytest.CaptureFixture[str]) -> None:
    nine_bits = packed(128, 128, 8)
    nine_bits["trellis"] = np.zeros((8, 8, 144), np.int16)
    no_suh = packed(128, 128, 3)
    del no_suh["suh"]
    files = {
        "a.safetensors": {"model.layers.0.mlp.up_proj": nine_bits, "model.layers.0.mlp.gate_proj": no_suh},
        "b.safetensors": {"model.layers.0.self_attn.o_proj": packed(384, 128, 3), "model.norm": DENSE},
    }
    index = {f"{m}.{s}": file for file, modules in files.items() for m, parts in modules.items() for s in parts}
    model = make_model(files, index={**index, "lm_head.trellis": "c.safetensors"})
    os.truncate(model / "b.safetensors", (model / "b.safetensors").stat().st_size - 7)
    status, report, lines = check(capsys, str(model), "--tp", "2")
    assert status == 1 and report["modules"] == 1
    assert {(finding["id"], finding["tensor"], finding["file"]) for finding in report["findings"]} == {
        ("truncated-file", "b.safetensors", "b.safetensors"),
        ("missing-file", "c.safetensors", "c.safetensors"),
        ("impossible-k", "model.layers.0.mlp.up_proj.trellis", "a.safetensors"),
        ("missing-suh", "model.layers.0.mlp.gate_proj.suh", "a.safetensors"),
        ("tp-split", "model.layers.0.self_attn.o_proj.trellis", "b.safetensors"),
    }
    assert len(lines) == 5
    assert any("found K = 144/16 = 9 with codebook mul1, needed K one of 1, 1.5" in line for line in lines)


def test_which_projections_are_cut(make_model: Make, capsys: pytest.CaptureFixture[str]) -> None:
    names = {
        "layers.0.attn.wq_a": False,
        "layers.0.attn.wkv": False,
        "layers.0.attn.wo_a.slice.0": False,
        "layers.0.attn.indexer.wq_b": False,
        "layers.0.attn.wq_b": True,
        "layers.0.attn.wo_b": True,
        "layers.1.engram.wkv": True,
        "layers.0.ffn.experts.17.w1": True,
        "layers.0.ffn.experts.17.w2": True,
        "layers.0.ffn.shared_experts.w3": True,
        "model.layers.0.self_attn.q_b_proj": True,
        "model.layers.0.self_attn.kv_b_proj": True,
        "model.layers.0.self_attn.q_a_proj": False,
        "model.layers.0.self_attn.kv_a_proj_with_mqa": False,
        "head": True,
    }
    model = make_model({"model.safetensors": {name: packed(128, 128, 3) for name in names}})
    _, report, _ = check(capsys, str(model), "--tp", "2")
    refused = {finding["tensor"].removesuffix(".trellis") for finding in report["findings"]}
    assert refused == {name for name, is_cut in names.items() if is_cut}


def test_heads_and_vocabulary_come_from_the_config(make_model: Make, capsys: pytest.CaptureFixture[str]) -> None:
    modules = {"model.layers.0.self_attn.k_proj": packed(128, 128, 3), "lm_head": packed(128, 512, 3)}
    model = make_model({"model.safetensors": modules}, config={"num_key_value_heads": 1, "vocab_size": 500})
    assert check(capsys, str(model), "--tp", "2")[0] == 0  # one head on both ranks; 500 becomes 512
    (model / "config.json").write_text(json.dumps({"text_config": {"num_key_value_heads": 2, "vocab_size": 448}}))
    status, report, _ = check(capsys, str(model), "--tp", "2")
    assert status == 1
    assert {finding["found"] for finding in report["findings"]} == {
        "128 features over tp 2 = 64 each",
        "448 features over tp 2 = 224 each",
    }


def test_a_native_model_is_not_an_exl3_one(make_model: Make, capsys: pytest.CaptureFixture[str]) -> None:
    status, report, _ = check(capsys, str(make_model({"model.safetensors": {"model.norm": DENSE}})))
    assert status == 1 and [finding["id"] for finding in report["findings"]] == ["not-exl3"]


def test_a_tp_below_one_is_a_usage_error(arith: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(arith), "--tp", "0"])
    assert stop.value.code == 2


def test_the_command_needs_the_standard_library_only(arith: Path) -> None:
    source = str(Path(sparkwright_kernels.__file__).parents[1])
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from sparkwright_kernels.exl3.check import main; "
        "status = main([sys.argv[2]]); "
        "sys.exit(status or 3 * bool({'numpy', 'safetensors', 'torch', 'vllm'} & sys.modules.keys()))"
    )
    # -S -I: no site-packages to import from
    subprocess.run([sys.executable, "-I", "-S", "-c", code, source, str(arith)], check=True, capture_output=True)
