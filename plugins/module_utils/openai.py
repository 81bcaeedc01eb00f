# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Requests to an OpenAI endpoint and the judgement of its answer."""

from __future__ import annotations

import json
import shlex
from typing import Any, Dict, List, Mapping


def chat_request(model: str, prompt: str, max_tokens: int) -> Dict[str, Any]:
    """Body of a deterministic chat completion."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }


def answer_text(body: Mapping[str, Any]) -> str:
    """The text of the first choice of a chat completion; ValueError when the body is something else."""
    try:
        text = body["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"no chat completion: {json.dumps(body)[:200]}") from error
    return str(text or "")


def problems(status_without_key: int, status: int, text: str, expected: str) -> List[str]:
    """What is wrong with an endpoint; statuses are HTTP codes, 0 for no answer."""
    found = []
    if status_without_key not in (401, 403):
        found.append(f"a request without the API key was answered with {status_without_key}; needed 401")
    if status != 200:
        found.append(f"the request was answered with {status}: {text[:200]}; needed 200")
    elif text.strip() != expected:
        found.append(f"the answer is {text.strip()[:200]!r}; needed {expected!r}")
    return found


def curl_command(url: str, body: Mapping[str, Any], key_command: str) -> str:
    """A command line that asks the same; the key is read when it runs and stands in no argument here."""
    return (
        f'curl -s {url} -H "Authorization: Bearer $({key_command})" '
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )
