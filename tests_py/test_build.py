"""What loading the built library does to a process, and what the library asks of a machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"
sys.path.insert(0, str(TOOLS))

import build_core  # noqa: E402
import glibc  # noqa: E402
from eae_runtime._core import _eae  # noqa: E402

LIBRARY = Path(_eae.__file__)
# The library alone: importing the package would import torch too.
LOAD = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("_eae", {str(LIBRARY)!r})
_eae = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_eae)
"""
STUB = ROOT / "eae_runtime" / "_core" / "_eae.pyi"


def run_python(code: str, **env: str) -> dict[str, object]:
    """Runs the code in a fresh interpreter; its last line of output is JSON. A line LOAD loads the library alone."""
    out = subprocess.run(
        [sys.executable, "-c", code.replace("LOAD\n", LOAD)],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert out.returncode == 0, out.stderr
    result: dict[str, object] = json.loads(out.stdout.splitlines()[-1])
    return result


def test_the_library_needs_only_libc_and_has_no_run_path():
    elf = glibc.dynamic(LIBRARY)
    assert set(elf.needed) <= glibc.ALLOWED
    assert elf.run_paths == []


def test_the_library_names_no_path_of_the_machine_that_built_it():
    assert str(ROOT).encode() not in LIBRARY.read_bytes()


def test_the_core_is_not_compiled_with_unsafe_mathematics():
    go = build_core.find_go()
    assert go is not None
    env = build_core.environment(go)
    assert "-Ofast" not in env["CGO_CFLAGS"] and "-ffast-math" not in env["CGO_CFLAGS"]
    # The whole way: a C function compiled with these very flags keeps isnan.
    code = "#include <math.h>\nint main(int n, char **v) { volatile double z = n - 1; return isnan(z / z) ? 0 : 1; }\n"
    program = ROOT / "build" / "isnan-check"
    program.parent.mkdir(exist_ok=True)
    flags = env["CGO_CFLAGS"].split()
    subprocess.run(["cc", *flags, "-x", "c", "-", "-o", str(program)], input=code, text=True, check=True)
    assert subprocess.run([str(program)]).returncode == 0


def test_loading_keeps_denormals():
    code = """
import json, sys
before = 5e-324 * 1.0
LOAD
_eae.api_Version()
import torch
x = torch.full((64,), 1e-40)
kept = bool((x * 1.0 == x).all() and (x * 1.0 != 0).all())
print(json.dumps({"before": before, "after": 5e-324 * 1.0, "torch": kept}))
"""
    assert run_python(code) == {"before": 5e-324, "after": 5e-324, "torch": True}


def test_loading_leaves_torchs_thread_counts_alone():
    code = """
import json, threading, torch
def counts():
    inside = []
    t = threading.Thread(target=lambda: inside.append(torch.get_num_threads())); t.start(); t.join()
    return [torch.get_num_threads(), torch.get_num_interop_threads(), inside[0]]
before = counts()
LOAD
_eae.api_Live()
print(json.dumps({"before": before, "after": counts()}))
"""
    seen = run_python(code)
    assert seen["before"] == seen["after"]


def test_loading_leaves_signals_locale_and_environment_alone():
    code = """
import json, locale, os, signal
def look():
    handlers = {}
    for number in signal.valid_signals():
        handlers[int(number)] = repr(signal.getsignal(number))
    return [handlers, locale.setlocale(locale.LC_ALL), dict(os.environ), os.getcwd()]
before = look()
LOAD
_eae.api_Version()
after = look()
print(json.dumps({"same": before == after}))
"""
    assert run_python(code) == {"same": True}


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD", "SIGALRM", "SIGUSR1", "SIGWINCH"])
def test_signals_that_python_handles_stay_pythons(name: str):
    code = f"""
import json, os, signal
got = []
signal.signal(signal.{name}, lambda n, f: got.append(n))
LOAD
_eae.api_Version()
os.kill(os.getpid(), signal.{name})
print(json.dumps({{"got": got}}))
"""
    assert run_python(code) == {"got": [int(getattr(signal, name))]}


def test_faulthandler_still_reports_a_crash():
    code = """
import faulthandler
faulthandler.enable()
LOAD
_eae.api_Version()
import ctypes
ctypes.string_at(0)
"""
    code = code.replace("LOAD\n", LOAD)
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert out.returncode != 0
    assert "Segmentation fault" in out.stderr and "string_at" in out.stderr


@pytest.mark.parametrize("first, second", [("torch", "eae_runtime._core._eae"), ("eae_runtime._core._eae", "torch")])
def test_either_import_order_works(first: str, second: str):
    code = f"""
import importlib, json
importlib.import_module({first!r}); importlib.import_module({second!r})
import torch
from eae_runtime._core import _eae
y = (torch.ones(3, requires_grad=True) * 2).sum(); y.backward()
print(json.dumps({{"version": _eae.api_Version(), "y": y.item()}}))
"""
    assert run_python(code) == {"version": "0.2.0", "y": 6.0}


def test_loading_adds_few_threads():
    code = """
import json, os
before = len(os.listdir("/proc/self/task"))
LOAD
for _ in range(200):
    _eae.api_Live()
print(json.dumps({"added": len(os.listdir("/proc/self/task")) - before}))
"""
    added = run_python(code)["added"]
    assert isinstance(added, int) and added <= 6


def test_the_process_ends_at_once():
    assert run_python("LOAD\n_eae.api_Live()\nprint('{}')") == {}


def test_a_forked_child_is_refused_and_lives():
    code = """
import json, os
LOAD
_eae.api_Live()
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    try:
        _eae.api_Version()
        text = "no error"
    except RuntimeError as error:
        text = str(error)
    os.write(write, text.encode())
    os._exit(0)
os.close(write)
text = os.read(read, 10000).decode()
_, status = os.waitpid(pid, 0)
print(json.dumps({"status": status, "text": text, "parent": _eae.api_Version()}))
"""
    seen = run_python(code)
    assert seen["status"] == 0 and seen["parent"] == "0.2.0"
    assert str(seen["text"]).startswith("BridgeError|this process was forked")
    assert "spawn" in str(seen["text"])


def stub_functions() -> dict[str, int]:
    """The stub's functions with their numbers of parameters."""
    found = re.findall(r"^def (\w+)\((.*?)\) ->", STUB.read_text(), re.M)
    return {name: len(params.split(",")) if params else 0 for name, params in found}


def test_the_stub_names_what_the_extension_holds():
    assert set(stub_functions()) == {name for name in dir(_eae) if not name.startswith("__")}


@pytest.mark.parametrize("name, count", sorted(stub_functions().items()))
def test_the_stub_counts_parameters_right(name: str, count: int):
    # A call with a parameter too many never reaches Go. (A parameterless function takes none and ignores none.)
    with pytest.raises(
        TypeError, match=rf"takes (at most|exactly|no)( {count})?( keyword)? arguments?|takes no arguments"
    ):
        getattr(_eae, name)(*range(count + 1))


def test_the_stub_is_what_the_generator_writes():
    go = build_core.find_go()
    assert go is not None
    env = build_core.environment(go)
    out = subprocess.run(
        [str(go), "run", "./tools/genstub", "bridge/api"], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert out.stdout == STUB.read_text(), "run `make stub`"


def test_version_is_one():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{_eae.api_Version()}"' in text


def test_a_call_leaves_no_bytes_behind() -> None:
    """The error string of a call that can only fail is freed: once it was not, 31 bytes a call."""
    code = """
import torch
from eae_runtime import BoundaryStore

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

x = torch.ones(4)
with BoundaryStore() as store:
    sizes = []
    for _ in range(3):
        for i in range(150_000):
            store.adopt(0, x)
            store.drop(0)
        sizes.append(resident())
print(sizes[2] - sizes[1])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    # 150,000 puts and drops: 9.3 MB if each call left its string. Go's heap breathes by a megabyte.
    assert int(ran.stdout) < 4_000_000
