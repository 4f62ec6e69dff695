"""One benchmark problem: its sizes, and the data that every contender is given."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

Tensor = torch.Tensor

#: Columns of a table of pairs that the reference may hold at a time, in numbers.
REFERENCE_NUMBERS = 1 << 24
DTYPES = ("float32", "float64", "float16", "bfloat16")
FRONTS = ("LazyTensor", "Genred", "estimator")


@dataclass(frozen=True)
class Config:
    """What is measured; all of it goes into the JSON file.

    Attributes:
        case: a key of ``cases.CASES``.
        n: number of rows and of columns.
        d: dimension of the points.
        dtype: a key of ``DTYPES``.
        rhs: number of right-hand sides.
        k: number of neighbours.
        backward: inputs whose gradients are computed too, a subset of ``"xyb"``; empty for the value alone.
        device: ``"cpu"`` or ``"cuda"``.
        backend: back end of kernops.
        algorithm: of kernops where it searches neighbours; ``"auto"`` calls ``argKmin``, others ``neighbors.knn``.
        front: ``"LazyTensor"`` or ``"Genred"``, for kernops and for PyKeOps alike; ``"estimator"`` for kernops' and
            scikit-learn's, where the case has one.
        offset: added to every coordinate: how far the points are from the origin.
        rtol: relative tolerance that an estimator is allowed.
    """

    case: str
    n: int
    d: int = 3
    dtype: str = "float32"
    rhs: int = 1
    k: int = 10
    backward: str = ""
    device: str = "cpu"
    backend: str = "auto"
    front: str = "LazyTensor"
    algorithm: str = "auto"
    offset: float = 0.0
    rtol: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Config:
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


@dataclass(frozen=True)
class Data:
    """Points ``x`` (n, d) and ``y`` (n, d), right-hand sides ``b`` (n, rhs), the cotangent ``g`` of the result."""

    x: Tensor
    y: Tensor
    b: Tensor
    g: Tensor

    def wanted(self, names: str) -> list[Tensor]:
        """The inputs by which to differentiate."""
        return [getattr(self, name) for name in names]

    def double_rows(self, rows: Tensor) -> Data:
        """The rows of a sample against all columns, in float64."""
        take = lambda t: t.detach()[rows].double()  # noqa: E731
        return Data(take(self.x), self.y.detach().double(), self.b.detach().double(), take(self.g))


def make_data(config: Config, seed: int = 0) -> Data:
    """Independent normal points, scaled so that squared distances are about 2 in every dimension."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.dtype)

    def normal(columns: int, scale: float = 1.0, offset: float = 0.0) -> Tensor:
        numbers = torch.randn(config.n, columns, generator=generator, dtype=torch.float64)
        return (scale * numbers + offset).to(dtype).to(config.device)

    x, y = (normal(config.d, config.d**-0.5, config.offset) for _ in range(2))
    data = Data(x, y, normal(config.rhs), normal(config.rhs))
    for name in config.backward:
        getattr(data, name).requires_grad_()
    return data


def sample_rows(config: Config) -> Tensor:
    """Rows on which errors are measured: few where there are many columns, so that the reference stays affordable."""
    count = min(config.n, max(32, min(512, 100_000_000 // config.n)))
    generator = torch.Generator().manual_seed(1)
    return torch.randperm(config.n, generator=generator)[:count].sort().values.to(config.device)
