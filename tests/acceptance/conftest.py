# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Each file of tests starts from the initial state of the machines; the last one leaves none running."""

from __future__ import annotations

from collections.abc import Iterator

import machines
import pytest


@pytest.fixture(scope="session")
def _started() -> Iterator[None]:
    try:
        machines.vm("up")
        yield
    finally:
        machines.disconnect()
        machines.vm("down")


@pytest.fixture(scope="module", autouse=True)
def initial_state(_started: None) -> None:
    machines.vm("reset")
