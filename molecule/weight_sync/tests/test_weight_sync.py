"""Every node holds what the head holds, receipt included, and nothing of a broken transfer."""

import subprocess
from pathlib import Path

LAB = Path(__file__).parents[3] / ".lab"
PLACE = "/var/lib/sparkwright/weights/arith-exl3-3bpw"
DIGESTS = f"cd {PLACE} && find . -type f -not -path './.cache/*' -exec sha256sum {{}} + | sort"


def test_same_files_as_on_the_head(host):
    ssh = ["ssh", "-F", str(LAB / "ssh_config"), "spark1", DIGESTS]
    there = subprocess.run(ssh, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(there) >= 8
    assert host.check_output(DIGESTS).splitlines() == there


def test_nothing_is_left_of_a_broken_transfer(host):
    assert host.check_output(f"find {PLACE} -name '.partial' -o -name '.~tmp~' -o -name '*.incomplete'") == ""
