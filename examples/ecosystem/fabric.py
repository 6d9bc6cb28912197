"""Lightning Fabric: both of its strategies for models that do not fit one device.

    torchrun --standalone --nproc-per-node 2 -m shardfn.compat examples/ecosystem/fabric.py --fsdp 2

Without `-m shardfn.compat` torch's classes do the same.
"""

from common import Told, batches, make_model, options
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """One unit a layer, as ModelParallelStrategy asks for it."""
    for module in model.modules():
        if isinstance(module, LlamaDecoderLayer):
            fully_shard(module, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


class OnCPUs(FSDPStrategy):
    """Fabric refuses its own class there, by name."""


def main() -> None:
    """Train, save, and go on from there."""
    asked, told = options(__doc__), Told()
    if asked.fsdp == 2:
        # The defaults are one data rank a node, and tensor parallelism over what it has.
        strategy = ModelParallelStrategy(parallelize, data_parallel_size=asked.ranks, tensor_parallel_size=1)
    else:
        strategy = OnCPUs(auto_wrap_policy={LlamaDecoderLayer}, state_dict_type="sharded")
    fabric = Fabric(accelerator="cpu", devices=asked.ranks, strategy=strategy)
    fabric.launch()
    with fabric.init_module(empty_init=False):
        model = make_model()
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(AdamW(model.parameters(), lr=1e-2))

    def train(first: int, last: int) -> None:
        for ids in batches(first, last, fabric.global_rank, asked.ranks):
            logits: Tensor = model(input_ids=ids).logits
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            fabric.backward(loss)
            norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            told.step(loss.detach(), norm)

    state = {"model": model, "optimizer": optimizer}
    train(0, 4)
    fabric.save(asked.directory / "step-4", state)
    train(4, 8)
    fabric.load(asked.directory / "step-4", state)
    train(4, 8)
    told.write(asked)


if __name__ == "__main__":
    main()
