"""Many tensors at a time: DTensors, and lists with plain tensors among them."""

import torch
from torch import nn

import shardfn as sf
from shardfn._torch import dtypes_of, same_layouts, unwrap_locals, with_locals


def test_lists_may_have_plain_tensors_among_dtensors() -> None:
    params = sf.shard(nn.Linear(4, 2), sf.make_mesh("cpu", fsdp=1), sf.Policy())
    leaves = [*params.values()]
    new = [torch.ones_like(x) for x in unwrap_locals(leaves)]
    plain, other = torch.zeros(3), torch.ones(3)
    for mixed in ([*leaves, plain], [plain, *leaves]):
        parts = [other if x is plain else new.pop(0).clone() for x in mixed]
        made = with_locals(mixed, parts)
        new = [x for x in parts if x is not other]
        assert [type(x) for x in made] == [type(x) for x in mixed]
        assert all(x is y for x, y in zip(unwrap_locals(made), parts, strict=True))
        assert dtypes_of(mixed) == [torch.float32] * 3
    assert all(x is y for x, y in zip(unwrap_locals(with_locals(leaves, new)), new, strict=True))
    assert same_layouts(leaves, with_locals(leaves, new)) and not same_layouts(leaves, leaves[::-1])
    assert not same_layouts(leaves, new), "a DTensor is not laid out as a plain tensor"
