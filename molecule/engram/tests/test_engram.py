"""Each node has its own rank's files, and every row in them is the published one."""

import json

import pytest

FORMAT = "pages-heads-tp2"
PLACE = f"/var/lib/sparkwright/engram/lab/{FORMAT}"
SOURCE = "/var/lib/sparkwright/weights/arith-engram"
PACKER = "/opt/sparkwright/engram/bin/sparkwright-engram"


@pytest.fixture
def rank(host):
    return {"spark1": 0, "spark2": 1}[host.check_output("hostname")]


def test_own_rank_alone_and_nothing_unfinished(host, rank):
    found = host.check_output(f"ls {PLACE}").split()
    assert found == [f"engram-l1-r{rank}of2.bin", f"engram-l14-r{rank}of2.bin"]


def test_every_row_is_the_published_one(host, rank):
    options = f"--model {SOURCE} --directory {PLACE.rpartition('/')[0]} --tp 2 --rank {rank}"
    told = json.loads(host.check_output(f"{PACKER} verify --json --all {options}").splitlines()[-1])
    assert told["event"] == "result" and len(told["verified"]) == 2


def test_the_engine_sees_them(host, rank):
    found = host.run(f"docker inspect -f '{{{{.State.Pid}}}}' sparkwright-lab-r{rank}")
    if found.rc != 0 or found.stdout.strip() == "0":
        pytest.skip("NOT TESTED: no engine runs")
    assert f"engram-l1-r{rank}of2.bin" in host.check_output(f"ls /proc/{found.stdout.strip()}/root/engram/{FORMAT}")
