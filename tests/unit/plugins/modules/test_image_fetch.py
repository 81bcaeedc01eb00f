# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The module with a docker that holds one image as a file, and an ssh that stands for the head."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils import images
from ansible_collections.sparkwright.dsv41.plugins.modules import image_fetch

NAME = "sparkwright/tiny:0123456789ab"
NO_IMAGE = f"Error response from daemon: no such image: {NAME}: No such image: {NAME}"
NO_REFERENCE = "Error response from daemon: reference does not exist"

# `image inspect` shows the file `here`; `load` makes what it is sent the image that is there.
DOCKER = f"""#!/bin/sh
echo "$*" >> DIR/docker.calls
case "$*" in
  "image inspect {NAME}")
    [ -e DIR/here ] || {{ echo "[]"; echo "{NO_IMAGE}" >&2; exit 1; }}
    exec /bin/cat DIR/here ;;
  "load --quiet")
    /bin/cat > DIR/sent
    [ -s DIR/sent ] || {{ echo "open /var/lib/docker/tmp/docker-import-1/repositories: no such file" >&2; exit 1; }}
    /bin/cp DIR/sent DIR/here; echo "Loaded image: {NAME}" ;;
  *) echo "unexpected: docker $*" >&2; exit 99 ;;
esac
"""


@pytest.fixture
def wanted(recorded: Callable[[str], str]) -> str:
    return images.identity(json.loads(recorded("image-overlay2"))[0])


@pytest.fixture
def here(commands: Any) -> Path:
    docker = commands.directory / "docker"
    docker.write_text(DOCKER.replace("DIR", str(commands.directory)))
    docker.chmod(0o755)
    return commands.directory / "here"  # type: ignore[no-any-return]


@pytest.fixture
def fetch(run_module: Callable[..., Any], wanted: str, here: Path) -> Callable[..., Any]:
    def run(check: bool = False, **options: Any) -> Any:
        base = {"name": NAME, "identity": wanted, "head_address": "10.77.0.1", "key_directory": "/keys"}
        return run_module(image_fetch.main, check=check, **{**base, **options})

    return run


def test_an_image_that_is_the_same_is_not_moved(fetch: Any, here: Path, recorded: Any, wanted: str) -> None:
    """D3: also when the other engine shows it with another id."""
    inspect = json.loads(recorded("image-vfs"))
    inspect[0]["Id"] = "sha256:" + "0" * 64
    here.write_text(json.dumps(inspect))
    for check in (True, False):
        result = fetch(check)
        assert (result["changed"], result["identity"]) == (False, wanted)


@pytest.mark.parametrize("before", ["absent", "other"])
def test_check_then_real_then_again(
    before: str, fetch: Any, here: Path, recorded: Any, commands: Any, wanted: str
) -> None:
    if before == "other":
        here.write_text(recorded("image-overlay2").replace("amd64", "arm64"))
    commands.add("ssh", {"*": (0, recorded("image-overlay2"), "")})

    result = fetch(check=True)
    assert result["changed"] and commands.calls("ssh") == []
    result = fetch()
    assert (result["changed"], result["identity"]) == (True, wanted)
    assert result["diff"]["after"] == f"{NAME} {wanted}\n"
    assert (before == "absent") == ("absent" in result["diff"]["before"])
    assert fetch()["changed"] is False
    assert fetch(check=True)["changed"] is False

    (call,) = commands.calls("ssh")
    for part in (
        "BatchMode=yes",
        "StrictHostKeyChecking=yes",
        "UserKnownHostsFile=/keys/known_hosts",
        "-i /keys/id_ed25519",
        "root@10.77.0.1",
    ):
        assert part in call
    assert call.endswith(f"image {NAME}")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((255, "", "Host key verification failed."), "the head answered 255: Host key verification failed."),
        ((1, "", NO_REFERENCE), f"the head answered 1: {NO_REFERENCE}"),
        ((77, "", "peer-serve: refused"), "the head answered 77: peer-serve: refused"),
        # A head that ends well and sends nothing.
        ((0, "", ""), "docker load answered 1: open /var/lib/docker/tmp"),
    ],
)
def test_what_went_wrong_is_told(answer: Any, words: str, fetch: Any, commands: Any) -> None:
    commands.add("ssh", {"*": answer})
    result = fetch()
    assert result["failed"] and words in result["msg"]
    assert "repair: --tags peers,image" in result["msg"]


def test_a_load_that_stops_early_is_named(fetch: Any, here: Path, commands: Any) -> None:
    """The broken pipe of the head must not hide the full disk of the worker."""
    docker = commands.directory / "docker"
    full = 'load --quiet") echo "write: no space left on device" >&2; exit 1 ;;\n  "never'
    docker.write_text(docker.read_text().replace("load --quiet", full, 1))
    ssh = commands.directory / "ssh"
    ssh.write_text("#!/bin/sh\nexec /usr/bin/timeout 5 /bin/cat /dev/zero\n")
    ssh.chmod(0o755)
    started = time.monotonic()
    result = fetch()
    assert result["failed"] and "docker load answered 1: write: no space left on device" in result["msg"]
    assert time.monotonic() - started < 4, "the head went on sending"


def test_another_image_than_wanted_arrives(fetch: Any, recorded: Any, commands: Any, wanted: str) -> None:
    commands.add("ssh", {"*": (0, recorded("image-overlay2").replace("amd64", "arm64"), "")})
    result = fetch()
    assert result["failed"] and f"after the transfer; needed {wanted}" in result["msg"]


def test_a_head_without_the_image(fetch: Any, commands: Any) -> None:
    result = fetch(identity="")
    assert result["failed"] and "the head has no image" in result["msg"]
    assert commands.calls("docker") == []
