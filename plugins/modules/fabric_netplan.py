#!/usr/bin/python
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_netplan
author: Sparkwright contributors (@sparkwright)
version_added: 0.1.0
short_description: Addresses and MTU of fabric ports by a netplan file
description:
  - Writes C(/etc/netplan/90-sparkwright-fabric.yaml) and applies it, with everything checked before.
  - Before anything changes, the node arms a timer that puts everything back by itself. It is only stopped by
    O(state=confirmed), which the controller must run over a new connection, within RV(confirm_within_s).
  - What an interrupted run left is put back by the next run.
  - Other netplan files, other devices and profiles of NetworkManager are never touched.
attributes:
  check_mode:
    description: Checks everything, including what netplan says, and changes nothing.
    support: full
  diff_mode:
    description: Shows the file before and after.
    support: full
  idempotent:
    description: Does nothing when the file is there and the kernel has what it says.
    support: full
options:
  host:
    description: Name of this node in findings.
    type: str
    required: true
  ports:
    description: Fabric ports with their addresses; required when O(state=applied).
    type: list
    elements: dict
    suboptions:
      netdev:
        description: Name of the network device.
        type: str
        required: true
      address:
        description: IPv4 address with its prefix, such as 10.77.0.1/24; each port has a network of its own.
        type: str
        required: true
      mtu:
        description: MTU in bytes.
        type: int
        default: 9000
  management_address:
    description:
      - IPv4 address by which the controller reaches the node, and which must stay; required unless
        O(state=confirmed).
    type: str
  state:
    description: V(applied) writes and applies the file, V(absent) removes it, and V(confirmed) keeps either change.
    type: str
    choices: [applied, confirmed, absent]
    default: applied
  deadline_s:
    description: Seconds after which the node puts everything back, unless the change was confirmed.
    type: int
    default: 30
  settle_s:
    description: Seconds for which the management address may be away while netplan works.
    type: int
    default: 5
  root:
    description: Where the files lie; below another directory than C(/) they are checked and written, not applied.
    type: path
    default: /
"""

EXAMPLES = r"""
- name: Give the ports their addresses
  sparkwright.dsv41.fabric_netplan:
    host: spark1
    ports:
      - netdev: enp1s0f0np0
        address: 10.77.0.1/24
      - netdev: enP2p1s0f0np0
        address: 10.77.1.1/24
    management_address: 192.168.1.5

- name: Keep them
  sparkwright.dsv41.fabric_netplan:
    host: spark1
    state: confirmed
"""

RETURN = r"""
before:
  description: The file as it was, empty where there was none.
  returned: success
  type: str
after:
  description: The file as it is now, or would be.
  returned: success
  type: str
findings:
  description: What is wrong, as id, host, found, needed, repair, severity; the module fails when there is any.
  returned: always
  type: list
  elements: dict
confirm_within_s:
  description: Seconds that remain until everything is put back; 0 when nothing waits for O(state=confirmed).
  returned: success
  type: int
"""

import contextlib
import fcntl
import glob
import os
import shutil
import stat
import subprocess
import tempfile
import time
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, NoReturn, Optional, Sequence, Tuple

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkwright.dsv41.plugins.module_utils import netplan
from ansible_collections.sparkwright.dsv41.plugins.module_utils.findings import Finding

# The root whose files the node really uses.
LIVE = "/"
STATE = "var/lib/sparkwright/netplan"
UNIT = "sparkwright-netplan-restore"
POLL_S = 0.1
# What the controller needs at least for a new connection.
CONFIRM_S = 5


class Failed(Exception):
    """Something that is wrong on the node: the finding's id, what was found, what is needed, what repairs it."""


def write(path: str, text: str, mode: int) -> None:
    """Write a file that is complete, and on the disk, as soon as it has its name."""
    new = f"{path}.new"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as stream:
        os.fchmod(stream.fileno(), mode)
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, path)
    sync(os.path.dirname(path))


def sync(directory: str) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Generated(NamedTuple):
    """What netplan made of files, by name; or the file it complains of ("" when it names none) and its error."""

    culprit: str
    error: str
    files: Mapping[str, str]


class Change:
    """One run of the module on one node."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        params: Dict[str, Any] = module.params
        self.check = module.check_mode
        self.root = os.path.abspath(params["root"])
        self.live = os.path.realpath(self.root) == os.path.realpath(LIVE)
        self.file = os.path.join(self.root, netplan.DIRECTORIES[0], netplan.NAME)
        self.state = os.path.join(self.root, STATE)
        self.pending = f"{self.state}/pending"
        self.restored = f"{self.state}/restored"
        self.deadline: int = params["deadline_s"]
        self.ports = [netplan.Port(**port) for port in params["ports"] or []] if params["state"] == "applied" else []
        self.text = netplan.render(self.ports) if params["state"] == "applied" else ""
        self.before, self.mode = self.read()

    def run(self) -> None:
        try:
            with self.lock():
                if self.module.params["state"] == "confirmed":
                    self.confirm()
                else:
                    self.configure()
        except Failed as error:
            self.fail(error.args)

    # Results

    def leave(self, changed: bool, after: str, confirm_within_s: int = 0) -> NoReturn:
        header = {"before_header": self.file, "after_header": self.file}
        self.module.exit_json(
            changed=changed,
            before=self.before,
            after=after,
            diff={"before": self.before, "after": after, **header},
            findings=[],
            confirm_within_s=confirm_within_s,
        )
        raise AssertionError("exit_json returned")

    def fail(self, *wrong: Sequence[str]) -> NoReturn:
        """Fail with (id, found, needed, repair) for each thing that is wrong."""
        host = self.module.params["host"]
        found = [Finding(name, host, *rest) for name, *rest in wrong]
        lines = "\n".join(finding.line() for finding in found)
        self.module.fail_json(msg=lines, findings=[finding.to_dict() for finding in found])
        raise AssertionError("fail_json returned")

    # The node

    def command(self, name: str) -> str:
        path = self.module.get_bin_path(name)
        if not path:
            package = {"ip": "iproute2", "netplan": "netplan.io"}.get(name, "systemd")
            raise Failed("fabric.netplan", f"no {name} command", f"{name} in PATH", f"apt-get install {package}")
        return str(path)

    def call(self, *words: str) -> str:
        rc, out, err = self.module.run_command([self.command(words[0]), *words[1:]])
        if rc != 0:
            raise Failed("fabric.netplan", f"{' '.join(words[:4])} failed: {err.strip() or out.strip()}", "success", "")
        return str(out)

    def devices(self) -> Dict[str, netplan.Device]:
        return netplan.devices(self.call("ip", "-j", "-d", "address", "show"))

    def read(self) -> Tuple[str, int]:
        try:
            with open(self.file, encoding="utf-8", errors="replace") as stream:
                return stream.read(), stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
        except FileNotFoundError:
            return "", 0

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep the watchdog and other runs away, except in check mode, which leaves no trace."""
        if self.check:
            yield
            return
        os.makedirs(self.state, mode=0o700, exist_ok=True)
        os.chmod(self.state, 0o700)
        with open(f"{self.state}/lock", "w", encoding="utf-8") as stream:
            end = time.monotonic() + 2 * self.deadline
            while True:
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        found = "another run of fabric_netplan, or its restore, is at work"
                        self.fail(("fabric.netplan", found, "one at a time", f"journalctl -u {UNIT}"))
                    time.sleep(POLL_S)
            # Another run may have changed it meanwhile.
            self.before, self.mode = self.read()
            yield

    # Steps

    def confirm(self) -> None:
        if os.path.isdir(self.pending):
            if not os.path.exists(f"{self.pending}/verified"):
                self.fail((
                    "fabric.netplan", "the last change was cut off before it was checked", "a complete change",
                    "run --tags fabric again",
                ))  # fmt: skip
            if not self.check:
                self.disarm()
            self.leave(True, self.before)
        if os.path.isdir(self.restored):
            self.fail((
                "fabric.management", "the change was not confirmed in time and everything was put back",
                f"a connection within {self.deadline} s", "run again, with a larger fabric_configure_deadline_s",
            ))  # fmt: skip
        self.leave(False, self.before)

    def configure(self) -> None:
        interrupted = os.path.isdir(self.pending)
        if not self.check:
            if interrupted:
                self.put_back()
                self.before, self.mode = self.read()
            # Whoever asks for a change knows what became of the last one.
            shutil.rmtree(self.restored, ignore_errors=True)
        known = self.devices() if self.live else None
        self.refuse_wrong_ports(known)
        same = self.before == self.text and self.mode == (0o600 if self.text else 0)
        # In check mode nothing was put back, and what the kernel has is about to go.
        if same and not (self.check and interrupted) and not (known and netplan.lacking(self.ports, known)):
            self.leave(interrupted, self.text)
        self.refuse_what_netplan_refuses(known or {})
        for name in ("systemd-run", "systemctl") if self.live else ():
            self.command(name)
        if self.check:
            self.leave(True, self.text)
        if known is None:
            os.makedirs(os.path.dirname(self.file), exist_ok=True)
            self.install()
            self.leave(True, self.text)
        self.leave(True, self.text, self.apply(known))

    def refuse_wrong_ports(self, known: Optional[Mapping[str, netplan.Device]]) -> None:
        ours = [port.netdev for port in netplan.parse(self.before)]
        wrong = netplan.problems(self.ports, known, self.module.params["management_address"], ours)
        host = self.module.params["host"]
        repair = f"correct spark_fabric_rails of {host}"
        if wrong:
            self.fail(*(("fabric.netplan", problem.found, problem.needed, repair) for problem in wrong))

    def generate(self, files: Mapping[str, bytes]) -> Generated:
        """Let netplan read copies of the files, which are by name below the root."""
        with tempfile.TemporaryDirectory(prefix="sparkwright-netplan-") as scratch:
            for name, content in files.items():
                os.makedirs(f"{scratch}/{os.path.dirname(name)}", exist_ok=True)
                with open(os.open(f"{scratch}/{name}", os.O_WRONLY | os.O_CREAT, 0o600), "wb") as stream:
                    stream.write(content)
            rc, out, err = self.module.run_command([self.command("netplan"), "generate", "--root-dir", scratch])
            if rc != 0:
                return Generated(*netplan.blame(f"{err}\n{out}", scratch, files), {})
            made = {}
            for pattern in ("run/systemd/network/*", "run/NetworkManager/system-connections/*"):
                for path in glob.glob(f"{scratch}/{pattern}"):
                    with open(path, encoding="utf-8", errors="replace") as text:
                        made[path[len(scratch) + 1 :]] = text.read()
            return Generated("", "", made)

    def refuse_what_netplan_refuses(self, known: Mapping[str, netplan.Device]) -> None:
        """What others have must be well without ours, must not be about our ports, and be well with ours."""
        others = self.others()
        made = self.generate(others)
        without: Dict[str, Generated] = {}
        if made.error or any(netplan.claimed(made.files, *self.identity(port.netdev, known)) for port in self.ports):
            # Slow, and only needed to tell which file it is.
            without = {name: self.generate({key: others[key] for key in others if key != name}) for name in others}
        if made.error:
            culprit = made.culprit or next((name for name in others if not without[name].error), "")
            at = os.path.join(self.root, culprit) if culprit else "one of the netplan files of this node"
            repair = f"correct or move away {at} until netplan generate succeeds; nothing was changed"
            self.fail(("fabric.netplan", f"{at} is broken: {made.error}", "files that netplan accepts", repair))
        owned = []
        for netdev, *rest in (self.identity(port.netdev, known) for port in self.ports):
            if not netplan.claimed(made.files, netdev, *rest):
                continue
            named = [
                name
                for name, less in without.items()
                if not less.error and not netplan.claimed(less.files, netdev, *rest)
            ]
            # Two files may be about it, or others may need the one that is.
            named = named or [name for name in others if netdev.encode() in others[name]] or list(others)
            at = " or ".join(os.path.join(self.root, name) for name in named)
            repair = f"take {netdev} out of it, or set fabric_configure: false; nothing was changed"
            owned.append(("fabric.netplan", f"{at} configures {netdev} too", "one owner for each port", repair))
        if owned:
            self.fail(*owned)
        if self.text:
            ours = f"{netplan.DIRECTORIES[0]}/{netplan.NAME}"
            error = self.generate({**others, ours: self.text.encode()}).error
            if error:
                found = f"netplan refuses our file beside the others: {error}"
                self.fail(("fabric.netplan", found, "files that netplan accepts together", "see netplan get"))

    def identity(self, netdev: str, known: Mapping[str, netplan.Device]) -> Tuple[str, str, str]:
        """Name, MAC and driver of a device, by which netplan files may mean it."""
        mac = known[netdev].mac if netdev in known else ""
        driver = os.path.join("/sys/class/net", netdev, "device/driver")
        return netdev, mac, os.path.basename(os.path.realpath(driver)) if os.path.exists(driver) else ""

    def others(self) -> Dict[str, bytes]:
        """Content of every netplan file but ours, by its name below the root."""
        found = {}
        for directory in netplan.DIRECTORIES:
            for path in sorted(glob.glob(os.path.join(glob.escape(os.path.join(self.root, directory)), "*.yaml"))):
                name = f"{directory}/{os.path.basename(path)}"
                if os.path.basename(path) == netplan.NAME:
                    continue
                try:
                    with open(path, "rb") as stream:
                        found[name] = stream.read()
                except OSError as error:
                    repair = f"correct or remove {path}; nothing was changed"
                    why = f"{path} cannot be read: {error.strerror}"
                    self.fail(("fabric.netplan", why, "files that netplan can read", repair))
        return found

    def install(self) -> None:
        if self.text:
            write(self.file, self.text, 0o600)
        elif os.path.exists(self.file):
            os.unlink(self.file)
            sync(os.path.dirname(self.file))

    def apply(self, known: Dict[str, netplan.Device]) -> int:
        """Change the node under the eyes of the watchdog; return the seconds in which that must be confirmed."""
        old = netplan.parse(self.before)
        device, expected = netplan.located(self.module.params["management_address"], known)
        try:
            self.record([port.netdev for port in [*old, *self.ports]], known)
            armed = time.monotonic()
            self.arm()
        except (OSError, Failed) as error:
            shutil.rmtree(self.pending, ignore_errors=True)
            self.fail_with(error, "; nothing was changed")
        try:
            self.install()
            self.netplan_apply()
            kept = [(port.netdev, port.address) for port in self.ports]
            for port in old:
                if (port.netdev, port.address) not in kept:
                    # networkd leaves addresses on a device that it no longer manages.
                    self.module.run_command([self.command("ip"), "address", "del", port.address, "dev", port.netdev])
            self.watch(device, expected)
            remaining = int(armed + self.deadline - time.monotonic())
            if remaining < CONFIRM_S or not os.path.isdir(self.pending):
                raise Failed(
                    "fabric.netplan", f"netplan took {time.monotonic() - armed:.0f} s",
                    f"at most {self.deadline - CONFIRM_S} s", "raise fabric_configure_deadline_s",
                )  # fmt: skip
            write(f"{self.pending}/verified", "", 0o600)
        except Exception as error:  # Whatever it was.
            self.put_back()
            self.fail_with(error, "; everything was put back")
        return remaining

    def fail_with(self, error: BaseException, outcome: str) -> NoReturn:
        if isinstance(error, Failed):
            name, found, needed, repair = error.args
        else:
            name, found, needed, repair = "fabric.netplan", str(error), "a change that works", ""
        self.fail((name, f"{found}{outcome}", needed, repair or "see journalctl -u systemd-networkd"))

    def record(self, names: List[str], known: Dict[str, netplan.Device]) -> None:
        """What is needed to put everything back, on the disk before anything changes."""
        chosen = [known[name] for name in sorted(set(names)) if name in known]
        names = [device.name for device in chosen]
        routes = {name: netplan.routes(self.call("ip", "-4", "route", "show", "dev", name)) for name in names}
        modes = {name: netplan.gen_mode(self.call("ip", "-j", "-d", "link", "show", "dev", name)) for name in names}
        script = netplan.restore_script(
            netplan.Record(chosen, modes, routes, self.ports), self.state, self.file, os.path.exists(self.file),
            self.command("netplan"), self.command("ip"), 2 * self.deadline,
        )  # fmt: skip
        new = f"{self.state}/new"
        shutil.rmtree(new, ignore_errors=True)
        os.mkdir(new, 0o700)
        write(f"{new}/restore", script, 0o700)
        if os.path.exists(self.file):
            write(f"{new}/before.yaml", self.before, self.mode)
        os.rename(new, self.pending)
        sync(self.state)

    def arm(self) -> None:
        self.stop_watchdog()
        self.call(
            "systemd-run", "--quiet", "--collect", f"--unit={UNIT}", f"--on-active={self.deadline}",
            "--timer-property=AccuracySec=100ms", "/bin/sh", f"{self.pending}/restore",
        )  # fmt: skip

    def stop_watchdog(self) -> None:
        """Stop the timer. Its service waits for the lock that we hold, if it runs at all."""
        self.module.run_command([self.command("systemctl"), "stop", f"{UNIT}.timer", f"{UNIT}.service"])

    def disarm(self) -> None:
        # First the record, then the timer: in between it finds nothing to do.
        done = f"{self.state}/confirmed"
        shutil.rmtree(done, ignore_errors=True)
        os.rename(self.pending, done)
        sync(self.state)
        self.stop_watchdog()
        shutil.rmtree(done, ignore_errors=True)

    def put_back(self) -> None:
        self.stop_watchdog()
        rc, out, err = self.module.run_command(["/bin/sh", f"{self.pending}/restore", "locked"])
        if os.path.isdir(self.pending):
            found = f"putting everything back failed ({rc}): {(err or out).strip()}"
            repair = f"see what it says, then run it again: sh {self.pending}/restore"
            self.fail(("fabric.netplan", found, "the network as it was before", repair))

    def netplan_apply(self) -> None:
        words = [self.command("netplan"), "apply"]
        try:
            done = subprocess.run(words, capture_output=True, errors="replace", timeout=self.deadline, check=False)
        except subprocess.TimeoutExpired:
            found = f"netplan apply had not ended after {self.deadline} s"
            raise Failed("fabric.netplan", found, "an end", "raise fabric_configure_deadline_s") from None
        if done.returncode != 0:
            why = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
            raise Failed("fabric.netplan", f"netplan apply failed: {why}", "success", "")

    def watch(self, device: str, expected: str) -> None:
        """Wait until the management address is back for good, and the ports have what they are to have."""
        patience = int(self.module.params["settle_s"] / POLL_S)
        end = time.monotonic() + max(self.module.params["settle_s"], self.deadline / 2)
        samples: List[List[str]] = []
        while True:
            known = self.devices()
            samples.append(known[device].ipv4 if device in known else [])
            verdict = netplan.settled(samples, expected, patience)
            missing = netplan.lacking(self.ports, known)
            if verdict == "ok" and not missing:
                return
            if verdict in ("gone", "different") or time.monotonic() > end:
                break
            time.sleep(POLL_S)
        if verdict != "ok":
            has = ", ".join(samples[-1]) or "no address"
            found = f"{device} has {has} after netplan apply"
            raise Failed("fabric.management", found, f"{expected}, which it had before", "configure the fabric by hand")
        repair = "look for other configuration of the port: networkctl status, nmcli device"
        raise Failed("fabric.netplan", f"after netplan apply {'; '.join(missing)}", "what the file says", repair)


def main() -> None:
    port = {
        "netdev": {"type": "str", "required": True},
        "address": {"type": "str", "required": True},
        "mtu": {"type": "int", "default": 9000},
    }
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "required": True},
            "ports": {"type": "list", "elements": "dict", "options": port},
            "management_address": {"type": "str"},
            "state": {"type": "str", "choices": ["applied", "confirmed", "absent"], "default": "applied"},
            "deadline_s": {"type": "int", "default": 30},
            "settle_s": {"type": "int", "default": 5},
            "root": {"type": "path", "default": "/"},
        },
        required_if=[
            ("state", "applied", ["ports", "management_address"]),
            ("state", "absent", ["management_address"]),
        ],
        supports_check_mode=True,
    )
    Change(module).run()


if __name__ == "__main__":
    main()
