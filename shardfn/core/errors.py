"""The error that every caller sees, and the way several problems become one message. Layer 0."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


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


def caret(source: str, span: tuple[int, int]) -> str:
    """`source` indented, with `^^^` under the characters of `span`."""
    start, end = span
    source = re.sub(r"\s", " ", source)  # the caret is on the line below, in the same column
    return f"    {source}\n    {' ' * start}{'^' * max(1, end - start)}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"`, or nothing when no known word is close."""
    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def raise_problems(verb: str, problems: Sequence[str]) -> None:
    """Raise one `ShardError` that lists all of `problems`; nothing when there are none."""
    if not problems:
        return
    if len(problems) == 1:
        raise ShardError(f"{verb}: {problems[0]}")
    listed = "\n".join(f"{i}. {problem}" for i, problem in enumerate(problems, 1))
    raise ShardError(f"{verb}: {len(problems)} problems\n{listed}")
