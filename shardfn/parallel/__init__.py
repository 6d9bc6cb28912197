"""How modules compute with split weights: tensor, sequence and expert parallelism.

Read `compute_axes` (collectives that a parallel forward can use), `amended_calls` (calls of torch in a forward of one
process that get other arguments on a rank), `linears` (also embeddings) and `layers` (convolutions, norms, attention),
`wiring` (which forward a module of a plan gets), `experts` and `loss`. A new kind of layer of torch is a row of
`_FORWARDS` in `layers`, and one of `_LAYERS` in `layout/model_info.py` (see `kind_of`, also of `OUT_DIM` for linears,
and of `BIAS_DIM` for what asks `Layer.sides` or `Layer.made`, which know dims 0 and 1 of a weight); a class of your own
gets its parallel forward by `sf.register`. Heads of `nn.MultiheadAttention` are checked in `layers._check_heads`. Not
here: the shape-only trace, which subclasses `ComputeAxes`, see `trace`.
"""

from shardfn.parallel import wiring
from shardfn.parallel.amended_calls import Amendment, amend, arguments_of, may_run_again, place_of_call
from shardfn.parallel.compute_axes import Adjustments, ComputeAxes, Step
from shardfn.parallel.experts import Experts, identity_expert, or_without_data, tensor_parallel_experts
from shardfn.parallel.linears import Layouts, kept_by_acts, others_forwards, splits, weight_parts
from shardfn.parallel.loss import SplitLogits, cross_entropy
