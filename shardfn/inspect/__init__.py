"""See a layout: `typeof`, `visualize`. Run all ranks in one process: `simulate`, `check`.

Read `views` (who has which part, and `typeof`), `pictures` (`visualize`) and `check`. Not here: how layouts are made.
"""

from shardfn.inspect.check import Report, check, simulate
from shardfn.inspect.pictures import visualize
from shardfn.inspect.views import typeof
