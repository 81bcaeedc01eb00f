"""Every node holds what the head holds, verified there, and nothing of a broken transfer."""

import json
import subprocess
from pathlib import Path

LAB = Path(__file__).parents[3] / ".lab"
PLACE = "/var/lib/sparkwright/weights/arith-exl3-3bpw"
RECEIPT = ".sparkwright-weights.json"
DIGESTS = f"cd {PLACE} && find . -type f -not -path './.cache/*' -not -name {RECEIPT} -exec sha256sum {{}} + | sort"


def test_same_files_as_on_the_head(host):
    ssh = ["ssh", "-F", str(LAB / "ssh_config"), "spark1", DIGESTS]
    there = subprocess.run(ssh, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(there) >= 7
    assert host.check_output(DIGESTS).splitlines() == there


def test_the_node_has_a_receipt_of_its_own(host):
    """The times in it are those of its own files, or the next run would hash them all."""
    for entry in json.loads(host.file(f"{PLACE}/{RECEIPT}").content_string)["files"]:
        seconds = host.check_output(f"stat --format=%.9Y {PLACE}/{entry['path']}")
        assert int(seconds.replace(".", "")) == entry["mtime_ns"], entry["path"]


def test_nothing_is_left_of_a_broken_transfer(host):
    assert host.check_output(f"find {PLACE} -path '*/.cache/sparkwright*' -o -name '*.incomplete'") == ""
