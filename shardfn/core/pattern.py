"""Name patterns: `*` one segment, `**` any number, `{a,b}` alternatives, `re:...`; anchored at both ends. Layer 0."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from shardfn.core.errors import ShardError

_PIECE = re.compile(r"\*\*|\*|\{[^{}]*\}|\.|[^*{}.]+|[{}]")
_ANY = ".*"


def exactly(name: str) -> str:
    """The pattern of one name.

    >>> from shardfn.core.pattern import exactly
    >>> exactly("layers.0"), exactly("a*")
    ('layers.0', 're:a\\\\*')
    """
    return name if re.fullmatch(r"[\w.]+", name) else "re:" + re.escape(name)


@lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern.

        >>> from shardfn.core.pattern import compile_pattern
        >>> bool(compile_pattern("layers.*.{wq,wk}.weight").fullmatch("layers.11.wk.weight"))
        True

    Raises:
        ShardError: the pattern cannot be read.
    """
    if pattern.startswith("re:"):
        try:
            return re.compile(pattern[3:])
        except re.error as error:
            raise ShardError(f"bad pattern {pattern!r}: {error}") from None
    segments = [""]
    for piece in _PIECE.findall(pattern):
        if piece == ".":
            segments.append("")
        else:
            segments[-1] += _translate(piece, pattern)
    return re.compile(_join(segments))


def _join(segments: Sequence[str]) -> str:
    """Segments with dots between; a `**` of its own stands for none too: "layers.**.weight" is "layers.weight"."""
    kept = [segment for i, segment in enumerate(segments) if segment != _ANY or segments[i + 1 : i + 2] != [_ANY]]
    text = ""
    for segment in kept[:-1]:
        text += r"(?:.*\.)?" if segment == _ANY else segment + r"\."
    if kept[-1] == _ANY and text:
        return text.removesuffix(r"\.") + r"(?:\..*)?"
    return text + kept[-1]


def _translate(piece: str, pattern: str) -> str:
    if piece == "**":
        return _ANY
    if piece == "*":
        return r"[^.]*"
    if piece in "{}":
        raise ShardError(f"bad pattern {pattern!r}: '{piece}' without its pair")
    if piece.startswith("{"):
        return "(?:" + "|".join(re.escape(choice.strip()) for choice in piece[1:-1].split(",")) + ")"
    return re.escape(piece)


def is_in(name: str, module: str) -> bool:
    """Whether a name is that of something in a module, at any depth.

    >>> from shardfn.core.pattern import is_in
    >>> is_in("layers.0.mlp", "layers.0"), is_in("layers.0", "layers.0"), is_in("layers", "")
    (True, False, True)
    """
    return name.startswith(f"{module}.") if module else name != ""


def modules_above(names: Iterable[str]) -> set[str]:
    """The modules that something of those names is in.

    >>> from shardfn.core.pattern import modules_above
    >>> sorted(modules_above(["layers.0.mlp", "head"]))
    ['', 'layers', 'layers.0']
    """
    words = [name.split(".") for name in names if name]
    return {".".join(path[:depth]) for path in words for depth in range(len(path))}


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` matches all of `name`."""
    return compile_pattern(pattern).fullmatch(name) is not None


def first_match(patterns: Mapping[str, object] | Iterable[str], names: Iterable[str]) -> str | None:
    """The first pattern that matches one of `names`."""
    names = tuple(names)
    return next((pattern for pattern in patterns if any(matches(pattern, name) for name in names)), None)
