"""Every template, rendered by Ansible, against its golden file and a real parser.

SPARKWRIGHT_UPDATE_GOLDEN=1 writes the golden files anew.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
PARSERS = {"peer-serve": ["sh", "-n"], "zfs-serve": ["sh", "-n"]}
VARIABLES = {
    "peers_stream_ports": "18730-18793",
    "peers_weights": [{"id": "model", "path": "/var/lib/sparkwright/weights/model"}],
    "peers_zfs_datasets": ["tank/models/model"],
}
TEMPLATES = sorted(ROOT.glob("roles/*/templates/*.j2"))


def render(template: Path, target: Path, **variables: Any) -> None:
    argument = json.dumps({"src": str(template), "dest": str(target), "mode": "0700"})
    command = ["ansible", "localhost", "-c", "local", "-m", "ansible.builtin.template", "-a", argument]
    command += ["-e", json.dumps(variables)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_template_has_a_parser() -> None:
    assert [template.stem for template in TEMPLATES] == sorted(PARSERS)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.stem)
def test_rendered(template: Path, tmp_path: Path) -> None:
    target = tmp_path / template.stem
    render(template, target, **VARIABLES)
    golden = GOLDEN / template.stem
    if os.environ.get("SPARKWRIGHT_UPDATE_GOLDEN"):
        golden.write_text(target.read_text())
    assert target.read_text() == golden.read_text()
    subprocess.run([*PARSERS[template.stem], str(target)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(target)], check=True)


def test_a_hostile_directory_stays_one_word(tmp_path: Path) -> None:
    target, hostile = tmp_path / "peer-serve", f"{tmp_path}/x; touch {tmp_path}/broken"
    render(
        ROOT / "roles/peers/templates/peer-serve.j2",
        target,
        **{**VARIABLES, "peers_weights": [{"id": "model", "path": hostile}]},
    )
    Path(hostile).mkdir(parents=True)
    (Path(hostile) / ".sparkwright-weights.json").write_text("the receipt")
    env = {"PATH": "/usr/bin:/bin", "SSH_ORIGINAL_COMMAND": "receipt model"}
    answer = subprocess.run([str(target)], env=env, capture_output=True, text=True, check=True)
    assert answer.stdout == "the receipt"
    assert not (tmp_path / "broken").exists()


def test_without_datasets_nothing_is_asked_of_zfs(tmp_path: Path) -> None:
    target = tmp_path / "peer-serve"
    render(ROOT / "roles/peers/templates/peer-serve.j2", target, **{**VARIABLES, "peers_zfs_datasets": []})
    env = {"PATH": "/usr/bin:/bin", "SSH_ORIGINAL_COMMAND": "zfs-list tank/models/model"}
    answer = subprocess.run([str(target)], env=env, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (77, "peer-serve: refused\n")
