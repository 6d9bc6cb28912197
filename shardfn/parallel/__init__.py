"""How modules compute with split weights: tensor, sequence and expert parallelism.

Read `compute_axes` (what a forward may ask of its ranks), `linears` and `layers` (forwards of classes of modules),
`wiring` (which forward a module of a plan gets, and what stands around it), `experts`, `loss`. A layer's tensor
parallelism goes into `linears` or `layers`. Not here: anything that traces; `trace` overrides `ComputeAxes`.
"""

from shardfn.parallel import wiring
from shardfn.parallel.compute_axes import Adjustments, ComputeAxes, Step
from shardfn.parallel.experts import Experts, identity_expert, or_without_data, tensor_parallel_experts
from shardfn.parallel.linears import Layouts, kept_by_acts, others_forwards, weight_parts
from shardfn.parallel.loss import SplitLogits, cross_entropy
