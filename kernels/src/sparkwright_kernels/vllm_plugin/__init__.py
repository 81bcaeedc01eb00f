# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin: serves EXL3 checkpoints, and Engram tables from files. vLLM finds it by entry point."""

ENGRAM_MODEL = "DeepseekV41ForCausalLM"


def register() -> None:
    """Add quantization method "exl3" and the model with Engram tables in files to vLLM.

    Called in each of its processes; calling it again changes nothing.

    A spawned worker may import the config module before this runs (the pickled VllmConfig names it), so no step here
    may conclude from the state of another that it is done.
    """
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.models.registry import ModelRegistry

    from sparkwright_kernels.vllm_plugin.config import Exl3Config

    register_quantization_config("exl3")(Exl3Config)

    # Lazily: importing the model may start CUDA, which no process may do before it forks.
    if ENGRAM_MODEL in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ENGRAM_MODEL, f"{__name__}.deepseek_v41:{ENGRAM_MODEL}")
