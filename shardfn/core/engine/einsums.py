"""`torch.einsum` in the same operations whatever the sizes, for runs without data that are compared. Layer 3.

torch leaves out dims of size 1, and joins several operands in an order that depends on sizes: with one head a rank it
does other operations than with all heads. The results are the same.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Labels = tuple[Any, ...]


def einsum(*args: Any) -> Tensor:
    """What `torch.einsum` computes, operand by operand from the left, each as a batched matrix product."""
    terms, out, operands = _read(args)
    if terms is None or not _is_plain(terms, out, operands):
        return torch.einsum(*args)
    x, labels = operands[0], terms[0]
    if len(operands) == 1:
        return _arranged(x, labels, out)
    for at in range(1, len(operands)):
        needed = {*out, *(label for term in terms[at + 1 :] for label in term)}
        x, labels = _product(x, labels, operands[at], terms[at], needed)
    return _arranged(x, labels, out)


def _read(args: Sequence[Any]) -> tuple[list[Labels] | None, Labels, list[Tensor]]:
    """The labels of each operand and of the result, and the operands; None for what only torch reads."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if not isinstance(equation, str) or "." in equation or not all(isinstance(x, Tensor) for x in operands):
        return None, (), []
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = [tuple(term) for term in left.split(",")]
    once = tuple(sorted(label for label in set(left) - {","} if left.count(label) == 1))
    return terms, tuple(right) if arrow else once, operands


def _is_plain(terms: Sequence[Labels], out: Labels, operands: Sequence[Tensor]) -> bool:
    """Whether every label has one size, and none is twice in a term; torch has the other kinds, and the errors."""
    if len(terms) != len(operands) or any(x.dim() != len(term) for x, term in zip(operands, terms, strict=True)):
        return False
    sizes: dict[Any, int] = {}
    pairs = [pair for x, term in zip(operands, terms, strict=True) for pair in zip(term, x.shape, strict=True)]
    once = all(len(set(term)) == len(term) for term in (*terms, out))
    return once and all(sizes.setdefault(at, n) == n for at, n in pairs) and set(out) <= set(sizes)


def _arranged(x: Tensor, labels: Labels, out: Labels) -> Tensor:
    """A value with its dims in another order; those that are in no result are summed up."""
    gone = [at for at, label in enumerate(labels) if label not in out]
    x = x.sum(gone) if gone else x
    left = [label for label in labels if label in out]
    return x.permute([left.index(label) for label in out])


def _product(x: Tensor, mine: Labels, y: Tensor, other: Labels, needed: set[Any]) -> tuple[Tensor, Labels]:
    """Two operands as one, with the labels of it."""
    both = [label for label in mine if label in other]
    batch, summed = [at for at in both if at in needed], [at for at in both if at not in needed]
    rows, columns = ([at for at in term if at not in both and at in needed] for term in (mine, other))
    sizes = dict(zip((*mine, *other), (*x.shape, *y.shape), strict=True))
    x, y = _arranged(x, mine, (*batch, *rows, *summed)), _arranged(y, other, (*batch, *summed, *columns))
    product = torch.bmm(
        x.reshape(*_joined(sizes, batch, rows, summed)), y.reshape(*_joined(sizes, batch, summed, columns))
    )
    labels = (*batch, *rows, *columns)
    return product.view([sizes[label] for label in labels]), labels


def _joined(sizes: dict[Any, int], *groups: Sequence[Any]) -> list[int]:
    """The size of each group of dims as one dim."""
    return [torch.Size([sizes[label] for label in group]).numel() for group in groups]
