"""`sf.tree`: functions over trees of shards. Layer 5."""

from shardfn.core.optim.norms import dot
from shardfn.core.tree import cast, ema, leaves, lerp, map, map_local, paths, select, zeros_like

__all__ = ["cast", "dot", "ema", "leaves", "lerp", "map", "map_local", "paths", "select", "zeros_like"]
