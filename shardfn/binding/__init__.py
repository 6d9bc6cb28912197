"""A module finds the weights of a call in its own tables: the user's own modules run, without copies.

Read `forwards` (what modules do in a call), then `module_tables`: it replaces the parameter dict of a module, and each
read asks which call is active in this thread. `compiled_forwards` is for `torch.compile`. Not here: where weights come
from, see `engine`; what a parallel forward computes, see `parallel`.
"""

from shardfn.binding import module_tables
from shardfn.binding.compiled_forwards import Forward, GraphBreak, as_they_are, untraced
from shardfn.binding.forwards import Around, InnerCall, Wiring, goes_around, has_attribute, own_forward
from shardfn.binding.module_tables import ForwardStandIn, ModelBinding, call_now, escaped, is_computing, weight_now
from shardfn.binding.module_tables import with_tables
