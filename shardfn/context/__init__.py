"""What goes on around a call: transforms of torch that are under way, axes that are mapped, a recording of a step.

All of it is in `transform_state`. Not here: state of a model or a plan; everything here ends with the `with` that began
it.
"""

from shardfn.context import transform_state
from shardfn.context.transform_state import RECORDING, Recording, asks, axes_of_losses, derivatives_asked_for, having
from shardfn.context.transform_state import holding, in_forward_mode, is_asked_for, is_differentiated, is_under_way
from shardfn.context.transform_state import losses_over, mapped_axes, mapped_over, note_tree, recording, several_losses
