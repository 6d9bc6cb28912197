"""One call of a module: weights gathered just in time, freed, gathered again in backward, gradients reduced.

Read `session` (one call: which unit is gathered, and when), `saved_tensors` (autograd saves descriptions of views, so
that gathered memory can be freed), `reductions` (when gradients are reduced; `comm/buckets.py` says how), `runtime`
(what all calls of a plan share) and `remat` (recomputing units inside transforms). Not here: how modules find their
weights, see `binding`; arithmetic of split layers, see `parallel`.
"""

from shardfn.engine.reductions import Gradients
from shardfn.engine.remat import Borrowed, recomputed
from shardfn.engine.session import Session
