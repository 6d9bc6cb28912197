"""`sf.tree`: functions over trees of shards. Layer 5."""

from shardfn.core.optim.norms import dot as dot
from shardfn.core.tree import cast as cast
from shardfn.core.tree import ema as ema
from shardfn.core.tree import leaves as leaves
from shardfn.core.tree import lerp as lerp
from shardfn.core.tree import map as map
from shardfn.core.tree import map_local as map_local
from shardfn.core.tree import paths as paths
from shardfn.core.tree import select as select
from shardfn.core.tree import zeros_like as zeros_like

__all__ = [
    "cast",
    "dot",
    "ema",
    "leaves",
    "lerp",
    "map",
    "map_local",
    "paths",
    "select",
    "zeros_like",
]
