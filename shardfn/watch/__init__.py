"""Ranks that watch one another: which one does not come, what it does instead, and an error on all of them.

Read `records` (what a rank says of itself), `verdicts` (whether ranks can go on together; functions of records) and
`watcher` (the thread that writes, reads and ends). What is written down of each collective is `comm/journal.py`. Not
here: checks before a call, which are `comm/agreement.py`.
"""

from shardfn.watch.watcher import call, watch, watch_for
