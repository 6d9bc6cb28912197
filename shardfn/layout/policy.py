"""`Policy`: everything a user decides about layout, units and precision, as frozen data; and its patterns.

A pattern of names: `*` one segment, `**` any number, `{a,b}` alternatives, `re:...`; anchored at both ends.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self

import torch

from shardfn.layout.model_info import require_forward
from shardfn.notation import ShardError, did_you_mean, see

_ELSEWHERE = {  # what FSDP1 and FSDP2 call fields
    "param_dtype": "compute_dtype",
    "mp_policy": "compute_dtype",
    "mixed_precision": "compute_dtype",
    "cast_forward_inputs": "cast_inputs",
    "reshard_after_forward": "regather",
    "sharding_strategy": "regather",
    "auto_wrap_policy": "units",
    "cpu_offload": "offload",
    "offload_policy": "offload",
}
_DTYPES = ("compute_dtype", "reduce_dtype", "output_dtype")
UNIT_SETTINGS = ("regather", *_DTYPES, "cast_inputs")  # what one unit may have of its own
MAPPINGS = ("rules", "axes", "sizes", "acts", "pad", "local_sizes", "compute")  # in `a | b` both count
BATCH_AXES = ("fsdp", "dp", "data", "batch", "shard", "dp_shard", "replicate", "dp_replicate", "*_replicate")


def is_batch_axis(name: str, batch: Sequence[str] = BATCH_AXES) -> bool:
    """Whether a mesh axis splits the batch by the patterns of a policy, or of one that says nothing."""
    return any(fnmatchcase(name, pattern) for pattern in batch)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a model is laid out on a mesh; one object, no setters.

    A rule maps a parameter pattern to the notation of `docs/rules.md`: `*` is one name segment, `**` any number,
    `{a,b}` alternatives, `re:...` a regular expression; anchored; the first match wins; a rule that matches
    nothing is an error.

        >>> import shardfn as sf
        >>> megatron = sf.Policy(rules={"*.up.weight": "ff@tp c@fsdp", "*.down.weight": "c@fsdp ff@tp"})
        >>> mixed = megatron | sf.Policy(compute_dtype=torch.bfloat16)
        >>> list(mixed.rules), mixed.compute_dtype
        (['*.up.weight', '*.down.weight'], torch.bfloat16)

    Args:
        rules: parameter pattern -> rule, for example `"(heads@tp d) c@fsdp"`.
        axes: logical name -> mesh axis or axes, for factors that carry no `@axis` of their own.
        sizes: sizes of names that cannot be inferred from the shapes.
        batch: mesh axes (or patterns of them) that split the batch: the data axes. Weights never shard over
            `replicate`, `dp_replicate` and `*_replicate`.
        acts: module pattern -> layout of its output. `{"head": "b s vocab@tp"}` keeps logits sharded, as a `DTensor`;
            `{"block.up": "... _"}` gathers features, `{"conv": "b _ ..."}` channels, where what follows needs them all.
        units: modules gathered and freed together: `"auto"`, patterns, classes, or `callable(name, module) -> bool`. A
            mapping of patterns or classes gives units settings of their own: `regather`, `compute_dtype`,
            `reduce_dtype`, `output_dtype`, `cast_inputs`. `{"layers.*": {}, "layers.3": {"regather": False}}`: the last
            match wins. A callable may return such a mapping too. A unit with a `compute_dtype` of its own casts its
            floating inputs to it, unless `cast_inputs` is False. `"": {"regather": True}` has weights that no unit
            holds freed after the whole forward, too; they are kept otherwise.
        ignore: patterns of parameters that stay out of the tree: a module computes with its own tensor, as it is.
        regather: True frees a unit's weights after its forward and gathers them again for its backward (ZeRO-3);
            False keeps them until the backward is done (ZeRO-2); an int n keeps the n-th part of them, and gathers it
            again from n neighbouring ranks of the innermost data axis, which n divides.
        compute_dtype: dtype in which weights are gathered and used.
        reduce_dtype: dtype in which gradients are reduced; `None` is the dtype they have.
        output_dtype: dtype of floating outputs of `apply`.
        cast_inputs: whether floating inputs are cast to `compute_dtype`.
        compile: runs the forward of every unit that holds no other unit through `torch.compile`; True, or its options:
            `{"fullgraph": True, "mode": "max-autotune"}`. Gathers stay outside of the graphs, and linears and
            embeddings split over a compute axis end one. `module.compile()` on units does the same.
        offload: `"cpu"` keeps shards, gradients and optimizer state in pinned host memory, and the optimizer computes
            there; copies go on beside the device's computation. It changes nothing on a mesh of CPUs.
        default: layout of parameters that no rule matches. `"auto"` shards over the data axes on dim 0 if it divides,
            else on the largest dim that does, else unevenly on the largest; `"replicate"`; or `"error"`.
        min_size: under `"auto"`, tensors with fewer elements stay replicated.
        local_sizes: module pattern -> attributes that hold a size of the whole model, and which product of factors of
            the rules each is: `{"layers.*.attn": {"num_heads": "heads@tp", "inner": "heads@tp d"}}`. A module then
            computes with the size that its rank has. `"a / b"` is a ratio of local sizes, and `"config.num_heads"` an
            attribute of an object that the module holds.
        pad: name -> multiple to which that factor is padded when sharded (`{"vocab": 128}`); trimmed again by `gather`.
        compute: module pattern -> a forward of your own, `fn(module, local_params, layout, *args, **kwargs)`.

    Raises:
        TypeError: an unknown field, or a value of the wrong type.
        ValueError: a value that means nothing.
    """

    rules: Mapping[str, str] = field(default_factory=dict)
    axes: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    batch: Sequence[str] = BATCH_AXES
    acts: Mapping[str, str] = field(default_factory=dict)
    units: Any = "auto"
    ignore: Sequence[str] = ()
    regather: bool | int = True
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_inputs: bool = True
    compile: bool | Mapping[str, Any] = False
    offload: Literal["cpu"] | None = None
    default: Literal["auto", "replicate", "error"] = "auto"
    min_size: int = 0
    pad: Mapping[str, int] = field(default_factory=dict)
    local_sizes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    compute: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    given: ClassVar[frozenset[str]] = frozenset()  # each policy has its own: the fields that its caller named

    def __new__(cls, *args: object, **given: object) -> Self:
        """Note which fields are given: in `a | b` only those of `b` win."""
        if args:
            raise TypeError("Policy takes keyword arguments only, for example Policy(rules={...})")
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                hint = f"; that is '{_ELSEWHERE[name]}' here." if name in _ELSEWHERE else did_you_mean(name, known)
                why = f"Policy has no field '{name}'{hint or '.'} Its fields: {', '.join(known)}."
                raise see(TypeError(why), "policy")
        policy = super().__new__(cls)
        object.__setattr__(policy, "given", frozenset(given))
        return policy

    def __post_init__(self) -> None:
        for name in MAPPINGS:
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise TypeError(f"Policy({name}=...) takes a mapping, not {type(value).__name__}")
            if name not in ("rules", "acts"):  # of which more is said below
                _names(f"Policy({name}={value!r})", value)
            object.__setattr__(self, name, dict(value))
        for name, pattern, rule in ((n, *pair) for n in ("rules", "acts") for pair in getattr(self, n).items()):
            if not isinstance(pattern, str) or not isinstance(rule, str):
                call = f"Policy({name}={{{pattern!r}: {rule!r}}})"
                raise TypeError(f"{call}: a pattern and a rule, both strings, are needed")
        for pattern, given in self.local_sizes.items():
            if not isinstance(given, Mapping) or not all(isinstance(text, str) for text in given.values()):
                call = f"Policy(local_sizes={{{pattern!r}: {given!r}}})"
                example = "local_sizes={'attn': {'heads': 'heads@tp'}}"
                raise TypeError(f"{call}: attributes and factors are needed, as in {example}")
        for name in ("batch", "ignore"):
            object.__setattr__(self, name, _names(f"Policy({name}={getattr(self, name)!r})", getattr(self, name)))
        for name, axes in self.axes.items():
            _names(f"Policy(axes={{{name!r}: {axes!r}}})", axes)
        for pattern, function in self.compute.items():
            require_forward(f"Policy(compute={{{pattern!r}: ...}})", function)
        given = self.units if isinstance(self.units, Iterable) else [self.units]
        if wrong := [type(unit).__name__ for unit in given if isinstance(unit, torch.nn.Module)]:
            why = f"Policy(units=...): a unit is named by its path, as in 'layers.*', or by its class, {wrong[0]}"
            raise see(TypeError(f"{why}; the module itself is none"), "policy")
        if isinstance(self.units, Mapping):
            object.__setattr__(self, "units", {unit: unit_settings(given, unit) for unit, given in self.units.items()})
        _check_dtypes(vars(self))
        if self.default not in ("auto", "replicate", "error"):
            raise ValueError(f"Policy(default={self.default!r}): one of 'auto', 'replicate', 'error'")
        if self.offload not in (None, "cpu"):
            raise ValueError(f"Policy(offload={self.offload!r}): None or 'cpu'")
        object.__setattr__(self, "regather", _checked_regather(self.regather))
        for name, key, value in ((n, *pair) for n in ("sizes", "pad") for pair in getattr(self, n).items()):
            _check_whole(f"Policy({name}={{{key!r}: {value!r}}})", value, least=int(name == "pad"))
        _check_whole(f"Policy(min_size={self.min_size!r})", self.min_size, least=0)
        if isinstance(self.compile, bool):
            return
        if not isinstance(self.compile, Mapping):
            raise TypeError(f"Policy(compile={self.compile!r}): True, False, or a mapping of options of torch.compile")
        known = [name for name in inspect.signature(torch.compile).parameters if name not in ("model", "disable")]
        for name in self.compile:
            if name not in known:
                raise TypeError(f"Policy(compile={{{name!r}: ...}}): torch.compile has {', '.join(known)}")
        object.__setattr__(self, "compile", dict(self.compile))

    def __or__(self, other: "Policy") -> "Policy":
        """Both policies: `other`'s rules come first, and the fields `other` was given win."""
        if not isinstance(other, Policy):
            return NotImplemented
        names = self.given | other.given
        merged = {name: getattr(other if name in other.given else self, name) for name in names}
        for name in names.intersection(MAPPINGS):
            first, second = getattr(other, name), getattr(self, name)
            merged[name] = first | {key: value for key, value in second.items() if key not in first}
        return Policy(**merged)


def batch_with(axes: Sequence[str]) -> dict[str, Any]:
    """`Policy(batch=...)` for data axes of any name, beside the usual ones; nothing when these are all."""
    others = [axis for axis in axes if not is_batch_axis(axis)]
    return {"batch": (*others, *BATCH_AXES)} if others else {}


def unit_settings(settings: object, unit: object) -> dict[str, Any]:
    """The checked settings of one unit.

    Raises:
        TypeError: they are no mapping, or name something that units share.
    """
    if not isinstance(settings, Mapping):
        raise TypeError(f"Policy(units={{{unit!r}: ...}}) takes a mapping of settings, not {type(settings).__name__}")
    for name in settings:
        call = f"Policy(units={{{unit!r}: {{{name!r}: ...}}}})"
        if name not in UNIT_SETTINGS:
            raise TypeError(f"{call}: a unit may have {', '.join(UNIT_SETTINGS)}")
        if unit == "" and name != "regather":
            raise TypeError(f"{call}: what no other unit holds may have regather; {name} of it is Policy({name}=...)")
    _check_dtypes(settings)
    checked = {"regather": _checked_regather(settings["regather"])} if "regather" in settings else {}
    return {**settings, **checked}


def _names(call: str, given: object) -> tuple[str, ...]:
    """One name, or several."""
    names = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    known = tuple(name for name in names if isinstance(name, str))
    if len(known) < len(names):
        raise TypeError(f"{call}: names are needed, which are strings")
    return known


def _check_whole(call: str, number: object, least: int) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise ValueError(f"{call}: a whole number is needed")


def _check_dtypes(settings: Mapping[str, Any]) -> None:
    for name in _DTYPES:
        dtype = settings.get(name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"Policy({name}=...) takes a floating torch.dtype, as torch.bfloat16 is, not {dtype!r}")


def _checked_regather(regather: Any) -> bool | int:
    """One rank keeps all of it, and 1 equals True: so 1 becomes False."""
    if not isinstance(regather, int) or regather < 0:
        raise ValueError(f"Policy(regather={regather!r}): True, False, or over how many ranks to keep a shard")
    return False if regather == 1 and not isinstance(regather, bool) else regather


# -- patterns of names -------------------------------------------------------------------------------------------------

# What a pattern is made of. A `**` that is a segment of its own stands for none too, with the dot next to it.
_PIECE = re.compile(
    r"(?P<front>(?<![^.])(?:\*\*\.)+)|(?P<back>(?:\.\*\*)+\Z)|(?P<any>\*\*)|(?P<one>\*)"
    r"|\{(?P<choices>[^{}]+)\}|(?P<odd>[{}])|[^*{}.]+|\."
)
_MEANS = {"front": r"(?:.*\.)?", "back": r"(?:\..*)?", "any": ".*", "one": r"[^.]*"}


def exactly(name: str) -> str:
    """The pattern of one name.

    >>> from shardfn.layout.policy import exactly
    >>> exactly("layers.0"), exactly("a*")
    ('layers.0', 're:a\\\\*')
    """
    return name if re.fullmatch(r"[\w.]+", name) else "re:" + re.escape(name)


def starred(name: str) -> str:
    """A path with `*` for the numbers of layers.

    >>> from shardfn.layout.policy import starred
    >>> starred("layers.10.mlp.0")
    'layers.*.mlp.*'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


@lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern.

        >>> from shardfn.layout.policy import compile_pattern
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

    def translated(piece: re.Match[str]) -> str:
        if piece["odd"]:
            raise ShardError(f"bad pattern {pattern!r}: '{piece[0]}' without its pair")
        if piece["choices"]:
            return "(?:" + "|".join(re.escape(choice.strip()) for choice in piece["choices"].split(",")) + ")"
        return _MEANS.get(piece.lastgroup or "") or re.escape(piece[0])

    return re.compile(_PIECE.sub(translated, pattern))


def is_in(name: str, module: str) -> bool:
    """Whether a name is that of something in a module, at any depth.

    >>> from shardfn.layout.policy import is_in
    >>> is_in("layers.0.mlp", "layers.0"), is_in("layers.0", "layers.0"), is_in("layers", "")
    (True, False, True)
    """
    return name.startswith(f"{module}.") if module else name != ""


def modules_above(names: Iterable[str]) -> set[str]:
    """The modules that something of those names is in.

    >>> from shardfn.layout.policy import modules_above
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
