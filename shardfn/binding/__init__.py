"""A tree of modules whose weights come from elsewhere: the user's own modules run, with the weights of a call.

Read `module_tables` (the tables of a module, which ask the call that goes on), then `graphs` (forwards under
`torch.compile`). Not here: where the weights come from, see `engine`; what a parallel forward computes, see `parallel`.
"""

from shardfn.binding import graphs, module_tables
from shardfn.binding.graphs import Forward, as_they_are, untraced
from shardfn.binding.module_tables import Around, InnerCall, Place, Wiring, call_now, escaped, has_attribute
from shardfn.binding.module_tables import is_computing, own_forward, weight_now, with_tables
