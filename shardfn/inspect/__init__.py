"""Looking at a layout: `typeof` and `visualize`; `simulate` and `check`, all ranks in one process."""

from shardfn.inspect.check import Report, check, simulate
from shardfn.inspect.inspect import typeof, visualize
