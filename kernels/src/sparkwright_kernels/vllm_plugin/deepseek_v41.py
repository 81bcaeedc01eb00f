# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1 with its n-gram tables in files: vLLM's model, made while the table's class is swapped.

Registered over vLLM's own by `register`; without `sparkwright_engram` in `--additional-config` it does the same.
"""

from __future__ import annotations

from typing import Any

from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState
from vllm.models.deepseek_v41.nvidia.vl_model import DeepseekV41ForCausalLM as Upstream

from sparkwright_kernels.vllm_plugin.engram import EngramFiles, FileEngramEmbedding, ReadAhead, file_backed


class EngramModelState(DeepseekV41ModelState):
    """vLLM's, which also tells the read-ahead what will be computed next."""

    _ahead: ReadAhead | None = None

    def __init__(self, vllm_config: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, model, *args, **kwargs)
        tables = [module for module in model.modules() if isinstance(module, FileEngramEmbedding)]
        if tables:
            hashes = model.language_model.model.engram_hash
            self._ahead = ReadAhead(tables, model.engram_files.layout, hashes.token_map.cpu().numpy(), hashes.pad_id)

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)
        if self._ahead:
            self._ahead.add_request(req_index, new_req_data.prefill_token_ids or [])

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        if self._ahead:
            count = input_batch.num_reqs
            scheduled = input_batch.num_scheduled_tokens[:count]
            ends = input_batch.num_computed_tokens_np[:count] + scheduled
            self._ahead.start(input_batch.idx_mapping_np[:count], ends, scheduled)
        inputs: dict[str, Any] = super().prepare_inputs(input_batch, req_states)
        return inputs


class DeepseekV41ForCausalLM(Upstream):
    """vLLM's class of that name, its Engram tables read from the files that the configuration names, if it does."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config.to_dict()
        files = EngramFiles.from_config(vllm_config.additional_config, config)
        with file_backed(files):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.engram_files = files

    @staticmethod
    def get_model_state_cls() -> type[EngramModelState]:
        return EngramModelState
