"""Activations between modules split along another dim than features, as `Policy.acts` asks. Layer 4.

    acts={"layers.*": "b s@tp c"}                                                     what each rank has
        layers.0            its first input is sliced                                 [b, s/W, c]
          norm, residual    on this rank's positions
          attention         has column-parallel children: its inputs are gathered     [b, s, c]
            q, k, v, o      as ever, with this rank's heads; the sum after o is       [b, s/W, c]
                            scattered
        norm                                                                          [b, s/W, c]
        head                column-parallel: its input is gathered                    [b, s, vocab/W]

[Note: steps]
Where a value has to be sliced or gathered depends on which values arrive split, so the run without data finds it
(`flow.py`), and leaves a list of steps by module. A gathered input is invariant at first (backward: a slice, after the
all-reduce of `pvary`), and the output of a module with gathered inputs is sliced at its end. Where that is enough, a
second run tries less: the gathered input varies (backward: a reduce-scatter), and a sum that is all of the output is
scattered where it is made.
"""

from collections.abc import Callable, Sequence, Set
from math import prod
from typing import Any

from torch import Tensor

from shardfn._torch import pytree
from shardfn.core.compute_axes import Adjustments, ComputeAxes, Step
from shardfn.core.engine.binding import Forward
from shardfn.core.errors import ShardError
from shardfn.core.pattern import first_match
from shardfn.core.plan import Plan
from shardfn.core.spec import parse

Around = Callable[[Forward], Forward]
Decision = Callable[[list[Any]], Sequence[Step]]  # which steps the leaves of inputs or outputs need


def stepping(axes: ComputeAxes, inputs: Decision, outputs: Decision) -> Around:
    """What slices or gathers the inputs and outputs of a module."""

    def moved(tree: Any, decide: Decision) -> tuple[Any, list[tuple[Step, Tensor, Tensor]]]:
        leaves, structure = pytree.tree_flatten(tree)
        done = []
        for step in decide(leaves):
            before = leaves[step.at]
            leaves[step.at] = axes.step(before, step)
            done.append((step, before, leaves[step.at]))
        return (pytree.tree_unflatten(leaves, structure), done) if done else (tree, done)

    def around(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            (args, kwargs), done = moved((args, kwargs), inputs)
            with axes.gathers_again([own for own in done if own[0].how in ("gather", "join")]):
                out = inner(*args, **kwargs)
            return moved(out, outputs)[0]

        return forward

    return around


def stepped(axes: ComputeAxes, adjust: Adjustments) -> dict[str, Around]:
    """Module path -> what takes the steps that a run without data found."""

    def at(path: str, steps: Set[Step]) -> Decision:
        own = sorted(step for step in steps if step.path == path)
        return lambda leaves: own

    paths = {step.path for step in adjust.inputs | adjust.outputs}
    return {path: stepping(axes, at(path, adjust.inputs), at(path, adjust.outputs)) for path in paths}


def boundaries(plan: Plan) -> dict[str, str]:
    """Module path -> the entry of `Policy.acts` that splits its output along another dim than the last.

    Raises:
        ShardError: an entry splits the last dim too.
    """
    found = {}
    for module in plan.info.modules if plan.policy.acts else ():
        pattern = first_match(plan.policy.acts, [module.name])
        if pattern is None or any(".dropout." in cls for cls in module.classes):
            continue
        rule = plan.policy.acts[pattern]
        split = [[axis for f in dim.factors for axis in f.axes if is_split(plan, axis)] for dim in parse(rule).dims]
        if any(split[:-1]) and split[-1]:
            raise ShardError(f"apply: Policy.acts[{pattern!r}]: '{rule}' splits features and another dim; choose one")
        if any(split[:-1]):
            found[module.name] = rule
    return found


def ranks_of_acts(plan: Plan) -> int:
    """Between how many ranks activations are split at most."""
    rules = map(parse, boundaries(plan).values())
    return prod(plan.axes[axis] for axis in {axis for rule in rules for f in rule.factors for axis in f.axes})


def is_split(plan: Plan, axis: str) -> bool:
    """Whether a compute axis has several ranks."""
    return axis in plan.roles.compute and plan.axes[axis] > 1
