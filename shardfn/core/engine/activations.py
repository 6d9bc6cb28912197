"""Activations gathered over a compute axis, of which the graph keeps this rank's piece. Layer 3.

With `acts={"layers.*": "b s@tp c"}` linears read inputs that were gathered along the sequence, and autograd saves them
for the gradients of weights. It saves the piece instead, and the first one that is asked for in the backward gathers
again, for all that the forward saved of it.
"""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn._torch import version_of


class PackedActivation(NamedTuple):
    """A saved view of a gathered activation, without its storage."""

    activation: "Activation"
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Activation:
    """One gathered activation."""

    def __init__(self, own: Tensor, whole: Tensor, again: Callable[[Tensor], Tensor]) -> None:
        """`again` gathers `own`, which is what was gathered as `whole`."""
        self._own, self._own_version = own.detach(), version_of(own)  # they count changes together
        self._first, self._version, self._dtype = weakref.ref(whole), version_of(whole), whole.dtype
        self._again = again
        self._saved = self._waiting = 0  # views that were saved, and that the backward under way has not asked for
        self._whole: Tensor | None = None
        self._changed = False

    def pack(self, saved: Tensor) -> PackedActivation | None:
        """What autograd keeps of a view; None when that is not a view of what was gathered, as it was."""
        if saved.dtype != self._dtype or saved.is_neg() or saved.is_conj() or version_of(saved) != self._version:
            return None
        self._saved += 1
        return PackedActivation(self, saved.shape, saved.stride(), int(saved.storage_offset()))

    def end(self) -> None:
        """The module that reads it has ended."""
        first = self._first()
        self._changed = first is not None and version_of(first) != self._version

    def view(self, packed: PackedActivation) -> Tensor:
        """The saved view."""
        if self._changed or version_of(self._own) != self._own_version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                f"activation of shape {list(packed.shape)} that is split by Policy.acts. Write a new tensor."
            )
        if self._whole is None:
            with torch.no_grad():
                self._whole = self._again(self._own)
            self._waiting = self._saved
        whole = self._whole
        self._waiting -= 1
        if self._waiting == 0:
            self._whole = None
        return whole.as_strided(packed.shape, packed.stride, packed.offset)
