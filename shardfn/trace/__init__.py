"""The shape-only trace: a forward run once without data, to find what the layout of weights means for activations.

Read `shape_trace` (what drives it; `traced_plan` is `sf.plan`), `paired_sizes` (a size for a rank, one for the whole),
`operations` and `operation_rules` (what each operation of torch makes of parts), `interpreter` (what applies them) and
`traced_axes` (what parallel forwards do in it). Beside these `side_effects`, `values`, `value_numbers` and `padding`;
`guards` and `reached`, which say whether a later call is like the traced one; `suggestions`, what to write when it
cannot go on. Not here: a step of training, which runs none of it.
"""

from shardfn.trace.guards import Guards, Structure, Watch, signature
from shardfn.trace.reached import Reached
from shardfn.trace.shape_trace import Trial
from shardfn.trace.traced_plan import plan
from shardfn.trace.values import is_cache, snapshot, tensors_in
