"""The examples that train models of transformers: `examples/lora.py` and `examples/vit.py`."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.testing import assert_parity, on_meshes, run

EXAMPLES = Path(__file__).parents[2] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))  # as when torchrun starts one of them

lora, vit = importlib.import_module("lora"), importlib.import_module("vit")


@pytest.mark.slow
def test_adapters_are_trained_and_saved(tmp_path: Path) -> None:
    base = tmp_path / "base"
    trained = lora.merge(lora.make_model(4))
    trained.model.embed_tokens.weight.data.neg_()
    trained.save_pretrained(base)
    arguments = ["--steps", "10", "--base", str(base), "--out", str(tmp_path / "out")]
    first, *others = run(lora.main, arguments, ranks=4)
    saved = load_file(tmp_path / "out" / "adapters.safetensors")
    assert len(saved) == 2 * 7 * 2 and all(name.endswith((".A.weight", ".B.weight")) for name in saved)
    for found in (first, *others):
        assert_parity(found, saved)
    adapted = lora.make_model(4, base)
    begun = dict(adapted.named_parameters())
    assert all(not torch.equal(saved[name], begun[name]) for name in saved)
    adapted.load_state_dict(saved, strict=False)
    ids = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    alone = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(alone(input_ids=ids).logits, adapted(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


def _adapted() -> nn.Module:
    """In float64, with adapters that count."""
    model = lora.make_model(4).double()
    generator = torch.Generator().manual_seed(2)
    for name, param in model.named_parameters():
        if name.endswith(".B.weight"):
            param.data.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return model


@pytest.mark.slow
@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 4, "tp": 1}, {"fsdp": 1, "tp": 4})
def test_adapters_have_the_gradients_of_one_rank(mesh: DeviceMesh) -> None:
    model, reference = _adapted(), _adapted()
    params = sf.shard(model, mesh, lora.policy_for(model))
    ids = torch.randint(256, (4, 8), generator=torch.Generator().manual_seed(1))

    def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
        return sf.cross_entropy(logits[:, :-1], ids[:, 1:])

    (local,) = sf.data.local_batch((ids,), mesh)
    loss, grads = sf.value_and_grad(lambda p: loss_of(sf.apply(model, p, input_ids=local).logits, local))(params)
    expected = loss_of(reference(input_ids=ids).logits, ids)
    expected.backward()
    wanted = {name: param.grad for name, param in reference.named_parameters() if param.grad is not None}
    assert_parity({"loss": loss}, {"loss": expected.detach()}, tol=1e-6)  # norms compute in float32
    assert_parity(sf.gather(grads.select(lora.ADAPTERS)), wanted, tol=1e-5)
    held = set(sf.optim.adamw(1e-3).init(params).mu)
    assert held == wanted.keys()


@pytest.mark.parametrize("child", ["base", "base_layer"])
def test_rules_of_a_model_with_adapters(child: str) -> None:
    def rules(wrapped: bool, make: Any, config: Any) -> dict[str, str]:
        with torch.device("meta"):
            model = make(config)
            for module in list(model.modules()) if wrapped else ():
                for name, linear in list(module.named_children()):
                    if isinstance(linear, nn.Linear):
                        holder = nn.Module()
                        holder.add_module(child, linear)
                        setattr(module, name, holder)
        return dict(sf.policies.from_transformers(model).rules)

    small: Any = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
    for make, config in (
        (transformers.LlamaModel, transformers.LlamaConfig(intermediate_size=64, **small)),
        (transformers.BertModel, transformers.BertConfig(**small)),
    ):
        tables = ("embed", "pooler")
        plain = {name: rule for name, rule in rules(False, make, config).items() if not any(t in name for t in tables)}
        moved = {name: rule for name, rule in rules(True, make, config).items() if not any(t in name for t in tables)}
        assert moved == {name.replace(".weight", f".{child}.weight"): rule for name, rule in plain.items()}


@pytest.mark.slow
def test_a_vit_tells_shapes_apart() -> None:
    found = run(vit.main, ["--steps", "60"], ranks=4)
    assert len(set(found)) == 1 and found[0] > 0.6, found


def test_images_are_the_same_everywhere() -> None:
    images, labels = vit.make_images(50, seed=3)
    again, _ = vit.make_images(50, seed=3)
    assert torch.equal(images, again) and set(labels.tolist()) <= set(range(vit.CLASSES))
    assert images.shape == (50, 3, vit.SIZE, vit.SIZE)
