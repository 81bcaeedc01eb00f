"""Both engines hold the same image, by layers and configuration."""

import json
import subprocess
from pathlib import Path

LAB = Path(__file__).parents[3] / ".lab"
FORMAT = "{{json .RootFS.Layers}} {{json .Config.Env}} {{json .Config.Entrypoint}}"


def image_of(listing: str) -> str:
    return next(name for name in listing.splitlines() if name.startswith("sparkwright/exl3-vllm-cpu:"))


def on_head(*argv: str) -> str:
    ssh = ["ssh", "-F", str(LAB / "ssh_config"), "spark1", *argv]
    return subprocess.run(ssh, capture_output=True, text=True, check=True).stdout


def test_same_layers_as_on_the_head(host):
    name = image_of(host.check_output("docker image ls --format '{{.Repository}}:{{.Tag}}'"))
    here = host.check_output("docker image inspect --format %s %s", FORMAT, name)
    there = on_head("docker", "image", "inspect", "--format", f"'{FORMAT}'", name).strip()
    assert here == there
    assert len(json.loads(here.split(" ")[0])) > 3


def test_our_wheel_is_in_it(host):
    name = image_of(host.check_output("docker image ls --format '{{.Repository}}:{{.Tag}}'"))
    answer = host.run("docker run --rm --network none %s python3 -c 'import sparkwright_kernels'", name)
    assert answer.rc == 0, answer.stderr
