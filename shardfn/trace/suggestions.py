"""What to write when a shape-only trace cannot go on: changes of the policy that may help, and advice.

A change is only offered after a further run with it has gone to its end; `shape_trace.py` does these runs. What is said
when none helps depends on the kind of the problem.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from shardfn.layout import BIAS_DIM, MAPPINGS, FailedOperation, Plan, Policy, Problem, first_match, is_in, starred
from shardfn.notation import ShardError
from shardfn.parallel import splits, wiring

_PARALLEL = "give the module a parallel forward: Policy(compute={path: fn}), or @sf.register for its class."
_SIZES = (
    "take sizes from tensors (x.shape[-1], or rearrange with the size of a head, not with their number) instead of the "
    "configuration: only this rank's part of each split dim is there; or name the attribute that holds one, as in "
    "Policy(local_sizes={'attn': {'heads': 'heads@tp'}}). A loop over heads takes all, Policy(acts={'qkv': '... _'}); "
    "or "
)
_ADVICE = {
    "gradient": "Split both sides alike in the rules, or write sf.collectives.pvary(x, mesh, axis) on the shared "
    f"value; or {_PARALLEL}",
    "whole": "Gather what is split before that, by Policy(acts={path: '... _'}) at the module that splits it, or leave "
    f"the axis out of the rules of its weights; or {_PARALLEL}",
    "sizes": f"{_SIZES[0].upper()}{_SIZES[1:]}{_PARALLEL}",
    "pads": "Pad what belongs together alike: Policy(pad={'heads': ..., 'kv': ...}) in the ratio that they have.",
    "rules": f"Split both alike in the rules, by the same names and axes; or {_PARALLEL}",
    "sums": "Add a sum up where it is made: what a module with parameters returns is added up, so give what makes the "
    f"sum a module of its own, or write sf.collectives.psum(x, mesh, axis) there; or {_PARALLEL}",
    "draws": "Without a gather: torch.rand(x.shape, device=x.device), or torch.randn, draws for the whole value; in "
    "place of torch.bernoulli(p) write torch.rand(p.shape, device=p.device) < p.",
    "acts": "Compute the loss outside of the model, by sf.cross_entropy(logits, targets), or drop the entry.",
    "random": "Each way that the forward may go has to be followed by a run of its own.",
    "backward": "Give what acts on the gradient a module of its own that returns its result, and a module that has "
    "hooks nn.Sequential(module): parts of a gradient are added up behind what such a module returns.",
    "zeros": "That is NaN, or has a gradient that is, and spreads to all that it meets. Keep from zero what is divided "
    "by, or of which a root or logarithm is taken, as by x.norm(dim=-1, keepdim=True).clamp_min(1e-12), and give norms "
    "an eps. The gradient of a norm has no gradient there: (x.square().sum(-1, keepdim=True) + 1e-12).sqrt() has.",
    "twice": "Leave that collective out where the value is split already.",
}

_MENDED_BY_ACTS = ("whole", "acts", "rules", "sums", "sizes", "draws")

_OF_TORCH = {
    "functorch transform|BatchedTensorImpl|invalid gradient": wiring.AROUND,
    "cannot be called on meta|aten::_local_scalar_dense|aten::is_nonzero|to numpy": "Numbers that are made of floats "
    "are not known before the forward: return the tensor and read it outside, or compute with it, as in x * x.mean() "
    "for x * x.mean().item() and torch.where(x.mean() > 0, a, b) for an `if`, or pass the number as an argument; "
    "torch.distributions take validate_args=False.",
    "no fake impl or Meta kernel": "How long the result of that operation is depends on values, which a run without "
    "data does not have: compute with a mask of fixed shape, or call it outside of the model and pass what it gives.",
    "'lengths' argument": "Packed sequences cannot be followed: pad them, and mask what is padded.",
    "Cannot copy out of meta": "Something without data is read, as by .tolist() or .cpu(): return it, and read it "
    "outside. Or it is written into a tensor that has data: those that a forward makes must follow x.device; pass "
    "others as an argument, in a tuple, list or dict, or make them buffers. Instead of save_on_cpu(), which does so, "
    "write torch.utils.checkpoint.",
    "ContextVar name='sides'": "A thread of its own computes a module; call modules in that of the forward.",
}


def of_torch(words: str) -> str:
    """What to write when a run without data fails with words of torch that name another cause; else empty."""
    return next((advice for pattern, advice in _OF_TORCH.items() if re.search(pattern, words)), "")


class Failure(NamedTuple):
    """Why a run did not go on: the problems that it found; what was `raised` in the module at `path`, and where."""

    problems: tuple[Problem, ...] = ()
    path: str = ""
    stuck: FailedOperation | None = None
    raised: str = ""

    @property
    def where(self) -> tuple[Any, ...]:
        """What tells it from another one."""
        return (self.path, self.raised, *(problem.what for problem in self.problems[:1]))


class Unserved(ShardError):
    """A shape-only trace cannot go on; internal, what callers see is made of it."""

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(message)
        self.failure = failure


def header(plan: Plan, problems: Sequence[Problem]) -> str:
    """What the problems have in common."""
    kinds = {problem.kind for problem in problems}
    if kinds <= {"gradient", "backward"}:
        return "gradients would be partial sums"
    if kinds == {"twice"}:
        return "gradients would be added up twice"
    return f"the forward cannot be computed part by part over {over(plan)}"


def over(plan: Plan) -> str:
    """The compute axes, with their sizes."""
    return ", ".join(f"{axis}={plan.axes[axis]}" for axis in plan.roles.compute)


def described(plan: Plan, failure: Failure) -> str:
    """What an operation that raised was given, and whose parts these are, line by line; or what came before."""
    module = plan.info.module(failure.path)
    if module is not None and module.kind.endswith("norm"):  # which computes whole
        rule = f"{{'{failure.path}.*': '_@{plan.roles.compute[0]}'}}"
        return f"\n  its channels are split, and its parameters are not; write a rule, {rule}"
    if failure.stuck is None:
        return "".join(f"\n  before that, in {p.at or '(the model)'!r}: {p.what}" for p in failure.problems[-1:])
    if not any(part.split for _, tag in failure.stuck.inputs for part in tag.parts.values()):
        return ""
    lines = [f"\n  {failure.stuck.name} was given"]
    for shape, tag in failure.stuck.inputs:
        whole = tag.whole_shape(shape, plan.axes)
        rules = {name: plan.layouts.get(f"{name}.weight") for name in sorted(tag.split_by)}
        by = [f"{name!r} ('{layout.rule}')" for name, layout in rules.items() if layout is not None]
        source = (tag.source or "").removeprefix("module ").removeprefix("parameter ")
        if whole != shape:
            lines.append(f"    {shape}, this rank's part of {whole}" + (f", split by {', '.join(by)}" if by else ""))
        else:
            lines.append(f"    {shape}, whole" + (f", of {source!r}" if source else ""))
    return "\n".join(lines)


def advice(failure: Failure) -> str:
    """What may help when no change of the policy was found that does."""
    if failure.raised:
        return (
            "Where two layers disagree about a size, split what is between them alike in both rules; after two that "
            f"are concatenated that is '_ (2 k@tp)'. Otherwise {_SIZES}{_PARALLEL} Tensors that are neither parameters "
            "nor buffers must follow x.device, and control flow must not depend on values."
        )
    return "\n".join(dict.fromkeys(_ADVICE[problem.kind] for problem in failure.problems))


def said(change: Policy, plan: Plan, failure: Failure) -> str:
    """A change of the policy that helps, as it is written."""
    fields = ", ".join(f"{name}={getattr(change, name)!r}" for name in MAPPINGS if name in change.given)
    drops = any("@" in plan.policy.acts.get(pattern, "") for pattern in change.acts)
    loss = ", or compute the loss outside of the model, by sf.cross_entropy(logits, targets)" if drops else ""
    more = f"\n{advice(failure)}" if failure.raised else f" Or {_PARALLEL}" if change.rules else ""
    more = f"\nOr {_SIZES}{_PARALLEL}" if any(p.kind == "sizes" for p in failure.problems) else more
    more = f"\n{_ADVICE['draws']}" if any(p.kind == "draws" for p in failure.problems) else more
    return f"Write policy | sf.Policy({fields}), with which this run goes to its end{loss}.{more}"


def changes(plan: Plan, failure: Failure) -> Iterator[Policy]:
    """Changes of the policy that may help, the likeliest first."""
    stuck = failure.stuck
    if stuck is not None:
        yield from _gathered(plan, {name for _, tag in stuck.inputs for name in tag.split_by})
    elif failure.raised:  # before any operation: what comes before it, maybe
        names = [module.name for module in plan.info.modules if module.kind in BIAS_DIM or module.name == failure.path]
        yield from _gathered(plan, names[: names.index(failure.path)][-1:] if failure.path in names else [])
    asked = [problem for problem in failure.problems if problem.kind in _MENDED_BY_ACTS]
    yield from _gathered(plan, {name for problem in asked for name in problem.sources})
    loops = [problem.at for problem in asked if problem.kind == "sizes" and not problem.sources]
    yield from _gathered(plan, {x.name for x in plan.info.modules if any(is_in(x.name, path) for path in loops)})
    yield from _gathered(plan, {x.name for x in plan.info.modules if x.name and x.kind == "other" and splits(plan, x)})
    paths = {failure.path} if failure.raised else {p.at for p in asked if p.kind in ("whole", "sizes", "rules")}
    paths |= {path.rpartition(".")[0] for path in paths}
    yield from _whole(plan, [[one] for x in plan.info.modules if x.name in paths for one in x.params])
    yield from _whole(plan, [x.params for x in plan.info.modules if x.name and x.name.rpartition(".")[0] in paths])


def _whole(plan: Plan, groups: Sequence[Sequence[tuple[str, str]]]) -> Iterator[Policy]:
    """Parameters that every rank computes with whole: a group of them, or all."""
    for group in (*groups, [*chain(*groups)]):
        if split := [layout for _, name in group if plan.compute_axes(layout := plan.layouts[name])]:
            yield Policy(rules={starred(x.name): str(plan.given_rule(x).without(plan.roles.compute)) for x in split})


def _gathered(plan: Plan, names: Collection[str]) -> Iterator[Policy]:
    """Outputs of column-parallel modules, whole."""
    acts = {}
    for name in sorted(names):
        module = plan.info.module(name)
        entry = first_match(plan.policy.acts, [name]) or starred(name)
        if module is not None and module.kind == "other" and splits(plan, module):
            acts[entry] = "... _"
        elif module is not None and module.kind in BIAS_DIM:
            layout = plan.weight_of(module)
            factors = plan.given_rule(layout).without(plan.roles.data).dims[BIAS_DIM[module.kind]].factors
            if not any(factor.axes for factor in factors):
                continue
            last = factors[0].name if len(factors) == 1 else "_"
            acts[entry] = f"... {last}" if "linear" in module.kind else f"b {last} ..."
    if acts:
        yield Policy(acts=acts)
