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


def problems(without_key: Mapping[str, int], status: int, body: str, expected: str) -> List[str]:
    """What is wrong with an endpoint; statuses are HTTP codes, 0 for no answer (then `body` is the reason).

    `without_key` maps paths that were asked without the API key to their status.
    """
    found = []
    for path, refused in without_key.items():
        if refused not in (401, 403) and (refused, status) != (0, 0):
            seen = f"was answered with {refused}" if refused else "got no answer"
            found.append(f"a request to {path} without the API key {seen}; needed 401")
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
    """A command line that asks the same; the key goes through a pipe and stands in no argument."""
    return (
        f"{key_command} | sed 's/^/Authorization: Bearer /' | "
        f"curl -s {url} -H @- -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )
