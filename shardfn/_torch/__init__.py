"""Private and version-dependent names of torch, and workarounds for its bugs. Besides, only `compat` uses any.

Each name is resolved once, at import, and says under which condition it can go. By subject: `tensors` (DTensors,
versions), `memory`, `groups` (process groups), `autograd`, `transforms` (`torch.func`, modes), `dispatch`
(operations), `modules`, `simulation` (all ranks in one process), `symbols` (sizes that are no plain numbers),
`threads` (of this process), `checkpoint_files` (what torch.distributed.checkpoint reads). Not here: anything that knows
of a plan.
"""

from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardfn._torch.autograd import HOOKING, accumulates, after_backward, backward_id, blank_gradients, grad_dtypes_of
from shardfn._torch.autograd import has_gradient_hooks, has_hooks, in_reentrant_checkpoint, in_selective_checkpoint
from shardfn._torch.autograd import made_before, metadata_of, node_that_runs, number_of, out_of_inference_mode
from shardfn._torch.autograd import profiles, users_backward, watch_backward
from shardfn._torch.dispatch import LAZY_MODULES, asks_for_values, backend_for_graphs, base_name, dispatch_modes
from shardfn._torch.dispatch import draw_whole_values
from shardfn._torch.dispatch import function_modes, is_mutable, masks_pick_all, named_arguments, one_for_each
from shardfn._torch.dispatch import outside_dispatch, outside_functions, outside_modes, record, without_writing
from shardfn._torch.checkpoint_files import checkpoint_metadata, read_checkpoint_metadata
from shardfn._torch.groups import COMPILES_EXCHANGES, HashStore, all_gather_single, all_to_all_single, close_connections
from shardfn._torch.groups import apart_from, default_store, exchanging, gather_bytes, gathering, group_named, group_of
from shardfn._torch.groups import close_all_connections, has_store, is_of_peers, last_calls
from shardfn._torch.groups import longest_timeout, numbers_of_calls, other_client, share_device_of_gloo
from shardfn._torch.threads import Place, error_handled_by, interrupt, stacks_of_threads
from shardfn._torch.groups import reduce_scatter_single, scattering_sum, summing, waited
from shardfn._torch.memory import address_of, base_of, chunk_cat, copy_each, foreach, fused, holds_data
from shardfn._torch.memory import set_storage, storage_key, storage_uses, tensor_over, wraps
from shardfn._torch.modules import Compiler, IncompatibleKeys, attributes_read, buffers_of, call_uncompiled
from shardfn._torch.modules import call_wrapped, children_of, compiler_of, compiler_of_wrapped, convolves_plainly
from shardfn._torch.modules import forward_hooks, function_of_custom, has_forward_hooks, init_of, left_by_dynamo
from shardfn._torch.modules import names_left_out, padding_widths, parameters_of, refresh_flat_weights, set_tables
from shardfn._torch.modules import unsplit_classes, wrapped_by
from shardfn._torch.simulation import AS_TENSORS, of_each_rank, on_each_rank, part_of_rank, simulated_ranks
from shardfn._torch.symbols import FOLDED_BY_VALUE, OF_MEMORY, PLAIN, Node, plainly, wrapper
from shardfn._torch.tensors import bytes_of, call_parameters, differentiates_from_local, dtensor_spec, dtypes_of
from shardfn._torch.tensors import fresh_leaves
from shardfn._torch.tensors import move_to_mesh, same_layouts, spec_of, unwrap_local, unwrap_locals, version_of
from shardfn._torch.tensors import version_of_saved, versions_of, with_local, with_locals, wrap_local
from shardfn._torch.transforms import JVP, MESSAGES, Level, checkpoint_nothing_in_transforms
from shardfn._torch.transforms import differentiated_in_transform, differentiated_in_vmap, from_outside, has_no_memory
from shardfn._torch.transforms import in_transform, innermost, innermost_transform, innermost_value, is_traced
from shardfn._torch.transforms import kinds_of_transforms, materialized, outside_transforms
from shardfn._torch.transforms import pull_back, refuse_of_dtensors, seen_by_dynamo, simulated, traces_first_order
from shardfn._torch.transforms import callback_of_dynamo, values_of, vmap_depth
