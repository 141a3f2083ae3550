"""The command line: `eae verify path/to/script.py:make`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["main"]

OK, DIFFERENT, USAGE = 0, 1, 2


class _Unusable(Exception):
    """What was asked for cannot be run; the text says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0 if all is well, 1 for a difference, 2 for what cannot be run."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except _Unusable as error:
        print(f"eae: {error}", file=sys.stderr)
        return USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eae", description="A programmable reverse-mode runtime for PyTorch.")
    parser.add_argument("--version", action="version", version=f"eae-runtime {metadata.version('eae-runtime')}")
    commands = parser.add_subparsers(required=True, metavar="command")
    verify = commands.add_parser(
        "verify",
        help="compare the runtime with plain PyTorch, bit for bit",
        description="Runs plain PyTorch and the runtime from the same state on the same batch and compares outputs, "
        "loss, gradients, buffers, random state and hooks. Exits with 0 if nothing differs, 1 if something does, 2 if "
        "the script cannot be run.",
    )
    verify.add_argument(
        "script",
        metavar="SCRIPT.py:FUNCTION",
        help="a function that returns (model, inputs, loss_fn) or (model, inputs, loss_fn, config)",
    )
    verify.add_argument(
        "--driver",
        choices=("chain", "autograd"),
        help="EAERuntime or wrap(); default: chain for nn.Sequential and lists",
    )
    verify.add_argument(
        "--blocks", nargs="+", metavar="NAME", help="modules that are the blocks, with * and ? (autograd driver)"
    )
    verify.add_argument("--scheduler", help="in place of the config's")
    verify.add_argument("--tier", choices=("device", "host", "disk"), help="where boundaries wait")
    verify.add_argument("--json", action="store_true", help="print the report as JSON")
    verify.set_defaults(run=_verify)
    return parser


def _verify(options: argparse.Namespace) -> int:
    from . import RuntimeConfig, verify
    from .errors import ConfigError

    made = _call(_function(options.script))
    if not isinstance(made, tuple) or len(made) not in (3, 4):
        given = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise _Unusable(
            f"{options.script} returned {given}; it has to return (model, inputs, loss_fn) or "
            "(model, inputs, loss_fn, config)"
        )
    config = made[3] if len(made) == 4 else None
    try:
        if options.scheduler or options.tier:
            config = config if config is not None else RuntimeConfig()
            config.scheduler = options.scheduler or config.scheduler
            config.boundary_tier = options.tier or config.boundary_tier
            config.validate()
        report = verify(made[0], made[1], made[2], config, driver=options.driver, blocks=options.blocks)
    except ConfigError as error:
        raise _Unusable(str(error).replace("blocks=['encoder.*', 'head']", "--blocks 'encoder.*' head")) from None
    except Exception as error:
        traceback.print_exc()
        raise _Unusable(f"plain PyTorch cannot run it: {type(error).__name__}: {error}") from None
    print(json.dumps(report.to_dict(), indent=1) if options.json else report)
    return OK if report.ok else DIFFERENT


def _function(text: str) -> Callable[[], Any]:
    """The function that `path/to/script.py:name` stands for."""
    path, colon, name = text.rpartition(":")
    if not colon or not path or not name:
        raise _Unusable(f"{text!r}: give the script and the function, path/to/script.py:make")
    file = Path(path)
    if not file.is_file():
        raise _Unusable(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise _Unusable(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # As `python path/to/script.py` does it: its neighbours can be imported, and classes in it can be pickled.
    sys.path.insert(0, str(file.resolve().parent))
    sys.modules[file.stem] = module
    _call(lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    function = getattr(module, name, None)
    if not callable(function):
        raise _Unusable(f"{path} has no function {name!r}")
    return function


def _call(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        traceback.print_exc()
        raise _Unusable(f"the script raised {type(error).__name__}: {error}") from None
