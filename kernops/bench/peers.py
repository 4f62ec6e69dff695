"""The table of contenders: who computes a case, and how each is called at its best."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .cases import CASES, SQUARES, Case, evaluate_rows
from .problem import Config, Data, Tensor

Call = Callable[[], list[Tensor]]

os.environ.setdefault("PYKEOPS_VERBOSE", "0")  # or it prints into the table

#: Rows per block that are tried for torch, and the most numbers that one of its tables may hold.
CHUNKS = (16, 64, 256, 1024, 4096, 16384)
TABLE_NUMBERS = {"cpu": 1 << 26, "cuda": 1 << 30}
#: Pairs that a try of one chunk size computes, at least.
TRY_PAIRS = {"cpu": 4_000_000, "cuda": 400_000_000}


@dataclass(frozen=True)
class Built:
    """A contender ready to run: ``call()`` gives the value and then the gradients asked for.

    ``choice`` is what a search found to be best (handed to another process, it saves the search there); ``note`` is
    shown in the table.
    """

    call: Call
    note: str = ""
    choice: tuple[str, int] | None = None


@dataclass(frozen=True)
class Contender:
    """One row of the table.

    Attributes:
        modules: what must be importable.
        build: ``build(case, config, data, choice)``.
        compiles: whether the first call compiles, so that first-call times are worth a measurement.
        cache_variable: environment variable that moves the directory of compiled code.
        cases: the cases that the library has; empty for all.
        devices, dtypes: what it runs on.
    """

    name: str
    modules: tuple[str, ...]
    build: Callable[[Case, Config, Data, tuple[str, int] | None], Built]
    compiles: bool = False
    cache_variable: str = ""
    cases: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ("float32", "float64")

    def missing(self, config: Config) -> str:
        """Why this contender cannot take part, in words; empty where it can."""
        for module in self.modules:
            if importlib.util.find_spec(module.partition(".")[0]) is None:
                return "not installed"
        for have, want in ((self.cases, config.case), (self.devices, config.device), (self.dtypes, config.dtype)):
            if have and want not in have:
                return f"does not do {want}"
        return ""


def _symbolic(package: str, with_backend: bool):
    """A library with PyKeOps' interface: the same script for PyKeOps and for kernops."""

    def build(case: Case, config: Config, data: Data, choice: tuple[str, int] | None) -> Built:
        library: Any = importlib.import_module(package)
        options = {"backend": config.backend} if with_backend and config.backend != "auto" else {}
        forward = _lazy(library, case, config, data, options)
        if config.front == "Genred":
            forward = _genred(library, case, config, data, options)

        def call() -> list[Tensor]:
            value = forward()
            wanted = data.wanted(config.backward)
            return [value, *torch.autograd.grad(value, wanted, data.g)] if wanted else [value]

        return Built(call, config.front)

    return build


def _lazy(library: Any, case: Case, config: Config, data: Data, options: dict[str, Any]) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        x, y = library.LazyTensor(data.x[:, None, :]), library.LazyTensor(data.y[None, :, :])
        return case.lazy(((x - y) ** 2).sum(-1), config, data, options)

    return forward


def _genred(library: Any, case: Case, config: Config, data: Data, options: dict[str, Any]) -> Callable[[], Tensor]:
    formula, aliases, reduction, further = case.genred(config)
    function = library.Genred(formula, list(aliases), reduction_op=reduction, axis=1, **further)
    tensors = (data.x, data.y, data.b) if case.uses_b else (data.x, data.y)
    return lambda: function(*tensors, **options)


def _kernops(case: Case, config: Config, data: Data, choice: tuple[str, int] | None) -> Built:
    if config.algorithm == "auto":
        return _symbolic("kernops", True)(case, config, data, choice)
    from ..neighbors import knn

    def call() -> list[Tensor]:
        return [knn(data.x, data.y, config.k, backend=config.backend, algorithm=config.algorithm)[1]]

    return Built(call, f"knn, {config.algorithm}")


def _torch(case: Case, config: Config, data: Data, choice: tuple[str, int] | None) -> Built:
    """Plain torch by blocks of rows, with the formulation and the block length that turn out fastest."""
    form, rows = choice or _best_blocks(case, config, data)
    return Built(lambda: evaluate_rows(case, SQUARES[form], config, data, rows), f"{form}, {rows} rows", (form, rows))


def _best_blocks(case: Case, config: Config, data: Data) -> tuple[str, int]:
    best = (float("inf"), "matmul", 1)
    for form, squares in SQUARES.items():
        width = data.y.shape[0] * (config.d if form == "direct" else 1)
        for chunk in CHUNKS:
            rows = min(chunk, config.n)
            if rows > 1 and rows * width > TABLE_NUMBERS[config.device]:
                break
            best = min(best, (_seconds_per_row(case, squares, config, data, rows), form, rows))
            if chunk >= config.n:
                break
    return best[1:]


def _seconds_per_row(case: Case, squares: Callable, config: Config, data: Data, chunk: int) -> float:
    blocks = max(1, TRY_PAIRS[config.device] // (data.y.shape[0] * chunk))
    rows = min(config.n, chunk * blocks)
    part = Data(data.x[:rows], data.y, data.b, data.g[:rows])
    times = []
    for _ in range(3):
        synchronize(config.device)
        start = time.perf_counter()
        evaluate_rows(case, squares, config, part, chunk)
        synchronize(config.device)
        times.append(time.perf_counter() - start)
    return min(times) / rows


def synchronize(device: str) -> None:
    """Wait for the device's work."""
    if device == "cuda":
        torch.cuda.synchronize()


def _sklearn(algorithm: str):
    def build(case: Case, config: Config, data: Data, choice: tuple[str, int] | None) -> Built:
        from sklearn.neighbors import NearestNeighbors

        x, y = data.x.numpy(), data.y.numpy()

        def call() -> list[Tensor]:
            model = NearestNeighbors(n_neighbors=config.k, algorithm=algorithm, n_jobs=-1).fit(y)
            return [torch.from_numpy(model.kneighbors(x, return_distance=False))]

        return Built(call, "fit and search")

    return build


def _ckdtree(case: Case, config: Config, data: Data, choice: tuple[str, int] | None) -> Built:
    from scipy.spatial import cKDTree

    x, y, threads = data.x.numpy(), data.y.numpy(), torch.get_num_threads()

    def call() -> list[Tensor]:
        index = cKDTree(y).query(x, config.k, workers=threads)[1]
        return [torch.from_numpy(index.reshape(len(x), config.k))]

    return Built(call, f"build and search, {threads} workers")


def _faiss(case: Case, config: Config, data: Data, choice: tuple[str, int] | None) -> Built:
    import faiss

    x, y = data.x.numpy(), data.y.numpy()
    return Built(lambda: [torch.from_numpy(faiss.knn(x, y, config.k)[1])], "brute force")


_NEIGHBOURS = ("argkmin",)
CONTENDERS: dict[str, Contender] = {
    c.name: c
    for c in (
        Contender("kernops", ("kernops.lazy",), _kernops, True, "KERNOPS_CACHE_DIR"),
        Contender("torch", ("torch",), _torch),
        Contender("keops", ("pykeops.torch",), _symbolic("pykeops.torch", False), True, "KEOPS_CACHE_FOLDER"),
        Contender("sklearn", ("sklearn",), _sklearn("brute"), cases=_NEIGHBOURS, devices=("cpu",)),
        Contender("sklearn-tree", ("sklearn",), _sklearn("kd_tree"), cases=_NEIGHBOURS, devices=("cpu",)),
        Contender("ckdtree", ("scipy",), _ckdtree, cases=_NEIGHBOURS, devices=("cpu",)),
        Contender("faiss", ("faiss",), _faiss, cases=_NEIGHBOURS, devices=("cpu",), dtypes=("float32",)),
    )
}


def build(name: str, config: Config, data: Data, choice: tuple[str, int] | None = None) -> Built:
    """Contender ``name`` ready to run ``config`` on ``data``."""
    return CONTENDERS[name].build(CASES[config.case], config, data, choice)


def start(name: str, config: Config, data: Data) -> tuple[Built, list[Tensor]]:
    """Contender ``name`` after its first call, and what that gave."""
    with contextlib.redirect_stdout(sys.stderr):  # what a library says while it compiles is no part of the table
        built = build(name, config, data)
        return built, built.call()
