"""The head's files are the fixture's, byte for byte."""

import hashlib
from pathlib import Path

import pytest

FIXTURE = Path(__file__).parents[3] / "tests/fixtures/models/arith-exl3-3bpw"
PLACE = "/var/lib/sparkwright/weights/arith-exl3-3bpw"


@pytest.mark.parametrize("path", sorted(path.name for path in FIXTURE.iterdir()))
def test_file_is_the_published_one(host, path):
    assert host.file(f"{PLACE}/{path}").sha256sum == hashlib.sha256((FIXTURE / path).read_bytes()).hexdigest()


def test_no_token_and_no_leftovers(host):
    assert host.run(f"find {PLACE} -name '*.incomplete' | grep -q .").rc != 0
    assert not host.file("/root/.cache/huggingface/token").exists
