"""Installs the checkout with pip into a fresh environment of each Python from 3.10 to 3.13 that is found, with the
newest torch that pyproject.toml names, and once more with the oldest torch claimed, and trains a step in each.

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
from pathlib import Path

import build_core
from make_wheel import cache_environment

ROOT = build_core.ROOT
VERSIONS = ("3.10", "3.11", "3.12", "3.13")


def interpreters() -> dict[str, Path]:
    """The interpreters that are found, by version: on PATH first, then under pyenv."""
    found: dict[str, Path] = {}
    for version in VERSIONS:
        candidates = [Path(path) for path in [shutil.which(f"python{version}")] if path]
        candidates += sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
        for candidate in candidates:
            code = "import sys; print('%d.%d' % sys.version_info[:2])"
            out = subprocess.run([str(candidate), "-c", code], capture_output=True, text=True)
            if out.returncode == 0 and out.stdout.strip() == version:
                found[version] = candidate
                break
    return found


def torch_versions() -> tuple[str, str]:
    """(the oldest claimed, the one that development is pinned to), from pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    oldest, pinned = re.search(r'"torch>=([\d.]+)"', text), re.search(r'"torch==([\d.]+)"', text)
    assert oldest and pinned, "pyproject.toml names no torch"
    return oldest[1], pinned[1]


def attempt(interpreter: Path, torch: str, keep: bool) -> bool:
    """One environment: torch, `pip install .`, the smoke test. Prints what came of it."""
    folder = ROOT / "build" / "compat" / f"{interpreter.parent.parent.name}-torch{torch}"
    python = folder / "bin" / "python"
    try:
        if not python.exists():
            subprocess.run([str(interpreter), "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
        subprocess.run([*pip, f"torch=={torch}"], check=True)
        subprocess.run([*pip, str(ROOT)], check=True, env=cache_environment())
        with tempfile.TemporaryDirectory() as elsewhere:
            script = shutil.copy(ROOT / "tools" / "smoke.py", elsewhere)
            subprocess.run([str(python), script], check=True, cwd=elsewhere)
    except subprocess.CalledProcessError as error:
        print(f"FAILED: {interpreter} with torch {torch}: {error}", flush=True)
        return False
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="leave the environments in build/compat")
    parser.add_argument("--only", help="one Python version, as 3.12")
    parser.add_argument("--torch", help="one torch version")
    args = parser.parse_args()
    found = {version: path for version, path in interpreters().items() if args.only in (None, version)}
    if not found:
        print("error: no Python from 3.10 to 3.13 was found", file=sys.stderr)
        return 1
    oldest, pinned = torch_versions()
    runs = [(path, args.torch or pinned) for path in found.values()]
    if args.torch is None:
        runs.append((next(iter(found.values())), oldest))
    # All are tried, also after a failure.
    results = [attempt(path, torch, args.keep) for path, torch in runs]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
