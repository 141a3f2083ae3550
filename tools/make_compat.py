"""Installs the sdist with pip into a fresh environment of each Python from 3.10 to 3.13 that is found, with the torch
that pyproject.toml pins, and once more with the oldest torch claimed, and trains in each (tools/smoke.py).

    python tools/make_compat.py [--keep] [--only 3.12] [--torch VERSION]

Each environment takes about 5.5 GB in build/compat while it lasts; they are made one after the other and removed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import build_core
from make_wheel import build_sdist, cache_environment

ROOT = build_core.ROOT
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
FOLDER = ROOT / "build" / "compat"
NEEDED_GB = 8


def version_of(interpreter: Path) -> str | None:
    """As "3.12"; None when it does not run."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    out = subprocess.run([str(interpreter), "-c", code], capture_output=True, text=True)
    return out.stdout.strip() if out.returncode == 0 else None


def interpreters() -> dict[str, Path]:
    """The interpreters that are found, by version: on PATH first, then under pyenv."""
    found: dict[str, Path] = {}
    for version in VERSIONS:
        candidates = [Path(path) for path in [shutil.which(f"python{version}")] if path]
        candidates += sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
        for candidate in candidates:
            if version_of(candidate) == version:
                found[version] = candidate
                break
    return found


def torch_versions() -> tuple[str, str]:
    """(the oldest claimed, the one that development is pinned to), from pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    oldest, pinned = re.search(r'"torch>=([\d.]+)"', text), re.search(r'"torch==([\d.]+)"', text)
    assert oldest and pinned, "pyproject.toml names no torch"
    return oldest[1], pinned[1]


def attempt(version: str, interpreter: Path, torch: str, sdist: Path, keep: bool) -> str:
    """One environment: torch (as "==2.10.0" or "<=2.15.0"), `pip install` of the sdist, the smoke test. Gives what
    failed, "" if nothing did."""
    folder = FOLDER / f"python{version}"
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    with tempfile.TemporaryDirectory() as elsewhere:
        script = shutil.copy(ROOT / "tools" / "smoke.py", elsewhere)
        steps = [
            ("making the environment", [str(interpreter), "-m", "venv", "--clear", str(folder)]),
            ("installing torch", [*pip, f"torch{torch}"]),
            ("installing the package", [*pip, str(sdist)]),
            ("training", [str(python), script]),
        ]
        try:
            for name, command in steps:
                # Elsewhere, so that the package can only come from the environment.
                if subprocess.run(command, cwd=elsewhere, env=cache_environment()).returncode != 0:
                    return name
            return ""
        finally:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="leave the environments in build/compat")
    parser.add_argument("--only", help="one Python version, as 3.12")
    parser.add_argument("--torch", help="one torch version")
    args = parser.parse_args()
    found = {version: path for version, path in interpreters().items() if args.only in (None, version)}
    if not found:
        print(f"error: no Python {args.only or 'from 3.10 to 3.13'} was found", file=sys.stderr)
        return 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(FOLDER).free / 1e9
    if free < NEEDED_GB:
        print(
            f"error: an environment with torch needs {NEEDED_GB} GB in {FOLDER}, {free:.1f} GB are free",
            file=sys.stderr,
        )
        return 1
    sdist = build_sdist(FOLDER)
    oldest, pinned = torch_versions()
    # Not every interpreter has the newest torch.
    runs = [(version, f"=={args.torch}" if args.torch else f"<={pinned}") for version in found]
    if args.torch is None:
        runs.append((next(iter(found)), f"=={oldest}"))
    # All are tried, also after a failure.
    outcomes = []
    for version, torch in runs:
        start = time.monotonic()
        fault = attempt(version, found[version], torch, sdist, args.keep)
        outcome = f"FAILED at {fault}" if fault else "ok"
        outcomes.append(f"Python {version}, torch{torch}: {outcome} ({time.monotonic() - start:.0f} s)")
        print(outcomes[-1], flush=True)
    print("\n".join(["", *outcomes]))
    return int(any("FAILED" in outcome for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
