"""The shape-only trace: a forward run once without data, to find how each activation is sharded.

Read `shape_trace`, which drives it (`traced_plan` is `sf.plan`). Each size has two values, on one rank and unsharded:
`paired_sizes`. `operations` has what a rule is given, `operation_rules` a rule for each operation, `interpreter`
applies them, and `function_mode` sees functions of torch before they become operations. `traced_axes` is what parallel
forwards do in it, `meta_values` holds known values, `value_numbering` finds equal values of two runs, `padding` follows
zeros. `state_rollback` puts back what a forward changed; `guards` say whether a later call is like the traced one
(`transforms/module_call` asks them, and traces again); `suggestions` say what to write when a trace fails, such as when
the forward reads a head count from the configuration. Errors about sizes that do not divide come from the plan,
`layout/planning.py`, but for heads of `nn.MultiheadAttention`. Not here: training steps; they run only `guards`.
"""

from shardfn.trace.guards import Guards, Structure, Watch, signature
from shardfn.trace.meta_values import is_cache, is_filled, snapshot
from shardfn.trace.shape_trace import ShapeTrace
from shardfn.trace.state_rollback import ReachableState, all_in
from shardfn.trace.traced_plan import plan
