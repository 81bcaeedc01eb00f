#!/usr/bin/env python3
"""Deploy a cluster from Python and read what came out: deploy_with_runner.py INVENTORY [TAG ...].

Shows the three things an automation needs: progress while it runs, what failed on which host, and the answer of the
smoke test. Run it with the project's .venv.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import ansible_runner

PROJECT = Path(__file__).resolve().parents[2]


def deploy(inventory: Path, private_data_dir: Path, tags: list[str] | None = None) -> dict[str, Any]:
    """Run site.yml; returns status, changed tasks per host, failures and the smoke test's answer."""
    # The project directory becomes the working directory, so that its ansible.cfg applies.
    runner = ansible_runner.run(
        project_dir=str(PROJECT),
        private_data_dir=str(private_data_dir),
        playbook="site.yml",
        inventory=str(inventory.resolve()),
        tags=",".join(tags or []),
        quiet=True,
        rotate_artifacts=5,
    )
    answer, failures = None, []
    for event in runner.events:
        data = event.get("event_data", {})
        result = data.get("res") or {}
        if event["event"] in ("runner_on_failed", "runner_on_unreachable") and not data.get("ignore_errors"):
            failures.append({"host": data["host"], "task": data["task"], "message": result.get("msg")})
        if event["event"] == "runner_on_ok" and "answer" in result:
            answer = result["answer"]
    return {
        "status": runner.status,
        "changed": (runner.stats or {}).get("changed", {}),
        "failures": failures,
        "answer": answer,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inventory", type=Path)
    parser.add_argument("tags", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sparkwright-runner-") as directory:
        outcome = deploy(args.inventory, Path(directory), args.tags)
    print(json.dumps(outcome, indent=2))
    return 0 if outcome["status"] == "successful" else 1


if __name__ == "__main__":
    raise SystemExit(main())
