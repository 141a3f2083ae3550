"""A process ends at once, with its own exit code and no files left, whatever the runtime is in the middle of."""

from __future__ import annotations

from pathlib import Path

import pytest

from child import run
from test_host_process import SLOW, folder  # noqa: F401 (a fixture)

# The promise is 2 s; the machine may be busy. What is under way would take 10 s and more.
SOON = 5.0

# Runs `leave()` in the rebuild of the middle block, while loads and stores are under way on the slow disk.
MIDDLE = (
    SLOW
    + """
calls = 0

class Leave(Pass):
    def forward(self, x):
        # Not an attribute: a rebuild sees those as they were.
        global calls
        calls += 1
        if calls == CALL:
            report(at=time.monotonic(), files=len(files()))
            leave()
        return super().forward(x)

def big_step(**options):
    runtime = make([Pass(), Leave(), Pass()], passes=[], **options)
    step(runtime, ROWS, WIDTH)
"""
)


def check(folder: Path, code: str, expected: int, words: str = "") -> None:  # noqa: F811
    ended = run(MIDDLE + code, folder)
    print(f"exit code {ended.code} after {ended.seconds:.2f} s")
    assert ended.code == expected, ended.errors
    assert ended.result["files"] > 0 and ended.seconds < SOON
    assert list(folder.iterdir()) == []
    assert words in ended.errors
    for bad in ("Fatal", "fatal error", "goroutine ", "panic", "SIGSEGV", "terminate called"):
        assert bad not in ended.errors, ended.errors
    if not words:
        assert ended.errors == ""


# The second call of the block is its rebuild.
@pytest.mark.parametrize("when", [1, 2])
def test_sys_exit_inside_a_step(folder: Path, when: int) -> None:  # noqa: F811
    check(folder, f"CALL = {when}\nslow_disk(0.05)\ndef leave(): sys.exit(3)\nbig_step()\n", 3)


def test_an_unhandled_exception_inside_a_step(folder: Path) -> None:  # noqa: F811
    check(folder, "CALL = 1\ndef leave(): raise ValueError('mine')\nbig_step()\n", 1, "ValueError: mine")


def test_sys_exit_while_another_thread_is_inside_a_step(folder: Path) -> None:  # noqa: F811
    code = """
CALL = 2 ** 60
moving = threading.Event()
once_moving(moving.set)
threading.Thread(target=big_step, daemon=True).start()
moving.wait()
report(at=time.monotonic(), files=len(files()))
sys.exit(4)
"""
    # The thread goes on for a moment and finds the store closed under it.
    check(folder, code, 4, "is closed")


def test_main_returns_with_moves_under_way(folder: Path) -> None:  # noqa: F811
    code = """
runtime = make([Pass(), Pass(), Pass()], passes=[])
runtime.forward(torch.ones(ROWS, WIDTH))
report(at=time.monotonic(), files=len(files()))
"""
    check(folder, code, 0)


def test_main_returns_with_everything_open(folder: Path) -> None:  # noqa: F811
    code = """
runtime = make(trace=True)
step(runtime)
store = BoundaryStore(tier="host", is_async=True)
store.put(0, torch.ones(3))
tensor = store.get(0)
runtime.forward(torch.ones(4, 8))
report(at=time.monotonic(), files=len(files()))
"""
    check(folder, code, 0)


def test_the_end_of_a_process_by_sigterm(folder: Path) -> None:  # noqa: F811
    code = """
def end():
    report(at=time.monotonic(), files=len(files()))
    os.kill(os.getpid(), signal.SIGTERM)
once_moving(end)
CALL = 2 ** 60
big_step()
"""
    # Nobody tidies up here: the next store in that folder does.
    ended = run(MIDDLE + code, folder)
    assert ended.code == -15 and ended.seconds < SOON and list(folder.iterdir()) != []
    after = run("BoundaryStore(tier='disk', directory=FOLDER).close()\nreport(files=files())\n", folder)
    assert after.result == {"files": []}
