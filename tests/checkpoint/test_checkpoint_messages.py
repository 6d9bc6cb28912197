"""What errors of checkpoints say: `messages.txt` has all of each, and no rank says anything else.

Each is at most twelve lines: what, where, what was expected and what there is, and what to write instead. To write the
file again after a change, run this file as a script; read what has changed.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from drawing import untyped
from ranks import folder
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.checkpoint import background, manifest
from shardfn.testing import run

PAGE = Path(__file__).with_name("messages.txt")
LINES = 12
CASES: dict[str, Callable[["Place"], object]] = {}


class Place:
    """A directory with a checkpoint, `step-1`, and what a rank has to save."""

    def __init__(self, at: Path, mesh: DeviceMesh) -> None:
        self.at, self.mesh, self.rank = at, mesh, dist.get_rank()
        torch.manual_seed(0)
        self.params = sf.shard(nn.Linear(6, 4), mesh, sf.Policy())
        self.tree: dict[str, Any] = {"params": self.params, "rate": 0.5, "step": 3}
        self.step = at / "step-1"
        sf.checkpoint.save(self.step, self.tree, overwrite=True)
        self.file = min(self.step.glob("*.distcp"))

    def once(self, change: Callable[[], object]) -> None:
        """What one process does to files while the others wait."""
        if self.rank == 0:
            change()
        dist.barrier()

    def load(self, like: Any = None, **options: Any) -> Any:
        return sf.checkpoint.load(self.step, self.tree if like is None else like, **options)

    def save(self, tree: Any = None, name: str = "step-2", **options: Any) -> Any:
        return sf.checkpoint.save(self.at / name, self.tree if tree is None else tree, self.mesh, **options)


def case(call: Callable[[Place], object]) -> Callable[[Place], object]:
    CASES[call.__name__] = call
    return call


@contextmanager
def failing(where: Any, name: str, error: Exception, rank: int) -> Iterator[None]:
    """One rank cannot do something."""
    was = getattr(where, name)

    def fail(*_: Any, **__: Any) -> None:
        raise error

    if dist.get_rank() == rank:
        setattr(where, name, fail)
    try:
        yield
    finally:
        setattr(where, name, was)


def changed(at: Place, **values: Any) -> None:
    """A manifest that says something else, with the hash that belongs to it."""
    path = at.step / manifest.NAME
    about = json.loads(path.read_text())["manifest"] | values
    path.write_text(json.dumps({"manifest": about, "sha256": manifest.digest(about)}))


def other_bytes(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


# What is there cannot be loaded


@case
def nothing_there(at: Place) -> None:
    sf.checkpoint.load(at.at / "step-9", at.tree)


@case
def one_bit_is_another(at: Place) -> None:
    at.once(lambda: other_bytes(at.file, at.file.stat().st_size // 2))
    at.load()


@case
def a_file_is_missing(at: Place) -> None:
    at.once(at.file.unlink)
    at.load()


@case
def a_file_is_cut(at: Place) -> None:
    at.once(lambda: os.truncate(at.file, 100))
    at.load()


@case
def a_file_too_many(at: Place) -> None:
    at.once(lambda: (at.step / "0123456789abcdef_7.distcp").touch())
    at.load()


@case
def the_manifest_is_changed(at: Place) -> None:
    at.once(lambda: other_bytes(at.step / manifest.NAME, 40))
    at.load()


@case
def the_manifest_is_cut(at: Place) -> None:
    at.once(lambda: os.truncate(at.step / manifest.NAME, 100))
    at.load()


@case
def a_newer_format(at: Place) -> None:
    at.once(lambda: changed(at, format=2))
    at.load()


@case
def another_shape_and_dtype(at: Place) -> None:
    at.load({"params": sf.shard(nn.Linear(6, 8).double(), at.mesh, sf.Policy()), "step": 0, "schedule": 1})


@case
def forty_parameters_that_do_not_fit(at: Place) -> None:
    names = [f"{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(40)]
    at.load({name: torch.zeros(3) for name in names})


@case
def a_name_that_is_close(at: Place) -> None:
    at.load({"parms": at.params, "rate": 0.5, "step": 3})


@case
def a_rank_wants_something_else(at: Place) -> None:
    at.load(at.tree | ({"more": 1} if at.rank else {}), missing="ignore")


@case
def a_directory_of_checkpoints(at: Place) -> None:
    sf.checkpoint.load(at.at, at.tree)


@case
def a_checkpoint_without_its_manifest(at: Place) -> None:
    at.once((at.step / manifest.NAME).unlink)
    at.load()


@case
def a_checkpoint_of_torch(at: Place) -> None:
    at.once(
        lambda: [
            (at.step / manifest.NAME).unlink(),
            *(x.rename(at.step / f"_{x.name}") for x in at.step.glob("*.distcp")),
        ]
    )
    at.load()


@case
def ranks_load_from_different_directories(at: Place) -> None:
    sf.checkpoint.load(at.step if at.rank else at.at / "step-0", at.tree)


@case
def a_rank_cannot_read(at: Place) -> None:
    with failing(os, "open", PermissionError(13, "Permission denied", str(at.file)), rank=1):
        at.load()


@case
def what_each_rank_has_of_other_ranks(at: Place) -> None:
    at.save({"x": sf.checkpoint.PerRank(torch.ones(2))}, overwrite=True)
    if at.rank == 0:
        changed_path = at.at / "step-2" / manifest.NAME
        about = json.loads(changed_path.read_text())["manifest"]
        del about["leaves"]["x@1"]
        changed_path.write_text(json.dumps({"manifest": about, "sha256": manifest.digest(about)}))
    dist.barrier()
    sf.checkpoint.load(at.at / "step-2", {"x": sf.checkpoint.PerRank(torch.ones(2))}, at.mesh)


# What cannot be saved


@case
def a_checkpoint_of_that_name(at: Place) -> None:
    at.save(name="step-1")


@case
def files_of_another_kind(at: Place) -> None:
    at.once(lambda: ((at.at / "mine").mkdir(), (at.at / "mine" / "notes.txt").touch()))
    at.save(name="mine", overwrite=True)


@case
def below_a_file(at: Place) -> None:
    at.once((at.at / "file").touch)
    at.save(name="file/step-1")


@case
def a_path_and_a_tree_the_other_way_round(at: Place) -> None:
    sf.checkpoint.save(untyped(at.tree), str(at.at))


@case
def a_text(at: Place) -> None:
    at.save(at.tree | {"name": "mine"})


@case
def a_large_number(at: Place) -> None:
    at.save(at.tree | {"n": 2**70})


@case
def two_of_a_name(at: Place) -> None:
    at.save({0: torch.ones(1), "0": torch.ones(1)})


@case
def notes_that_json_does_not_have(at: Place) -> None:
    at.save(notes={"x": torch.ones(1)})


@case
def gradients_that_are_not_reduced(at: Place) -> None:
    model = nn.Linear(6, 4)
    loss = sf.grad(lambda p: sf.apply(model, p, torch.ones(3, 6)).sum(), reduce=None)
    at.save({"grads": loss(at.params)})


@case
def another_value_on_a_rank(at: Place) -> None:
    at.save(at.tree | {"step": 3 + at.rank})


@case
def another_tensor_on_a_rank(at: Place) -> None:
    at.save(at.tree | {"x": torch.full((2,), at.rank)})


@case
def another_leaf_on_a_rank(at: Place) -> None:
    at.save(at.tree | ({"more": 1} if at.rank else {}))


@case
def another_kind_of_leaf_on_a_rank(at: Place) -> None:
    x = torch.ones(2)
    at.save({"x": sf.checkpoint.PerRank(x) if at.rank else x})


@case
def ranks_save_to_different_directories(at: Place) -> None:
    at.save(name=f"step-{2 + at.rank}")


@case
def one_rank_in_the_background(at: Place) -> None:
    at.save(async_=at.rank == 1)


@case
def a_mesh_of_some_ranks(at: Place) -> None:
    sf.checkpoint.save(at.at / "step-2", {"n": 1}, DeviceMesh("cpu", [0], mesh_dim_names=("fsdp",)))


@case
def a_full_disk_of_a_rank(at: Place) -> None:
    with failing(os, "pwrite", OSError(28, "No space left on device"), rank=1):
        at.save()


@case
def a_directory_that_cannot_be_written(at: Place) -> None:
    with failing(os, "mkdir", PermissionError(13, "Permission denied", str(at.at)), rank=0):
        at.save()


@case
def a_full_disk_in_the_background(at: Place) -> None:
    full = OSError(28, "No space left on device", str(at.at / "step-2"))
    with failing(vars(background)["Background"], "write", full, rank=1):
        at.save(async_=True).wait()


@case
def a_full_disk_that_the_next_save_tells_of(at: Place) -> None:
    full = OSError(28, "No space left on device", str(at.at / "step-2"))
    with failing(vars(background)["Background"], "write", full, rank=1):
        at.save(async_=True)
        at.save(name="step-3")


@case
def a_directory_of_each_rank_with_files(at: Place) -> None:
    mine = at.at / f"rank-{at.rank}"
    mine.mkdir(exist_ok=True)
    (mine / "old").touch()
    sf.checkpoint.save(sf.checkpoint.LocalDirectory(mine), at.tree)


@case
def in_a_simulation(at: Place) -> None:
    with sf.simulate(fsdp=2) as mesh:
        sf.checkpoint.save(at.at / "step-2", sf.shard(nn.Linear(6, 4), mesh, sf.Policy()))


# What a trainer says


def trainer(at: Place) -> sf.Trainer:
    torch.manual_seed(0)
    return sf.Trainer(nn.Linear(6, 4), at.mesh, sf.Policy(), optimizer=sf.optim.sgd(0.1))


@case
def nothing_is_to_be_kept(at: Place) -> None:
    trainer(at).save(at.at / "run", keep=0)


@case
def no_state_of_that_name(at: Place) -> None:
    one = trainer(at)
    one.save(at.at / "run")
    one.load(at.at / "run", loader=torch.optim.SGD([torch.ones(1)]))


@case
def nothing_to_go_on_from(at: Place) -> None:
    trainer(at).load(at.at / "nowhere")


@case
def all_that_is_there_is_damaged(at: Place) -> None:
    one = trainer(at)
    path = one.save(at.at / "run")
    at.once(min(Path(path).glob("*.distcp")).unlink)
    one.load(at.at / "run")


def said(place: Path) -> dict[str, str]:
    """What each case raises on this rank, without what is another one at another time."""
    mesh, found = sf.make_mesh("cpu", fsdp=2), dict[str, str]()
    for name, call in CASES.items():
        with folder() as at:
            one = Place(at, mesh)
            try:
                call(one)
                found[name] = "nothing"
            except Exception as error:
                text = f"{type(error).__name__}: {error}".replace(str(at), "DIR")
                text = re.sub(r"\d+ bytes are free", "N bytes are free", text)
                text = re.sub(r"values [0-9a-f]{64}", "values HASH", text)
                text = re.sub(r"[0-9a-f]{16}(?=[_-])", "NONCE", text)
                found[name] = re.sub(r"-[0-9a-f]{8}\.\d+\.\d+", "-OWNER", text)
            dist.barrier()
            left = sorted(x.name for x in at.iterdir() if x.name.startswith((".writing", "step-2", "step-3")))
            if left and not name.startswith("what_each"):
                found[name] += f"\nLEFT {left}"
            dist.barrier()
    return found


def page(of_ranks: list[dict[str, str]]) -> str:
    sections = []
    for name in CASES:
        texts = [each[name] for each in of_ranks]
        alike = len(set(texts)) == 1
        lines = texts[:1] if alike else [f"rank {rank}: {text}" for rank, text in enumerate(texts)]
        sections.append("\n".join([f"# {name.replace('_', ' ')}", *lines]))
    return "\n\n".join(sections) + "\n"


def test_errors_say_what_the_page_says(tmp_path: Path) -> None:
    of_ranks = run(said, tmp_path, ranks=2)
    assert page(of_ranks) == PAGE.read_text()
    long = {name for each in of_ranks for name, text in each.items() if text.count("\n") >= LINES}
    assert not long


if __name__ == "__main__":
    PAGE.write_text(page(run(said, Path(), ranks=2)))
