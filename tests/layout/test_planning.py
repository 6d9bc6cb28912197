"""Plans: what a policy means for a model, without a process group; every problem at once, each with its text."""

import copy
import functools
import pickle
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawing import untyped
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardfn as sf

RULES = {
    "layers.*.up.weight": "ff@tp c@fsdp",
    "layers.*.down.weight": "c@fsdp ff@tp",
    "layers.*.qkv.weight": "(q: heads@tp hd + k: kv@tp hd + v: kv@tp hd) c@fsdp",
    "emb.weight": "vocab@tp c@fsdp",
}
POLICY = sf.Policy(rules=RULES, sizes={"hd": 2, "heads": 8})
MESH = sf.MeshSpec(fsdp=2, tp=4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 32, bias=False)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)
        self.norm = nn.LayerNorm(6)


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.emb.weight


def plan(policy: sf.Policy = POLICY, mesh: sf.MeshSpec = MESH, model: Any = None) -> sf.Plan:
    return sf.plan(Model() if model is None else model, mesh, policy)


def rule_of(made: sf.Plan, name: str) -> str:
    return str(made.layouts[name].rule)


# Decisions


def test_rules_and_defaults() -> None:
    made = plan()
    assert made.layouts["layers.1.up.weight"].source == "rule 'layers.*.up.weight'"
    assert made.layouts["emb.weight"].aliases == ("head.weight",) and made.canonical["head.weight"] == "emb.weight"
    assert rule_of(made, "layers.0.up.bias") == "ff@tp@fsdp", "a bias follows its weight"
    assert (
        rule_of(made, "layers.0.down.bias") == "6@fsdp"
        and made.layouts["layers.0.down.bias"].source == "default 'auto'"
    )
    assert rule_of(made, "scale") == "" and made.layouts["scale"].axes == ()
    assert [leaf for leaf in made.leaves if leaf.startswith("layers.0.qkv")] == [
        f"layers.0.qkv.weight[{x}]" for x in "qkv"
    ]
    assert made.local_shape("layers.0.qkv.weight[k]") == (2, 3) and made.local_shape(
        "emb.weight", {"fsdp": 1, "tp": 0}
    ) == (2, 3)
    assert not dist.is_initialized()


def test_the_first_matching_rule_wins() -> None:
    made = plan(
        sf.Policy(rules={"layers.0.**": "..."})
        | sf.Policy(rules={"layers.*.up.weight": "a@fsdp b"}, default="replicate")
    )
    assert rule_of(made, "layers.0.up.weight") == "a@fsdp b", "what is merged later comes first"
    made = plan(sf.Policy(rules={"layers.0.**": "...", "layers.*.up.weight": "a@fsdp b"}))
    assert (rule_of(made, "layers.0.up.weight"), rule_of(made, "layers.1.up.weight")) == ("_ _", "a@fsdp b")
    assert rule_of(plan(sf.Policy(rules={"head.weight": "v@fsdp c"})), "emb.weight") == "v@fsdp c", "a tied name counts"


def test_a_dim_may_have_the_name_of_its_axis() -> None:
    assert rule_of(plan(sf.Policy(rules={"emb.weight": "tp@tp fsdp@fsdp"})), "emb.weight") == "tp@tp fsdp@fsdp"
    with pytest.raises(sf.ShardError, match=r"a dim is split by an @: write '_@tp'"):
        plan(sf.Policy(rules={"emb.weight": "tp fsdp@fsdp"}))


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        ((8, 3), "8@fsdp 3"),
        ((3, 8), "3 8@fsdp"),
        ((3, 12, 8), "3 12@fsdp 8"),
        ((3, 5), "3 5@fsdp"),
        ((5,), "5@fsdp"),
        ((), ""),
        ((0, 4), "0 4"),
    ],
)
def test_the_default_takes_dim_0_or_the_largest(shape: tuple[int, ...], rule: str) -> None:
    model = {"w": torch.ones(shape)}
    assert rule_of(plan(sf.Policy(), sf.MeshSpec(fsdp=4), model), "w") == rule
    assert "@" not in rule_of(plan(sf.Policy(default="replicate"), sf.MeshSpec(fsdp=4), model), "w")
    assert "@" not in rule_of(plan(sf.Policy(), sf.MeshSpec(replicate=4, tp=2), model), "w"), (
        "replicate never holds a part"
    )


def test_small_leaves_stay_whole() -> None:
    made = plan(sf.Policy(min_size=13), sf.MeshSpec(fsdp=2), {"a": torch.ones(12), "b": torch.ones(13)})
    assert (rule_of(made, "a"), rule_of(made, "b")) == ("12", "13@fsdp")


def test_logical_axes() -> None:
    policy = sf.Policy(rules={"w": "(heads d) c"}, axes={"heads": "tp", "c": ("cp", "fsdp")}, sizes={"d": 2})
    made = plan(policy, sf.MeshSpec(fsdp=2, cp=2, tp=2), {"w": torch.ones(8, 4)})
    assert rule_of(made, "w") == "(heads@tp d) c@cp@fsdp"


def test_optional_and_padded_factors() -> None:
    model = {"w": torch.ones(6, 10)}
    assert rule_of(plan(sf.Policy(rules={"w": "a@tp? b@tp2?"}), sf.MeshSpec(tp=4, tp2=5), model), "w") == "a b@tp2?"
    leaf = plan(sf.Policy(rules={"w": "vocab@tp b"}, pad={"vocab": 8}), sf.MeshSpec(tp=4), model).layouts["w"].leaves[0]
    assert (leaf.shape, leaf.extent) == ((8, 10), (6, 10))
    leaf = (
        plan(sf.Policy(rules={"w": "(h@tp d) b@fsdp"}, sizes={"d": 3}), sf.MeshSpec(tp=2, fsdp=4), model)
        .layouts["w"]
        .leaves[0]
    )
    assert (leaf.shape, leaf.splits) == ((6, 10), (("tp",), ("fsdp",))), "whole outer factors need no dims of their own"
    leaf = (
        plan(sf.Policy(rules={"w": "(d h@tp) b@fsdp"}, sizes={"d": 3}), sf.MeshSpec(tp=2, fsdp=4), model)
        .layouts["w"]
        .leaves[0]
    )
    assert (leaf.shape, leaf.splits, leaf.merges) == ((3, 2, 10), ((), ("tp",), ("fsdp",)), (2, 1))
    leaf = (
        plan(sf.Policy(rules={"w": "(h@fsdp d) b"}, sizes={"d": 2}), sf.MeshSpec(fsdp=2), model).layouts["w"].leaves[0]
    )
    assert leaf.shape == (3, 2, 10), "an uneven outer factor keeps whole heads by a dim of its own"


def test_units_and_buckets() -> None:
    made = plan()
    assert [unit.name for unit in made.units] == ["", "layers.0", "layers.1"]
    assert made.units[0].params == ("scale", "emb.weight"), "the tie is in the root unit"
    buckets = {bucket.axes: bucket.leaves for bucket in made.units[1].buckets}
    assert set(buckets) == {("fsdp",)} and len(buckets["fsdp",]) == 9
    assert made.bucket_of("scale").axes == () and made.bucket_of("layers.1.up.bias").unit == "layers.1"
    half = plan(
        POLICY | sf.Policy(compute_dtype=torch.bfloat16),
        model={"w": torch.ones(4), "i": torch.ones(4, dtype=torch.int8)} and None,
    )
    assert {bucket.dtype for unit in half.units for bucket in unit.buckets} == {torch.bfloat16}
    mixed = plan(
        sf.Policy(compute_dtype=torch.bfloat16), model={"w": torch.ones(4), "i": torch.ones(4, dtype=torch.int8)}
    )
    assert [bucket.dtype for bucket in mixed.units[0].buckets] == [torch.bfloat16, torch.int8], "integers are not cast"


def test_a_tie_between_units_belongs_to_the_root() -> None:
    model = Model()
    layers = [model.get_submodule(f"layers.{i}") for i in range(2)]
    layers[1].register_parameter("again", layers[0].get_parameter("up.bias"))
    layers[0].register_parameter("twice", layers[0].get_parameter("down.bias"))
    made = plan(sf.Policy(), model=model)
    assert made.layouts["layers.0.up.bias"].unit == "", "no one layer holds all of its names"
    assert {made.layouts[name].unit for name in ("layers.0.twice", "layers.0.up.weight")} == {"layers.0"}


def by_name(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and name.startswith("layers.1")


@pytest.mark.parametrize(
    ("units", "want"),
    [
        ("auto", ["layers.0", "layers.1"]),
        ((), []),
        ("layers.1", ["layers.1"]),
        (["layers.*.up", "layers.0"], ["layers.0", "layers.0.up", "layers.1.up"]),
        (nn.LayerNorm, ["layers.0.norm", "layers.1.norm"]),
        ({Layer}, ["layers.0", "layers.1"]),
        (by_name, ["layers.1.qkv", "layers.1.up", "layers.1.down"]),
    ],
)
def test_what_units_may_be(units: Any, want: list[str]) -> None:
    assert [unit.name for unit in plan(POLICY | sf.Policy(units=units)).units if unit.name] == want


def test_lists_inside_a_unit_make_no_units() -> None:
    model = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(2))
    assert [unit.name for unit in plan(sf.Policy(), sf.MeshSpec(fsdp=2), model).units] == ["0", "1"]


# Values


def test_plans_are_values() -> None:
    made = plan()
    for twin in (plan(), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert twin == made and hash(twin) == hash(made) and twin.digest == made.digest
    for other in (
        plan(POLICY | sf.Policy(regather=False)),
        plan(POLICY | sf.Policy(units=())),
        plan(POLICY | sf.Policy(acts={"head": "b s vocab@tp"})),
        plan(POLICY | sf.Policy(pad={"vocab": 16})),
        plan(mesh=sf.MeshSpec(fsdp=4, tp=2)),
        plan(model=Model(3)),
        plan(model=Model().double()),
    ):
        assert other != made and other.digest != made.digest
    assert made != "a plan"


class Forward:
    def __call__(self, *args: Any) -> None:
        """A parallel forward that is an object."""


def forward(*args: Any) -> None:
    """A parallel forward."""


def other_forward(*args: Any) -> None:
    """Another one."""


def test_functions_are_compared_by_name() -> None:
    def digest(fn: Any) -> str:
        return plan(POLICY | sf.Policy(compute={"head": fn})).digest

    both: tuple[Any, Any] = (Forward(), Forward())  # at two addresses, as on two ranks
    assert digest(both[0]) == digest(both[1]) != digest(forward)
    assert digest(functools.partial(both[0], 1)) == digest(functools.partial(both[1], 1))
    assert digest(functools.partial(forward)) != digest(functools.partial(other_forward))


def test_bytes_and_table() -> None:
    made = plan(
        sf.Policy(rules={"w": "a@tp b@fsdp"}), MESH, {"w": torch.ones(8, 6), "s": torch.ones(3, dtype=torch.float64)}
    )
    # w: 2 x 3 floats; s: 2 of 3 doubles on the first rank
    assert made.bytes_per_rank == 24 + 16
    # two buckets, each with one gather (root unit) and one reduction of 24 and 16 bytes over 2 ranks
    assert made.data_collectives == 4
    assert made.comm_bytes == 2 * 24 + 2 * 16
    lines = str(made).split("\n")
    assert lines[0].split() == ["parameter", "shape", "rule", "local", "bytes/rank", "unit"]
    assert (
        lines[1].split("  ")[0] == "w" and "a@tp b@fsdp" in lines[1] and "[2, 3]" in lines[1] and "(root)" in lines[1]
    )
    assert lines[-1].startswith(
        "mesh fsdp=2, tp=4; 40 bytes of shards per rank; 1 unit, the whole model at once; "
        "4 collectives over data axes and 80 bytes"
    )
    assert "(scalar)" in str(plan()) and "[4, 3] + [2, 3] + [2, 3]" in str(plan())
    assert plan(sf.Policy(), MESH, {}).bytes_per_rank == 0 and str(plan(sf.Policy(), MESH, {}))


def test_layers_that_are_alike_are_one_row() -> None:
    """Names in braces stand for every combination of their numbers, and for nothing else."""
    names = [f"layers.{i}.{x}" for i in range(12) for x in ("up", "experts.0.w", "experts.1.w")]
    tensors = {name: torch.ones(8, 8) for name in names} | {"layers.3.up": torch.ones(8, 16), "odd2.w": torch.ones(2)}
    tensors |= {
        "head.0.b": torch.ones(4),
        "head.1.b": torch.ones(4),
        "stack.0.1": torch.ones(3),
        "stack.1.0": torch.ones(3),
    }
    rows = str(plan(sf.Policy(), sf.MeshSpec(fsdp=2), tensors)).split("\n")[1:-1]
    assert [row.split("  ")[0] for row in rows] == [
        "layers.{0,1,2,4,5,6,7,8,9,10,11}.up",
        "layers.{0..11}.experts.{0,1}.w",
        "layers.3.up",
        "odd2.w",
        "head.{0,1}.b",
        "stack.0.1",
        "stack.1.0",
    ]
    assert "24 x 128" in rows[1] and "11 x 128" in rows[0]


def test_bytes_of_replicas_and_regather() -> None:
    mesh = sf.MeshSpec(replicate=4, fsdp=2)
    model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
    shard = 4 * 4 * 4 // 2
    reduction = shard + 2 * 3 * shard // 4
    assert plan(sf.Policy(), mesh, model).comm_bytes == 2 * (2 * shard + reduction)
    assert plan(sf.Policy(regather=False), mesh, model).comm_bytes == 2 * (shard + reduction)
    assert sf.Policy(regather=1).regather is False, "one rank keeps all"
    half = plan(sf.Policy(compute_dtype=torch.bfloat16), mesh, model)
    assert half.comm_bytes == 2 * (2 * shard + reduction) // 2 and half.bytes_per_rank == 2 * shard
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert plan(sf.Policy(), mesh, model).comm_bytes == 2 * 2 * shard, "frozen weights have no gradients"


def test_explain() -> None:
    made = plan()
    text = made.explain("layers.0.up.weight")
    assert text.split("\n") == [
        "layers.0.up.weight (12, 6) float32: ff@tp c@fsdp, by rule 'layers.*.up.weight'",
        "  local (3, 3), 36 bytes per rank",
        "  forward: all_gather over fsdp; backward: reduce_scatter over fsdp",
    ]
    assert "stored as layers.0.qkv.weight[q] (16, 6), local (4, 3)" in made.explain("layers.0.qkv.weight")
    assert "forward: nothing; backward: all_reduce over fsdp" in made.explain("scale")
    assert made.explain("head.weight").startswith("head.weight (8, 6) float32: vocab@tp c@fsdp")
    with pytest.raises(KeyError, match=r"no parameter 'layers.0.upp.weight'; did you mean 'layers.0.up.weight'"):
        made.explain("layers.0.upp.weight")


def test_assert_sharded() -> None:
    plan().assert_sharded(0.98)
    with pytest.raises(
        sf.ShardError,
        match=r"only 91.7% of the elements are sharded, 98.0% wanted; whole: scale|only .*% of the elements",
    ):
        plan(sf.Policy(default="replicate")).assert_sharded()
    plan(sf.Policy(), sf.MeshSpec(fsdp=1, tp=1)).assert_sharded()
    plan(sf.Policy(), sf.MeshSpec(replicate=4)).assert_sharded()
    with pytest.raises(sf.ShardError, match=r"only 80.0% of the elements are sharded, 98.0% wanted; whole: b"):
        plan(
            sf.Policy(rules={"b": "_"}), sf.MeshSpec(fsdp=2), {"a": torch.ones(8), "b": torch.ones(2)}
        ).assert_sharded()
    sizes = {"a": 8, "b": 4, "c": 2, "d": 16}
    rules = dict.fromkeys(sizes, "_")
    with pytest.raises(sf.ShardError, match=r"only 0.0% .*; whole: d, a, b$"):  # the three largest
        plan(sf.Policy(rules=rules), sf.MeshSpec(fsdp=2), {n: torch.ones(k) for n, k in sizes.items()}).assert_sharded()


def test_diff() -> None:
    made = plan()
    lines = made.diff(plan(POLICY | sf.Policy(rules={"emb.weight": "vocab c@fsdp"}))).split("\n")
    assert (
        lines[0] == "emb.weight: vocab@tp c@fsdp -> vocab c@fsdp"
        and lines[1].startswith("bytes per rank: ")
        and len(lines) == 3
    )
    assert "layers.2.up.weight: absent -> ff@tp c@fsdp" in made.diff(plan(model=Model(3)))
    a, b = (plan(sf.Policy(rules={"w": "o i"}), MESH, {"w": torch.ones(shape)}) for shape in ((2, 3), (3, 2)))
    assert a.diff(b).split("\n")[0] == (
        "w: o i (2, 3) float32, stored as (2, 3), trainable -> o i (3, 2) float32, stored as (3, 2), trainable"
    )


def test_units_inside_of_an_outermost_checkpoint_wrapper() -> None:
    model = checkpoint_wrapper(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))
    made = sf.plan(model, MESH, sf.Policy())
    assert [layout.unit for layout in made.layouts.values()] == [
        f"_checkpoint_wrapped_module.{i}" for i in (0, 0, 1, 1)
    ]


# Size


def test_a_thousand_parameters_and_4096_ranks() -> None:
    calls = [calls_of_a_plan(layers) for layers in (10, 65, 120)]
    assert calls[2] - calls[1] == pytest.approx(calls[1] - calls[0], rel=0.02), calls  # linear in the parameters
    assert calls[2] - calls[1] < 400_000, calls  # 291,000 on torch 2.13: 755 for a parameter


def calls_of_a_plan(layers: int) -> int:
    """How many functions are called, C's too, while a model of 7 parameters a layer is planned."""
    with torch.device("meta"):
        model = Model(layers)
    calls = 0

    def note(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        layouts = plan(mesh=sf.MeshSpec(fsdp=1024, tp=4), model=model).layouts
    finally:
        sys.setprofile(None)
    assert len(layouts) == 2 + 7 * layers
    return calls


# Bad input


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (sf.Policy(rules={"scale": "c"}), r"scale \(\): the rule has 1 dims, the tensor has 0\n    c\n    \^"),
        (
            sf.Policy(rules={"emb.weight": "v@@ c"}),
            r"emb.weight \(8, 6\): bad rule: expected a mesh axis after '@'\n    v@@ c\n      \^",
        ),
        (
            sf.Policy(rules={"emb.weight": "v@fsdq c"}),
            r"emb.weight: unknown mesh axis 'fsdq'; the mesh has fsdp=2, tp=4; did you mean 'fsdp'\?"
            r"\n    v@fsdq c\n    \^{6}",
        ),
        (
            sf.Policy(rules={"emb.weight": "v@fsdp@tp c"}),
            r"axes nest compute axes first, then data axes.*; write 'v@tp@fsdp'",
        ),
        (sf.Policy(rules={"emb.weight": "v c +tp"}), r"a parameter cannot be a pending sum \(\+tp\)"),
        (
            sf.Policy(rules={"layers.*.upp.weight": "a b"}),
            r"rule 'layers.\*.upp.weight' matches no parameter; did you mean 'layers.\d.up.weight'\? The model has",
        ),
        (
            sf.Policy(rules={"emb.weight": "v c@tp"}),
            r"'emb.weight' has shape \(8, 6\); rule 'v c@tp' splits dim 1 \(c=6\) over tp=4, 6 % 4 = 2."
            r"\n    v c@tp\n      \^{4}\n"
            r"    Write 'c@tp\?' to replicate it when it does not divide, or Policy\(pad=\{'c': 4\}\).",
        ),
        (
            sf.Policy(rules={"emb.weight": "v c@tp"}, local_sizes={"head": {"width": "c@tp?"}}),
            r"Write 'c@tp\?' to replicate it when it does not divide",
        ),
        (
            sf.Policy(rules={"emb.weight": "v 6@tp"}),
            r"6 % 4 = 2.\n.*\n.*\n    Write '6@tp\?' to replicate it when it does not divide\.",
        ),
        (
            sf.Policy(rules={"emb.weight": "v c", "layers.*.up.weight": "c f"}),
            r"layers.0.up.weight: dim 0 of size 12 does not match 6: c=6 \(from emb.weight\)",
        ),
        (
            sf.Policy(rules={"layers.*.up.weight": "(h d) c"}),
            r"layers.0.up.weight: cannot infer h, d from a dim of size 12; pass sizes=",
        ),
        (
            sf.Policy(rules={"layers.*.norm.weight": "6"}, sizes={"c": 1}, default="error"),
            r"emb.weight \(8, 6\): no rule matches it, and Policy\(default='error'\)",
        ),
        (sf.Policy(rules={"layers.0.norm.weight": "_@fsdp", "a{": "b"}), r"bad pattern 'a\{': '\{' without its pair"),
        (sf.Policy(units=["layer.*"]), r"Policy.units: 'layer.\*' matches no module; did you mean 'layers.\d'"),
        (sf.Policy(acts={"heads": "b c"}), r"Policy.acts: 'heads' matches no module; did you mean 'head'"),
        (sf.Policy(acts={"head": "b c@tpp"}), r"Policy.acts\['head'\]: unknown mesh axis 'tpp'; .*; did you mean 'tp'"),
        (sf.Policy(acts={"head": "b (c"}), r"Policy.acts\['head'\]: bad rule: expected '\)'"),
        (sf.Policy(compute={"heads": print}), r"Policy.compute: 'heads' matches no module"),
        (sf.Policy(regather=5), r"Policy\(regather=5\): .*must divide fsdp=\d, \d % 5 = \d"),
        (sf.Policy(rules={"emb.weight": "v@fsdp c@fsdp"}), r"mesh axis 'fsdp' is used 2 times"),
        (sf.Policy(rules={"emb.weight": "v@tp c"}, axes={"c": "tp"}), r"mesh axis 'tp' is used 2 times"),
    ],
)
def test_a_bad_policy(policy: sf.Policy, match: str) -> None:
    with pytest.raises(sf.ShardError, match=match):
        plan(policy)


def test_what_no_forward_can_use() -> None:
    policy = sf.Policy(rules={"0.weight": "c@tp"})
    model = nn.Sequential(nn.LayerNorm(4))
    match = r"0.weight: rule 'c@tp' splits it over tp, but LayerNorm '0' uses its 'weight' in a forward of its"
    with pytest.raises(sf.ShardError, match=match):
        plan(policy, MESH, model)
    plan(policy | sf.Policy(compute={"0": print}), MESH, model)
    plan(policy, sf.MeshSpec(tp=1), model)


def test_weights_never_shard_over_replicate() -> None:
    with pytest.raises(
        sf.ShardError,
        match=r"weights never shard over 'replicate', which only splits the batch; leave '@replicate' out",
    ):
        plan(sf.Policy(rules={"w": "a@replicate"}), sf.MeshSpec(replicate=2), {"w": torch.ones(4)})


def test_all_problems_at_once() -> None:
    rules = {
        "emb.weight": "v@nope c",
        "layers.0.up.weight": "f@tp c@fsdp@tp",
        "layers.1.up.weight": "f 7",
        "none": "a",
        "layers.0.down.weight": "d@tp f",
    }
    with pytest.raises(sf.ShardError) as caught:
        plan(sf.Policy(rules=rules, units=["nothing"], regather=3))
    text = str(caught.value)
    assert text.startswith("plan: 8 problems\n1. ")
    for part in (
        "'nope'",
        "used 2 times",
        "does not match 7",
        "'none' matches no",
        "6 % 4 = 2",
        "'nothing' matches no module",
        "regather=3",
    ):
        assert part in text, part


def test_what_is_no_argument() -> None:
    with pytest.raises(TypeError, match="plan: expected a Policy, got dict"):
        sf.plan(Model(), MESH, untyped({}))
    with pytest.raises(TypeError, match="expected a DeviceMesh or a MeshSpec, got int"):
        sf.plan(Model(), untyped(4), POLICY)
    with pytest.raises(TypeError, match=r"expected an nn\.Module or a mapping"):
        sf.plan(untyped([Model()]), MESH, POLICY)
    with pytest.raises(TypeError, match=r"Policy\(units=3\): 'auto', patterns, classes, or a callable"):
        plan(sf.Policy(units=3))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"sizes": {"hedas": 2}}, "Policy.sizes: no rule has a dim named 'hedas'; did you mean 'heads'"),
        ({"pad": {"vocb": 2}}, "Policy.pad: no rule has a dim named 'vocb'"),
        ({"axes": {"head": "tp"}}, "Policy.axes: no rule has a dim named 'head'"),
        ({"axes": {"heads": "tpp"}}, "Policy.axes.'heads'.: unknown mesh axis 'tpp'; did you mean 'tp'"),
        ({"batch": ("fdsp",)}, "has no axis 'fdsp'; did you mean 'fsdp'"),
    ],
)
def test_names_that_nothing_has(fields: dict[str, Any], match: str) -> None:
    policy = sf.Policy(rules={"weight": "(heads d) c", "bias": "vocab"}, sizes={"d": 2, "other": 3}) | sf.Policy(
        **fields
    )
    with pytest.raises(sf.ShardError, match=match):
        sf.plan(nn.Linear(4, 6), sf.MeshSpec(fsdp=2, tp=2), policy)


def test_a_tied_parameter_has_one_rule() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    rules = {"0.weight": "vocab@tp c", "1.weight": "vocab c"}
    with pytest.raises(sf.ShardError, match=r"one tensor under several names needs one rule, but '0\.weight' has"):
        sf.plan(model, sf.MeshSpec(tp=2), sf.Policy(rules=rules))


class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return self.down(self.up(x) if scale is None else self.up(x) * scale)


class _Batch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Named()

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.inner(**batch)


X = torch.empty(2, 4)


@pytest.mark.parametrize(
    ("model", "examples"),
    [
        (_Named, [X, (X,), {"x": X}, ((), {"x": X}), ((X,), {})]),
        (_Named, [(X, X[:, :1]), {"x": X, "scale": X[:, :1]}, ((X,), {"scale": X[:, :1]})]),
        (_Batch, [{"x": X}, ({"x": X},), {"batch": {"x": X}}, (({"x": X},), {})]),
    ],
)
def test_an_example_may_have_names(model: type[nn.Module], examples: list[Any]) -> None:
    """A dict goes by the names of the forward, where it has them."""
    rules = sf.Policy(rules={"**.up.weight": "ff@tp c", "**.down.weight": "c ff@tp"})
    plans = [sf.plan(model(), sf.MeshSpec(tp=2), rules, example=example) for example in examples]
    assert len({made.activation_bytes for made in plans}) == 1 and plans[0].activation_bytes > 0
