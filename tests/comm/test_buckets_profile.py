"""What torch's profiler shows of gathers and reductions."""

from collections import Counter

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.testing import on_meshes


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


@on_meshes({"fsdp": 4}, {"replicate": 2, "fsdp": 2})
def test_collectives_have_the_names_of_their_units(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = _Net()
    params = sf.shard(model, mesh, sf.Policy(compute_dtype=torch.bfloat16))

    def loss_fn(p: sf.Params, x: Tensor) -> Tensor:
        return sf.apply(model, p, x).float().square().mean()

    def names(act: object, *args: object) -> Counter[str]:
        assert callable(act)
        with torch.profiler.profile() as profile:
            act(*args)
        return Counter(event.name for event in profile.events() or () if "shardfn::" in event.name)

    axes = "fsdp" if "replicate" not in (mesh.mesh_dim_names or ()) else "fsdp and replicate"
    seen = names(sf.value_and_grad(loss_fn), params, torch.ones(2, 8))
    for unit, size in (("layers.0", 144), ("layers.1", 144), ("(root)", 18)):  # in bfloat16
        assert seen[f"shardfn::all_gather {unit} over fsdp, {size} bytes"] >= 2, seen
        assert seen[f"wait for shardfn::all_gather {unit} over fsdp, {size} bytes"] >= 1, seen
        assert seen[f"shardfn::reduce {unit} over {axes}, {size} bytes"] >= 1, seen
        assert seen[f"wait for shardfn::reduce {unit} over {axes}, {size} bytes"] >= 1, seen
    of_whole = names(sf.gather, params)
    assert of_whole["shardfn::all_gather 3 units over fsdp, 612 bytes"], of_whole  # at once, in float32
