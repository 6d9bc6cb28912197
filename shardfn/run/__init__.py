"""`python -m shardfn.run`: torchrun, which stays the launcher, with what training needs around it.

`python -m shardfn.run --nproc-per-node 4 train.py --its-own-arguments`, and all that `torchrun --help` lists. Read
`__main__` (the launcher: restarts that work on gloo, the first error, statuses) and `rank` (what each process is before
it is the script: it ends with its launcher, and writes its error down). Not here: what ranks say to one another, which
is `watch`.
"""
