"""Run functions on many ranks in tests, and compare the results: public, because users need it too.

`ranks` runs functions (`run`, `run_raises`, `on_meshes`, `shutdown`) in the processes of `process_pool`; `compare` has
comparisons that raise (`assert_close`, `assert_trees_close`, `assert_parity`), `counting` a counter of collectives
(`count_collectives`). Not here: anything a training run needs; nothing in shardfn imports it.
"""

from shardfn.testing.compare import assert_close, assert_parity, assert_trees_close
from shardfn.testing.counting import Collectives, count_collectives
from shardfn.testing.ranks import RankError, on_meshes, run, run_raises, shutdown

__all__ = ["Collectives", "RankError", "assert_close", "assert_parity", "assert_trees_close", "count_collectives"]
__all__ += ["on_meshes", "run", "run_raises", "shutdown"]
