"""`python -m shardfn`: what there is, in a few lines."""

import shardfn

_COMMANDS = {
    "python -m shardfn.run": "torchrun with restarts, one error for all ranks, and an end after SIGTERM",
    "python -m shardfn.checkpoint": "list, verify and convert checkpoints",
    "python -m shardfn.compat": "run a script for FSDP1, FSDP2, hfai or Megatron-core on this library",
}


def main() -> None:
    """Print commands, functions and classes, each with the first line of its docstring."""
    docs = {name: (getattr(shardfn, name).__doc__ or "").partition("\n")[0] for name in shardfn.__all__}
    width = max(map(len, (*_COMMANDS, *docs)))
    print(f"shardfn {shardfn.__version__}: training models that do not fit one device\n")
    for title, rows in (("Commands", _COMMANDS), ("In Python, import shardfn as sf", docs)):
        print(title, *(f"  {name:{width}}  {what}" for name, what in sorted(rows.items())), "", sep="\n")
    print("help(sf.shard) has the rest of one of them.")


if __name__ == "__main__":
    main()
