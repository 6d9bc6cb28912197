"""What an optimizer is, and what becomes of its updates. Layer 4."""

from collections.abc import Callable
from typing import Any, NamedTuple

from shardfn.core.optim.trees import Tree, like, require_match, require_tree, views


class Optimizer(NamedTuple):
    """Three functions. Whatever an optimizer remembers is in its state, a pytree.

        >>> import torch, shardfn as sf
        >>> opt = sf.optim.sgd(0.5)
        >>> params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
        >>> updates, state = opt.update(grads, opt.init(params), params)
        >>> sf.optim.apply_updates(params, updates)
        {'w': tensor([0.5000, 0.5000])}
        >>> params, state = opt.step(params, grads, state)
        >>> params
        {'w': tensor([0.5000, 0.5000])}

    Attributes:
        init: `init(params) -> state`; allocates, communicates nothing.
        update: `update(grads, state, params) -> (updates, state)`, pure and differentiable. Updates are added to
            parameters, see `apply_updates`; they are in float32 or wider, and only for parameters that train.
        step: `step(params, grads, state) -> (params, state)`, the same in place: the parameters returned are the same
            objects, `nn.Parameter`s too, and the old state is used up. Outside autograd.
    """

    init: Callable[[Tree], Any]
    update: Callable[[Tree, Any, Tree], tuple[Tree, Any]]
    step: Callable[[Tree, Tree, Any], tuple[Tree, Any]]


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """`params + updates`, in the parameters' dtypes; parameters without an update are the same objects.

        >>> import torch, shardfn as sf
        >>> sf.optim.apply_updates({"a": torch.ones(2), "b": torch.ones(1)}, {"a": torch.ones(2)})
        {'a': tensor([2., 2.]), 'b': tensor([1.])}

    Args:
        params: the parameters; not changed.
        updates: what an optimizer's `update` returned.

    Returns:
        a new tree like `params`.

    Raises:
        ShardError: updates of other names or layouts.
    """
    names = list(require_tree("apply_updates", "updates", updates))
    require_match("apply_updates", "updates", params, names, updates)
    local, wrap = views(params, updates, names=names)
    new = {
        name: wrap(params[name], (local(params[name]) + local(updates[name])).to(params[name].dtype)) for name in names
    }
    return like(params, {**params, **new})
