"""The shape-only trace: a forward run once without data, to find what the layout of weights means for activations.

Read `shape_trace` (what drives it), `paired_sizes` (one size for a rank, one for the whole), `operations` (a rule for
each operation of torch), `interpreter` (what applies them) and `traced_axes` (what parallel forwards do in it). Beside
these: `side_effects`, `values`, `value_numbers`, `padding`; `guards` and `reached`, which say whether a later call is
like the traced one; `suggestions`, what to write when it cannot go on. Not here: a step of training, which runs none
of it.
"""

from shardfn.trace.guards import Guards, Structure, Watch, signature
from shardfn.trace.reached import Reached
from shardfn.trace.shape_trace import Trial, plan
from shardfn.trace.values import is_cache, snapshot, tensors_in
