# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils import openai


def completion(content: Any) -> str:
    """A body as vLLM sends it, shortened to what a client reads."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    return json.dumps({"id": "chatcmpl-1", "object": "chat.completion", "model": "m", "choices": [choice]})


REFUSED = '{"error":"Unauthorized"}'
HTML = "<html><body>It works!</body></html>"


def test_the_request_is_deterministic() -> None:
    body = openai.chat_request("m", "What is 17*19?", 8)
    assert body["temperature"] == 0
    assert (body["model"], body["max_tokens"]) == ("m", 8)
    assert body["messages"] == [{"role": "user", "content": "What is 17*19?"}]


@pytest.mark.parametrize(
    ("without_key", "status", "body", "expected"),
    [
        (401, 200, completion("323"), []),
        (403, 200, completion(" 323\n"), []),
        (401, 200, completion("324"), ["the answer is '324'; needed '323'"]),
        (401, 200, completion("3230"), ["the answer is '3230'; needed '323'"]),
        (401, 200, completion("It is 323"), ["the answer is 'It is 323'; needed '323'"]),
        (401, 200, completion(""), ["the answer is ''; needed '323'"]),
        (401, 200, completion(None), ["the answer is ''; needed '323'"]),
        (401, 200, HTML, [f"the answer is no chat completion: {HTML}"]),
        (401, 200, "[]", ["the answer is no chat completion: []"]),
        (401, 200, '{"choices": []}', ['the answer is no chat completion: {"choices": []}']),
        (401, 200, "323", ["the answer is no chat completion: 323"]),
        (401, 200, "", ["the answer is no chat completion: "]),
        (401, 401, REFUSED, [f"the request was answered with 401: {REFUSED}; needed 200"]),
        (401, 500, "Internal Server Error", ["the request was answered with 500: Internal Server Error; needed 200"]),
        (401, 0, "timed out", ["no answer: timed out"]),
        (0, 0, "Connection refused", ["no answer: Connection refused"]),
        # C3, C4: the key must be needed, whatever the answer is.
        (200, 200, completion("323"), ["a request to /v1 without the API key was answered with 200; needed 401"]),
        (404, 200, completion("323"), ["a request to /v1 without the API key was answered with 404; needed 401"]),
        (0, 200, completion("323"), ["a request to /v1 without the API key got no answer; needed 401"]),
        (
            200,
            0,
            "timed out",
            ["a request to /v1 without the API key was answered with 200; needed 401", "no answer: timed out"],
        ),
    ],
)
def test_problems(without_key: int, status: int, body: str, expected: list[str]) -> None:
    assert openai.problems({"/v1": without_key}, status, body, "323") == expected


def test_every_open_path_is_named() -> None:
    found = openai.problems({"/v1": 401, "/invocations": 200}, 200, completion("323"), "323")
    assert found == ["a request to /invocations without the API key was answered with 200; needed 401"]


def test_a_long_answer_is_cut() -> None:
    (problem,) = openai.problems({"/v1": 401}, 500, "x" * 100_000, "323")
    assert len(problem) < 300


@pytest.mark.parametrize(
    ("key", "valid"),
    [
        ("sk-abc123", True),
        ("", False),
        ("a b", False),
        ("a\nb", False),
        ("a\rb", False),
        ("ké", False),
        ("\ufffd", False),
    ],
)
def test_valid_key(key: str, valid: bool) -> None:
    assert openai.valid_key(key) is valid


def test_the_command_line_reads_the_key_when_it_runs() -> None:
    body = openai.chat_request("m", "What's 17*19?", 8)
    command = openai.curl_command("http://h:1/v1/chat/completions", body, "cat /key")
    assert command.startswith("cat /key | ") and " -H @- " in command
    words = shlex.split(command)
    assert json.loads(words[-1]) == body
