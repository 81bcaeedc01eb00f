"""The head's files are the fixture's, byte for byte."""

import hashlib
from pathlib import Path

import pytest

FIXTURE = Path(__file__).parents[3] / "tests/fixtures/models/arith-exl3-3bpw"
PLACE = "/var/lib/sparkwright/weights/arith-exl3-3bpw"


@pytest.fixture
def head(host):
    if host.check_output("hostname") != "spark1":
        pytest.skip("the other nodes have them from role weight_sync")
    return host


@pytest.mark.parametrize("path", sorted(path.name for path in FIXTURE.iterdir()))
def test_file_is_the_published_one(head, path):
    assert head.file(f"{PLACE}/{path}").sha256sum == hashlib.sha256((FIXTURE / path).read_bytes()).hexdigest()


def test_no_token_and_no_leftovers(head):
    assert head.run(f"find {PLACE} -name '*.incomplete' | grep -q .").rc != 0
    assert not head.file("/root/.cache/huggingface/token").exists
