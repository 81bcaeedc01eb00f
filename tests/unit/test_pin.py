# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""playbooks/pin.yml against a real hub: what it prints can be pasted, and answers the question."""

from __future__ import annotations

import json
from pathlib import Path

import ansible_cli
import pytest
from hub import Hub, Rule


def test_commits_of_what_nobody_pins(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = {
        "tiny": {"repo": "acme/tiny", "revision": ""},
        "gone": {"repo": "acme/gone", "revision": ""},
        "pinned": {"repo": "acme/other", "revision": "a" * 40},
    }
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", "hf_averysecrettoken")
    hub.faults(Rule("acme/gone", "status", status=401))
    done = ansible_cli.run("playbook", "playbooks/pin.yml", "-vvv", "-e", json.dumps({"pin_catalog": catalog}))
    assert done.returncode == 0, done.stdout
    assert f"tiny: {hub.commit('acme/tiny')}" in done.stdout
    assert "# gone: acme/gone answers 401" in done.stdout
    assert hub.requests(match="other") == []
    assert all(request["token"] for request in hub.requests())
    assert "hf_averysecrettoken" not in done.stdout


def test_every_catalog_entry_is_a_repository() -> None:
    text = Path(ansible_cli.ROOT / "roles/recipe/files/weights.yml").read_text()
    assert text.count("repo: ") == text.count("revision: ") == text.count("include: ")
