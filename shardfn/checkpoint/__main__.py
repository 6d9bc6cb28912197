"""Checkpoints from the command line.

python -m shardfn.checkpoint ls runs/checkpoints        # what is there, the newest first
python -m shardfn.checkpoint verify runs/checkpoints    # every byte of all of them; 1 if one is damaged
python -m shardfn.checkpoint convert theirs step-1      # from torch.distributed.checkpoint, or safetensors
python -m shardfn.checkpoint convert step-1 weights.safetensors --only params
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardfn.checkpoint import dcp, directories, tensor_files
from shardfn.checkpoint.commits import METADATA
from shardfn.checkpoint.hashed_files import VerifiedReader
from shardfn.checkpoint.leaves import keys_of, top_of
from shardfn.checkpoint.manifest import Manifest, is_checkpoint, read_manifest
from shardfn.checkpoint.saves import save
from shardfn.checkpoint.storages import storage_of
from shardfn.layout import is_in
from shardfn.notation import ShardError


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser("python -m shardfn.checkpoint", description="List, verify, convert checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("ls", "what is there"), ("verify", "compare every byte with its hash")):
        command = commands.add_parser(name, help=what)
        command.add_argument("path", type=Path, nargs="+", help="a checkpoint, or a directory of some")
    command = commands.add_parser("convert", help="from torch.distributed.checkpoint's or safetensors, or to them")
    command.add_argument("source", type=Path, help="a directory; or a file of safetensors")
    command.add_argument("target", type=Path, help="a new directory; or a new file of safetensors")
    command.add_argument("--to", choices=["shardfn", "dcp"], default="shardfn", help="what a new directory is")
    command.add_argument("--only", action="append", default=[], help="of what is below this name, such as params")
    options = parser.parse_args(arguments)
    if options.command == "convert":
        return _reported(options.target, lambda: _convert(options.source, options.target, options.to, options.only))
    found = [one for path in options.path for one in ([path] if is_checkpoint(path) else _in(path))]
    if not found:
        print(f"no checkpoint in {', '.join(map(str, options.path))}", file=sys.stderr)
    check = directories.verify if options.command == "verify" else directories.notes
    return max([_reported(one, partial(check, one)) for one in found], default=1)


def _in(directory: Path) -> list[Path]:
    names = sorted(directory.iterdir()) if directory.is_dir() else []
    steps = directories.steps(directory)
    return [*steps, *(x for x in names if is_checkpoint(x) and x not in steps)]


def _reported(path: Path, command: Callable[[], object]) -> int:
    """Run a command, and print what there is then, or why it failed."""
    try:
        command()
        if is_checkpoint(path):
            manifest = read_manifest(storage_of(path))
            size = sum(file.nbytes for file in manifest.files.values())
            files, notes = sum(x.endswith(".distcp") for x in manifest.files), f", notes {sorted(manifest.notes)}"
            there = f"{len(manifest.leaves)} leaves in {sorted({*map(top_of, manifest.leaves)})}"
            print(f"{path}: {there}, {files} files, {size:,} bytes{notes * bool(manifest.notes)}")
        else:
            print(f"{path}: written; notes are not in it")
    except (ShardError, OSError, TypeError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    return 0


def _convert(source: Path, target: Path, to: str, only: list[str]) -> None:
    """Write what is in one place to another, of another kind."""
    if target.exists():
        raise ShardError("it is there already; give a new name")
    if not is_checkpoint(source):
        _into_ours(source, target, to, only)
        return
    directories.verify(source)
    manifest = read_manifest(storage_of(source))
    if target.suffix == ".safetensors":
        _into_safetensors(source, manifest, target, only)
    elif to == "dcp" and not only:
        dcp.write_directory(source, target)
    else:
        raise ShardError("from a checkpoint of shardfn: write --to dcp, or a name that ends in .safetensors")


def _into_ours(source: Path, target: Path, to: str, only: list[str]) -> None:
    if to == "dcp" or target.suffix == ".safetensors":
        raise ShardError(f"'{source}' is no checkpoint of shardfn; convert it into one first")
    notes: dict[str, Any] = {}
    if (source / METADATA).is_file():
        values, notes = dcp.read_directory(source)
    else:
        with closing(tensor_files.TensorFiles(source)) as files:
            values = {name: torch.empty(stored.shape, dtype=stored.dtype) for name, stored in files.tensors.items()}
            for name, value in values.items():
                files.read(name, tuple((0, n) for n in value.shape), value)
    tree: dict[str, Any] = {}
    known = [name for name, value in values.items() if isinstance(value, torch.Tensor | int | float)]
    for name, short in _names(known, only).items():
        *path, last = short.split(".")
        place = tree
        for key in path:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise ShardError(f"'{name}' is below a tensor of that name")
        place[last] = values[name]
    save(target, tree, notes=None if only else notes)


def _names(known: Iterable[str], only: list[str]) -> dict[str, str]:
    """What is below some names, or all there is, with what it is called there."""
    known = sorted(known)
    names = {name: name[len(top) + 1 :] for top in only for name in known if is_in(name, top)}
    if unmet := [top for top in only if not any(is_in(name, top) for name in known)]:
        raise ShardError(f"nothing is below {unmet}; there are {sorted({*map(top_of, known)})}")
    if twice := [short for short, count in Counter(names.values()).items() if count > 1]:
        raise ShardError(f"of {only}, several have '{twice[0]}'")
    return names if only else dict(zip(known, known, strict=True))


def _into_safetensors(source: Path, manifest: Manifest, target: Path, only: list[str]) -> None:
    names = {name: keys_of(short) for name, short in _names(manifest.leaves, only).items()}
    if len({*names.values()}) < len(names):
        raise ShardError("two leaves would have one name, since they differ by dots in their keys only; write --only")
    wanted = {short: (manifest.leaves[name].shape, manifest.leaves[name].dtype) for name, short in names.items()}
    plan = tensor_files.plan_file(target.name, wanted)
    writer = tensor_files.TensorWriter(target.parent, tensor_files.FilesPlan((plan,), alone=True))
    with closing(VerifiedReader(storage_of(source), manifest)) as reader, closing(writer):
        writer.open()
        for name, short in names.items():
            (shape, dtype), box = wanted[short], tuple((0, n) for n in wanted[short][0])
            reader.read_leaf(manifest.leaves[name], box, value := torch.empty(shape, dtype=dtype))
            writer.write(short, box, value)
        writer.finish()


if __name__ == "__main__":
    sys.exit(main())
