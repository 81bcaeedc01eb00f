"""The real packed model answers through the engine as users start it: spawned workers, chat template, tokenizer."""

from __future__ import annotations

from pathlib import Path

PRODUCTS = {(17, 19): "323", (17, 23): "391", (99, 98): "9702"}


def test_the_packed_model_multiplies(fixtures: Path) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(fixtures / "models" / "arith-exl3-3bpw"),
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
    )
    questions = [[{"role": "user", "content": f"What is {a}*{b}? Reply with the integer only."}] for a, b in PRODUCTS]
    outputs = llm.chat(questions, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    assert [output.outputs[0].text for output in outputs] == list(PRODUCTS.values())
