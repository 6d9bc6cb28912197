"""What is compared: one way to save, load, find the newest and take away old ones, of four libraries.

All have one tree (`whole_tree`): parameters that are split over the ranks, a plain tensor, and a number. Each is used
as its documentation says, with every option on that keeps data safe:

    shardfn         sf.checkpoint.save into `step-N`, the newest by sf.checkpoint.latest; old ones go as in
                    Trainer.save(keep=). Its variant `replace` saves over the newest with overwrite=True.
    dcp-overwrite   torch.distributed.checkpoint with its defaults, over one directory, as its tutorial does.
    dcp-steps       the same into `step-N`; the newest with `.metadata` counts, and old ones are taken away as
                    torchtitan's manager does, which lists `step-N` directories, valid or not.
    torch_checkpointing  0.1.1: synchronous, temporary directory and barrier (defaults), a resharder, strict=True; no
                    hashes exist. O_DIRECT is off, which fails on some file systems. Two lines that ask for CUDA are
                    changed in a copy. A final name is only ever given to what is whole, so the newest name counts.
"""

import importlib.util
import inspect
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from failpoints import Point, event
from torch import nn
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardfn as sf

ROWS = 1001
Tree = dict[str, Any]


def whole_tree(step: int, rows: int = ROWS, job: int = 0) -> Tree:
    """What a run has after so many steps."""
    draw = torch.Generator().manual_seed(step + 1000 * job)
    random = {"weight": torch.randn(rows, 17, generator=draw), "bias": torch.randn(rows, generator=draw)}
    return random | {"plain": torch.randn(5, generator=draw, dtype=torch.float64), "step": step}


def blank_tree(rows: int = ROWS) -> Tree:
    """Memory for one, with numbers that no step has."""
    tree = whole_tree(0, rows)
    return {name: torch.full_like(x, -7) for name, x in tree.items() if name != "step"} | {"step": 0}


def step_of(path: Path) -> int:
    """The number of a directory `step-N`."""
    return int(path.name.rpartition("-")[2])


class Contender:
    """A library, as it is used here."""

    name = ""
    overwrites = False  # there is one directory
    variant = ""
    data, manifest = r"\.distcp$", r"\.metadata(\.tmp)?$"
    points: Mapping[str, Point]
    others: tuple[str, ...] = ()  # patterns of files that are written besides

    def missing(self) -> str:
        """Why it cannot be used here, if so."""
        return ""

    def watch(self) -> None:
        """Report events that are not the operating system's."""

    def path(self, folder: Path, step: int) -> Path:
        """Where a step is saved."""
        return folder / ("one" if self.overwrites else f"step-{step:08d}")

    def pack(self, tree: Tree, mesh: DeviceMesh | None) -> Any:
        """A whole tree as this library's ranks have it."""
        return tree if mesh is None else {name: _split(name, x, mesh) for name, x in tree.items()}

    def local(self, state: Any) -> Tree:
        """What this rank has of it."""
        return {name: x.to_local() if isinstance(x, DTensor) else x for name, x in state.items()}

    def save(self, folder: Path, step: int, state: Any) -> None:
        """Save it, on all ranks; it is acknowledged when this returns."""
        raise NotImplementedError

    def has_async(self) -> bool:
        """Whether it saves while training goes on."""
        return True

    def dies_at(self, victim: int) -> tuple[str, ...]:
        """Where a rank dies in a save that is under way."""
        return ("returned", "mid data")

    def save_async(self, folder: Path, step: int, state: Any) -> Any:
        """Begin to save it; what is returned is waited for by `wait` or `result`."""
        raise NotImplementedError

    def load(self, path: Path, state: Any) -> Any:
        """Read it, into the tensors of `state` or into new ones."""
        raise NotImplementedError

    def all(self, folder: Path) -> list[Path]:
        """The checkpoints in a directory, the newest first."""
        found = [x for x in folder.glob("step-*") if self.is_one(x)]
        return sorted(found, key=step_of, reverse=True)

    def is_one(self, path: Path) -> bool:
        """Whether a directory is one that was finished."""
        return (path / ".metadata").is_file()

    def prune(self, folder: Path, keep: int) -> None:
        """Take away all but the newest, on the first rank."""
        for path in sorted(folder.glob("step-*"), key=step_of, reverse=True)[keep:]:
            shutil.rmtree(path)


def _points(data: str, manifest: str, final: str) -> dict[str, Point]:
    """Where ranks are killed, by the patterns of files of data, of the manifest, and of a name that makes it count."""
    return {
        "plan": Point("making", ""),
        "mid data": Point("wrote", data),
        "after data": Point("synced", data),
        "mid manifest": Point("syncing", manifest),
        "before rename": Point("renaming", final),
        "renamed": Point("renamed", final),
        "deleting": Point("removing", "", 2),
    }


def _split(name: str, x: Any, mesh: DeviceMesh) -> Any:
    if name not in ("weight", "bias"):
        return x
    placements = [Shard(0), *[Shard(1) if x.dim() > 1 else Replicate()] * (mesh.ndim - 1)]
    return distribute_tensor(x, mesh, placements, src_data_rank=None)


class Shardfn(Contender):
    """sf.checkpoint, by new names, or over what is there."""

    name, manifest = "shardfn", r"manifest\.json(-[^-]*)?$"

    def __init__(self, variant: str = "new") -> None:
        self.variant = variant
        name = r"step-\d+$" if variant == "new" else r"manifest\.json$"
        self.points = _points(self.data, self.manifest, name)
        self.others = (r"\.metadata(-[^-]*)?$",)

    def dies_at(self, victim: int) -> tuple[str, ...]:
        """What writes data is another process; a thread of the first rank writes the manifest."""
        return ("returned", *(["mid manifest", "before rename", "renamed"] if victim == 0 else []))

    def path(self, folder: Path, step: int) -> Path:
        return folder / ("step-00000001" if self.variant == "replace" else f"step-{step:08d}")

    def pack(self, tree: Tree, mesh: DeviceMesh | None) -> Any:
        if mesh is None:
            params: Any = {name: tree[name] for name in ("weight", "bias")}
        else:
            model = nn.Linear(tree["weight"].shape[1], len(tree["weight"]))
            with torch.no_grad():
                for name, x in model.named_parameters():
                    x.copy_(tree[name])
            axes = dict(zip(("fsdp", "tp"), mesh.shape, strict=False))
            params = sf.shard(model, sf.make_mesh("cpu", **axes), sf.Policy())
        return {"params": params, **{name: x for name, x in tree.items() if name not in ("weight", "bias")}}

    def local(self, state: Any) -> Tree:
        return super().local({**state["params"], **{name: x for name, x in state.items() if name != "params"}})

    def save(self, folder: Path, step: int, state: Any) -> None:
        sf.checkpoint.save(self.path(folder, step), state, overwrite=self.variant == "replace")

    def has_async(self) -> bool:
        return "async_" in inspect.signature(sf.checkpoint.save).parameters

    def save_async(self, folder: Path, step: int, state: Any) -> Any:
        options: dict[str, Any] = {"async_": True, "overwrite": self.variant == "replace"}
        return sf.checkpoint.save(self.path(folder, step), state, **options)

    def load(self, path: Path, state: Any) -> Any:
        return sf.checkpoint.load(path, state)

    def all(self, folder: Path) -> list[Path]:
        return sf.checkpoint.directories.steps(folder)

    def is_one(self, path: Path) -> bool:
        return sf.checkpoint.directories.is_checkpoint(path)

    def prune(self, folder: Path, keep: int) -> None:
        sf.checkpoint.directories.prune(folder, step_of(self.all(folder)[0]), keep)


class Dcp(Contender):
    """torch.distributed.checkpoint."""

    def __init__(self, overwrites: bool) -> None:
        self.name, self.overwrites = "dcp-overwrite" if overwrites else "dcp-steps", overwrites
        self.points = _points(self.data, r"\.metadata\.tmp$", r"\.metadata$")

    def watch(self) -> None:
        module: Any = filesystem
        write = module._write_item

        def written(transforms: Any, stream: Any, *others: Any) -> Any:
            result = write(transforms, stream, *others)
            stream.flush()
            event("wrote", stream.name)
            return result

        module._write_item = written

    def save(self, folder: Path, step: int, state: Any) -> None:
        state_dict_saver.save(state, checkpoint_id=self.path(folder, step))

    def save_async(self, folder: Path, step: int, state: Any) -> Any:
        return state_dict_saver.async_save(state, checkpoint_id=self.path(folder, step))

    def load(self, path: Path, state: Any) -> Any:
        state_dict_loader.load(state, checkpoint_id=path)
        return state

    def all(self, folder: Path) -> list[Path]:
        return [folder / "one"] if self.overwrites and self.is_one(folder / "one") else super().all(folder)


@dataclass
class _Library:
    """torch_checkpointing, once it is imported."""

    module: Any = None
    copy: Any = None


_TC = _Library()
TC_FILES = "metadata_manager.py"
TC_CUDA = {'device="cuda"': 'device="cpu"', "dtype=torch.uint8).cuda()": "dtype=torch.uint8)"}


class TorchCheckpointing(Contender):
    """torch_checkpointing 0.1.1."""

    name = "torch_checkpointing"

    def dies_at(self, victim: int) -> tuple[str, ...]:
        """What writes is another process."""
        return ("returned",)

    data, manifest = r"\.pt$", r"metadata\.pkl$"
    points = MappingProxyType(
        _points(data, manifest, r"step-\d+$")
        | {
            "mid data": Point("wrote", r"weights_\d+\.pt$", 2),
            "after data": Point("closed", r"weights_\d+\.pt$"),
            "mid manifest": Point("wrote", manifest),
        }
    )

    def missing(self) -> str:
        if _TC.module is not None:
            return ""
        found = importlib.util.find_spec("torch_checkpointing")
        if found is None or found.origin is None:
            return "not installed: pip install torch_checkpointing==0.1.1 --no-deps, and safetensors"
        _TC.copy = tempfile.TemporaryDirectory(prefix="faults-tc-")
        copy = Path(_TC.copy.name) / "torch_checkpointing"
        Path(_TC.copy.name).chmod(0o755)
        shutil.copytree(Path(found.origin).parent, copy)
        text = (copy / TC_FILES).read_text()
        for old, new in TC_CUDA.items():
            assert old in text, f"another version of torch_checkpointing: no {old}"
            text = text.replace(old, new)
        (copy / TC_FILES).write_text(text)
        sys.path.insert(0, str(copy.parent))
        for module in ("checkpoint_manager", "default_resharder", "storage.filesystem", "barriers"):
            importlib.import_module(f"torch_checkpointing.{module}")
        _TC.module = sys.modules["torch_checkpointing"]  # its path stays: an asynchronous save imports it once more
        return ""

    def watch(self) -> None:
        stream = _TC.module.storage.filesystem.WriteStream
        write, close = stream.write, stream.close

        def written(self: Any, data: Any) -> int:
            view = memoryview(data).cast("B")
            half = len(view) // 2
            write(self, view[:half])
            self.flush()
            event("wrote", self._path)
            write(self, view[half:])
            return len(view)

        def closed(self: Any) -> None:
            close(self)
            event("closed", self._path)

        stream.write, stream.close = written, closed

    def _manager(self, asynchronous: bool = False) -> Any:
        tc = _TC.module
        manager, resharder = tc.checkpoint_manager, tc.default_resharder.DefaultResharder
        config = manager.CheckpointManager.Config.with_sync_save()
        if asynchronous:
            config = manager.CheckpointManager.Config.with_async_save()
            config.save.staging_config.use_pinned_memory = config.save.staging_config.use_shared_memory = False
            config.save.staging_config.use_non_blocking_copy = config.save.staging_config.use_async_staging = False
        config.save.writer_config.checkpoint_write_barrier_timeout_sec = 5
        config.items = {"weights": manager.ItemSpec(resharder=resharder())}
        config.storage_config = tc.storage.filesystem.LocalFileSystemStorageConfig(use_direct_io=False)
        return config.build()

    def _items(self, state: Any) -> Any:
        return {"weights": state | {"step": torch.as_tensor(state["step"])}}  # a number would be of each rank

    def save(self, folder: Path, step: int, state: Any) -> None:
        self._manager().save(str(self.path(folder, step)), self._items(state))

    def save_async(self, folder: Path, step: int, state: Any) -> Any:
        return self._manager(True).save(str(self.path(folder, step)), self._items(state))

    def load(self, path: Path, state: Any) -> Any:
        read = self._manager().load(str(path), into=self._items(state), strict=True)
        return {**read["weights"], "step": int(read["weights"]["step"])}

    def is_one(self, path: Path) -> bool:
        return path.is_dir()


def contenders() -> list[Contender]:
    """All of them, in the order of the columns."""
    return [Shardfn(), Dcp(True), Dcp(False), TorchCheckpointing()]


def barrier() -> None:
    """Until all ranks are here."""
    if dist.is_initialized():
        dist.barrier()
