"""Builds sdist and wheel into `dist/`, checks the wheel's library, installs it into a clean environment and trains
a step there, with neither Go nor a compiler on PATH.

The clean environment sees this environment's site-packages behind its own, for torch, which is 5 GB; the package
itself can only come from the wheel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

import build_core
import glibc

ROOT = build_core.ROOT


def cache_environment() -> dict[str, str]:
    """The environment for a build outside the checkout that shall use the checkout's Go caches."""
    env = dict(os.environ)
    if env.get("EAE_USE_HOST_GO_CACHE") != "1":
        cache = ROOT / ".cache"
        env.update(GOCACHE=str(cache / "go-build"), GOMODCACHE=str(cache / "go-mod"), GOPATH=str(cache / "go"))
        env["EAE_USE_HOST_GO_CACHE"] = "1"
    return env


def build_sdist(folder: Path) -> Path:
    """Builds the sdist into that folder; gives its path."""
    for old in folder.glob("*.tar.gz"):
        old.unlink()
    cmd = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", str(folder), str(ROOT)]
    subprocess.run(cmd, check=True, stdout=subprocess.DEVNULL)
    (sdist,) = folder.glob("*.tar.gz")
    return sdist


def build() -> Path:
    """Builds the sdist, and the wheel from the sdist; gives the wheel."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    cmd = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(ROOT)]
    subprocess.run(cmd, check=True, env=cache_environment(), stdout=subprocess.DEVNULL)
    (wheel,) = dist.glob("*.whl")
    return wheel


def check(wheel: Path) -> list[str]:
    """What is wrong with the wheel; nothing, if all is well."""
    faults = []
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    if f"-{tag}-{tag}-" not in wheel.name:
        faults.append(f"the wheel is not tagged {tag}: {wheel.name}")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        if len(libraries) != 1:
            return [*faults, f"the wheel should hold one library, and holds {libraries}"]
        library = Path(archive.extract(libraries[0], folder))
        elf = glibc.dynamic(library)
        faults += [f"the library needs {name}" for name in elf.needed if name not in glibc.ALLOWED]
        faults += [f"the library has the run path {path}" for path in elf.run_paths]
    return faults


def try_out(wheel: Path) -> None:
    """Installs the wheel into a clean environment and runs tools/smoke.py there."""
    folder = ROOT / "build" / "wheel-venv"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    cmd = [
        str(python),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "-q",
        "--no-index",
        "--no-deps",
        str(wheel),
    ]
    subprocess.run(cmd, check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "torch-from-the-checkout.pth").write_text(sysconfig.get_path("purelib") + "\n")
    with tempfile.TemporaryDirectory() as elsewhere:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "GO"))}
        env["PATH"] = str(folder / "bin")
        for tool in ("go", "cc", "gcc"):
            assert shutil.which(tool, path=env["PATH"]) is None, f"{tool} is still on PATH"
        script = shutil.copy(ROOT / "tools" / "smoke.py", elsewhere)
        out = subprocess.run(
            [str(python), script], check=True, env=env, cwd=elsewhere, stdout=subprocess.PIPE, text=True
        )
        print(out.stdout, end="")
        assert str(folder) in out.stdout, "the package was not imported from the wheel"


def main() -> int:
    wheel = build()
    faults = check(wheel)
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    if faults:
        return 1
    try_out(wheel)
    for path in sorted((ROOT / "dist").iterdir()):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
