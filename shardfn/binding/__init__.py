"""A tree of modules whose weights come from elsewhere: the user's own modules run, with the weights of a call.

Read `forwards` (what modules do in a call), `module_tables` (which call goes on in this thread, and the tables of a
module, which ask it), then `graphs` (forwards under `torch.compile`). Not here: where the weights come from, see
`engine`; what a parallel forward computes, see `parallel`.
"""

from shardfn.binding import graphs, module_tables
from shardfn.binding.forwards import Around, InnerCall, Wiring, has_attribute, own_forward
from shardfn.binding.graphs import Forward, as_they_are, untraced
from shardfn.binding.module_tables import Place, call_now, escaped, is_computing, weight_now, with_tables
