"""Readers of checkpoints against files that were changed at random: what was written, or an error that says so."""

import copy
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import changed, changes
from torch import Tensor

import shardfn as sf
from shardfn.checkpoint import manifest
from shardfn.layout import Box

ODD = [
    -1,
    0,
    1,
    2**31,
    2**63,
    2**200,
    1.5,
    None,
    True,
    "",
    "..",
    "../x",
    "/etc/passwd",
    "a" * 1000,
    [],
    {},
    [[]],
    [None],
    "\x00",
]


def _tree() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randn(9, 7, generator=draw)
    return {"a": numbers, "b": torch.arange(5), "c": torch.tensor(3.0), "d": torch.ones(2, dtype=torch.bfloat16)}


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for key, item in inner for place in _places(item, (*path, key))]


def _signed(about: dict[str, Any], draw: random.Random) -> str:
    """A manifest with something else in one place, and the hash that belongs to it."""
    about = copy.deepcopy(about)
    *outer, key = draw.choice(_places(about))
    holder: Any = about
    for step in outer:
        holder = holder[step]
    odd = draw.choice(ODD)
    match draw.randrange(4):
        case 0 if isinstance(holder, dict):
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[str(odd)] = holder.pop(key)
        case 2 if isinstance(holder, list):
            holder.append(odd)
        case _:
            holder[key] = odd
    return json.dumps({"manifest": about, "sha256": manifest.digest(about)})


def _outcomes(tmp_path: Path, change: Callable[[Path, random.Random], bool]) -> Counter[str]:
    """How often a load gave what was written, and how often an error; anything else raises."""
    tree, draw, outcomes = _tree(), random.Random(0), Counter[str]()
    good = sf.checkpoint.save(tmp_path / "good", tree)
    for number in changes():
        path = tmp_path / "changed"
        shutil.copytree(good, path)
        exact = change(path, draw)
        try:
            read = sf.checkpoint.load(path, {name: torch.zeros_like(x) for name, x in tree.items()})
            outcomes["read"] += 1
            assert not exact or all(x.equal(tree[name]) for name, x in read.items()), f"change {number} went unnoticed"
        except (sf.ShardError, FileNotFoundError):
            outcomes["error"] += 1
        shutil.rmtree(path)
    return outcomes


def _in_a_file(path: Path, draw: random.Random) -> bool:
    file = draw.choice(sorted(x for x in path.iterdir() if x.name != ".metadata"))
    file.write_bytes(changed(bytearray(file.read_bytes()), draw))
    return True


def _in_what_it_says(path: Path, draw: random.Random) -> bool:
    file = path / "manifest.json"
    file.write_text(_signed(json.loads(file.read_text())["manifest"], draw), encoding="utf-8", errors="surrogatepass")
    return False


@pytest.mark.law("P11")
@pytest.mark.parametrize("change", [_in_a_file, _in_what_it_says])
def test_what_is_changed_is_noticed(tmp_path: Path, change: Callable[[Path, random.Random], bool]) -> None:
    outcomes = _outcomes(tmp_path, change)
    assert outcomes["error"] > 0.8 * outcomes.total(), outcomes


def test_nothing_runs_and_no_path_is_followed(tmp_path: Path) -> None:
    """Pickles are never read, here or elsewhere in the directory."""
    tree = _tree()
    path = sf.checkpoint.save(tmp_path / "step-1", tree)
    payload = b"cbuiltins\nprint\n(S'ran'\ntR."
    (path / ".metadata").write_bytes(payload)
    read = sf.checkpoint.load(path, {name: torch.zeros_like(x) for name, x in tree.items()})
    assert all(x.equal(tree[name]) for name, x in read.items())
    with pytest.raises(sf.ShardError, match="metadata' has become shorter"):
        sf.checkpoint.verify(path)


def _cut(shape: list[int], draw: random.Random) -> list[Box]:
    """Boxes that are all of a shape, each element once; half of the time one is another one then."""
    boxes: list[Box] = [tuple((0, n) for n in shape)]
    for _ in range(draw.randrange(5)):
        box = boxes.pop(draw.randrange(len(boxes)))
        dim, (start, size) = draw.choice([*enumerate(box)])
        first = draw.randint(0, size)
        parts = (start, first), (start + first, size - first)
        boxes += [(*box[:dim], part, *box[dim + 1 :]) for part in parts]
    if draw.random() < 0.5:
        box = boxes.pop(draw.randrange(len(boxes)))
        dim, (start, size) = draw.choice([*enumerate(box)])
        moved = (start + draw.choice((0, 1, -1)), max(0, size - draw.choice((0, 1))))
        boxes += [(*box[:dim], moved, *box[dim + 1 :])] * draw.choice((1, 1, 2))
    return boxes


def test_parts_are_all_of_a_leaf_each_once() -> None:
    outcomes = Counter[bool]()
    for seed in range(3000):
        draw = random.Random(seed)
        shape = [draw.randint(0, 4) for _ in range(draw.randint(1, 3))]
        boxes, count = _cut(shape, draw), torch.zeros([n + 5 for n in shape], dtype=torch.int64)
        for box in boxes:
            count[tuple(slice(start + 2, start + 2 + n) for start, n in box)] += 1
        count[tuple(slice(2, 2 + n) for n in shape)] -= 1
        try:
            manifest.require_each_once("x", shape, boxes)
        except sf.ShardError:
            assert count.any(), (shape, boxes)
        else:
            assert not count.any(), (shape, boxes)
        outcomes[bool(count.any())] += 1
    assert min(outcomes.values()) > 500
