# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The module on a node whose kernel, netplan and systemd are one file of JSON; cut off at every step that it takes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils import netplan
from ansible_collections.sparkwright.dsv41.plugins.modules import fabric_netplan

FIXTURES = Path(__file__).parents[3] / "fixtures/netplan"
A, B, C = "enp1s0f0np0", "enP2p1s0f0np0", "enp1s0f1np1"
MANAGEMENT = "192.168.1.5"
PORTS = [{"netdev": A, "address": "10.77.0.1/24"}, {"netdev": B, "address": "10.77.1.1/24"}]
TEXT = netplan.render([netplan.Port(**port) for port in PORTS])
OURS = f"etc/netplan/{netplan.NAME}"
BROKEN = "network: [\n"
# A second address, a route and an MTU that somebody gave by hand.
BEFORE = {
    "lo": {"up": True, "mtu": 65536, "addresses": ["127.0.0.1/8"], "routes": [], "gen": "eui64"},
    "enP7s7": {"up": True, "mtu": 1500, "addresses": [f"{MANAGEMENT}/24"], "routes": [], "gen": "eui64"},
    A: {
        "up": True,
        "mtu": 4200,
        "addresses": ["10.9.9.9/24", "10.77.1.9/24"],
        "routes": ["10.0.0.2 via 10.9.9.1"],
        "gen": "eui64",
    },
    B: {"up": False, "mtu": 1500, "addresses": [], "routes": [], "gen": "eui64"},
    C: {"up": True, "mtu": 1500, "addresses": [], "routes": [], "gen": "eui64"},
}

# ip, netplan, systemd-run and systemctl. netplan's files are JSON here; others it refuses in netplan's words.
NODE = """#!PYTHON -IS
import glob, json, os, sys
base = "BASE"
tool, words = os.path.basename(sys.argv[0]), sys.argv[1:]
with open(base + "/calls", "a") as stream:
    print(tool, *words, file=stream)
with open(base + "/node.json") as stream:
    node = json.load(stream)
devices = node["devices"]


def done(code=0, error=""):
    with open(base + "/node.json.new", "w") as stream:
        json.dump(node, stream)
    os.replace(base + "/node.json.new", base + "/node.json")
    if error:
        print(error, file=sys.stderr)
    sys.exit(code)


def files(root):
    found = {}
    for path in sorted(glob.glob(glob.escape(root) + "/*/netplan/*.yaml")):
        with open(path) as stream:
            text = "".join(line for line in stream if not line.startswith("#"))
        try:
            found.update(json.loads(text)["network"].get("ethernets", {}))
        except ValueError:
            done(1, "ERROR: no file is named" if "anonymous" in text else path + ":1:1: Invalid YAML: no flow end:")
    return found


if tool in node["fail"] and node["fail"][tool] in " ".join(words):
    done(1, tool + " does not want to")
if tool == "netplan" and words[:1] == ["generate"]:
    made = words[2] + "/run/systemd/network"
    for name, entry in files(words[2]).items():
        if "clash" in entry:
            done(1, "ERROR: two of a kind")
        os.makedirs(made, exist_ok=True)
        with open(made + "/10-netplan-" + name + ".network", "w") as stream:
            stream.write("[Match]\\nName=" + entry.get("match", {}).get("name", name) + "\\n")
    done()
if tool == "netplan" and words == ["apply"]:
    for name, entry in files(base + "/root").items():
        if name in devices and "addresses" in entry:
            devices[name].update(up=True, mtu=entry["mtu"], addresses=list(entry["addresses"]), routes=[], gen="none")
            devices[name].update(node["wrong"])
    if node["management"]:
        node["samples"] = list(node["management"])
    done()
if tool == "ip" and words == "-j -d address show".split():
    seen = dict(devices)
    if node["samples"]:
        sample = node["samples"].pop(0)
        seen["enP7s7"] = {**devices["enP7s7"], "addresses": sample}
        node["samples"] = node["samples"] or [sample] * (node["forever"] > 0)
    print(json.dumps([{"ifname": name, "mtu": each["mtu"], "max_mtu": 9978, "flags": ["UP"] * each["up"],
        "addr_info": [{"family": "inet", "local": text.split("/")[0], "prefixlen": int(text.split("/")[1])}
        for text in each["addresses"]]} for name, each in seen.items()]))
    done()
if tool == "ip" and words[:-1] == "-4 route show dev".split():
    print(*devices[words[-1]]["routes"], sep="\\n")
    done()
if tool == "ip" and words[:-1] == "-j -d link show dev".split():
    print(json.dumps([{"inet6_addr_gen_mode": devices[words[-1]]["gen"]}]))
    done()
if tool == "ip" and words[:3] == "link show dev".split():
    done(words[3] not in devices)
if tool == "ip" and words[:3] == "link set dev".split():
    device = devices[words[3]]
    key, value = words[4], words[-1]
    changes = {"mtu": {}, "addrgenmode": {"gen": value}}
    device.update(changes.get(key, {"up": key == "up"}), mtu=int(value) if key == "mtu" else device["mtu"])
    done()
if tool == "ip" and words[:2] in (["address", "del"], ["address", "replace"]):
    text, device = words[2], devices[words[4]]
    kept = [each for each in device["addresses"] if each != text]
    if words[1] == "del" and kept == device["addresses"]:
        done(2, "RTNETLINK answers: Cannot assign requested address")
    device["addresses"] = kept + [text] * (words[1] == "replace")
    done()
if tool == "ip" and words[:2] == ["route", "replace"]:
    device, text = devices[words[-1]], " ".join(words[2:-2])
    device["routes"] = [each for each in device["routes"] if each != text] + [text]
    done()
if tool == "systemd-run":
    if node["timer"]:
        done(1, "Unit was already loaded")
    node["timer"] = words
    done()
if tool == "systemctl" and words[0] == "stop":
    node["timer"] = None
    done()
done(99, "unexpected: " + tool + " " + " ".join(words))
"""


class Node:
    def __init__(self, base: Path) -> None:
        self.base, self.root = base, base / "root"
        (base / "bin").mkdir()
        for tool in ("ip", "netplan", "systemd-run", "systemctl"):
            script = base / "bin" / tool
            script.write_text(NODE.replace("PYTHON", sys.executable).replace("BASE", str(base)))
            script.chmod(0o755)
        (base / "bin/sleep").symlink_to("/bin/true")
        (self.root / "etc/netplan").mkdir(parents=True)
        self.start()

    def start(self, file: str = "") -> None:
        """As it was before anything; `file` is our file."""
        shutil.rmtree(self.state, ignore_errors=True)
        (self.root / OURS).unlink(missing_ok=True)
        if file:
            (self.root / OURS).write_text(file)
            (self.root / OURS).chmod(0o600)
        (self.base / "calls").unlink(missing_ok=True)
        quiet: dict[str, Any] = {"fail": {}, "wrong": {}, "management": [], "samples": [], "forever": 0, "timer": None}
        self.set(devices=json.loads(json.dumps(BEFORE)), **quiet)

    @property
    def state(self) -> Path:
        return self.root / fabric_netplan.STATE

    def get(self, name: str) -> Any:
        return json.loads((self.base / "node.json").read_text())[name]

    def set(self, **values: Any) -> None:
        path = self.base / "node.json"
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **values}))

    def calls(self, beginning: str = "") -> list[str]:
        path = self.base / "calls"
        return [line for line in path.read_text().splitlines() if line.startswith(beginning)] if path.exists() else []

    def file(self) -> str:
        path = self.root / OURS
        return path.read_text() if path.exists() else ""

    def snapshot(self) -> Any:
        """Every file and device, in an order that tells nothing."""
        devices = self.get("devices")
        for each in devices.values():
            each["addresses"].sort()
        ours = (self.state / "lock", self.state)
        files = {
            str(path): (path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
            for path in self.root.rglob("*")
            if path.is_file() and path not in ours and "restored" not in path.parts
        }
        return devices, files, self.get("timer")

    def fire(self) -> int:
        """The deadline passes."""
        words, _ = self.get("timer"), self.set(timer=None)
        return subprocess.run(words[-2:], check=False, capture_output=True).returncode


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    node = Node(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr(fabric_netplan, "LIVE", str(node.root))
    monkeypatch.setattr(fabric_netplan, "POLL_S", 0.001)
    monkeypatch.setattr(netplan, "STEADY", 2)
    return node


@pytest.fixture
def run(run_module: Callable[..., Any], node: Node) -> Callable[..., Any]:
    def run(state: str = "applied", check: bool = False, **options: Any) -> Any:
        base: dict[str, Any] = {"host": "spark1", "state": state, "root": str(node.root), "settle_s": 0}
        if state != "confirmed":
            base["management_address"] = MANAGEMENT
        if state == "applied":
            base["ports"] = PORTS
        return run_module(fabric_netplan.main, check=check, **{**base, **options})

    return run


def has(node: Node, ports: list[dict[str, Any]] = PORTS) -> bool:
    devices = node.get("devices")
    return all(
        port["address"] in devices[port["netdev"]]["addresses"] and devices[port["netdev"]]["mtu"] == 9000
        for port in ports
    )


def only(result: Any) -> Any:
    assert result["failed"]
    (finding,) = result["findings"]
    assert finding["host"] == "spark1" and result["msg"].startswith("spark1: [fabric.")
    return finding


# The way it should go


def test_check_then_real_then_confirmed_then_again(run: Any, node: Node) -> None:
    before = node.snapshot()
    result = run(check=True)
    assert result["changed"] and (result["before"], result["after"]) == ("", TEXT)
    assert node.snapshot() == before and not node.state.exists()

    result = run()
    assert result["changed"] and result["findings"] == [] and 20 <= result["confirm_within_s"] <= 30
    assert (result["diff"]["before"], result["diff"]["after"]) == ("", TEXT)
    assert node.file() == TEXT and has(node)
    assert stat.S_IMODE((node.root / OURS).stat().st_mode) == 0o600
    assert stat.S_IMODE(node.state.stat().st_mode) == stat.S_IMODE((node.state / "pending").stat().st_mode) == 0o700
    timer = node.get("timer")
    assert {"--collect", "--on-active=30", "--timer-property=AccuracySec=100ms"} <= set(timer)
    assert timer[-2:] == ["/bin/sh", str(node.state / "pending/restore")]

    result = run("confirmed", check=True)
    assert result["changed"] and node.get("timer")
    result = run("confirmed")
    assert result["changed"] and result["confirm_within_s"] == 0
    assert node.get("timer") is None and [path.name for path in node.state.iterdir()] == ["lock"]

    (node.base / "calls").unlink()
    for check in (True, False):
        result = run(check=check)
        assert not result["changed"] and result["confirm_within_s"] == 0 and result["before"] == result["after"] == TEXT
        assert run("confirmed", check=check)["changed"] is False
    assert set(node.calls()) == {"ip -j -d address show"}
    assert node.file() == TEXT and has(node)


@pytest.mark.parametrize("drift", ["mtu", "address", "down", "mode", "content"])
def test_drift_is_repaired(drift: str, run: Any, node: Node) -> None:
    run()
    run("confirmed")
    devices = node.get("devices")
    if drift == "mode":
        (node.root / OURS).chmod(0o644)
    elif drift == "content":
        (node.root / OURS).write_text("{}\n")
    else:
        devices[A].update({"mtu": {"mtu": 1500}, "address": {"addresses": []}, "down": {"up": False}}[drift])
        node.set(devices=devices)
    assert run(check=True)["changed"] and run()["changed"]
    assert run("confirmed")["changed"]
    assert node.file() == TEXT and has(node) and not run()["changed"]
    assert stat.S_IMODE((node.root / OURS).stat().st_mode) == 0o600


def test_the_record_is_there_before_anything_changes(run: Any, node: Node) -> None:
    node.set(fail={"systemd-run": ""})
    before = node.snapshot()
    finding = only(run())
    assert "systemd-run" in finding["found"] and finding["found"].endswith("nothing was changed")
    assert node.snapshot() == before and not node.calls("netplan apply")
    node.set(fail={})
    run()
    calls = node.calls()
    order = [
        next(n for n, line in enumerate(calls) if line.startswith(each)) for each in ("systemd-run", "netplan apply")
    ]
    assert order == sorted(order)


def test_a_port_that_leaves_loses_our_address(run: Any, node: Node) -> None:
    run()
    run("confirmed")
    moved = [{"netdev": C, "address": "10.77.0.1/24"}, PORTS[1]]
    assert run(ports=moved)["changed"]
    assert has(node, moved) and node.get("devices")[A]["addresses"] == []
    assert node.fire() == 0
    assert node.file() == TEXT and has(node) and node.get("devices")[C] == BEFORE[C]


def test_absent(run: Any, node: Node) -> None:
    assert run("absent")["changed"] is False
    run()
    run("confirmed")
    assert run("absent", check=True)["changed"] and node.file() == TEXT
    result = run("absent")
    assert result["changed"] and (result["before"], result["after"]) == (TEXT, "") and result["confirm_within_s"] > 0
    assert node.file() == "" and all(node.get("devices")[name]["addresses"] == [] for name in (A, B))
    assert run("confirmed")["changed"]
    assert run("absent")["changed"] is False


def test_absent_that_is_not_confirmed(run: Any, node: Node) -> None:
    run()
    run("confirmed")
    before = node.snapshot()
    run("absent")
    assert node.fire() == 0
    assert node.snapshot() == before


def test_below_another_root_nothing_is_applied(run: Any, node: Node, tmp_path: Path) -> None:
    root = tmp_path / "image"
    assert run(root=str(root), check=True)["changed"] and not root.exists()
    result = run(root=str(root))
    assert result["changed"] and result["confirm_within_s"] == 0
    assert (root / OURS).read_text() == TEXT and stat.S_IMODE((root / OURS).stat().st_mode) == 0o600
    assert run(root=str(root))["changed"] is False
    assert run("confirmed", root=str(root))["changed"] is False
    assert run("absent", root=str(root))["changed"] and not (root / OURS).exists()
    assert {line.split()[1] for line in node.calls()} == {"generate"}


# Refusals: nothing changes


def test_bad_wishes_are_told_at_once(run: Any, node: Node) -> None:
    before = node.snapshot()
    ports = [{"netdev": "enp9s9", "address": "10.77.0.1"}, {"netdev": A, "address": "10.77.0.0/24", "mtu": 9979}]
    for check in (True, False):
        result = run(ports=ports, check=check)
        assert [finding["id"] for finding in result["findings"]] == ["fabric.netplan"] * 4
        assert result["msg"].count("repair: correct spark_fabric_rails of spark1") == 4
    assert node.snapshot() == before and not node.calls("netplan")


def stranger(node: Node, name: str, text: str, directory: str = "etc") -> Path:
    path = node.root / directory / "netplan" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def of(**ethernets: Any) -> str:
    return json.dumps({"network": {"version": 2, "ethernets": ethernets}})


@pytest.mark.parametrize("directory", ["etc", "run", "lib"])
@pytest.mark.parametrize("state", ["applied", "absent"])
def test_a_broken_file_of_a_stranger(directory: str, state: str, run: Any, node: Node) -> None:
    """R13."""
    node.start(TEXT if state == "absent" else "")
    stranger(node, "10-good.yaml", of(enP7s7={}))
    path = stranger(node, "90-NM-1b2c.yaml", BROKEN, directory)
    before = node.snapshot()
    for check in (True, False):
        finding = only(run(state, check=check))
        assert finding["id"] == "fabric.netplan"
        assert finding["found"] == f"{path} is broken: 1:1: Invalid YAML: no flow end:"
        assert str(path) in finding["repair"] and "nothing was changed" in finding["repair"]
    assert node.snapshot() == before and not node.calls("netplan apply")


def test_a_broken_file_that_netplan_does_not_name(run: Any, node: Node) -> None:
    stranger(node, "10-good.yaml", of(enP7s7={}))
    path = stranger(node, "20-bad.yaml", "anonymous")
    assert only(run())["found"] == f"{path} is broken: ERROR: no file is named"
    stranger(node, "30-bad.yaml", "anonymous")
    assert only(run())["found"].startswith("one of the netplan files of this node is broken: ERROR")


def test_a_file_that_cannot_be_read(run: Any, node: Node) -> None:
    path = node.root / "etc/netplan/20-gone.yaml"
    path.symlink_to("nowhere")
    assert only(run())["found"] == f"{path} cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"50-b.yaml": of(**{A: {}})}, "50-b.yaml"),
        ({"50-b.yaml": of(**{"some": {"match": {"name": "enp1*"}}})}, "50-b.yaml"),
        ({"50-b.yaml": of(**{A: {}}), "60-c.yaml": of(**{A: {}})}, "50-b.yaml or ETC/60-c.yaml"),
    ],
)
def test_two_owners(files: dict[str, str], named: str, run: Any, node: Node) -> None:
    stranger(node, "10-good.yaml", of(enP7s7={}))
    for name, text in files.items():
        stranger(node, name, text)
    before = node.snapshot()
    for check in (True, False):
        finding = only(run(check=check))
        assert finding["found"] == f"ETC/{named} configures {A} too".replace("ETC", str(node.root / "etc/netplan"))
    assert node.snapshot() == before and not node.calls("netplan apply")


def test_netplan_refuses_ours_beside_the_others(run: Any, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netplan, "render", lambda ports: of(**{A: {"clash": True}}))
    before = node.snapshot()
    assert only(run())["found"] == "netplan refuses our file beside the others: ERROR: two of a kind"
    assert node.snapshot() == before


@pytest.mark.parametrize("tool", ["ip", "netplan", "systemd-run", "systemctl"])
def test_a_tool_that_is_missing(tool: str, run: Any, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    (node.base / "bin" / tool).unlink()
    monkeypatch.setattr("ansible.module_utils.basic.get_bin_path", lambda arg, **_: which(node, arg))
    before = node.snapshot()
    for check in (True, False):
        assert only(run(check=check))["found"] == f"no {tool} command"
    assert node.snapshot() == before


def which(node: Node, name: str) -> str:
    path = node.base / "bin" / name
    if not path.exists():
        raise ValueError(name)
    return str(path)


# Failures: everything is put back


@pytest.mark.parametrize("file", ["", netplan.render([netplan.Port(A, "10.9.9.9/24", 4200)])], ids=["new", "old"])
@pytest.mark.parametrize(
    ("trouble", "id_", "found"),
    [
        # R12.
        ({"management": [[]], "forever": 1}, "fabric.management", "enP7s7 has no address after netplan apply"),
        (
            {"management": [["192.168.1.99/24"]], "forever": 1},
            "fabric.management",
            "enP7s7 has 192.168.1.99/24 after netplan apply",
        ),
        ({"wrong": {"mtu": 1500}}, "fabric.netplan", f"after netplan apply {A} has MTU 1500 instead of 9000"),
        ({"wrong": {"addresses": []}}, "fabric.netplan", f"after netplan apply {A} has no address"),
    ],
)
def test_what_goes_wrong_is_put_back(trouble: Any, id_: str, found: str, file: str, run: Any, node: Node) -> None:
    node.start(file)
    node.set(**trouble)
    before = node.snapshot()
    finding = only(run(deadline_s=4 if "wrong" in trouble else 30))
    assert finding["id"] == id_ and finding["found"].startswith(found)
    assert finding["found"].endswith("; everything was put back")
    node.set(**{**trouble, "management": [], "samples": []})
    assert node.snapshot() == before
    assert "was put back" in only(run("confirmed"))["found"]


def test_the_management_address_blinks(run: Any, node: Node) -> None:
    """R12: away for ten polls, then as before."""
    node.set(management=[[]] * 10 + [[f"{MANAGEMENT}/24"]])
    assert run(settle_s=5)["changed"] and has(node)
    assert run("confirmed")["changed"]


def test_netplan_apply_fails(run: Any, node: Node) -> None:
    node.set(fail={"netplan": "apply"})
    before = node.snapshot()
    result = run()
    # It fails for the restore too: then the record stays, for the next run.
    assert "putting everything back failed" in only(result)["found"] and (node.state / "pending").exists()
    assert node.file() == ""
    assert "putting everything back failed" in only(run())["found"]
    node.set(fail={})
    assert run()["changed"] and has(node)
    assert node.fire() == 0
    node.set(fail=before[0] and {})
    assert node.snapshot() == before


def test_netplan_apply_takes_too_long(run: Any, node: Node) -> None:
    before = node.snapshot()
    finding = only(run(deadline_s=4))
    assert finding["needed"] == "at most -1 s" and "fabric_configure_deadline_s" in finding["repair"]
    assert node.snapshot() == before


def test_no_confirmation(run: Any, node: Node) -> None:
    before = node.snapshot()
    run()
    assert node.fire() == 0
    assert node.snapshot() == before
    for check in (True, False):
        finding = only(run("confirmed", check=check))
        assert finding["id"] == "fabric.management" and "not confirmed in time" in finding["found"]
    # It is over once somebody asks for a change again.
    assert run()["changed"] and run("confirmed")["changed"]
    assert run("confirmed")["changed"] is False


def test_a_late_watchdog_finds_nothing_to_do(run: Any, node: Node) -> None:
    run()
    timer = node.get("timer")
    script = (node.state / "pending/restore").read_text()
    run("confirmed")
    after = node.snapshot()
    node.set(timer=timer)
    assert node.fire() != 0, "the script is gone with the record"
    subprocess.run(["sh"], input=script, text=True, check=True)
    assert node.snapshot() == after


def test_a_timer_that_a_killed_confirmation_left(run: Any, node: Node) -> None:
    """It must not put back the next change, of which it knows nothing."""
    node.set(timer=["/bin/sh", "old"])
    assert run()["changed"] and node.get("timer")[-1] == str(node.state / "pending/restore")


def test_the_restore_may_run_twice(run: Any, node: Node) -> None:
    before = node.snapshot()
    run()
    shutil.copytree(node.state / "pending", node.base / "kept")
    assert node.fire() == 0
    shutil.copytree(node.base / "kept", node.state / "pending")
    assert subprocess.run(["sh", node.state / "pending/restore"], check=False).returncode == 0
    assert node.snapshot() == before


def test_a_device_that_is_gone_does_not_stop_the_restore(run: Any, node: Node) -> None:
    run()
    devices = node.get("devices")
    del devices[A]
    node.set(devices=devices)
    assert node.fire() == 0
    assert node.file() == "" and node.get("devices")[B] == BEFORE[B]


def test_other_devices_are_not_touched(run: Any, node: Node) -> None:
    run()
    node.fire()
    touched = [line for line in node.calls("ip") if " show" not in line]
    assert touched and {line.split(" dev ")[1].split()[0] for line in touched} == {A, B}


def test_the_watchdog_waits_for_who_holds_the_lock(run: Any, node: Node) -> None:
    run()
    with open(node.state / "lock", "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with subprocess.Popen(node.get("timer")[-2:]) as watchdog:
            with pytest.raises(subprocess.TimeoutExpired):
                watchdog.wait(0.3)
            assert (node.state / "pending").exists()
            fcntl.flock(stream, fcntl.LOCK_UN)
            assert watchdog.wait(10) == 0
    assert (node.state / "restored").exists()


def test_a_run_waits_for_who_holds_the_lock(run: Any, node: Node) -> None:
    node.state.mkdir(parents=True)
    with open(node.state / "lock", "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        before = node.snapshot()
        assert "is at work" in only(run(deadline_s=0))["found"]
        assert node.snapshot() == before


def test_what_another_run_did_meanwhile_counts(run: Any, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    old = netplan.render([netplan.Port(C, "10.77.5.1/24")])
    monkeypatch.setattr(fabric_netplan.fcntl, "flock", lambda *_: (node.root / OURS).write_text(old))
    assert run()["before"] == old


# Cut off


def test_a_second_run_while_the_watchdog_is_armed(run: Any, node: Node) -> None:
    before = node.snapshot()
    run()
    assert run(check=True)["changed"]
    other = [{"netdev": C, "address": "10.77.5.1/24"}]
    result = run(ports=other)
    assert result["changed"] and result["before"] == ""
    assert has(node, other) and {name: node.get("devices")[name] for name in (A, B)} == {A: BEFORE[A], B: BEFORE[B]}
    assert node.fire() == 0
    assert node.snapshot() == before


def test_a_second_run_that_wants_what_was_before(run: Any, node: Node) -> None:
    before = node.snapshot()
    run()
    result = run("absent")
    assert result["changed"] and result["confirm_within_s"] == 0
    assert node.snapshot() == before and run("confirmed")["changed"] is False


def test_a_reboot_before_the_confirmation(run: Any, node: Node) -> None:
    """The timer is lost; the node is reachable with the change, so that it may be confirmed."""
    run()
    node.set(timer=None)
    assert run("confirmed")["changed"] and has(node)


def cut_off(main: Callable[[], Any], node: Node, step: int) -> bool:
    """Run in a child that is killed right before a step that changes something; False when it ended before."""
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event: str, arguments: Any) -> None:
            nonlocal count
            if event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
                counts = str(arguments[0]).startswith(str(node.root))
            else:
                words = " ".join(map(os.fsdecode, arguments[1])) if event == "subprocess.Popen" else ""
                counts = words != "" and " generate " not in words and " show" not in words
            if counts and count == step:
                os.kill(os.getpid(), signal.SIGKILL)
            count += counts

        sys.addaudithook(hook)
        try:
            main()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def every_step(node: Node, start: Callable[[], None], main: Callable[[], Any]) -> Iterator[int]:
    for step in range(1000):
        start()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            cut = cut_off(main, node, step)
        if not cut:
            print(step)
            assert step > 8, "steps were counted"
            return
        yield step


def record(node: Node) -> tuple[list[str], str]:
    pending = node.state / "pending"
    return sorted((pending / "restore").read_text().splitlines()), (pending / "before.yaml").read_text()


@pytest.mark.parametrize("then", ["again", "deadline"])
def test_killed_at_every_step(then: str, run: Any, node: Node) -> None:
    old = netplan.render([netplan.Port(A, "10.9.9.9/24", 4200)])

    def start() -> None:
        node.start(old)

    start()
    before = node.snapshot()
    run()
    complete = record(node)
    for step in every_step(node, start, run):
        if then == "again":
            result = run()
            assert result["changed"] and result["before"] == old, step
            assert node.file() == TEXT and has(node), step
            # What is recorded now is what was before all of it.
            assert record(node) == complete, step
            continue
        if node.get("timer"):
            assert node.fire() == 0
        # Where nothing was armed nothing changed either, but for a record that nobody needs.
        for name in ("new", "pending"):
            shutil.rmtree(node.state / name, ignore_errors=True)
        assert node.snapshot() == before, step


def test_killed_at_every_step_of_a_confirmation(run: Any, node: Node) -> None:
    """It is confirmed or it is not; what waits is never lost."""
    start_count = []

    def start() -> None:
        node.start()
        run()
        start_count.append(1)

    for step in range(20):
        start()
        if not cut_off(lambda: run("confirmed"), node, step):
            break
        if (node.state / "pending").exists():
            assert node.get("timer"), step
            assert run("confirmed")["changed"]
        elif node.get("timer"):
            node.fire()
        assert node.file() == TEXT and has(node), step
        assert run()["changed"] is False
    assert 3 < len(start_count) < 20


def test_a_change_that_was_cut_off_is_not_confirmed(run: Any, node: Node) -> None:
    run()
    (node.state / "pending/verified").unlink()
    assert "cut off" in only(run("confirmed"))["found"]
    assert (node.state / "pending").exists() and node.get("timer")


# The real netplan


@pytest.fixture(scope="module")
def real_netplan() -> str:
    path = shutil.which("netplan")
    if not path:
        warnings.warn("no netplan in PATH: what it says is only compared with recordings", stacklevel=1)
        pytest.skip("no netplan in PATH")
    return path


@pytest.mark.parametrize("case", sorted(path.parent.name for path in FIXTURES.glob("*/etc")))
def test_netplan_still_says_what_was_recorded(case: str, real_netplan: str, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    shutil.copytree(FIXTURES / case / "etc", scratch / "etc")
    for path in (scratch / "etc/netplan").iterdir():
        path.chmod(0o600)
    if case == "dangling":
        (scratch / "etc/netplan/20-gone.yaml").symlink_to("/nowhere.yaml")
    done = subprocess.run(
        [real_netplan, "generate", "--root-dir", scratch], capture_output=True, text=True, check=False
    )
    recorded = FIXTURES / case / "stderr.txt"
    assert done.returncode == (1 if recorded.exists() else 0)
    if recorded.exists():
        assert done.stderr.splitlines()[0] == recorded.read_text().splitlines()[0].replace("/scratch", str(scratch))
    for path in (FIXTURES / case).rglob("run/*/*/*"):
        assert (scratch / path.relative_to(FIXTURES / case)).read_text() == path.read_text()


@pytest.mark.parametrize("case", ["network-manager", "no-file-named", "accepted-networkd", "accepted-manager"])
def test_the_module_with_the_real_netplan(case: str, real_netplan: str, run_module: Any, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(FIXTURES / case / "etc", root / "etc")
    options = {"host": "spark1", "root": str(root), "ports": PORTS, "management_address": MANAGEMENT}
    result = run_module(fabric_netplan.main, **options)
    named = {
        "network-manager": "90-NM-14f59568-5076-387a-aef6-10adfcca2e26.yaml is broken: 9:7: ",
        "no-file-named": "10-driver.yaml is broken: ERROR: drv: ",
        "accepted-networkd": f"50-cloud-init.yaml configures {A} too",
        "accepted-manager": f"90-NM-all.yaml configures {A} too",
    }[case]
    assert only(result)["found"].startswith(f"{root}/etc/netplan/{named}")
    assert not (root / OURS).exists()
    next((root / "etc/netplan").glob(named.split(" ")[0])).unlink()
    assert run_module(fabric_netplan.main, **options)["changed"]
    assert (root / OURS).read_text() == TEXT
