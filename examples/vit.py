"""Trains a small ViT of transformers to tell coloured shapes apart, on a 2 x 2 mesh.

    torchrun --standalone --nproc-per-node 4 examples/vit.py

`from_transformers(sequence_parallel=True)` splits heads and features, and between blocks the positions: 9 patches and
the class token are 10, 5 on each of two ranks. An odd number would leave the activations between blocks whole.
"""

import argparse
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import shardfn as sf

SIZE, PATCH = 15, 5
COLOURS = torch.tensor([[1.0, 0.2, 0.2], [0.2, 1.0, 0.2], [0.2, 0.4, 1.0]])
SHAPES = ("square", "frame", "cross")
CLASSES = len(COLOURS) * len(SHAPES)


def make_images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images `[count, 3, SIZE, SIZE]` of one shape each on noise, and which colour and shape it is."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    place = torch.rand(count, 2, 1, 1, generator=generator) * 3 + 5.5
    radius = torch.rand(count, 1, 1, generator=generator) + 3.5
    dy, dx = torch.arange(SIZE).view(1, SIZE, 1) - place[:, 0], torch.arange(SIZE).view(1, 1, SIZE) - place[:, 1]
    far, near = torch.maximum(dy.abs(), dx.abs()), torch.minimum(dy.abs(), dx.abs())
    kinds = [far < radius, (far < radius + 1) & (far > radius - 1), (far < radius + 1) & (near < 1)]
    inside = torch.stack(kinds, 1)[torch.arange(count), labels % len(SHAPES)]  # [count, SIZE, SIZE]
    colour = COLOURS[labels // len(SHAPES)].view(count, 3, 1, 1)
    noise = torch.randn(count, 3, SIZE, SIZE, generator=generator) * 0.2
    return inside.unsqueeze(1) * colour + noise, labels


def make_model(seed: int = 0) -> nn.Module:
    """A ViT of two layers, the same on every process."""
    torch.manual_seed(seed)
    config = transformers.ViTConfig(
        image_size=SIZE,
        patch_size=PATCH,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=CLASSES,
    )
    return transformers.ViTForImageClassification(config)


def accuracy(model: nn.Module, params: sf.Params, images: Tensor, labels: Tensor) -> float:
    """The share of images, the same on all ranks, whose class is found."""
    with torch.no_grad():
        found = sf.apply(model, params, pixel_values=images).logits.argmax(-1)
    return (found == labels).double().mean().item()


def main(argv: Sequence[str] | None = None) -> float:
    """Train; return the accuracy on images that were not trained on. Every rank calls this."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args(argv)
    ranks = sf.make_mesh("cpu", fsdp=-1).size()
    mesh = sf.make_mesh("cpu", fsdp=-1, tp=2 if ranks % 2 == 0 else 1)
    model = make_model()
    policy = sf.policies.from_transformers(model, sequence_parallel=True)
    params = sf.shard(model, mesh, policy)
    optimizer = sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(2e-3, weight_decay=0.01))
    state = optimizer.init(params)
    test = make_images(300, seed=1_000_000)

    def loss_fn(p: sf.Params, images: Tensor, labels: Tensor) -> Tensor:
        return sf.cross_entropy(sf.apply(model, p, pixel_values=images).logits, labels)

    for step in range(options.steps):
        local = sf.data.local_batch(make_images(64, seed=step), mesh)
        loss, grads = sf.value_and_grad(loss_fn)(params, *local)
        params, state = optimizer.step(params, grads, state)
        if dist.get_rank() == 0 and step % 20 == 19:
            print(f"step {step + 1:3}: loss {loss:.3f}, at random {math.log(CLASSES):.3f}", flush=True)
    found = accuracy(model, params, *test)
    if dist.get_rank() == 0:
        print(f"{found:.0%} of {len(test[0])} new images, {1 / CLASSES:.0%} by chance")
    return found


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
