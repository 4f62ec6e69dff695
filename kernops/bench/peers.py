"""The table of contenders: who computes a case, and how each is called at its best."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .cases import CASES, SQUARES, Case, evaluate_rows
from .problem import DTYPES, Config, Data, Tensor

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
        environment: variables that its libraries read when they are loaded: it is timed in a process of its own.
    """

    name: str
    modules: tuple[str, ...]
    build: Callable[[Case, Config, Data, tuple[str, int] | None], Built]
    compiles: bool = False
    cache_variable: str = ""
    cases: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = DTYPES
    environment: tuple[tuple[str, str], ...] = ()

    def missing(self, config: Config) -> str:
        """Why this contender cannot take part, in words; empty where it can."""
        for module in self.modules:
            if importlib.util.find_spec(module.partition(".")[0]) is None:
                return "not installed"
        return self.lacks(config)

    def lacks(self, config: Config) -> str:
        """What of a problem the library does not do, in words, whether or not it is installed."""
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
    if config.front == "estimator":
        return _estimator("kernops.estimators", "auto")(case, config, data, choice)
    if config.algorithm == "auto":
        return _symbolic("kernops", True)(case, config, data, choice)
    from ..neighbors import knn

    def call() -> list[Tensor]:
        return [knn(data.x, data.y, config.k, backend=config.backend, algorithm=config.algorithm)[1]]

    return Built(call, f"knn, {config.algorithm}")


def _in_float32(case: Case, config: Config, data: Data, choice: tuple[str, int] | None) -> Built:
    """kernops on the same numbers in float32: what half precision is compared with."""
    if config.backward:
        raise ValueError("measured without gradients")
    single = Data(*(t.float() for t in (data.x, data.y, data.b, data.g)))
    built = _kernops(case, replace(config, dtype="float32"), single, choice)
    return replace(built, note="the same in float32")


def _torch(case: Case, config: Config, data: Data, choice: tuple[str, int] | None) -> Built:
    """Plain torch by blocks of rows, with the formulation and the block length that turn out fastest."""
    form, rows = choice or _best_blocks(case, config, data)
    return Built(lambda: evaluate_rows(case, SQUARES[form], config, data, rows), f"{form}, {rows} rows", (form, rows))


def _best_blocks(case: Case, config: Config, data: Data) -> tuple[str, int]:
    best = (float("inf"), "matmul", 1)
    for form, squares in SQUARES.items():
        if form == "cdist" and data.x.dtype.itemsize == 2:
            continue  # torch has none in half precision
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


def _estimator(library: str, algorithm: str):
    """An estimator with scikit-learn's interface: the same script for scikit-learn and for kernops."""

    def build(case: Case, config: Config, data: Data, choice: tuple[str, int] | None) -> Built:
        if case.estimator is None:
            raise ValueError(f"{case.name} has no estimator")
        call = case.estimator(importlib.import_module(library), algorithm, config, data)
        return Built(lambda: [call()], "fit and search" if case.name == "argkmin" else f"rtol={config.rtol:g}")

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


def _flashlib(case: Case, config: Config, data: Data, choice: tuple[str, int] | None) -> Built:
    import flashlib

    return Built(lambda: [flashlib.flash_knn(data.x, data.y, config.k, return_distances=False)], "flash_knn")


_NEIGHBOURS = ("argkmin",)
_FITTED = ("argkmin", "kde")
_SINGLE, _NUMPY = ("float32",), ("float32", "float64")
_SYMBOLIC = ("float32", "float64", "float16")
_HASWELL = (("OPENBLAS_CORETYPE", "Haswell"),)  # the kernels of its BLAS that were found fastest for faiss
CONTENDERS: dict[str, Contender] = {
    c.name: c
    for c in (
        Contender("kernops", ("kernops.lazy",), _kernops, True, "KERNOPS_CACHE_DIR"),
        Contender("torch", ("torch",), _torch),
        Contender("keops", ("pykeops.torch",), _symbolic("pykeops.torch", False), True, "KEOPS_CACHE_FOLDER",
                  dtypes=_SYMBOLIC),
        Contender("sklearn", ("sklearn",), _estimator("sklearn.neighbors", "brute"), cases=_FITTED, devices=("cpu",),
                  dtypes=_NUMPY),
        Contender("sklearn-tree", ("sklearn",), _estimator("sklearn.neighbors", "kd_tree"), cases=_NEIGHBOURS,
                  devices=("cpu",), dtypes=_NUMPY),
        Contender("ckdtree", ("scipy",), _ckdtree, cases=_NEIGHBOURS, devices=("cpu",), dtypes=_NUMPY),
        Contender("faiss", ("faiss",), _faiss, cases=_NEIGHBOURS, devices=("cpu",), dtypes=_SINGLE),
        Contender("faiss-haswell", ("faiss",), _faiss, cases=_NEIGHBOURS, devices=("cpu",), dtypes=_SINGLE,
                  environment=_HASWELL),
        Contender("flashlib", ("flashlib",), _flashlib, cases=_NEIGHBOURS, devices=("cuda",), dtypes=_SINGLE),
        Contender("kernops-float32", ("kernops.lazy",), _in_float32, dtypes=("float16", "bfloat16")),
    )
}  # fmt: skip


def build(name: str, config: Config, data: Data, choice: tuple[str, int] | None = None) -> Built:
    """Contender ``name`` ready to run ``config`` on ``data``."""
    return CONTENDERS[name].build(CASES[config.case], config, data, choice)


def start(name: str, config: Config, data: Data) -> tuple[Built, list[Tensor]]:
    """Contender ``name`` after its first call, and what that gave."""
    with contextlib.redirect_stdout(sys.stderr):  # what a library says while it compiles is no part of the table
        built = build(name, config, data)
        return built, built.call()
