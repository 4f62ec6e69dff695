"""The bridge into torch: derivatives of any order, ``torch.func``, ``torch.compile`` and ``torch.export``."""

from . import operator  # noqa: F401  (registers torch.ops.kernops.reduce, which loaded programs look for)
from .function import reduce

__all__ = ["reduce"]
