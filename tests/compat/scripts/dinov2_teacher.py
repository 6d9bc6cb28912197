"""The manner of DINOv2: student and teacher in parts that are wrapped alone, an average over `params`, local files.

torchrun --standalone --nproc-per-node 2 dinov2_teacher.py result.pt     # rank r writes result.pt.r
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

STEPS, WIDTH, PROTOTYPES = 4, 10, 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)
        self.gamma = nn.Parameter(0.5 * torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.gamma * self.proj(F.scaled_dot_product_attention(q, k, v))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class BlockChunk(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, WIDTH, 4, 4)
        self.cls_token = nn.Parameter(0.1 * torch.randn(1, 1, WIDTH))
        self.mask_token = nn.Parameter(torch.zeros(1, WIDTH))
        self.blocks = nn.ModuleList([BlockChunk([Block()]), BlockChunk([nn.Identity(), Block()])])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, images: Tensor, masks: Tensor | None = None) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        if masks is not None:
            x = torch.where(masks.unsqueeze(-1), self.mask_token.unsqueeze(0), x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        for chunk in self.blocks:
            x = chunk(x)
        return self.norm(x)[:, 0]


class DINOHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, 6))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, PROTOTYPES, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.last_layer(F.normalize(self.mlp(x), dim=-1, eps=1e-6))


def get_fsdp_wrapper(strategy: str, modules_to_wrap: set[type[nn.Module]]) -> Any:
    precision = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
    return partial(
        FSDP,
        sharding_strategy=ShardingStrategy[strategy],
        mixed_precision=precision,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy(modules_to_wrap),
    )


def is_sharded_fsdp(x: Any) -> bool:
    return isinstance(x, FSDP) and x.sharding_strategy is not ShardingStrategy.NO_SHARD


def reshard_fsdp_model(x: nn.Module) -> None:
    """Drop whole weights that are kept from a forward: the shards have changed."""
    from torch.distributed.fsdp._runtime_utils import _reshard

    for module in FSDP.fsdp_modules(x):
        if is_sharded_fsdp(module) and module._handle is not None:
            _reshard(module, module._handle, True)


class SSLMetaArch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.ModuleDict({"backbone": VisionTransformer(), "dino_head": DINOHead()})
        self.teacher = nn.ModuleDict({"backbone": VisionTransformer(), "dino_head": DINOHead()})
        self.teacher.requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, PROTOTYPES))

    def prepare_for_distributed_training(self) -> None:
        for key, part in self.student.items():
            self.teacher[key].load_state_dict(part.state_dict())
            strategy = "SHARD_GRAD_OP" if key == "backbone" else "FULL_SHARD"
            self.student[key] = get_fsdp_wrapper(strategy, {BlockChunk})(part)
            self.teacher[key] = get_fsdp_wrapper("SHARD_GRAD_OP", {BlockChunk})(self.teacher[key])

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.teacher.eval()
        return self

    @torch.no_grad()
    def get_teacher_output(self, images: Tensor) -> Tensor:
        logits = self.teacher.dino_head(self.teacher.backbone(images))
        targets = F.softmax((logits - self.center) / 0.07, -1)
        mean = logits.mean(0, keepdim=True)
        dist.all_reduce(mean)
        self.center.mul_(0.9).add_(mean / dist.get_world_size(), alpha=0.1)
        return targets

    def forward_backward(self, views: list[Tensor], scaler: ShardedGradScaler) -> dict[str, Tensor]:
        targets = self.get_teacher_output(views[0])
        reshard_fsdp_model(self.teacher)
        masks = torch.rand(len(views[1]), 4) < 0.3
        logits = self.student.dino_head(self.student.backbone(views[1], masks))
        loss = -(targets * F.log_softmax(logits / 0.1, -1)).sum(-1).mean()
        scaler.scale(loss).backward()
        return {"dino_loss": loss.detach()}

    @torch.no_grad()
    def update_teacher(self, momentum: float) -> None:
        student_params: list[Tensor] = []
        teacher_params: list[Tensor] = []
        for key in self.student.keys():
            pairs = zip(FSDP.fsdp_modules(self.student[key]), FSDP.fsdp_modules(self.teacher[key]), strict=True)
            for student, teacher in pairs:
                student_params += student.params
                teacher_params += teacher.params
        torch._foreach_mul_(teacher_params, momentum)
        torch._foreach_add_(teacher_params, student_params, alpha=1 - momentum)

    def get_params_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = []
        for key, part in self.student.items():
            for name, param in part.named_parameters():
                if param.requires_grad:
                    no_decay = name.endswith("bias") or "norm" in name or "gamma" in name
                    rate = 0.2 if "patch_embed" in name else 1.0
                    group = {"params": param, "wd_multiplier": 0.0 if no_decay else 1.0, "lr_multiplier": rate}
                    groups.append(group | {"name": f"{key}.{name}".replace("_fsdp_wrapped_module.", "")})
        return groups


def save_local(model: SSLMetaArch, optimizer: torch.optim.Optimizer, path: Path) -> None:
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def load_local(model: SSLMetaArch, optimizer: torch.optim.Optimizer, path: Path) -> None:
    data = torch.load(path, weights_only=False)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        model.load_state_dict(data["model"], strict=False)  # flat parameters are in the file beside their parts
    optimizer.load_state_dict(data["optimizer"])


def build(seed: int) -> tuple[SSLMetaArch, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = SSLMetaArch()
    model.prepare_for_distributed_training()
    return model, torch.optim.AdamW(model.get_params_groups(), betas=(0.9, 0.999), eps=1e-5)


def train(model: SSLMetaArch, optimizer: torch.optim.Optimizer, first: int, found: dict[str, Any]) -> None:
    scaler = ShardedGradScaler(device="cpu", init_scale=2.0**8)
    model.train()
    for step in range(first, first + STEPS):
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.04 * group["wd_multiplier"]
            group["lr"] = 1e-2 * group["lr_multiplier"]
        torch.manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad(set_to_none=True)
        images = torch.randn(4, 1, 8, 8)
        losses = model.forward_backward([images, images + 0.1 * torch.randn_like(images)], scaler)
        scaler.unscale_(optimizer)
        for part in model.student.values():
            found["norms"].append(part.clip_grad_norm_(0.5).item())
        scaler.step(optimizer)
        scaler.update()
        model.update_teacher(0.9)
        for value in losses.values():
            dist.all_reduce(value)
        found["losses"].append({name: value.item() / dist.get_world_size() for name, value in losses.items()})
        found["scales"].append(scaler.get_scale())


def main(out: str) -> None:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"losses": [], "norms": [], "scales": []}
    path = Path(f"{out}.rank_{dist.get_rank()}.pth")
    model, optimizer = build(0)
    train(model, optimizer, 0, found)
    save_local(model, optimizer, path)
    model, optimizer = build(1)  # other weights, until the checkpoint is loaded
    load_local(model, optimizer, path)
    train(model, optimizer, STEPS, found)
    found["names"] = [group["name"] for group in optimizer.param_groups]
    found["teacher"] = model.teacher.state_dict()  # what an evaluation reads
    found["model"] = model.state_dict()
    torch.save(found, f"{out}.{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
