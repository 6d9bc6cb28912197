"""Checkpoints from the command line.

python -m shardfn.checkpoint ls runs/checkpoints        # what is there, the newest first
python -m shardfn.checkpoint verify runs/checkpoints    # every byte of all of them; 1 if one is damaged
"""

import argparse
import sys
from pathlib import Path

from shardfn.checkpoint import directories
from shardfn.checkpoint.manifest import is_checkpoint, read_manifest
from shardfn.checkpoint.storages import storage_of
from shardfn.notation import ShardError


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m shardfn.checkpoint", description="List and verify checkpoints.")
    parser.add_argument("command", choices=["ls", "verify"])
    parser.add_argument("path", type=Path, nargs="+", help="a checkpoint, or a directory of some")
    options = parser.parse_args(arguments)
    found = [one for path in options.path for one in ([path] if is_checkpoint(path) else _in(path))]
    if not found:
        print(f"no checkpoint in {', '.join(map(str, options.path))}", file=sys.stderr)
    return max([_command(options.command, one) for one in found], default=1)


def _in(directory: Path) -> list[Path]:
    names = sorted(directory.iterdir()) if directory.is_dir() else []
    return [*directories.steps(directory), *(x for x in names if is_checkpoint(x) and x.name[:5] != "step-")]


def _command(name: str, path: Path) -> int:
    try:
        if name == "verify":
            directories.verify(path)
        manifest = read_manifest(storage_of(path))
        size = sum(file.nbytes for file in manifest.files.values())
        files, notes = sum(x.endswith(".distcp") for x in manifest.files), f", notes {sorted(manifest.notes)}"
        print(f"{path}: {len(manifest.leaves)} leaves, {files} files, {size:,} bytes{notes * bool(manifest.notes)}")
    except (ShardError, OSError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
