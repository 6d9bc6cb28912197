"""Files in the safetensors format into shards and back: bits, bytes, memory, names, and what is wrong with files."""

import importlib
import json
import os
import random
import re
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from damage import changed, changes
from drawing import assert_same_bits, untyped
from families import FAMILIES, Family
from ranks import folder
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import conversion_mapping
from transformers.core_model_loading import Interleave, WeightConverter

import shardfn as sf
from shardfn._torch import unwrap_local
from shardfn.checkpoint import tensor_files
from shardfn.checkpoint.stored_names import Patchwork
from shardfn.comm import slice_messages
from shardfn.layout.layout import blocks
from shardfn.testing import on_meshes, run

EXAMPLES = Path(__file__).parents[2] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))  # as when torchrun starts one of them

lora = importlib.import_module("lora")
load, save = sf.checkpoint.load_safetensors, sf.checkpoint.save_safetensors


def read_all(path: Path) -> dict[str, Tensor]:
    """Every tensor of every file in a directory."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same_tensors(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    assert sorted(got) == sorted(want)
    for name, tensor in want.items():
        assert_same_bits(got[name], tensor, name)


def on_meta(family: Family, dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        config = getattr(transformers, family.config)(**family.fields)
        return getattr(transformers, family.model)(config).to(dtype)


def drop_from(file: Path, names: Sequence[str]) -> None:
    """Write a file again, without some of its tensors."""
    save_file({name: x for name, x in load_file(file).items() if name not in names}, file, {"format": "pt"})


def on_first_rank(fn: Any, *args: Any, **kwargs: Any) -> None:
    if dist.get_rank() == 0:
        fn(*args, **kwargs)
    dist.barrier()


def assert_all_raise(fn: Callable[[], object], text: str) -> list[str]:
    """Every rank raises an error that says `text`; what they say."""
    try:
        fn()
        mine = "nothing was raised"
    except (ValueError, OSError) as error:
        mine = str(error)
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, mine)
    assert all(re.search(text, message) for message in said), said
    return said


# ---------------------------------------------------------------------------------------------------------------------
# Models of transformers

TIED = {"tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "Llama": ("Llama", {}, torch.float32),
    "Llama, tied, bfloat16": ("Llama", TIED, torch.bfloat16),
    "Qwen2, bfloat16": ("Qwen2", {}, torch.bfloat16),
    "GPT-2": ("GPT-2", {}, torch.float32),
    "GPT-2, a vocabulary that does not divide": ("GPT-2", {"vocab_size": 101}, torch.float32),
    "Phi3, weights in unequal parts": ("Phi3", {}, torch.bfloat16),
    "Mixtral, bfloat16": ("Mixtral", {}, torch.bfloat16),
    "DeepSeek-V3, a buffer in the files": ("DeepSeek-V3", {}, torch.float32),
    "GPT-NeoX, other names in the files": ("GPT-NeoX", {}, torch.float32),
    "T5, three names of one weight": ("T5", {}, torch.float32),
}


@pytest.mark.everyday(1)
@pytest.mark.one_mesh
@pytest.mark.parametrize("name", MODELS)
@on_meshes()
def test_files_of_transformers_go_there_and_back(mesh: DeviceMesh, name: str) -> None:
    family, fields, dtype = MODELS[name]
    family = replace(FAMILIES[family], fields=FAMILIES[family].fields | fields)
    model = family.make().to(dtype)
    blank: Any = on_meta(family, dtype)
    with folder() as path:
        on_first_rank(model.save_pretrained, path / "theirs", max_shard_size="30KB")
        params = load(path / "theirs", blank, mesh, sf.policies.from_transformers(blank))
        assert all(x.is_meta for x in blank.parameters()), "the model is not touched"
        want = dict(model.named_parameters(remove_duplicate=False))
        assert_same_tensors(sf.gather(params), {n: x.detach() for n, x in want.items()})
        assert_same_tensors(params.buffers, dict(model.named_buffers(remove_duplicate=False)))
        assert save(path / "ours", blank, params, max_shard_size="30KB") == path / "ours"
        assert_same_tensors(read_all(path / "ours"), read_all(path / "theirs"))
        assert len(list((path / "ours").glob("*.safetensors"))) > 1, "there is an index"
        if "Mixtral" not in name and "DeepSeek" not in name:  # transformers splits experts by what shares memory
            for file in (path / "theirs").glob("model*"):
                assert file.read_bytes() == (path / "ours" / file.name).read_bytes(), file.name
        on_first_rank(blank.config.save_pretrained, path / "ours")
        again, report = type(blank).from_pretrained(path / "ours", output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert_same_tensors(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("name", ["Mixtral", "DeepSeek-V3"])
@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4})
def test_files_go_into_a_trainer(mesh: DeviceMesh, name: str) -> None:
    family = FAMILIES[name]
    model, blank = family.make().float(), on_meta(family, torch.float32)
    ids = torch.randint(4, 60, (4, 8), generator=torch.Generator().manual_seed(1))
    (local,) = sf.data.local_batch((ids,), mesh)

    def trainer_of(own: nn.Module, **more: Any) -> sf.Trainer:
        policy = sf.policies.from_transformers(own)
        optimizer = sf.optim.adamw(1e-3)

        def loss_fn(p: sf.Params, ids: Tensor) -> Tensor:
            return sf.apply(own, p, input_ids=ids, labels=ids).loss

        return sf.Trainer(own, mesh, policy, optimizer=optimizer, loss_fn=loss_fn, **more)

    with folder() as path:
        on_first_rank(model.save_pretrained, path)
        params = load(path, blank, mesh, sf.policies.from_transformers(blank))
    kept = sf.tree.map_local(torch.clone, params)
    mine, theirs = trainer_of(blank, params=params), trainer_of(model)
    for _ in range(2):
        assert torch.equal(mine.step(local)["loss"], theirs.step(local)["loss"])
    assert_same_tensors(sf.gather(mine.params), sf.gather(theirs.params))
    with folder() as path:  # by the model that the trainer has taken over, whose parameters are stored leaves
        sf.checkpoint.save_safetensors(path, blank, mine.params)
        again = load(
            path, on_meta(family, torch.float32), mesh, sf.policies.from_transformers(on_meta(family, torch.float32))
        )
        assert_same_tensors(sf.gather(again), sf.gather(mine.params))
    theirs.load_state_dict(kept)  # leaves of weights of experts have a dim for each factor of their rules
    assert_same_tensors(sf.gather(theirs.params), sf.gather(kept))


@on_meshes({"fsdp": 2, "tp": 2})
def test_files_may_be_of_the_base_model_or_in_the_models_own_names(mesh: DeviceMesh) -> None:
    for family in (FAMILIES["GPT-2"], FAMILIES["Mixtral"]):
        model, blank = family.make().float(), on_meta(family, torch.float32)
        want = {n: x.detach() for n, x in model.named_parameters(remove_duplicate=False)}
        with folder() as path:
            base: Any = getattr(model, "transformer", model)
            on_first_rank(base.save_pretrained, path, save_original_format=False)
            params = load(path, blank, mesh, sf.policies.from_transformers(blank))
            assert_same_tensors(sf.gather(params), want)


@on_meshes({"fsdp": 2, "tp": 1})
def test_init_is_asked_for_what_the_files_do_not_have(mesh: DeviceMesh) -> None:
    family = FAMILIES["GPT-2"]
    model, blank = family.make().float(), on_meta(family, torch.float32)
    init_weights: Any = blank._init_weights
    asked: list[str] = []

    def note(module: nn.Module) -> None:
        asked.append(type(module).__name__)
        init_weights(module)

    whole = MethodType(lambda _, module: note(module), blank)  # a method of the model: asked about every module
    for lost, init, want in (
        ((), whole, []),
        (("transformer.ln_f.weight",), whole, ["LayerNorm", "GPT2Model", "GPT2LMHeadModel"]),
        (("transformer.ln_f.weight",), note, ["LayerNorm"]),
    ):
        with folder() as path:
            on_first_rank(model.save_pretrained, path)
            on_first_rank(drop_from, path / "model.safetensors", lost)
            asked.clear()
            with pytest.warns(UserWarning, match="init_weights") if init is note else nullcontext():
                params = load(path, blank, mesh, sf.policies.from_transformers(blank), init=init, strict=False)
            assert sorted(asked) == sorted(want)
            assert_same_tensors(
                sf.gather(params), {n: x.detach() for n, x in model.named_parameters(remove_duplicate=False)}
            )
    with folder() as path:  # GPT-2 scales this one from the module above it, of which init has a copy
        on_first_rank(model.save_pretrained, path)
        on_first_rank(drop_from, path / "model.safetensors", ("transformer.h.0.attn.c_proj.weight",))
        assert_all_raise(
            lambda: load(path, blank, mesh, sf.policies.from_transformers(blank), init=whole, strict=False),
            "filled 'transformer.h.0.attn.c_proj.weight', which is another module's",
        )


@on_meshes({"fsdp": 1, "tp": 2})
def test_a_conversion_that_moves_elements_is_refused(mesh: DeviceMesh) -> None:
    family = FAMILIES["Llama"]
    model, blank = family.make().float(), on_meta(family, torch.float32)
    converter = WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", [Interleave(dim=0)])
    with folder() as path, pytest.MonkeyPatch.context() as patch:
        on_first_rank(model.save_pretrained, path)
        patch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *_, **__: [converter])
        with pytest.raises(sf.ShardError, match=r"up_proj.weight' from .* by \[Interleave.*from_pretrained"):
            load(path, blank, mesh, sf.Policy())


# ---------------------------------------------------------------------------------------------------------------------
# Layouts

WEIGHTS: dict[str, tuple[str | None, Tensor]] = {
    "qkv": ("(3 heads@tp d) c@fsdp", torch.randn(24, 8)),
    "grouped": ("(q: heads@tp d + k: kv@tp d + v: kv@tp d) c@fsdp", torch.randn(16, 8)),
    "across": ("c@fsdp (q: heads@tp d + k: kv@tp d + v: kv@tp d)", torch.randn(8, 16)),
    "inner": ("(heads d@tp) c@fsdp", torch.randn(8, 8)),
    "three": ("e (2 ff@tp) c@fsdp", torch.randn(3, 12, 8)),
    "twice": ("ff@tp@fsdp c", torch.randn(6, 8).to(torch.bfloat16)),
    "padded": ("vocab@tp c@fsdp", torch.randn(13, 8)),
    "uneven": ("n17@fsdp c", torch.randn(17, 8)),
    "columns": ("n17 n5@fsdp", torch.randn(17, 5)),
    "number": (None, torch.tensor(2.5)),
    "none": (None, torch.randn(0, 8)),
    "bits": (None, torch.tensor([True, False, True])),
    "long": (None, torch.arange(5)),
    "nan": (None, torch.tensor([float("nan"), -0.0, float("inf"), 1.0])),
}
LAYOUTS = sf.Policy(
    rules={name: rule for name, (rule, _) in WEIGHTS.items() if rule},
    sizes={"heads": 4, "kv": 2, "d": 2},
    pad={"vocab": 16},
)


def weights_of() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {
        name: torch.randn(x.shape).to(x.dtype) if x.is_floating_point() and name != "nan" else x
        for name, (_, x) in WEIGHTS.items()
    }


@on_meshes({"fsdp": 2, "tp": 2}, {"tp": 2, "fsdp": 2}, {"fsdp": 4, "tp": 1}, {"fsdp": 3, "tp": 1}, {"fsdp": 1, "tp": 1})
def test_every_layout_is_read_as_shard_cuts_it(mesh: DeviceMesh) -> None:
    full = weights_of()
    blank = {name: x.to("meta") for name, x in full.items()}
    for limit in (7, tensor_files.BLOCK_BYTES):
        with folder() as path, pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensor_files, "BLOCK_BYTES", max(limit, 8))
            patch.setattr(slice_messages, "PARCEL", max(limit, 8))
            patch.setattr(tensor_files, "_PAGE", limit)
            on_first_rank(save_file, full, path / "model.safetensors", {"format": "pt"})
            params, want = load(path, blank, mesh, LAYOUTS), sf.shard(full, mesh, LAYOUTS)
            assert list(params) == list(want)
            for name, leaf in want.items():
                assert params[name].placements == leaf.placements
                assert_same_bits(unwrap_local(params[name]), unwrap_local(leaf), name)
            save(path / "ours", full, params)
            assert (path / "ours" / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "tp": 2})
def test_each_rank_reads_its_part_only(mesh: DeviceMesh) -> None:
    model, rules = nn.Linear(4096, 64), sf.Policy(rules={"weight": "o@tp c@fsdp"})
    asked = []
    pread = os.preadv
    with folder() as path, pytest.MonkeyPatch.context() as patch:
        on_first_rank(save_file, dict(model.named_parameters()), path / "model.safetensors")
        patch.setattr(os, "preadv", lambda fd, data, at: asked.append(len(data[0])) or pread(fd, data, at))
        params = load(path, model, mesh, rules)
    assert sum(asked) == sum(unwrap_local(leaf).nbytes for leaf in params.values())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells how much memory was resident")
@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 4, "tp": 1})
def test_no_rank_has_more_than_its_shards_and_one_parameter(mesh: DeviceMesh) -> None:
    def resident(field: str) -> int:
        return int(re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024

    def reset_peak() -> int:
        Path("/proc/self/clear_refs").write_text("5")
        return resident("VmRSS")

    with torch.device("meta"):
        blank = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)), nn.Linear(2048, 8192, bias=False))
    policy = sf.Policy(rules={"*.weight": "_@tp _@fsdp"})
    with folder() as path:
        save(path, blank, sf.shard(blank, mesh, policy, init=reset))
        before = reset_peak()
        params = load(path, blank, mesh, policy)
        load_peak = resident("VmHWM") - before
        reset_peak()
        save(path / "again", blank, params)
        save_peak = resident("VmHWM") - before
    resting, largest = sum(unwrap_local(leaf).nbytes for leaf in params.values()), 2048 * 8192 * 4
    assert load_peak < 1.1 * resting + 2 * tensor_files.BLOCK_BYTES, (load_peak, resting)
    assert save_peak < 1.1 * (resting + largest), (save_peak, resting, largest)


@pytest.mark.everyday(1)
def test_one_process_may_be_all_ranks(tmp_path: Path) -> None:
    full = {name: x for name, x in weights_of().items() if name != "none"}
    policy = sf.Policy(
        rules={n: r for n, r in LAYOUTS.rules.items() if n in full}, sizes=LAYOUTS.sizes, pad=LAYOUTS.pad
    )
    save_file(full, tmp_path / "model.safetensors", {"format": "pt"})
    with sf.simulate(fsdp=2, tp=2) as mesh:
        params = load(tmp_path, {name: x.to("meta") for name, x in full.items()}, mesh, policy)
        save(tmp_path / "ours", full, params)
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


# ---------------------------------------------------------------------------------------------------------------------
# Models of one's own: names, buffers, dtypes, what is not in the files


class Net(nn.Module):
    """A tie, a buffer that files have and one that they have not."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 16, bias=bias)
        self.head.weight = self.emb.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def reset_parameters(self) -> None:
        self.table = torch.arange(4, dtype=self.table.dtype, device=self.table.device)


def reset(module: Any) -> None:
    module.reset_parameters()


def blank_net(**options: Any) -> Net:
    with torch.device("meta"):
        return Net(**options)


def saved_net(path: Path, **more: Tensor) -> Net:
    """The same net on every rank, in a file."""
    model = Net()
    with torch.no_grad():
        model.norm.register_buffer("running_mean", torch.arange(8.0))
    state = {name: x.clone() for name, x in model.state_dict().items() if name != "head.weight"}
    on_first_rank(save_file, state | more, path / "model.safetensors", {"format": "pt"})
    return model


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "tp": 1})
def test_buffers_and_ties(mesh: DeviceMesh) -> None:
    with folder() as path:
        model = saved_net(path)
        params = load(path, blank_net(), mesh, sf.Policy(), init=reset)
        assert_same_tensors(
            sf.gather(params), {n: x.detach() for n, x in model.named_parameters(remove_duplicate=False)}
        )
        assert_same_tensors(params.buffers, dict(model.named_buffers()))
        save(path / "ours", blank_net(), params)
        assert (path / "ours/model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()
        params = load(path, Net(), mesh, sf.Policy())  # what no file has is the model's own
        assert_same_tensors(params.buffers, dict(model.named_buffers()))
    with folder() as path:
        model = saved_net(path, **{"head.weight": torch.zeros(16, 8)})
        assert_all_raise(
            lambda: load(path, blank_net(), mesh, sf.Policy(), init=reset),
            "ties 'emb.weight', and the files have different values of it: 'emb.weight' and 'head.weight'",
        )


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "tp": 1})
def test_names_are_the_same_in_both_directions(mesh: DeviceMesh) -> None:
    def called(name: str) -> str:
        return f"net.{name}".replace(".emb.", ".tok.")

    with folder() as path:
        model = Net()
        params = sf.shard(model, mesh, sf.Policy())
        save(path, model, params, names=called)
        assert {"net.tok.weight", "net.norm.running_var", "net.head.bias"} < set(read_all(path))
        again = load(path, blank_net(), mesh, sf.Policy(), names=called, init=reset)
        assert_same_tensors(sf.gather(again), sf.gather(params))
        save(path, model, params, names={"head.bias": "b"}, max_shard_size=600)
        assert not (path / "model.safetensors").exists(), "what an older save left is gone"
        assert {"emb.weight", "b"} < set(read_all(path))
        load(path, blank_net(), mesh, sf.Policy(), names={"head.bias": "b"}, init=reset)
        assert_all_raise(lambda: save(path, model, params, names=lambda name: "x"), "names gives 'x' to two tensors")
        save(path, model, params)
        assert [file.name for file in path.iterdir()] == ["model.safetensors"], (
            "no parts and no index of the older save"
        )


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "tp": 1})
def test_dtypes_are_the_models(mesh: DeviceMesh) -> None:
    with folder() as path:
        model = saved_net(path)
        params = load(path, blank_net().to(torch.bfloat16), mesh, sf.Policy(), init=reset)
        assert_same_bits(sf.gather(params)["emb.weight"], model.emb.weight.detach().to(torch.bfloat16), "emb.weight")
        params = load(path, blank_net(), mesh, sf.Policy(), init=reset)
        save(path / "half", blank_net(), params, dtype=torch.float16)
        half = read_all(path / "half")
        assert_same_bits(half["emb.weight"], model.emb.weight.detach().half(), "emb.weight")
        assert half["norm.num_batches_tracked"].dtype == torch.int64
        on_first_rank(save_file, {"x": torch.ones(4, 4).to(torch.float8_e4m3fn)}, path / "model.safetensors")
        assert_all_raise(
            lambda: load(path, {"x": torch.empty(4, 4, device="meta")}, mesh, sf.Policy()),
            "'x' is torch.float8_e4m3fn in the files, torch.float32 in the model",
        )
        same = load(path, {"x": torch.empty(4, 4, dtype=torch.float8_e4m3fn, device="meta")}, mesh, sf.Policy())
        save(path / "eight", {"x": torch.empty(4, 4)}, same)
        assert read_all(path / "eight")["x"].dtype == torch.float8_e4m3fn


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "tp": 1})
def test_everything_that_does_not_fit_is_named_at_once(mesh: DeviceMesh) -> None:
    with folder() as path:
        model = saved_net(path, extra=torch.zeros(1), **{"head.bias": torch.zeros(3)})
        torch.manual_seed(5)
        wide = nn.Module()
        wide.net, wide.more = blank_net(), nn.Linear(2, 2)
        messages = assert_all_raise(
            lambda: load(path, blank_net(), mesh, sf.Policy(), init=reset), "does not fit the model"
        )
        for part in (
            "'extra' is in the files and not in the model",
            "'head.bias' is (3,) in the files, (16,) in the model",
        ):
            assert all(part in message for message in messages)
        params = load(path, blank_net(bias=False), mesh, sf.Policy(), strict=False, init=reset)
        assert_same_bits(sf.gather(params)["emb.weight"], model.emb.weight.detach(), "emb.weight")
        only = {"extra": torch.zeros(1, device="meta"), "other": torch.ones(3)}
        assert_all_raise(lambda: load(path, only, mesh, sf.Policy()), "'other' is not in the files")
        assert sf.gather(load(path, only, mesh, sf.Policy(), strict=False))["other"].tolist() == [1, 1, 1]
        only["other"] = only["other"].to("meta")
        assert_all_raise(
            lambda: load(path, only, mesh, sf.Policy(), strict=False),
            "'other' is not in the files and on the meta device",
        )


# ---------------------------------------------------------------------------------------------------------------------
# Files that are damaged, missing, or there for some ranks only; and files that cannot be written


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "tp": 1})
def test_damaged_files_are_errors_on_every_rank(mesh: DeviceMesh) -> None:
    me = dist.get_rank()
    with folder() as path:
        saved_net(path)
        (path / f"{me}").mkdir()
        own = path / f"{me}" / "model.safetensors"
        whole = (path / "model.safetensors").read_bytes()

        def attempt(text: str, data: bytes | None, rank: int | None = None) -> None:
            own.unlink(missing_ok=True)
            if rank not in (None, me):
                own.write_bytes(whole)
            elif data is not None:
                own.write_bytes(data)
            assert_all_raise(lambda: load(own.parent, blank_net(), mesh, sf.Policy(), init=reset), text)

        load(path, blank_net(), mesh, sf.Policy(), init=reset)
        attempt("cannot be read", whole[:-1])
        attempt("cannot be read", whole[:-1], rank=1)
        attempt("cannot be read", b"x" * 100)
        attempt("cannot be read", b"", rank=0)
        attempt("no model.safetensors and no model.safetensors.index.json", None)
        attempt("no model.safetensors and no model.safetensors.index.json", None, rank=1)
        assert_all_raise(lambda: load(path / "none", blank_net(), mesh, sf.Policy()), "no file or directory")
        assert_all_raise(lambda: load([path / "none"], blank_net(), mesh, sf.Policy()), "there is no file")
        save_file({"a": torch.zeros(2 + me)}, own)
        assert_all_raise(lambda: load(own, {"a": torch.zeros(2)}, mesh, sf.Policy(), strict=False), "a' is \\(3,\\)")
        own.write_bytes(whole)
        params = load(own, blank_net(), mesh, sf.Policy(), init=reset)  # each rank has a disk of its own
        assert "emb.weight" in params


@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4})
def test_a_part_of_a_tree_goes_into_a_file_of_its_own_and_back(mesh: DeviceMesh) -> None:
    model = lora.make_model(4)
    policy = lora.policy_for(model)
    params = sf.shard(model, mesh, policy)
    trained = sf.tree.map_local(lambda x: torch.randn_like(x), params.select(lora.ADAPTERS))
    full = sf.gather(trained)
    with torch.device("meta"):
        blank = lora.make_model(4)
    with folder() as path:
        file = path / "adapters.safetensors"
        save(path, model, params, max_shard_size="100KB")
        before = {each.name: each.read_bytes() for each in path.iterdir()}
        assert save(file, blank, trained) == file
        assert_same_tensors(load_file(file), full)
        part = load(file, blank, mesh, policy, only=lora.ADAPTERS)
        assert list(part) == list(trained) and not part.buffers
        for name, leaf in trained.items():
            assert_same_bits(unwrap_local(part[name]), unwrap_local(leaf), name)
        both = params | part
        assert_same_tensors(sf.gather(both), sf.gather(params) | full)
        assert list(both) == list(params) and both.buffers.keys() == params.buffers.keys()
        save(path / "both.safetensors", model, both)
        again = load(
            path / "both.safetensors", blank, mesh, policy, only=lora.ADAPTERS
        )  # what else is there is not read
        assert_same_tensors(sf.gather(again), full)
        assert len(before) > 3 and all((path / name).read_bytes() == data for name, data in before.items())

        def peft(name: str) -> str:
            return "base_model.model." + name.replace(".A.", ".lora_A.").replace(".B.", ".lora_B.")

        save(path / "adapter_model.safetensors", model, trained, names=peft)
        names = load_file(path / "adapter_model.safetensors")
        assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names and len(names) == len(full)
        again = load(path / "adapter_model.safetensors", blank, mesh, policy, names=peft, only=lora.ADAPTERS)
        assert_same_tensors(sf.gather(again), full)


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4})
def test_a_part_of_a_mixture_has_the_names_of_its_files(mesh: DeviceMesh) -> None:
    family = FAMILIES["Mixtral"]
    model = family.make().float()
    blank, policy = on_meta(family, torch.float32), sf.policies.from_transformers(model)
    params = sf.shard(model, mesh, policy)
    part = params.like((n, x) for n, x in params.items() if ".experts.gate_up_proj" in n or n.endswith("q_proj.weight"))
    with folder() as path:
        save(path / "part.safetensors", model, part)
        on_first_rank(model.save_pretrained, path)
        want = load_file(path / "model.safetensors")
        found = load_file(path / "part.safetensors")
        assert {name.rpartition(".")[0].rpartition(".")[2] for name in found} == {"w1", "w3", "q_proj"}
        assert_same_tensors(found, {name: want[name] for name in found})
        patterns = ["**.experts.gate_up_proj", "**.q_proj.weight"]
        for file in (path / "part.safetensors", path):
            again = load(file, blank, mesh, policy, only=patterns)
            assert_same_tensors(sf.gather(again), sf.gather(part))
            assert_same_tensors(sf.gather(params | again), sf.gather(params))


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "tp": 1})
def test_what_is_wrong_with_parts(mesh: DeviceMesh) -> None:
    model = Net()
    params = sf.shard(model, mesh, sf.Policy())
    with folder() as path:
        file = path / "part.safetensors"
        save(file, model, params.select("head.bias"))
        assert_all_raise(
            lambda: save(path, model, params.select("head.bias")), "'emb.weight' is not in the tree.*a file"
        )
        assert_all_raise(
            lambda: load(file, model, mesh, sf.Policy(), only="**.bias"), "'norm.bias' is not in the files"
        )
        assert list(load(file, model, mesh, sf.Policy(), only="**.bias", strict=False)) == ["head.bias"]
        assert_all_raise(
            lambda: load(file, model, mesh, sf.Policy(), only=["head.bais"]),
            "only='head.bais' matches no parameter of the model; did you mean 'head.bias'",
        )
        mine = "head.bias" if dist.get_rank() else "head.*"
        assert_all_raise(lambda: load(file, model, mesh, sf.Policy(), only=mine, strict=False), "has only=.*has only=")
        assert_all_raise(
            lambda: load(file, nn.Linear(2, 2), mesh, sf.Policy(), only="bias"), "'head.bias' is in the fil"
        )
        save(path / "all.safetensors", model, params)
        tied = load(path / "all.safetensors", model, mesh, sf.Policy(), only="head.weight")
        assert list(tied) == ["emb.weight"]  # in trees a tied parameter has its first name
        fused = sf.shard(weights_of(), mesh, LAYOUTS)
        some = fused.like((name, leaf) for name, leaf in fused.items() if name != "grouped[k]")
        assert_all_raise(
            lambda: save(file, weights_of(), some), r"'grouped\[k\]' is not in the tree, which has the rest"
        )
        assert list(load_file(file)) == ["head.bias"]


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "tp": 1})
def test_an_index_and_its_files_belong_together(mesh: DeviceMesh) -> None:
    with folder() as path:
        net = Net()
        save(path, net, sf.shard(net, mesh, sf.Policy()), max_shard_size=600)
        index = path / "model.safetensors.index.json"
        about, files = json.loads(index.read_text()), sorted(path.glob("*.safetensors"))
        assert about["metadata"] == {"total_parameters": 160, "total_size": 16 * 8 * 4 + 16 * 4 + 4 * 8 * 4 + 8}
        for given in (path, index, files):
            load(given, blank_net(), mesh, sf.Policy(), init=reset)

        def attempt(text: str) -> None:
            dist.barrier()
            assert_all_raise(lambda: load(path, blank_net(), mesh, sf.Policy(), init=reset), text)
            dist.barrier()

        on_first_rank(shutil.copy, files[0], path / "copy.safetensors")
        assert_all_raise(
            lambda: load([*files, path / "copy.safetensors"], blank_net(), mesh, sf.Policy()), "is in '.*' and"
        )
        on_first_rank(files[-1].rename, path / "away")
        attempt(f"names '{files[-1].name}', which is not there")
        on_first_rank(shutil.copy, files[0], files[-1])
        attempt("is in '.*' and in '")
        on_first_rank(index.write_text, "{}")
        attempt("is not an index of safetensors files")
        for elsewhere in ("../model.safetensors", "/model.safetensors"):
            on_first_rank(index.write_text, json.dumps({"weight_map": {"x": elsewhere}}))
            attempt("which is in another directory")


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "tp": 1})
def test_what_the_first_rank_cannot_write_is_an_error_everywhere(mesh: DeviceMesh) -> None:
    with folder() as path:
        model = nn.Linear(64, 4096)
        params = sf.shard(model, mesh, sf.Policy())
        on_first_rank((path / ".writing-model-00007-of-00008.safetensors").touch)  # by a save that was killed
        save(path, model, params)
        before = (path / "model.safetensors").read_bytes()
        doubled = sf.tree.map(lambda x: 2 * x, params)
        pending = sf.grad(lambda p: sf.apply(model, p, torch.ones(2, 64)).sum(), reduce=None)(params)
        assert_all_raise(lambda: save(path, model, pending), "is a sum that is still pending")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
        try:
            assert_all_raise(lambda: save(path, model, doubled), "File too large")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert sorted(x.name for x in path.iterdir()) == ["model.safetensors"], "nothing is left over"
        assert (path / "model.safetensors").read_bytes() == before, "the older save is whole"
        assert_all_raise(lambda: save(path / "model.safetensors" / "below", model, params), "model.safetensors")
        on_first_rank((path / "folder.safetensors").mkdir)
        assert_all_raise(lambda: save(path / "folder.safetensors", model, params), "folder.safetensors")
        assert sorted(x.name for x in path.iterdir()) == ["folder.safetensors", "model.safetensors"]
        assert_all_raise(lambda: save(path, model, params.select("weight")), "'bias' is not in the tree")
        assert_all_raise(lambda: save(path, nn.Linear(64, 8, bias=False), params), "'bias' is not in the model")
        mine = path / str(dist.get_rank())
        assert_all_raise(lambda: save(mine, model, params), "has path '.*'; rank 1 has path")
        complex_ = sf.shard({"z": torch.ones(4, dtype=torch.complex128)}, mesh, sf.Policy())
        assert_all_raise(
            lambda: save(path, {"z": torch.ones(4)}, complex_), "complex128, which the format does not have"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Parts of tensors


@pytest.mark.everyday(1)
def test_patchworks_follow_what_moves_parts() -> None:
    ids = {
        f"e{i}.{w}": torch.arange(12).view(3, 4) + 100 * i + 1000 * (w == "up")
        for i in range(2)
        for w in ("gate", "up")
    }
    made = {name: Patchwork.of(name, x.shape) for name, x in ids.items()}

    def program(x: Mapping[str, Any]) -> list[Any]:
        fused = torch.cat([torch.stack([x[f"e{i}.{w}"] for i in range(2)], dim=0) for w in ("gate", "up")], dim=1)
        turned = torch.transpose(fused, 1, 2)
        parts = torch.split(fused, [1, 4, 1], dim=1)
        return [
            fused,
            turned,
            *parts,
            *(c.squeeze(0) for c in torch.chunk(fused, 2, dim=0)),
            *torch.chunk(turned, 2, -1),
        ]

    for patchwork, want in zip(program(made), program(ids), strict=True):
        assert patchwork.shape == tuple(want.shape)
        got = torch.full(want.shape, -1)
        back = {name: torch.full(x.shape, -1) for name, x in ids.items()}
        for piece in patchwork.pieces:
            place = got[tuple(slice(a, a + n) for a, n in piece.here)]
            there = tuple(slice(a, a + n) for a, n in piece.there)
            piece.as_in_source(place).copy_(ids[piece.source][there])
            assert piece.inverse("whole").inverse(piece.source) == piece
            inverse = piece.inverse("whole")
            box = tuple(slice(a, a + n) for a, n in inverse.here)
            whole = want[tuple(slice(a, a + n) for a, n in inverse.there)]
            inverse.as_in_source(back[piece.source][box]).copy_(whole)
        assert torch.equal(got, want)
        assert all(bool(((x == ids[name]) | (x == -1)).all()) for name, x in back.items())
    with pytest.raises(TypeError, match="not followed through flip"):
        torch.flip(untyped(made["e0.up"]), [0])


@pytest.mark.everyday(99)
@pytest.mark.parametrize("size", [(), (1,), (7,), (3, 5), (2, 3, 4), (1, 0, 3)])
@pytest.mark.parametrize("limit", [1, 2, 5, 12, 100])
def test_blocks_fill_a_tensor_once(size: Sequence[int], limit: int) -> None:
    count = torch.zeros(size, dtype=torch.int64)
    for box in blocks(size, limit):
        count[tuple(slice(a, a + n) for a, n in box)] += 1
        assert torch.Size([n for _, n in box]).numel() <= limit
    assert bool((count == 1).all())


def without_the_library(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "safetensors", None)
        with pytest.raises(ImportError, match=r"pip install 'shardfn\[hf\]'"):
            load(path, blank_net(), sf.make_mesh("cpu", fsdp=1), sf.Policy())


@pytest.mark.everyday(1)
def test_without_the_library_the_error_names_the_extra(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    run(without_the_library, tmp_path, ranks=1)


def test_files_have_their_names_on_the_disk_and_are_written_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever device is the default."""
    seen: list[list[str]] = []
    model = nn.Linear(3, 3)
    params = sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy())
    monkeypatch.setattr(tensor_files, "sync", lambda at: seen.append(sorted(x.name for x in at.iterdir())))
    with torch.device("meta"):
        sf.checkpoint.save_safetensors(tmp_path, model, params)
    assert seen == [["model.safetensors"]]
    assert load_file(tmp_path / "model.safetensors")["weight"].equal(model.weight)


@pytest.mark.law("P11")
@pytest.mark.everyday(1)
def test_headers_and_indices_that_were_changed(tmp_path: Path) -> None:
    """An error that says so, or the weights as they were; numbers themselves have no hashes in this format."""
    model, mesh = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5, dtype=torch.float64)), sf.make_mesh("cpu", fsdp=1)
    params = sf.shard(model, mesh, sf.Policy())
    wanted, good = (
        sf.gather(params),
        sf.checkpoint.save_safetensors(tmp_path / "good", model, params, max_shard_size=90),
    )
    draw, outcomes = random.Random(0), Counter[str]()
    assert len([*good.iterdir()]) == 4
    for number in changes():
        path = tmp_path / "changed"
        shutil.copytree(good, path)
        file = draw.choice(sorted(path.iterdir()))
        data = file.read_bytes()
        front = len(data) if file.suffix == ".json" else 8 + int.from_bytes(data[:8], "little")
        file.write_bytes(changed(bytearray(data[:front]), draw) + data[front:])
        try:
            read = sf.gather(sf.checkpoint.load_safetensors(path, model, mesh, sf.Policy()))
            outcomes["read"] += 1
            assert all(x.equal(wanted[name]) for name, x in read.items()), f"change {number} went unnoticed"
        except (sf.ShardError, FileNotFoundError):
            outcomes["error"] += 1
        shutil.rmtree(path)
    assert outcomes["error"] > outcomes["read"], outcomes
