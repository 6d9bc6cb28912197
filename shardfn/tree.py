"""`sf.tree`: functions over trees of shards."""

from shardfn.optim import dot
from shardfn.params import cast, ema, leaves, lerp, map, map_local, paths, select, zeros_like

__all__ = ["cast", "dot", "ema", "leaves", "lerp", "map", "map_local", "paths", "select", "zeros_like"]
