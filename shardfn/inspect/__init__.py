"""Looking at a layout: `typeof` and `visualize`; `simulate` and `check`, all ranks in one process.

Read `views` (who has which part, and `typeof`), `pictures` (`visualize`) and `check`. Not here: how layouts are made.
"""

from shardfn.inspect.check import Report, check, simulate
from shardfn.inspect.pictures import visualize
from shardfn.inspect.views import typeof
