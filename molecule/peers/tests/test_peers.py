"""A worker's key opens two things on the head, and nothing else."""

import pytest

# What the refused commands would print if they ran.
LEAKS = ("uid=", "sk-")
SSH = (
    "ssh -o BatchMode=yes -o IdentitiesOnly=yes -o UserKnownHostsFile=/etc/sparkwright/peers/known_hosts"
    " -i /etc/sparkwright/peers/id_ed25519 root@10.77.0.1"
)


@pytest.fixture
def worker(host):
    if host.check_output("hostname") == "spark1":
        pytest.skip("the head has no key of its own")
    return host


def test_key_is_private(worker):
    key = worker.file("/etc/sparkwright/peers/id_ed25519")
    assert (key.user, key.mode) == ("root", 0o600)


@pytest.mark.parametrize(
    "command",
    [
        "",
        "id",
        "cat /var/lib/sparkwright/secrets/api_key",
        "image ubuntu:latest",
        "image sparkwright/x;id",
        "image sparkwright/$(id)",
        "rsync --server --sender -logDtpre.iLsfxCIvu . x/",
        "rsync --server -logDtpre.iLsfxCIvu . x/",
        "receipt ../secrets",
        "receipt .",
        "receipt a/b",
        "weights x;id",
        "weights $(id)",
        "weights",
    ],
)
def test_head_refuses_everything_else(worker, command):
    answer = worker.run(f"{SSH} %s", command)
    assert answer.rc != 0
    assert not any(leak in answer.stdout for leak in LEAKS)


def test_no_forwarding(worker):
    answer = worker.run(f"timeout 20 {SSH} -o ExitOnForwardFailure=yes -N -R 22222:127.0.0.1:22; echo rc=$?")
    assert "rc=255" in answer.stdout and "forwarding failed" in answer.stderr


def test_head_holds_one_entry_for_each_worker(host):
    if host.check_output("hostname") != "spark1":
        pytest.skip("only the head has entries")
    lines = host.file("/root/.ssh/authorized_keys").content_string.splitlines()
    entries = [line for line in lines if "peer-serve" in line]
    assert len(entries) == 1
    options = entries[0].partition(" ssh-ed25519 ")[0]
    assert "restrict" in options and 'from="10.77.0.2"' in options
