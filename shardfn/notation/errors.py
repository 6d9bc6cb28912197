"""The error that every caller sees, and the way several problems become one message."""

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import accumulate
from typing import TypeVar

_Error = TypeVar("_Error", bound=BaseException)


class ShardError(ValueError):
    """A layout, mesh, policy or batch that cannot be honoured; the message says what to change.

    Raised before any communication, with every problem of a plan listed at once.

        >>> import shardfn as sf
        >>> from torch import nn
        >>> try:
        ...     sf.plan(nn.Linear(4, 6), sf.MeshSpec(tp=4), sf.Policy(rules={"weight": "o@tp i"}))
        ... except sf.ShardError as error:
        ...     print("6 % 4 = 2" in str(error))
        True
    """


def see(error: _Error, entry: str) -> _Error:
    """The error, with a note, which a traceback shows, of what the docs have on it: an entry of `docs/errors.md`."""
    error.add_note(f"In the docs: errors.md#{entry}")
    return error


def caret(source: str, span: tuple[int, int]) -> str:
    """`source` indented, with `^^^` under the characters of `span`."""
    start, end = span
    source = re.sub(r"\s", " ", source)  # the caret is on the line below, in the same column
    return f"    {source}\n    {' ' * start}{'^' * max(1, end - start)}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"`, or nothing when no known word is close."""
    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def raise_problems(
    verb: str, problems: Sequence[str], lines: int | None = None, instead: str = "", entry: str = "rules"
) -> None:
    """Raise one `ShardError` that lists all of `problems`, those of like layers once; nothing when there are none.

    With `lines`, it lists as many as have room in so many, and says how many more there are; then what to write
    `instead`. `entry`: as for `see`.
    """
    if not problems:
        return
    kinds = list(of_like_layers(problems))
    if len(kinds) == 1:
        raise see(ShardError(f"{verb}: {kinds[0]}{f'. {instead}' * bool(instead)}"), entry)
    listed = [f"{i}. {problem}" for i, problem in enumerate(kinds, 1)]
    of_kinds = f", of {len(kinds)} kinds" if len(kinds) < len(problems) else ""
    listed = listed if lines is None else _first_of(listed, lines - 1 - bool(instead))
    text = "\n".join([f"{verb}: {len(problems)} problems{of_kinds}", *listed, *filter(None, [instead])])
    raise see(ShardError(text), entry)


def _first_of(listed: list[str], lines: int) -> list[str]:
    ends = [*accumulate(text.count("\n") + 1 for text in listed)]
    if ends[-1] <= lines:
        return listed
    shown = max(1, sum(end < lines for end in ends))
    return [*listed[:shown], f"and {len(listed) - shown} more"]


# A path with the number of a layer, quoted or in front.
_PATH = re.compile(r"(?:^|')((?:[^'\s:]*\.)?\d+\.[a-z_A-Z][^'\s:]*|[^'\s:]*\.\d+)(?=['\s:])")
_FEW = 2


def of_like_layers(problems: Sequence[str]) -> Iterator[str]:
    """Each kind of problem once: the first of those that differ in the numbers of a path, and which others."""
    kinds: dict[str, list[tuple[str, str]]] = {}  # with a mark for the path -> problems and paths
    for problem in problems:
        path_match = _PATH.search(problem)
        path = path_match[1] if path_match else ""
        kinds.setdefault(_without_layer(problem, path), []).append((problem, path))
    for (problem, path), *others in kinds.values():
        yield f"{problem}\n    The same for {_named([p for _, p in others])}." if others and path else problem


def _without_layer(problem: str, path: str) -> str:
    """A problem without the numbers of a path, wherever paths begin as it does."""
    for number in reversed(list(re.finditer(r"(?:(?<=\.)|^)\d+\b", path))):
        before, begins = path[: number.start()], rf"(^|'){re.escape(path[: number.end()])}(?=[.'\s:])"
        problem = re.sub(begins, lambda quote, before=before: f"{quote[1]}{before}*", problem)
    return problem


def _named(others: Sequence[str]) -> str:
    """Paths of like layers: all of few, else how many and up to which one."""
    if len(others) <= _FEW:
        return " and ".join(f"'{path}'" for path in others)
    return f"{len(others)} more, '{others[0]}' to '{others[-1]}'"
