"""The role by itself: from the hub with a client of its own, then from that directory as on a node without a hub."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_faults import HUB, RECEIPT, ROOT, ask, is_get, put, ssh

PLACE = "/var/tmp/sparkwright-directory"
REPO = "directory/engram"
LAYER = "layers.1.engram.embed"
OTHER = "layers.1.attn.weight"


def tensors(**sizes: int) -> bytes:
    """A safetensors file of zeros."""
    header, end = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


FILES = {
    "config.json": b"{}\n",
    "1.safetensors": tensors(**{OTHER: 5}),
    "2.safetensors": tensors(**{f"{LAYER}.weight": 256, f"{LAYER}.scale": 8}),
    "model.safetensors.index.json": json.dumps(
        {
            "weight_map": {
                OTHER: "1.safetensors",
                f"{LAYER}.weight": "2.safetensors",
                f"{LAYER}.scale": "2.safetensors",
            }
        }
    ).encode(),
}


def weights(name: str, revision: str) -> dict[str, Any]:
    path = f"{PLACE}/{name}"
    entry = {"id": "model", "repo": REPO, "revision": revision, "path": path, "slim": f"{path}/engram-only"}
    return {**entry, "include": [], "must_exist": list(FILES), "join": ""}


@pytest.fixture(scope="module")
def revision() -> Iterator[str]:
    for path, data in FILES.items():
        put(REPO, path, data)
    ssh(f"rm -rf {PLACE}")
    yield str(ask("GET", f"/api/models/{REPO}")["sha"])
    ssh(f"rm -rf {PLACE}")
    ask("DELETE", f"/_control/repositories/{REPO}")


def run(*arguments: str, **variables: Any) -> str:
    argv = ["ansible-playbook", "-i", "inventory/lab", str(Path(__file__).with_name("directory.yml")), *arguments]
    head = {"weights_head": "spark1", "weights_endpoint": HUB, **variables}
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    done = subprocess.run(
        [*argv, "-e", json.dumps(head)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def there(name: str) -> list[str]:
    return ssh(f"cd {PLACE}/{name} && find . -type f -not -path './.cache/*' | sort").split()


def assert_whole(name: str) -> None:
    found = {path.removeprefix("./") for path in there(name)}
    slim = {f"engram-only/{path}" for path in FILES if path != "1.safetensors"}
    assert found == {*FILES, *slim, RECEIPT}
    index = json.loads(ssh(f"cat {PLACE}/{name}/engram-only/model.safetensors.index.json"))
    assert set(index["weight_map"]) == {f"{LAYER}.weight", f"{LAYER}.scale"}
    inodes = ssh(f"stat -c %i {PLACE}/{name}/2.safetensors {PLACE}/{name}/engram-only/2.safetensors").split()
    assert inodes[0] == inodes[1]


def test_alone_with_a_client_of_its_own_then_from_its_directory(revision: str) -> None:
    client = {"weights_virtualenv": f"{PLACE}/venv", "weights_wheels_directory": f"{PLACE}/deep/wheels"}
    run(weights_list=[weights("model", revision)], **client)
    assert_whole("model")

    ask("DELETE", "/_control/requests")
    offline = {"weights_source_dir": PLACE, "weights_virtualenv": f"{PLACE}/none", "weights_verify": "full"}
    offline["weights_list"] = [weights("copy", revision)]
    planned = run("--check", **offline)
    assert f"{len(FILES)} file(s) to fetch" in planned and "changed=1" in planned
    run(**offline)
    assert_whole("copy")
    assert "changed=0" in run(**offline)
    assert not [entry for entry in ask("GET", "/_control/requests") if is_get(entry)]
    assert ssh(f"ls -d {PLACE}/none 2>&1 || true").strip().endswith("No such file or directory")
