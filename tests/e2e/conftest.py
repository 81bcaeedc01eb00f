"""Helpers for tests of whole playbooks on the lab."""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """A finished playbook run."""

    rc: int
    output: str

    @property
    def flat(self) -> str:
        """The output without its line breaks: YAML wraps long lines."""
        return " ".join(self.output.split())

    def recap(self, field: str) -> dict[str, int]:
        """A column of the recap (changed, failed, ...) per host."""
        rows = re.findall(rf"^(\S+)\s+: ok=.*?\b{field}=(\d+)", self.output, re.MULTILINE)
        return {host: int(count) for host, count in rows if host != "localhost"}


class Lab:
    root = ROOT

    def playbook(self, name: str, *args: str, inventory: str = "inventory/lab", timeout: int = 600) -> Outcome:
        command = ["ansible-playbook", name, *(["-i", inventory] if inventory else []), *args]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
        return Outcome(done.returncode, done.stdout + done.stderr)

    def start(self, name: str, *args: str) -> subprocess.Popen[str]:
        """A run in a process group of its own, so that it can be killed with all its forks."""
        command = ["ansible-playbook", name, "-i", "inventory/lab", *args]
        return subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def ssh(self, host: str, *argv: str, check: bool = True) -> str:
        command = ["ssh", "-F", str(ROOT / ".lab/ssh_config"), "-o", "BatchMode=yes", host, *argv]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def engine(self, path: str) -> None:
        """A POST to the Docker engine that runs the lab's machines."""
        connection = http.client.HTTPConnection("localhost", timeout=30)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(os.environ["DOCKER_HOST"].removeprefix("unix://"))
        connection.request("POST", f"/{path}")
        assert connection.getresponse().status < 300

    @contextmanager
    def frozen(self, host: str) -> Iterator[None]:
        """A node that is there but answers nothing."""
        self.engine(f"containers/sparkwright-lab-{host}/pause")
        try:
            yield
        finally:
            self.engine(f"containers/sparkwright-lab-{host}/unpause")

    def key(self) -> str:
        return self.ssh("spark1", "cat", "/var/lib/sparkwright/secrets/api_key").strip()


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()


def passed(outcome: Outcome) -> bool:
    return outcome.rc == 0 and "PASS: 17*19 = 323" in outcome.output
