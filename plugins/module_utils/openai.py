# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Requests to an OpenAI endpoint and the judgement of its answer."""

from __future__ import annotations

import json
import re
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


def valid_key(key: str) -> bool:
    """Whether a key can stand in a header: one word of printable ASCII."""
    return re.fullmatch(r"[!-~]+", key) is not None


def answer_text(body: str) -> str:
    """The text of the first choice of a chat completion; ValueError when the body is something else."""
    try:
        text = json.loads(body)["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"no chat completion: {body[:200]}") from error
    return str(text or "")


def problems(status_without_key: int, status: int, body: str, expected: str) -> List[str]:
    """What is wrong with an endpoint; statuses are HTTP codes, 0 for no answer (then `body` is the reason)."""
    found = []
    if status_without_key not in (401, 403) and (status_without_key, status) != (0, 0):
        seen = f"was answered with {status_without_key}" if status_without_key else "got no answer"
        found.append(f"a request without the API key {seen}; needed 401")
    if status == 0:
        found.append(f"no answer: {body[:200]}")
    elif status != 200:
        found.append(f"the request was answered with {status}: {body[:200]}; needed 200")
    else:
        try:
            text = answer_text(body).strip()
        except ValueError as error:
            found.append(f"the answer is {error}")
        else:
            if text != expected:
                found.append(f"the answer is {text[:200]!r}; needed {expected!r}")
    return found


def curl_command(url: str, body: Mapping[str, Any], key_command: str) -> str:
    """A command line that asks the same; the key is read when it runs and stands in no argument here."""
    return (
        f'curl -s {url} -H "Authorization: Bearer $({key_command})" '
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )
