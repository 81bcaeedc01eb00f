# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Image names that follow from their inputs, and identity that survives a move between engines."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Dict, List, Mapping, Optional, Tuple

_PINNED = re.compile(r"[a-z0-9][\w./:-]*@sha256:[0-9a-f]{64}", re.ASCII)


def content_tag(inputs: Mapping[str, bytes], settings: Mapping[str, Any]) -> str:
    """Tag (12 hex digits) of an image built from files (relative path to content) and build settings."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for path in sorted(inputs):
        digest.update(f"\0{path}\0{len(inputs[path])}\0".encode())
        digest.update(inputs[path])
    return digest.hexdigest()[:12]


def published(name: str, entry: Mapping[str, Any], stated: str) -> Tuple[str, List[str]]:
    """The reference of an image of somebody else, by digest, and what is wrong with it.

    `entry` is that of images.lock.yml, `stated` what the cluster says of it, which wins.
    """
    reference = stated or (f"{entry['published']}@{entry['digest']}" if entry.get("digest") else "")
    if _PINNED.fullmatch(reference):
        return reference, []
    found = f"is {reference!r}" if reference else entry.get("unpinned", "is pinned by nobody")
    needed = f"needed {entry.get('published') or 'NAME'}@sha256:DIGEST in spark_images"
    return "", [f"image {name} {found}; {needed}"]


def identity(inspect: Optional[Mapping[str, Any]]) -> str:
    """What makes two copies of an image the same one: layers, architecture, command, entrypoint and environment.

    `.Id` differs between storage drivers and repository digests are lost by save and load, so neither takes part.
    Returns "" for an image that is not there.
    """
    if not inspect:
        return ""
    config = inspect.get("Config") or {}
    parts: Dict[str, Any] = {
        "layers": (inspect.get("RootFS") or {}).get("Layers") or [],
        "architecture": inspect.get("Architecture"),
        "config": {key: config.get(key) or [] for key in ("Cmd", "Entrypoint", "Env")},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def first_inspect(images: List[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The one image of a `docker image inspect` answer, or an empty mapping."""
    return images[0] if images else {}
