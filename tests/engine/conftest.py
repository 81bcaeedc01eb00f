"""Settings for the engine on a small CPU-only machine, and where the fixtures are.

These tests need vLLM for CPU with the plugin installed: run `python -m pytest tests/engine` in the engine image.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Before vLLM is imported, and inherited by every process it starts. No C++ compiler is needed without TorchDynamo.
os.environ.update(
    GLOO_SOCKET_IFNAME="lo",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TORCHDYNAMO_DISABLE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_NO_USAGE_STATS="1",
)
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The fixtures directory; SPARKWRIGHT_FIXTURES overrides it where only the tests are mounted."""
    return Path(os.environ.get("SPARKWRIGHT_FIXTURES", Path(__file__).parents[1] / "fixtures"))
