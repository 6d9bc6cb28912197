"""The shape-only trace: a forward run once without data, to find how each activation is sharded.

Read `shape_trace`, which drives it (`traced_plan` is `sf.plan`). Each size has two values, on one rank and unsharded:
`paired_sizes`. `operations` has what a rule is given, `operation_rules` a rule for each operation, `interpreter`
applies them, and `function_mode` sees functions of torch before they become operations. `traced_axes` is what
parallel forwards do in it, `meta_values` the values that are known, `value_numbering` tells equal values of two runs,
`padding` follows zeros. `state_rollback` puts back what a forward changed; `guards` say whether a later call is like
the traced one; `suggestions` are what to write when a trace fails, such as a head count that the forward reads from
the configuration. A size that does not divide is no matter of a trace but of the plan, `layout/planning.py`. Not
here: a step of training, which runs none of it but `guards`.
"""

from shardfn.trace.guards import Guards, Structure, Watch, signature
from shardfn.trace.meta_values import is_cache, snapshot, tensors_in
from shardfn.trace.shape_trace import Trial
from shardfn.trace.state_rollback import Reached
from shardfn.trace.traced_plan import plan
