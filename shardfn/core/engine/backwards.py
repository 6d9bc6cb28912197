"""Whether a backward that a user wrote may be given parts of a gradient, which are added up behind it. Layer 3.

Where ranks use a shared value in shares, the gradient of each is a part of a sum, which is added up where the value
comes from. What torch's own operations do with it on the way there is linear, so that the sum is the same. The backward
of an `autograd.Function` may be anything. So it runs without data, on a gradient that is a pending sum, by the rules
that forwards follow: a clamp of it is lost.
"""

from typing import Any

import torch
from torch import Tensor

from shardfn._torch import blank_gradients, has_hooks, outside_dispatch, pytree, ran_backward, users_backward
from shardfn.core.collectives import watched
from shardfn.core.engine.tags import Tag
from shardfn.core.engine.values import tensors_of
from shardfn.core.engine.variance import Variance
from shardfn.core.parts import SUM

_AXIS = ""


def check_backwards(variance: Variance, output: Any) -> None:
    """Note what a user's backward makes of parts of gradients, in a forward that has ended with an output."""
    variance.note_backwards(tensors_of(pytree.tree_leaves(output)))
    for x, path in variance.with_backwards.values():
        axes = ", ".join(axis for axis, part in variance.tag(x).parts.items() if part.in_shares)
        if why := why_not_linear(x):
            with variance.inside(path):
                variance.refuse(f"each rank of '{axes}' has a part of a gradient, and {why}", "backward")


def acts_on_gradient(x: Tensor) -> bool:
    """Whether something of the user's is given the gradient of x that may not be given a part of it."""
    return has_hooks(x) or bool(why_not_linear(x))


def why_not_linear(x: Tensor) -> str:
    """Why what a user wrote may not be given parts of the gradient of x; empty when it may, or there is nothing."""
    function = users_backward(x)
    if function is None:
        return ""
    name, run = function.__qualname__, Variance({_AXIS: 2}, "rank")
    grads = blank_gradients(x)
    for grad in grads:
        run.mark(grad, Tag({_AXIS: SUM}))
    try:
        with outside_dispatch(), torch.no_grad(), watched(run.note_collective), run.worlds.run(), run:
            found = tensors_of(ran_backward(x, grads))
    except Exception as error:
        return f"the backward of {name} cannot be run without data ({error})"
    parts = [run.tag(grad).parts.get(_AXIS) for grad in found if not run.is_zero(grad)]
    why = next((part.why if part is not None else "it adds numbers to it" for part in parts if part != SUM), None)
    return "" if why is None else f"the backward of {name} is not linear in it ({why})"
