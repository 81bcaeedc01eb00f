# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin: serves EXL3 checkpoints. vLLM finds it by entry point; nothing of vLLM is patched."""


def register() -> None:
    """Add quantization method "exl3" to vLLM. Called in each of its processes; calling it again changes nothing.

    A spawned worker may import the config module before this runs (the pickled VllmConfig names it), so no step here
    may conclude from the state of another that it is done.
    """
    from vllm.model_executor.layers.quantization import register_quantization_config

    from sparkwright_kernels.vllm_plugin.config import Exl3Config

    register_quantization_config("exl3")(Exl3Config)
