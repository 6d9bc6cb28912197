"""Ranks that watch one another: which one does not come, what it does instead, and an error on all of them.

Read `records` (what a rank says of itself), `verdicts` (whether ranks can go on together; functions of records),
`watcher` (the thread that writes, reads and ends) and `stops` (a signal ends all ranks after the same call). What is
written down of each collective is `comm/journal.py`. Not here: checks before a call, which are `comm/agreement.py`.
"""

from shardfn.watch.stops import Stopped
from shardfn.watch.watcher import asked_to_stop, call, watch, watch_for
