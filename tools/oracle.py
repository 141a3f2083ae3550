"""Runs the Go tests that need torch's C++ library, in processes without Python: gotorch's ops and autograd as an
independent oracle for the core, and the stable C ABI.

    python tools/oracle.py [go test arguments]

gotorch's C++ part is compiled from the sources in the Go module cache against this environment's torch into
build/gotorch, two files at a time; that takes a minute or two the first time, and needs a g++ that knows C++20.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import build_core

ROOT = build_core.ROOT
GOTORCH = "github.com/wangkuiyi/gotorch"


def _environment(go: Path) -> dict[str, str]:
    """The environment for `go test`: the checkout's caches, but neither of the flags that only the extension needs."""
    env = build_core.environment(go)
    for name in ("CGO_CFLAGS", "CGO_LDFLAGS"):
        del env[name]
    return env


def _compile(source: Path, target: Path, includes: list[str]) -> None:
    abi = int(torch.compiled_with_cxx11_abi())
    cmd = ["g++", "-std=c++20", "-O1", "-fPIC", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *includes]
    fresh = target.with_suffix(".new")
    subprocess.run([*cmd, "-c", str(source), "-o", str(fresh)], check=True)
    os.replace(fresh, target)


def build_library(go: Path, env: dict[str, str]) -> Path:
    """Builds libcgotorch.a where it is out of date; gives its folder."""
    if shutil.which("g++") is None:
        raise build_core.BuildError("the gotorch oracle needs g++ with C++20")
    build_core.run([str(go), "mod", "download", GOTORCH], env)
    listed = subprocess.run(
        [str(go), "list", "-m", "-f", "{{.Dir}}", GOTORCH],
        check=True,
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    module = Path(listed.stdout.strip())
    sources = sorted((module / "cgotorch").glob("*.cc"))
    digest = hashlib.sha256(f"{module.name}|{torch.__version__}|{sys.platform}".encode()).hexdigest()[:16]
    folder = ROOT / "build" / "gotorch" / digest
    folder.mkdir(parents=True, exist_ok=True)
    include = Path(torch.__file__).parent / "include"
    includes = [f"-I{path}" for path in (module, include, include / "torch" / "csrc" / "api" / "include")]
    objects = {source: folder / f"{source.stem}.o" for source in sources}
    missing = [source for source, target in objects.items() if not target.exists()]
    if missing:
        print(f"compiling {len(missing)} files of gotorch against torch {torch.__version__}", flush=True)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda source: _compile(source, objects[source], includes), missing))
    archive = folder / "libcgotorch.a"
    if missing or not archive.exists():
        archive.unlink(missing_ok=True)
        subprocess.run(["ar", "rcs", str(archive), *map(str, objects.values())], check=True)
    return folder


def main() -> int:
    go = build_core.find_go()
    if go is None:
        print("error: no Go >= 1.26", file=sys.stderr)
        return 1
    env = _environment(go)
    torch_lib = Path(torch.__file__).parent / "lib"
    try:
        folder = build_library(go, env)
    except (build_core.BuildError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    env["LIBRARY_PATH"] = os.pathsep.join([str(folder), str(torch_lib)])
    env["LD_LIBRARY_PATH"] = str(torch_lib)
    env["CGO_LDFLAGS"] = f"-lstdc++ -Wl,-rpath-link,{torch_lib}"
    env["EAE_TEST_LIBTORCH"] = str(torch_lib / "libtorch_cpu.so")
    # gotorch's init would set torch's thread count otherwise.
    env.setdefault("OMP_NUM_THREADS", "1")
    packages = ["./bridge/...", "./tests_go/..."]
    cmd = [str(go), "test", "-tags", "gotorch,torch", "-p", "1", *(sys.argv[1:] or packages)]
    return subprocess.run(cmd, env=env, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
