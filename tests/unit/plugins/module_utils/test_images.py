# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils import images

FILES = {"Dockerfile": b"FROM scratch\n", "entrypoint": b"#!/bin/sh\n"}
SETTINGS = {"base": "debian", "architecture": "arm64"}


def test_the_tag_is_12_hex_digits_and_does_not_depend_on_order() -> None:
    tag = images.content_tag(FILES, SETTINGS)
    assert len(tag) == 12 and int(tag, 16) >= 0
    again = images.content_tag(dict(reversed(FILES.items())), dict(reversed(SETTINGS.items())))
    assert again == tag


@pytest.mark.parametrize(
    ("files", "settings"),
    [
        ({**FILES, "entrypoint": b"#!/bin/bash\n"}, SETTINGS),
        ({**FILES, "more": b""}, SETTINGS),
        ({"Dockerfile": FILES["Dockerfile"]}, SETTINGS),
        ({"dockerfile": FILES["Dockerfile"], "entrypoint": FILES["entrypoint"]}, SETTINGS),
        # The same bytes in a row, cut elsewhere.
        ({"Dockerfile": b"FROM scratch", "entrypoint": b"\n#!/bin/sh\n"}, SETTINGS),
        (FILES, {**SETTINGS, "architecture": "amd64"}),
    ],
)
def test_the_tag_changes_with_every_input(files: dict[str, bytes], settings: dict[str, Any]) -> None:
    assert images.content_tag(files, settings) != images.content_tag(FILES, SETTINGS)


def test_identity_survives_save_and_load_into_another_engine(recorded: Callable[[str], str]) -> None:
    here, there = (json.loads(recorded(name))[0] for name in ("image-overlay2", "image-vfs"))
    assert here != there
    assert images.identity(here) == images.identity(there) != ""


def edit(inspect: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    inspect = copy.deepcopy(inspect)
    *parents, last = path.split(".")
    target = inspect
    for name in parents:
        target = target[name]
    target[last] = value
    return inspect


@pytest.mark.parametrize(
    ("path", "value", "same"),
    [
        # D3: another storage driver shows another id, and save and load lose the digests.
        ("Id", "sha256:" + "0" * 64, True),
        ("RepoDigests", ["sparkwright/tiny@sha256:" + "1" * 64], True),
        ("RepoTags", ["other:tag"], True),
        ("Metadata.LastTagTime", "0001-01-01T00:00:00Z", True),
        ("Size", 1, True),
        ("Config.Labels", {"a": "b"}, True),
        ("RootFS.Layers", ["sha256:" + "0" * 64], False),
        ("Architecture", "arm64", False),
        ("Config.Cmd", ["other"], False),
        ("Config.Entrypoint", ["/bin/other"], False),
        ("Config.Env", ["HF_HUB_OFFLINE=0"], False),
    ],
)
def test_what_makes_an_image_another_one(path: str, value: Any, same: bool, recorded: Callable[[str], str]) -> None:
    inspect = json.loads(recorded("image-overlay2"))[0]
    assert (images.identity(edit(inspect, path, value)) == images.identity(inspect)) is same


@pytest.mark.parametrize("key", ["Cmd", "Entrypoint", "Env"])
def test_a_missing_setting_equals_an_empty_one(key: str, recorded: Callable[[str], str]) -> None:
    # Engines differ in whether they write null, an empty list or nothing.
    inspect = json.loads(recorded("image-overlay2"))[0]
    missing = copy.deepcopy(inspect)
    del missing["Config"][key]
    assert images.identity(missing) == images.identity(edit(inspect, f"Config.{key}", None))
    assert images.identity(missing) == images.identity(edit(inspect, f"Config.{key}", []))


def test_an_absent_image_has_no_identity() -> None:
    assert images.identity(None) == images.identity({}) == images.identity(images.first_inspect([])) == ""
