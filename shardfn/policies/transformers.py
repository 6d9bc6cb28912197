"""What a transformers model's own plans mean as rules, and rules for families without a plan.

Two sources say which weights are split, in this order: the model's `tp_plan` (of its configuration and its heads), and
the names that attention and feed-forward layers have everywhere. How many heads lie in a weight is read off the
attention module. All of it becomes an ordinary `Policy`, whose rules can be printed and pasted back.

A new style of a plan is a name in the sets below and a case of `_RulesReader._apply`. At the end are parallel forwards
of modules that need more than their rules.
"""

import inspect
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfn._torch import children_of, unsplit_classes
from shardfn.comm import axis_size, shard_slice
from shardfn.layout import OUT_DIM, Part, Policy, batch_with, class_of, declares, kind_of, modules_above, starred
from shardfn.notation import ShardError, raise_problems
from shardfn.parallel import Experts, Layouts, identity_expert, or_without_data, tensor_parallel_experts

_GATHERED = {"colwise_gather_output", "colwise_rep"}
_COLUMNS = {"colwise", "packed_colwise"} | _GATHERED
_ROWS = {"rowwise", "packed_rowwise", "rowwise_split_input", "rowwise_rep"}
_TABLES = {"embedding_rowwise", "embedding_colwise"}
_BY_NUMBER = {"grouped_gemm", "ep_dispatch_experts"}  # weights of experts, and their module
# Whole weights, and gradients or outputs that are sums over ranks: that follows from the values themselves here.
_PLAIN = set("replicated_with_grad_allreduce sequence_parallel local_params all_reduce mla_kv_a_proj replicate".split())

# Families without a plan: how the paths of linears end.
_INTO_HEADS = set("q k v query key value q_proj k_proj v_proj c_attn query_key_value".split())
_KEYS = set("k v key value k_proj v_proj".split())
_OUT_OF_HEADS = set("o o_proj out_proj dense c_proj output.dense".split())
_INTO_FF = set("fc1 c_fc dense_h_to_4h wi wi_0 wi_1 up_proj gate_proj lin1 intermediate.dense".split())
_OUT_OF_FF = set("fc2 c_proj dense_4h_to_h wo down_proj lin2 output.dense".split())

_HEAD_SIZES = ("qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_AROUND = ("base_layer", "base", "original_module", "modules_to_save")  # where adapters have the layers they are around
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads")


def from_transformers(
    model: nn.Module,
    *,
    axis: str | None = "tp",
    data_axis: str | Sequence[str] | None = "fsdp",
    expert_axis: str | None = None,
    sequence_parallel: bool = False,
) -> Policy:
    """Rules for a model of the transformers library.

    Reads `model.tp_plan`; a family without one gets rules by the names of its layers. Linears before heads and hidden
    features split their outputs over `axis`, those after them their inputs, and the vocabulary is split; the other dim
    is sharded over `data_axis`. Units are the blocks that transformers does not split either (`_no_split_modules`).

    With `expert_axis` the experts of a mixture are split over it by their number, as the model's `ep_plan` names them,
    each within over `axis` as ever. The axis splits the batch (`Policy.batch`), and tokens go to the ranks of their
    experts, see `sf.policies.Experts`; `| sf.Policy(batch=("fsdp",))` makes a compute axis of it.

        >>> import transformers, shardfn as sf
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
        ... )
        >>> with torch.device("meta"):
        ...     model = transformers.LlamaForCausalLM(config)
        >>> sf.policies.from_transformers(model).rules["model.layers.*.self_attn.q_proj.weight"]
        '(heads@tp d) _@fsdp'

    A model around that of transformers, as peft's or a compiled one, gets the rules of the one inside, under its own
    names. peft's adapters of low rank (LoRA) are split as the linears beside which they stand.

    Args:
        model: a `PreTrainedModel`, also on the meta device, or a model that holds one and has its `config`.
        axis: the mesh axis of tensor parallelism; None for none.
        data_axis: the axis that shards the other dim, or several in the mesh's order; None replicates it. One of
            another name than the usual ones (`fsdp`, `dp`, `data`) splits the batch, too: `Policy.batch`.
        expert_axis: the mesh axis of experts.
        sequence_parallel: whether activations between blocks are split along the sequence over `axis`, where it
            divides; norms, dropout and sums then compute with, and the backward keeps, this rank's positions only.

    Returns:
        a policy with `rules`, `acts`, `units`, `local_sizes`, for experts `compute`, for axes of other names `batch`.

    Raises:
        ShardError: the plan has a style that is not known here; `expert_axis`, and it names no experts; activations
            are to be split, and there is no `axis` or no blocks to split them between.
        TypeError: there is no model of transformers.

    Warns:
        UserWarning: no rule has `axis`.
    """
    path, base = _inside(model)
    data = [data_axis] if isinstance(data_axis, str) else list(data_axis or ())
    policy = _RulesReader(base, axis, data, expert_axis).policy()
    if axis is not None and not any(f"@{axis}" in rule for rule in policy.rules.values()):
        warnings.warn(
            f"from_transformers: {class_of(base).__name__} has no tp_plan, and no layers that are known by their "
            f"names: nothing is split over '{axis}', whose ranks would all compute the same. Write rules, "
            "| sf.Policy(rules={...}), or axis=None for a mesh without tensor parallelism.",
            stacklevel=2,
        )
    if sequence_parallel:
        if axis is None:
            raise ShardError("from_transformers(sequence_parallel=True, axis=None): no axis to split activations over")
        if policy.units == "auto":
            why = f"from_transformers(sequence_parallel=True): {type(base).__name__} names no blocks"
            raise ShardError(f"{why}; say between which modules: Policy(acts={{'layers.*': 'b s@{axis} ...'}})")
        policy |= Policy(acts=dict.fromkeys(policy.units, f"b s@{axis}? ..."))
    return _below(path, policy) if path else policy


def _inside(model: nn.Module) -> tuple[str, nn.Module]:
    """The model of transformers in one that hands attributes on to it, as peft's and compiled ones do; and its path.

    Raises:
        TypeError: there is none.
    """
    if hasattr(model, "config"):
        for path, module in model.named_modules():
            if unsplit_classes(class_of(module)) is not None:
                return path, module
    raise TypeError(f"from_transformers: expected a model of transformers, got {type(model).__name__}")


def _below(path: str, policy: Policy) -> Policy:
    """The policy of a model for one that holds it at a path."""
    moved: dict[str, Any] = {
        name: {f"{path}.{pattern}": value for pattern, value in getattr(policy, name).items()}
        for name in ("rules", "acts", "compute", "local_sizes")
    }
    if policy.units != "auto":
        moved["units"] = tuple(f"{path}.{pattern}" for pattern in policy.units)
    return Policy(**{name: moved.get(name, getattr(policy, name)) for name in policy.given})


class _RulesReader:
    """The rules of one model, collected module by module; layer numbers are written `*`."""

    def __init__(self, model: nn.Module, axis: str | None, data: Sequence[str], expert_axis: str | None) -> None:
        self.model, self.tp = model, f"@{axis}" if axis else ""
        self.axis, self.data, self.expert_axis = axis, data, expert_axis
        self.fsdp = "".join(f"@{name}" for name in data)
        self.modules = dict(model.named_modules())
        self.made: dict[str, dict[str, Any]] = defaultdict(dict)  # by the name of a field of `Policy`
        self.experts: dict[str, str] = {}  # weight of experts -> the axis that splits it by number
        self.problems: list[str] = []
        self._names: dict[str, int] = {}  # of factors, with their sizes
        self._found_sizes: dict[str, dict[str, str]] = {}  # attention module -> attributes
        self._counts: dict[str, dict[str, str]] = {}  # attention module -> "heads", "kv" -> factor

    def policy(self) -> Policy:
        plan = (getattr(self.model, "tp_plan", None) or {}) if self.axis is not None else {}
        self._find_experts(plan, str(self.axis))
        if self.expert_axis is not None:
            self._find_experts(getattr(self.model, "ep_plan", None) or {}, self.expert_axis)
            if not self.experts:
                self.problems.append(f"expert_axis={self.expert_axis!r}: the ep_plan of the model names no experts")
        if self.axis is not None:
            styles = dict(self._expanded(plan)) if plan else dict(self._by_names())
            for path, style in styles.items():
                self._apply(path, style)
            if not plan:
                self._vocabulary()
            for path, module in self.modules.items():  # those known by their class, and experts without a plan
                if (forward := _MODULES.get(class_of(module).__name__)) is not None:
                    self.made["compute"].setdefault(starred(path), forward)
                if hasattr(module, "is_concatenated") and hasattr(module, "has_gate"):
                    self.made["compute"].setdefault(starred(path), tensor_parallel_experts)
        for name in self.experts:
            if starred(name) not in self.made["rules"]:
                self._parameter(name, "")
        raise_problems("from_transformers", self.problems)
        for path, sizes in self._found_sizes.items():
            if sizes:
                self._put("local_sizes", path, sizes)
        fields: dict[str, Any] = batch_with(self.data)
        if self.expert_axis not in (None, self.axis):
            fields = {"batch": tuple(dict.fromkeys((*self.data, self.expert_axis)))}
        fields |= {name: values for name, values in self.made.items() if values}
        units: Any = tuple(dict.fromkeys(map(starred, _block_modules(self.model)))) or "auto"
        return Policy(units=units, **fields)

    # -- which modules and parameters have a style -----------------------------------------------------------------

    def _expanded(self, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """The modules and parameters that a plan names."""
        for name in (*self.modules, *(name for name, _ in self.model.named_parameters())):
            if (style := plan.get(starred(name))) is not None:
                yield name, style

    def _by_names(self) -> Iterator[tuple[str, str]]:
        """What linears in the blocks of the model are, by the ends of their paths."""
        for block in _block_modules(self.model):
            for path, module in self.modules.items():
                if not path.startswith(f"{block}.") or not any(_linears_in(module)):
                    continue
                ends = {path.rpartition(".")[2], ".".join(path.split(".")[-2:])}
                attends = re.search(r"att", path[len(block) :].rpartition(".")[0], re.IGNORECASE) is not None
                into, out_of = (_INTO_HEADS, _OUT_OF_HEADS) if attends else (_INTO_FF, _OUT_OF_FF)
                if ends & (into | out_of):
                    yield path, "colwise" if ends & into else "rowwise"

    # -- what a style means ----------------------------------------------------------------------------------------

    def _apply(self, path: str, style: str) -> None:
        module = self.modules.get(path)
        around = (self.modules[above] for above in modules_above([path]) if above in self.modules)
        if any(_WHOLE.get(class_of(outer).__name__, lambda _: False)(outer) for outer in around):
            style = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}.get(style, style)
        identity = partial(identity_expert, axis=str(self.axis))
        forwards = {"moe_tp_experts": tensor_parallel_experts, "moe_identity_expert": identity}
        if style in forwards:
            self.made["compute"].setdefault(starred(path), forwards[style])
        elif style in _COLUMNS | _ROWS:
            if module is None:
                self._parameter(path, style)
            elif any(_linears_in(module)):
                for inside, linear in _linears_in(module):
                    self._linear(path, inside, linear, style)
            else:
                self.problems.append(f"{path!r}: style {style!r} is for linears, and it is a {type(module).__name__}")
        elif style in _TABLES:
            for inside, table in _held_in(module):
                rule = f"{self._vocab(table)} _{self.fsdp}" if style == "embedding_rowwise" else f"_ c{self.tp}"
                self._put("rules", f"{path}{inside}.weight", rule)
        elif style not in _PLAIN | _BY_NUMBER:
            self.problems.append(f"{path!r}: style {style!r} is not known here")

    def _linear(self, path: str, inside: str, module: Any, style: str) -> None:
        out = OUT_DIM[kind_of(module)]
        at = out if style in _COLUMNS else 1 - out
        dims = [f"_{self.fsdp}"] * 2
        dims[at] = split = self._factors(path, module.weight.shape[at], style)
        self._put("rules", f"{path}{inside}.weight", " ".join(dims))
        if style in _GATHERED:
            self._put("acts", f"{path}{inside}", "... _")
        if inside.endswith(".base_layer"):
            self._low_rank(f"{path}{inside}".removesuffix(".base_layer"), split, style)

    def _low_rank(self, path: str, split: str, style: str) -> None:
        """peft's halves beside a linear: B's outputs are split as those of the linear, A's inputs as its inputs."""
        columns = style in _COLUMNS
        for which in ("lora_A", "lora_B"):
            halves: Any = children_of(self.modules[path]).get(which) or {}
            for name, half in halves.items():
                if (out := OUT_DIM.get(kind_of(half))) is None:
                    continue
                dims = ["_", "_"]
                if columns == (which == "lora_B"):
                    dims[out if columns else 1 - out] = split
                self._put("rules", f"{path}.{which}.{name}.weight", " ".join(dims))
                if which == "lora_B" and style in _GATHERED:
                    self._put("acts", f"{path}.{which}.{name}", "... _")

    def _parameter(self, name: str, style: str) -> None:
        """A weight that is no linear's, such as those of experts: [experts, out, in]."""
        param = self.model.get_parameter(name)
        dims = ["_"] * param.dim()
        owner, _, last = name.rpartition(".")
        if style:
            at = param.dim() - 2 if style in _COLUMNS and param.dim() > 1 else param.dim() - 1
            # Two weights one after the other, as the module itself says.
            halves = all(getattr(self.modules[owner], name, False) is True for name in ("has_gate", "is_concatenated"))
            packed = style.startswith("packed") or (last == "gate_up_proj" and halves)
            dims[at] = f"(2 _{self.tp})" if packed else f"_{self.tp}"
        expert_axis = self.experts.get(name)
        if expert_axis is not None:
            if dims[0] != "_":
                self.problems.append(f"{name!r}: style {style!r} splits it by number, as '{expert_axis}' does")
                return
            dims[0] = experts = f"{self._named('experts', param.shape[0])}@{expert_axis}"
            if getattr(self.modules[owner], "num_experts", None) == param.shape[0]:
                self._put("local_sizes", owner, {"num_experts": experts})
        whole = [at for at, dim in enumerate(dims) if dim == "_"]
        if whole and self.data:
            dims[whole[-1]] = "".join(["_", *(f"@{axis}" for axis in self.data if axis != expert_axis)])
        self._put("rules", name, " ".join(dims))

    def _find_experts(self, plan: Mapping[str, str], axis: str) -> None:
        """Note what a plan splits over an axis by number of expert."""
        for name in (name for name, style in self._expanded(plan) if style in _BY_NUMBER):
            if name in self.modules:
                self.made["compute"][starred(name)] = Experts(axis)
            else:
                self.experts[name] = axis

    def _vocab(self, module: Any) -> str:
        rows = module.weight.shape[0]
        name = self._named("vocab", rows)
        if rows % 64:
            self.made["pad"][name] = 64
        return f"{name}{self.tp}?"

    def _put(self, field: str, name: str, value: Any) -> None:
        """An entry for all layers, or for this one when layers differ; those come first, since the first match wins."""
        if self.made[field].setdefault(starred(name), value) != value:
            self.made[field] = {name: value} | self.made[field]

    # -- heads -----------------------------------------------------------------------------------------------------

    def _factors(self, path: str, size: int, style: str) -> str:
        """The dim of a weight that is split: whole heads where there are any."""
        if style in _GATHERED | {"rowwise_split_input", "rowwise_rep"}:
            vocab = getattr(self.model.config, "vocab_size", None) if style in _GATHERED else None
            return f"{self._named('vocab', size)}{self.tp}?" if size == vocab else f"_{self.tp}"
        owner_path, owner = self._attention(path)
        last = path.rpartition(".")[2]
        if owner is None or last in _INTO_FF | {"w1", "w2", "w3"}:
            return f"(2 _{self.tp})" if style.startswith("packed") else f"{self._named('ff', size)}{self.tp}"
        width, count = _number(owner, _HEAD_SIZES) or 0, _number(owner, _HEAD_COUNTS)
        compressed = hasattr(owner, "qk_head_dim")  # queries, keys with values, and outputs have heads of other sizes
        if count and size % count == 0 and (compressed or size % width):
            width = size // count
        if size % width:
            return f"_{self.tp}"
        if last == "c_attn" and size == 3 * (count or 0) * width:
            return self._heads("heads", size // 3, width, owner_path, owner, "3 ")
        if last == "query_key_value":
            return self._heads("heads", size, 3 * width, owner_path, owner)
        grouped = size != (count or 0) * width or hasattr(owner, "num_key_value_groups")
        text = _source(class_of(owner))
        grouped = grouped or any(hasattr(owner, name) or f"self.config.{name}" in text for name in _KEY_COUNTS)
        return self._heads("kv" if last in _KEYS and grouped else "heads", size, width, owner_path, owner)

    def _heads(self, name: str, size: int, width: int, path: str, owner: Any, before: str = "") -> str:
        """The split dim of a weight, of heads; notes which attributes of its module hold how many there are.

        That are numbers of heads, or of features of all heads.
        """
        count = size // width
        heads, d = self._named(name, count), self._named("d", width)
        self.made["sizes"][heads] = count
        sizes, counts = self._found_sizes.setdefault(path, {}), self._counts.setdefault(path, {})
        text = _source(class_of(owner))
        counts[name] = factor = f"{heads}{self.tp}{'?' if name == 'kv' else ''}"
        if len(counts) == 2 and hasattr(owner, "num_key_value_groups"):
            sizes["num_key_value_groups"] = f"{counts['heads']} / {counts['kv']}"
        for number in _KEY_COUNTS if name == "kv" else _HEAD_COUNTS:
            if getattr(owner, number, None) == count and f"self.{number}" in text:
                sizes[number] = factor
            if f"self.config.{number}" in text:
                sizes[f"config.{number}"] = factor
        for width_of_all in ("split_size", "inner_dim", "all_head_size") if name == "heads" else ():
            if getattr(owner, width_of_all, None) == count * width and f"self.{width_of_all}" in text:
                sizes[width_of_all] = f"{factor} {d}"
        if (forward := _ATTENTIONS.get(class_of(owner).__name__)) is not None:
            self.made["compute"].setdefault(starred(path), partial(forward, axis=self.axis))
        table = getattr(owner, "relative_attention_bias", None)
        if isinstance(table, nn.Embedding) and table.weight.shape[1] == count:  # a bias for each head
            inside = f"{path}.relative_attention_bias"
            self._put("rules", f"{inside}.weight", f"_ {heads}{self.tp}")
            self._put("acts", inside, f"... {heads}{self.tp}")
        return f"({before}{factor} {d})"

    def _attention(self, path: str) -> tuple[str, Any]:
        """The attention module around a linear: the nearest one that knows the size of a head."""
        while path:
            path = path.rpartition(".")[0]
            module = self.modules[path]
            if _number(module, _HEAD_SIZES) is not None:
                return path, module
            for child, inner in module.named_children():  # BERT's heads are beside what joins them
                if _number(inner, _HEAD_SIZES) is not None and "att" in path.lower():
                    return f"{path}.{child}", inner
        return "", None

    def _named(self, name: str, size: int) -> str:
        """A name for a size, which is one number in the whole model."""
        for numbered in (name, *(f"{name}{number}" for number in range(2, 99))):
            if self._names.setdefault(numbered, size) == size:
                return numbered
        return "_"

    # -- the vocabulary of a model without a plan ------------------------------------------------------------------

    def _vocabulary(self) -> None:
        for get, gathers in (("get_input_embeddings", False), ("get_output_embeddings", True)):
            table: Any = None
            with suppress(AttributeError, NotImplementedError):
                table = getattr(self.model, get)()
            path = next((name for name, module in self.modules.items() if module is table), None)
            if path is not None and isinstance(table, nn.Embedding | nn.Linear):
                self.made["rules"][f"{path}.weight"] = f"{self._vocab(table)} _{self.fsdp}"
                if gathers:
                    self.made["acts"][path] = "... _"


# By the name of a class: whether a module mixes the features or heads between its linears, and so needs them whole. The
# linears stay split; the outputs of the first are gathered, and the last takes its part of its input.
_WHOLE: dict[str, Callable[[Any], bool]] = {
    "DogeAttention": lambda module: True,  # a mask for the keys of each group, made of their values
    "EsmcAttention": lambda module: True,  # a norm over all heads
    "Gemma3nTextMLP": lambda module: module.activation_sparsity > 0,  # the mean over all features is a threshold
    "NeoMMEAttention": lambda module: True,  # a number for each head in a module of its own
}


def _number(module: Any, attributes: Sequence[str]) -> int | None:
    """The first of some attributes of a module that is a number."""
    return next((value for name in attributes if isinstance(value := getattr(module, name, None), int)), None)


def _held_in(module: Any) -> Iterator[tuple[str, Any]]:
    """A layer, or those that an adapter is around, and their places.

    `q_proj.base_layer` of peft, or `q_proj.base`; peft's copies that are trained whole, and what they are copies of.
    """
    around = [name for name in _AROUND if name in children_of(module)]
    if kind_of(module) != "other" or not around:
        yield "", module
        return
    for name in around:
        inner = children_of(module)[name]
        for key, each in inner.items() if isinstance(inner, nn.ModuleDict) else [("", inner)]:
            place = f".{name}.{key}" if key else f".{name}"
            yield from ((place + path, layer) for path, layer in _held_in(each))


def _linears_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((path, layer) for path, layer in _held_in(module) if kind_of(layer) in OUT_DIM)


@lru_cache(maxsize=2**10)
def _source(cls: type) -> str:
    """The text of the methods of a module that run in its forward."""
    try:
        text = inspect.getsource(cls)
    except (OSError, TypeError):
        return ""
    return text.partition("def __init__")[2].partition("\n    def ")[2]


def _block_modules(model: nn.Module) -> list[str]:
    """The paths of the blocks that are not split, in lists of them."""
    classes = set(unsplit_classes(model) or ())
    return [
        name
        for name, module in model.named_modules()
        if class_of(module).__name__ in classes and re.search(r"\.\d+$", name)
    ]


# -- forwards of modules that need more than their rules ---------------------------------------------------------------


@declares(calls_own=True)
def bloom_attention(
    module: Any, local: Mapping[str, Tensor], layouts: Layouts, /, *args: Any, axis: str, **kwargs: Any
) -> Any:
    """BLOOM's attention with the position biases [b * heads, 1, s] of this rank's heads."""
    bound = inspect.signature(class_of(module).forward).bind(module, *args, **kwargs)
    alibi, batch = bound.arguments["alibi"], bound.arguments["hidden_states"].shape[0]
    with layouts.hidden():
        alibi = alibi.view(batch, -1, *alibi.shape[1:])
        padding = module.num_heads * axis_size(layouts.mesh, axis) - alibi.shape[1]
        heads = shard_slice(F.pad(alibi, (0, 0, 0, 0, 0, padding)), layouts.mesh, axis, 1)
        own_alibi, part = heads.flatten(0, 1), Part("split", 0, ((batch, heads.shape[1]),))
    bound.arguments["alibi"] = layouts.note_part(own_alibi, axis, part, bound.arguments["alibi"])
    return class_of(module).forward(*bound.args, **bound.kwargs)


def _picked_pools(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Which keys GLM-5's indexer picks, without data: indices [b, s, keys]."""
    tail = module.index_kpool - 1 if module.index_kpool_always_select_tail else 0
    return hidden_states.new_empty(*hidden_states.shape[:2], module.index_topk + tail, dtype=torch.int32)


def _picked_blocks(
    module: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Which keys Qwen4's indexer picks, without data: a mask [b, 1, s, keys]."""
    return torch.empty_like(attention_mask, dtype=torch.bool)


@dataclass(frozen=True)
class _IndexerForward:
    """The forward of an indexer, with whole weights: its own, or what stands for it in a shape-only trace.

    It drops keys by values that it has computed, or goes through the queries one by one.
    """

    without_data: Callable[..., Any]

    def __call__(self, module: nn.Module, local: object, layouts: Layouts, /, *args: Any, **kwargs: Any) -> Any:
        return or_without_data(self.without_data, module, *args, **kwargs)


# By the name of a class: a forward of a module with whole weights whose own needs values that depend on them.
_MODULES = {
    "Glm5NextTextIndexer": _IndexerForward(_picked_pools),
    "Qwen4ExpTextQSAIndexer": _IndexerForward(_picked_blocks),
}
# By the name of a class: a forward of its attention that works with a part of the heads.
_ATTENTIONS: dict[str, Callable[..., Any]] = {"BloomAttention": bloom_attention}
