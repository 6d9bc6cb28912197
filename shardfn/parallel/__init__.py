"""How modules compute with split weights: tensor, sequence and expert parallelism.

Read `compute_axes` (collectives that a parallel forward can use), `linears` (also embeddings) and `layers`
(convolutions, norms, attention), `wiring` (which forward a module of a plan gets), `experts` and `loss`. The parallel
forward of a new kind of layer goes into `layers`, as a row of `_FORWARDS`; the kind itself into `kind_of` of
`layout/model_info.py`; that of one module of a user is given to `sf.register`. Not here: the shape-only trace, which
subclasses `ComputeAxes`, see `trace`.
"""

from shardfn.parallel import wiring
from shardfn.parallel.compute_axes import Adjustments, ComputeAxes, Step
from shardfn.parallel.experts import Experts, identity_expert, or_without_data, tensor_parallel_experts
from shardfn.parallel.linears import Layouts, kept_by_acts, others_forwards, weight_parts
from shardfn.parallel.loss import SplitLogits, cross_entropy
