#!/usr/bin/python
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
module: smoke_chat
author: Sparkwright contributors (@sparkwright)
version_added: 0.1.0
short_description: Ask an endpoint a question whose answer is known
description:
  - Sends one authenticated chat completion and compares the answer; also proves that a request without the key is
    refused. A health URL that answers says nothing about generation.
attributes:
  check_mode:
    description: Skipped in check mode, since the endpoint may not run yet.
    support: none
  diff_mode:
    description: Never changes anything.
    support: none
  idempotent:
    description: Reads only.
    support: full
options:
  url:
    description: Base URL of the API, up to and with C(/v1).
    type: str
    required: true
  model:
    description: Served model name.
    type: str
    required: true
  prompt:
    description: The question.
    type: str
    required: true
  expect:
    description: The whole answer, without surrounding white space.
    type: str
    required: true
  max_tokens:
    description: Most tokens to generate.
    type: int
    default: 32
  key_file:
    description: File with the API key.
    type: path
    required: true
  key_command:
    description: Command that prints the key, for the command line shown to the user.
    type: str
    required: true
  timeout_s:
    description: Seconds to wait for the answer.
    type: int
    default: 120
"""

EXAMPLES = r"""
- name: Ask
  sparkwright.dsv41.smoke_chat:
    url: http://127.0.0.1:8000/v1
    model: arith-exl3
    prompt: What is 17*19? Reply with the integer only.
    expect: "323"
    key_file: /var/lib/sparkwright/secrets/api_key
    key_command: cat /var/lib/sparkwright/secrets/api_key
"""

RETURN = r"""
answer:
  description: What the model said; after a failure what came instead.
  returned: always
  type: str
seconds:
  description: How long the answer took.
  returned: always
  type: float
summary:
  description: Lines for the end of the run.
  returned: success
  type: list
  elements: str
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any, Dict, Optional, Tuple

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkwright.dsv41.plugins.module_utils import openai
from ansible_collections.sparkwright.dsv41.plugins.module_utils.engine import RESTART


def ask(url: str, body: Dict[str, Any], key: Optional[str], timeout: int) -> Tuple[int, str]:
    """HTTP status and text of a POST; status 0 and the reason when there is no answer."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as answer:
            return int(answer.status), answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(4096).decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        return 0, str(error) or type(error).__name__


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "model": {"type": "str", "required": True},
            "prompt": {"type": "str", "required": True},
            "expect": {"type": "str", "required": True},
            "max_tokens": {"type": "int", "default": 32},
            "key_file": {"type": "path", "required": True, "no_log": False},
            "key_command": {"type": "str", "required": True, "no_log": False},
            "timeout_s": {"type": "int", "default": 120},
        },
        supports_check_mode=False,
    )
    params = module.params
    try:
        with open(params["key_file"], encoding="utf-8", errors="replace") as stream:
            key = stream.read().strip()
    except OSError as error:
        module.fail_json(msg=f"cannot read the API key: {error}; repair: {RESTART}")
    if not openai.valid_key(key):
        # Say nothing of the content: it may be a key with something added.
        module.fail_json(msg=f"{params['key_file']} does not hold one API key; repair: remove it, then {RESTART}")
    url = f"{params['url']}/chat/completions"
    body = openai.chat_request(params["model"], params["prompt"], params["max_tokens"])
    # /invocations generates too, and is outside of /v1.
    server = params["url"].removesuffix("/v1")
    paths = {"/v1/chat/completions": url, "/invocations": f"{server}/invocations"}
    refused = {path: ask(place, body, None, params["timeout_s"])[0] for path, place in paths.items()}
    started = time.monotonic()
    status, text = ask(url, body, key, params["timeout_s"])
    seconds = round(time.monotonic() - started, 2)
    problems = openai.problems(refused, status, text, params["expect"])
    if problems:
        # Ranks that run the plan are left alone by --tags engine, and an engine reads its key only when it starts.
        msg = f"{url}: {'; '.join(problems)}; repair: {RESTART}"
        module.fail_json(msg=msg, answer=text[:2000], seconds=seconds)
    answer = openai.answer_text(text).strip()
    curl = openai.curl_command(url, body, params["key_command"])
    question = params["prompt"].split("?")[0].replace("What is ", "")
    summary = f"PASS: {question} = {answer} in {seconds} s from {url} - try it: {curl}"
    module.exit_json(changed=False, answer=answer, seconds=seconds, summary=[summary])


if __name__ == "__main__":
    main()
