"""One call of a module: weights gathered just in time, freed, gathered again in backward, gradients reduced.

Read `session` (one call: which unit is whole, and when), `saved_tensors` (what autograd keeps in place of gathered
memory), `reductions` (gradients, bucket by bucket), `runtime` (what all calls of a plan share) and `remat` (activation
checkpointing). Not here: how modules find their weights, see `binding`; arithmetic of split layers, see `parallel`.
"""

from shardfn.engine import reductions
from shardfn.engine.reductions import Gradients, is_held_back
from shardfn.engine.remat import Borrowed, recomputed
from shardfn.engine.session import Session
