from typing import NamedTuple, Any
from torch import Tensor
class Mean(NamedTuple):
    total: Tensor
    count: Any
