"""State around a call: torch's transforms, mapped axes, differentiated losses, a recording by `jit`.

All of it is in `active_transforms`. State here is scoped to a `with` block. Not here: state of a model or a plan.
"""

from shardfn.context import active_transforms
from shardfn.context.active_transforms import RECORDING, Recording, axes_of_losses, derivatives_asked_for, having
from shardfn.context.active_transforms import holding, in_forward_mode, is_asked_for, is_differentiated, is_under_way
from shardfn.context.active_transforms import losses_over, mapped_axes, mapped_over, note_tree, order_of_derivatives
from shardfn.context.active_transforms import recording, requires_grad, several_losses
