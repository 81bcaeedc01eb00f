"""`generate.py OUT TP MODEL...`: greedy tokens and log probabilities of each model, as JSON in OUT.

The engine runs inside this process (with VLLM_ENABLE_V1_MULTIPROCESSING=0), and so does its worker if TP is 1, so that
the slow start is paid once for all models. For a larger TP the workers are spawned, as in production.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PROMPTS = [[5, 17, 300, 42, 7, 99], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]


def generate(model: str, tp: int) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        enforce_eager=True,
        tensor_parallel_size=tp,
        distributed_executor_backend="mp" if tp > 1 else "uni",
    )
    sampling = SamplingParams(temperature=0, max_tokens=12, logprobs=1, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                step[token].logprob
                for token, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
            ],
        }
        for output in outputs
    ]


def main() -> None:
    out, tp, *models = sys.argv[1:]
    results = {model: generate(model, int(tp)) for model in models}
    with open(out, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
