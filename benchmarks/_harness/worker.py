"""The inside of a competitor's process: holds one object and calls its methods on command.

0.1.1 and this package share the import name `eae_runtime`, so no process can hold both; each competitor has a process
of its own, and `Worker` (worker_client.py) lets only one of them run at a time.

One JSON object a line on stdin, one back on the original stdout (what the competitor prints goes to stderr):

    {"call": "timed", "args": {"steps": 3}}   ->   {"result": 1.25}   or   {"error": "traceback ..."}
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any


def main() -> None:
    factory, spec = sys.argv[1], json.loads(sys.argv[2])
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")

    module_name, _, attribute = factory.partition(":")
    try:
        target = getattr(importlib.import_module(module_name), attribute)(**spec)
    except Exception:  # whatever it is, the parent has to hear of it
        answer({"error": traceback.format_exc()})
        return
    answer({"result": "ready"})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer({"result": getattr(target, command["call"])(**command["args"])})
        except Exception:
            answer({"error": traceback.format_exc()})


if __name__ == "__main__":
    main()
