"""On nodes that nothing was deployed to: check mode says what would happen, and changes nothing."""

from __future__ import annotations

from conftest import Lab

# What a login and Ansible itself leave behind.
NOISE = ("/root/.ansible", "/var/log", "/run", "/tmp", "/proc", "/sys", "/dev", "/var/lib/docker", "/var/tmp")
SKIP = " -o ".join(f"-path {path}" for path in NOISE)


def tree(lab: Lab, host: str) -> str:
    return lab.ssh(host, f"find / -xdev \\( {SKIP} \\) -prune -o -printf '%p %s %T@\\n' | sort")


def test_check_mode_changes_nothing_and_tells_everything(lab: Lab) -> None:
    hosts = ("spark1", "spark2")
    assert not any(lab.ssh(host, "docker ps -aq").strip() for host in hosts), "the lab is not fresh"
    before = {host: tree(lab, host) for host in hosts}
    outcome = lab.playbook("site.yml", "--check", "--diff")
    assert outcome.rc == 0, outcome.output
    for host in hosts:
        changed = {line.split()[0] for line in set(tree(lab, host).splitlines()) ^ set(before[host].splitlines())}
        # Ansible makes its own directory in /root; Python may write the byte code of its own library.
        assert not {path for path in changed if "__pycache__" not in path} - {"/", "/root"}, host
        assert not lab.ssh(host, "docker image ls -q").strip()
    for told in (
        "Would fetch sparkwright/arith-exl3-3bpw@",
        "Would copy /var/lib/sparkwright/weights",
        "Would build sparkwright/exl3-vllm-cpu:",
        "Would fetch sparkwright/exl3-vllm-cpu:",
        "spark1: no container",
        "spark2: no container",
    ):
        assert told in outcome.output, told


def test_a_node_without_docker_is_named(lab: Lab) -> None:
    lab.ssh("spark2", "systemctl stop docker.socket docker.service")
    try:
        outcome = lab.playbook("site.yml")
    finally:
        lab.ssh("spark2", "systemctl start docker.service")
    assert outcome.rc != 0
    assert "spark2: [node.docker]" in outcome.output
    assert "spark1: [node" not in outcome.output
    assert outcome.recap("changed") == {"spark1": 0, "spark2": 0}
