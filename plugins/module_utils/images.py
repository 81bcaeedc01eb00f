# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Image names that follow from their inputs, and identity that survives a move between engines."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Dict, List, Mapping, Optional


def content_tag(inputs: Mapping[str, bytes], settings: Mapping[str, Any]) -> str:
    """Tag (12 hex digits) of an image built from files (relative path to content) and build settings."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for path in sorted(inputs):
        digest.update(f"\0{path}\0{len(inputs[path])}\0".encode())
        digest.update(inputs[path])
    return digest.hexdigest()[:12]


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
