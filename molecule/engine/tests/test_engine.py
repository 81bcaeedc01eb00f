"""The containers are what the plan says, and hold no secret."""

import json

import pytest


@pytest.fixture
def container(host):
    rank = 0 if host.check_output("hostname") == "spark1" else 1
    return json.loads(host.check_output(f"docker inspect sparkwright-lab-r{rank}"))[0]


def test_it_runs_and_docker_does_not_restart_it(container):
    assert container["State"]["Running"]
    assert container["HostConfig"]["RestartPolicy"]["Name"] == "no"


def test_limits_and_devices_are_those_of_a_spark(container):
    limits = {limit["Name"]: limit["Hard"] for limit in container["HostConfig"]["Ulimits"]}
    assert limits == {"memlock": -1, "stack": 67108864}
    assert container["HostConfig"]["NetworkMode"] == container["HostConfig"]["IpcMode"] == "host"
    assert container["HostConfig"]["OomScoreAdj"] == 1000
    assert container["HostConfig"]["CapAdd"] in (["IPC_LOCK"], ["CAP_IPC_LOCK"])
    assert [device["PathOnHost"] for device in container["HostConfig"]["Devices"]] == ["/dev/infiniband"]


def test_every_variable_has_a_value(container):
    empty = [entry for entry in container["Config"]["Env"] if entry.endswith("=")]
    assert not empty
    env = dict(entry.split("=", 1) for entry in container["Config"]["Env"])
    assert env["NCCL_IB_HCA"] == "=rocep1s0f0:1"
    assert env["GLOO_SOCKET_IFNAME"] == "enp1s0f0np0"
    assert "NCCL_IB_GID_INDEX" not in env


def test_key_is_private_and_on_the_head_only(host):
    key = host.file("/var/lib/sparkwright/secrets/api_key")
    if host.check_output("hostname") == "spark1":
        assert (key.user, key.mode) == ("root", 0o600)
        assert key.content_string.startswith("sk-") and len(key.content_string.strip()) > 40
    else:
        assert not key.exists


def test_key_is_nowhere_else(host, container):
    lab_key = host.run("cat /var/lib/sparkwright/secrets/api_key").stdout.strip()
    if not lab_key:
        pytest.skip("a worker has no key")
    assert lab_key not in json.dumps(container)
    logs = host.run(f"docker logs {container['Name'].lstrip('/')}")
    assert lab_key not in logs.stdout + logs.stderr
    cmdlines = host.run("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '").stdout
    assert "vllm serve /model" in cmdlines
    assert lab_key not in cmdlines


def test_log_of_the_stopped_container_was_kept(host, container):
    log = host.file(f"/var/log/sparkwright{container['Name']}.log")
    assert log.exists and log.mode == 0o640 and log.size > 1000
