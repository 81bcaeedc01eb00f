"""What a hub and a crash can do to a download, each to a directory of its own on the head.

The role's own tasks fetch with the unmodified client from the lab's hub, which misbehaves for the first run and behaves
for the second one. All cases run side by side, so that their waits overlap; the hub's log of requests is the proof of
what was fetched, and of what was not fetched again.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
LAB = ROOT / ".lab"
HUB = f"http://{yaml.safe_load((ROOT / 'inventory/lab/group_vars/all/lab.yml').read_text())['lab_hub_address']}:8080"
# On the head. Beside the cases' directories lies what links lead to.
PLACE = "/var/tmp/sparkwright-faults"
OUTSIDE = f"{PLACE}/outside"
PRECIOUS = b"precious\n"
RECEIPT = ".sparkwright-weights.json"
RETRY_AFTER_S = 2
# What the client writes at a time: less of a file is not kept.
CHUNK = 10 * 2**20
LIMIT_S = 240
# SSH lets no more than ten sessions share a connection, and no more than ten begin one at a time.
CONNECTIONS = 6


def filled(name: str, size: int) -> bytes:
    """Always the same bytes for a name, and no two blocks of them alike."""
    return hashlib.shake_256(name.encode()).digest(size)


FILES = {
    "a.bin": filled("a", 2**20),
    "b.bin": filled("b", 2 * 2**20 + 1),
    "c.bin": filled("c", 2**20 + 5),
    "config.json": b"{}\n",
    "tokens/vocab.txt": b"a\nb\n",
}
LARGE_B = filled("large", CHUNK + 2**20)
ALL = sorted(FILES)
AFTER_A = ALL[1:]


@dataclass(frozen=True)
class Case:
    """`rules` are the hub's; `{repo}` stands for the path of the repository, `{b}` for that of its `b.bin`.

    `says`: what the error of the first run has; empty when it must succeed. `left`: files that the first run does not
    leave finished, so that the second one fetches them and no other.
    """

    name: str
    rules: list[dict[str, Any]] = field(default_factory=list)
    says: str = ""
    left: list[str] = field(default_factory=list)
    large: bool = False
    links: dict[str, str] = field(default_factory=dict)
    # Called while the first run is at the file that its rule holds up.
    meanwhile: Callable[[Case], None] | None = None

    @property
    def repo(self) -> str:
        return f"faults/{self.name}"

    @property
    def dest(self) -> str:
        return f"{PLACE}/{self.name}"

    @property
    def files(self) -> dict[str, bytes]:
        return {**FILES, "b.bin": LARGE_B} if self.large else FILES


def kill(case: Case) -> None:
    """SIGKILL to the process that has the directory open, which is the module."""
    time.sleep(0.3)
    found = ssh(f"find /proc/[0-9]*/fd -lname {case.dest} 2> /dev/null || true").split()
    pids = sorted({path.split("/")[2] for path in found})
    assert pids, f"nothing fetches {case.dest}"
    ssh(f"kill -KILL {' '.join(pids)}")


def push(case: Case) -> None:
    """Another commit, so that the one that was listed is gone."""
    put(case.repo, "c.bin", b"another commit")


B = {"match": "{b}"}
GET_B = {"match": "{b}", "method": "GET"}
LIST = {"match": "^/api/models{repo}/"}
ESCAPES = {"up": "../escaped.bin", "absolute": f"{PLACE}/escaped.bin", "cache": ".cache/sparkwright/escaped.bin"}
CASES = [
    Case("good"),
    Case(
        "killed-between-files",
        [{**GET_B, "action": "slow", "seconds": 20}],
        "Module result deserialization failed",
        AFTER_A,
        meanwhile=kill,
    ),
    Case(
        "killed-inside-a-file",
        [{**B, "action": "stall_after_bytes", "bytes": CHUNK + 1000, "seconds": 20}],
        "Module result deserialization failed",
        AFTER_A,
        large=True,
        meanwhile=kill,
    ),
    Case("dropped-once", [{**B, "action": "drop_after_bytes", "bytes": CHUNK + 1000, "times": 1}], large=True),
    Case("dropped-always", [{**B, "action": "drop_after_bytes"}], "was dropped", ["b.bin"]),
    Case(
        "busy-once",
        [{**GET_B, "action": "status", "status": 429, "headers": {"Retry-After": str(RETRY_AFTER_S)}, "times": 1}],
    ),
    Case(
        "busy-always",
        [{**GET_B, "action": "status", "status": 429, "headers": {"Retry-After": "0"}}],
        "no more requests for now (429): wait, or lower workers, and run again",
        AFTER_A,
    ),
    Case("busy-listing", [{**LIST, "action": "status", "status": 429}], "no more requests for now (429)", ALL),
    Case(
        "unavailable-once",
        [
            {**B, "action": "status", "status": 503, "times": 2, "method": "HEAD"},
            {**B, "action": "status", "status": 502, "times": 1, "method": "GET"},
        ],
    ),
    Case(
        "broken-always",
        [{**GET_B, "action": "status", "status": 500}],
        "b.bin: found The hub answers 500",
        ["b.bin"],
    ),
    Case("page", [{**GET_B, "action": "html"}], "answers with a web page instead of b.bin", AFTER_A),
    Case("page-listing", [{**LIST, "action": "html"}], "a web page instead of the list of files", ALL),
    Case("wrong-once", [{**B, "action": "wrong_bytes", "times": 1}]),
    Case(
        "wrong-always",
        [{**B, "action": "wrong_bytes"}],
        f"needed sha256:{hashlib.sha256(FILES['b.bin']).hexdigest()}",
        ["b.bin"],
    ),
    Case(
        "short",
        [{**B, "action": "short", "bytes": 1000}],
        f"should be of size {len(FILES['b.bin'])} but has size {len(FILES['b.bin']) - 1000}",
        ["b.bin"],
    ),
    Case(
        "other-commit-listed",
        [{**LIST, "action": "listing", "sha": "f" * 40}],
        f"answers with commit {'f' * 40} instead of",
        ALL,
    ),
    Case(
        "other-file-after-listing",
        [{**B, "action": "other_file", "file": "c.bin"}],
        f"b.bin: found {len(FILES['c.bin'])} bytes, needed {len(FILES['b.bin'])} bytes",
        ["b.bin"],
    ),
    Case(
        "other-commit-after-listing",
        [{**GET_B, "action": "slow", "seconds": 3}],
        "has no commit",
        AFTER_A,
        meanwhile=push,
    ),
    *(
        Case(
            f"escape-{how}",
            [{**LIST, "action": "listing", "names": {"b.bin": name}}],
            f"unsafe file name '{name}'",
            ALL,
        )
        for how, name in ESCAPES.items()
    ),
    Case(
        "link-to-a-folder",
        says=f"tokens: found a link to {OUTSIDE}, needed none",
        left=ALL,
        links={"tokens": OUTSIDE},
    ),
    Case("link-to-a-file", links={"b.bin": f"{OUTSIDE}/vocab.txt"}),
]
IDS = [case.name for case in CASES]


@dataclass
class Seen:
    """What both runs did to one case. Files are paths below its directory with their SHA-256."""

    error: str = ""
    error_again: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    requests_again: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    files_again: dict[str, str] = field(default_factory=dict)

    def got(self, again: bool = False) -> list[str]:
        """The files whose bytes were asked for, in this order."""
        log = self.requests_again if again else self.requests
        return [entry["path"].split("/", 5)[5] for entry in log if is_get(entry)]


def is_get(entry: dict[str, Any]) -> bool:
    return entry["method"] == "GET" and "/resolve/" in entry["path"]


SSH = ["ssh", "-F", str(LAB / "ssh_config"), "-o", "BatchMode=yes"]


def ssh(command: str) -> str:
    return subprocess.run([*SSH, "spark1", command], check=True, text=True, capture_output=True, timeout=60).stdout


@contextmanager
def connections(folder: Path) -> Iterator[None]:
    """The connections of all cases, begun one after the other. Ansible uses those that it finds."""
    paths = [["-o", f"ControlPath={folder}/ssh-{number}"] for number in range(CONNECTIONS)]
    try:
        for path in paths:
            subprocess.run([*SSH, *path, "-o", "ControlMaster=yes", "-fN", "spark1"], check=True, timeout=60)
        yield
    finally:
        for path in paths:
            subprocess.run([*SSH, *path, "-O", "exit", "spark1"], capture_output=True, check=False, timeout=60)


def ask(method: str, path: str, body: bytes | None = None) -> Any:
    with urllib.request.urlopen(urllib.request.Request(HUB + path, body, method=method), timeout=60) as answer:
        return json.load(answer)


def put(repo: str, path: str, data: bytes) -> None:
    ask("PUT", f"/_control/repositories/{repo}/{path}", data)


def requests_by_case() -> dict[str, list[dict[str, Any]]]:
    log = ask("GET", "/_control/requests")
    return {case.name: [entry for entry in log if f"/{case.repo}/" in entry["path"]] for case in CASES}


def files_by_case() -> dict[str, dict[str, str]]:
    """All files of all directories, the client's own included, and whatever lies beside them."""
    found: dict[str, dict[str, str]] = {}
    for line in ssh(f"cd {PLACE} && find . -type f -exec sha256sum {{}} +").splitlines():
        digest, path = line.split("  ./", 1)
        top, _, rest = path.partition("/")
        found.setdefault(top, {})[rest] = digest
    return found


def digests(files: dict[str, bytes]) -> dict[str, str]:
    return {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}


def start(cases: list[Case], revisions: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    """The role's tasks for these cases: each is a host that is the head."""
    hosts = {
        case.name: {
            "ansible_control_path": f"{folder}/ssh-{number % CONNECTIONS}",
            "weights_list": [
                {
                    "repo": case.repo,
                    "revision": revisions[case.name],
                    "path": case.dest,
                    "include": [],
                    "must_exist": [],
                    "join": "",
                    "slim": "",
                }
            ],
        }
        for number, case in enumerate(cases)
    }
    address = yaml.safe_load((ROOT / "inventory/lab/hosts.yml").read_text())
    head = address["all"]["children"]["sparks"]["children"]["spark_head"]["hosts"]["spark1"]["ansible_host"]
    same = {"ansible_host": head, "lab_dir": str(LAB)}
    inventory = folder / "cases.json"
    inventory.write_text(json.dumps({"cases": {"hosts": hosts, "vars": same}}))
    playbook = str(Path(__file__).with_name("faults.yml"))
    argv = ["ansible-playbook", "-i", "inventory/lab", "-i", str(inventory), playbook]
    argv += ["-e", f"faults_outcomes={folder}/outcomes.json"]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_FORKS": "12"}
    output = (folder / "output").open("w")
    return subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=output, stderr=output, text=True)


def errors(process: subprocess.Popen[str], folder: Path) -> dict[str, str]:
    """How the run ended for each case: the messages of what failed, or nothing."""
    process.wait(timeout=LIMIT_S)
    assert process.returncode == 0, (folder / "output").read_text()
    outcomes = json.loads((folder / "outcomes.json").read_text())
    return {
        name: "\n".join(str(result.get("msg")) for result in outcome.get("results", [outcome]) if result.get("failed"))
        for name, outcome in outcomes.items()
    }


def act_meanwhile(process: subprocess.Popen[str]) -> None:
    """Wait until the hub holds up each case that has something done to it, and do it."""
    waiting = {case.name: case for case in CASES if case.meanwhile}
    end = time.monotonic() + LIMIT_S
    while waiting and process.poll() is None and time.monotonic() < end:
        for name, log in requests_by_case().items():
            held = [rule.get("bytes", 0) for rule in waiting[name].rules] if name in waiting else []
            if held and any(is_get(e) and e["path"].endswith("/b.bin") and e["bytes"] >= held[0] for e in log):
                case = waiting.pop(name)
                assert case.meanwhile
                case.meanwhile(case)
        time.sleep(0.2)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Seen]]:
    folder = tmp_path_factory.mktemp("faults")
    with connections(folder):
        yield from both_runs(folder)


def both_runs(folder: Path) -> Iterator[dict[str, Seen]]:
    results = {case.name: Seen() for case in CASES}
    revisions = {}
    clean_up()
    try:
        ssh(f"mkdir -p {OUTSIDE} && printf precious\\\\n > {OUTSIDE}/vocab.txt")
        for case in CASES:
            for path, data in case.files.items():
                put(case.repo, path, data)
            revisions[case.name] = ask("GET", f"/api/models/{case.repo}")["sha"]
            for path, target in case.links.items():
                ssh(f"mkdir -p {case.dest} && ln -s {target} {case.dest}/{path}")
        rules = [
            {**rule, "match": rule["match"].format(repo=f"/{case.repo}", b=f"^/{case.repo}/resolve/.*/b.bin$")}
            for case in CASES
            for rule in case.rules
        ]
        ask("DELETE", "/_control/requests")
        ask("POST", "/_control/faults", json.dumps(rules).encode())
        process = start(CASES, revisions, folder)
        act_meanwhile(process)
        for name, error in errors(process, folder).items():
            results[name].error = error
        ask("DELETE", "/_control/faults")
        for name, log in requests_by_case().items():
            results[name].requests = log
        for name, files in files_by_case().items():
            results.setdefault(name, Seen()).files = files

        # What an operator repairs, or what passes by itself.
        ssh(f"rm {PLACE}/link-to-a-folder/tokens")
        put("faults/other-commit-after-listing", "c.bin", FILES["c.bin"])
        ask("DELETE", "/_control/requests")
        again = [case for case in CASES if case.left or case.name == "good"]
        for name, error in errors(start(again, revisions, folder), folder).items():
            results[name].error_again = error
        for name, log in requests_by_case().items():
            results[name].requests_again = log
        for name, files in files_by_case().items():
            results.setdefault(name, Seen()).files_again = files
        yield results
    finally:
        ask("DELETE", "/_control/faults")
        clean_up()


def clean_up() -> None:
    ssh(f"rm -rf {PLACE}")
    for case in CASES:
        try:
            ask("DELETE", f"/_control/repositories/{case.repo}")
        except urllib.error.HTTPError as error:
            assert error.code == 404


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_clear_error_or_healed_and_nothing_half(seen: dict[str, Seen], case: Case) -> None:
    result = seen[case.name]
    assert (case.says in result.error) if case.says else (result.error == ""), result.error
    there = {path: digest for path, digest in result.files.items() if not path.startswith(".cache/")}
    receipt = there.pop(RECEIPT, None)
    assert (receipt is None) == bool(case.left)
    assert there == {path: digest for path, digest in digests(case.files).items() if path not in case.left}


@pytest.mark.parametrize("case", [case for case in CASES if case.left], ids=lambda case: case.name)
def test_the_next_run_fetches_what_is_left_and_no_more(seen: dict[str, Seen], case: Case) -> None:
    result = seen[case.name]
    assert result.error_again == ""
    assert result.got(again=True) == case.left
    there = {path: digest for path, digest in result.files_again.items() if not path.startswith(".cache/")}
    assert there.pop(RECEIPT)
    assert there == digests(case.files)
    assert not [path for path in result.files_again if path.endswith(".incomplete")]


def test_nothing_outside_is_written(seen: dict[str, Seen]) -> None:
    assert sorted(set(seen) - set(IDS)) == ["outside"]
    for files in (seen["outside"].files, seen["outside"].files_again):
        assert files == {"vocab.txt": hashlib.sha256(PRECIOUS).hexdigest()}


def test_a_finished_directory_needs_no_hub(seen: dict[str, Seen]) -> None:
    assert seen["good"].got() == ALL
    assert seen["good"].requests_again == []
    assert seen["good"].files_again == seen["good"].files


def test_a_kill_inside_a_file_leaves_it_half_and_under_another_name(seen: dict[str, Seen]) -> None:
    leftovers = [path for path in seen["killed-inside-a-file"].files if path.endswith(".incomplete")]
    assert len(leftovers) == 1 and leftovers[0].startswith(".cache/")


def test_a_dropped_connection_goes_on_inside_the_file(seen: dict[str, Seen]) -> None:
    first, second = (entry for entry in seen["dropped-once"].requests if is_get(entry) and "/b.bin" in entry["path"])
    assert (first["range"], second["range"]) == (None, f"bytes={CHUNK}-")
    assert second["bytes"] == len(LARGE_B) - CHUNK


def test_a_busy_hub_is_given_the_time_that_it_asks_for(seen: dict[str, Seen]) -> None:
    first, second = (entry for entry in seen["busy-once"].requests if is_get(entry) and "/b.bin" in entry["path"])
    assert (first["status"], second["status"]) == (429, 200)
    assert second["time"] - first["time"] >= RETRY_AFTER_S


@pytest.mark.parametrize("name", ["wrong-once", "wrong-always", "short"])
def test_a_bad_file_is_fetched_twice_and_no_more(seen: dict[str, Seen], name: str) -> None:
    assert seen[name].got().count("b.bin") == 2


@pytest.mark.parametrize("case", [case for case in CASES if case.left == ALL], ids=lambda case: case.name)
def test_a_listing_or_a_directory_not_to_be_trusted_has_nothing_fetched(seen: dict[str, Seen], case: Case) -> None:
    assert seen[case.name].got() == []
