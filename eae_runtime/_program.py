"""A schedule's text as lists of actions."""

from __future__ import annotations

__all__ = ["ALL", "Action", "Program", "parse_action"]

Action = tuple[str, int, int]

# The number that stands for "every microbatch" (`4B*`).
ALL = -1


def parse_action(text: str) -> Action:
    """`3R1` -> ("R", 3, 1); `4B*` -> ("B", 4, -1)."""
    start = 0
    while text[start].isdigit():
        start += 1
    end = start
    while text[end].isalpha():
        end += 1
    rest = text[end:]
    return text[start:end], int(text[:start]), ALL if rest == "*" else int(rest)


class Program:
    """A schedule ready to be walked: the forward and the reverse list."""

    __slots__ = ("forward", "reverse", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        forward, _, reverse = text.partition("\n")
        self.forward = [parse_action(token) for token in forward.split()]
        self.reverse = [parse_action(token) for token in reverse.split()]
