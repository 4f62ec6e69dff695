"""What the contenders compute, and the errors that are reported, against float64 torch written out here."""

from __future__ import annotations

import math

import pytest
import torch

from kernops.bench import peers
from kernops.bench.cases import CASES, SQUARES, evaluate_rows
from kernops.bench.peers import CONTENDERS, build
from kernops.bench.problem import Config, Data, make_data, sample_rows


@pytest.fixture(autouse=True)
def short_search(monkeypatch):
    """Torch's best block length is of no interest here."""
    monkeypatch.setattr(peers, "CHUNKS", (64,))
    monkeypatch.setitem(peers.TRY_PAIRS, "cpu", 1)


def table(config: Config, data: Data) -> torch.Tensor:
    """The case in float64, from the whole table of pairs."""
    x, y, b = (t.detach().double() for t in (data.x, data.y, data.b))
    return TABLES[config.case](torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist"), b, config)


def _density(r: torch.Tensor, b: torch.Tensor, config: Config) -> torch.Tensor:
    h, d = 0.2, config.d
    kernels = torch.exp(-(r**2) / (2 * h**2)) / (math.sqrt(2 * math.pi) * h) ** d
    return kernels.mean(1, keepdim=True).log()


#: Case -> its value from the table of distances.
TABLES = {
    "gaussian": lambda r, b, config: torch.exp(-(r**2)) @ b,
    "laplacian": lambda r, b, config: torch.exp(-r) @ b,
    "matern32": lambda r, b, config: ((1 + math.sqrt(3) * r) * torch.exp(-math.sqrt(3) * r)) @ b,
    "user": lambda r, b, config: (1 - torch.log1p(r**2)).abs() @ b,
    "logsumexp": lambda r, b, config: torch.logsumexp(-(r**2), 1, keepdim=True),
    "softmax": lambda r, b, config: torch.softmax(-(r**2), 1) @ b,
    "argkmin": lambda r, b, config: r.argsort(dim=1, stable=True)[:, : config.k],
    "kde": _density,
}


def test_every_case_has_a_value_here():
    assert set(TABLES) == set(CASES)


def errors(config: Config, data: Data, got: list[torch.Tensor]) -> dict[str, float]:
    rows = sample_rows(config)
    return CASES[config.case].error([t.detach()[rows] for t in got], data.double_rows(rows), config)


CONFIGS = [
    Config("gaussian", 300),
    Config("gaussian", 300, d=7, rhs=4, dtype="float64"),
    Config("gaussian", 300, front="Genred"),
    Config("gaussian", 200, d=5, rhs=2, front="Genred", dtype="float64"),
    Config("logsumexp", 300, d=2),
    Config("logsumexp", 300, d=2, front="Genred", dtype="float64"),
    Config("argkmin", 300, k=6),
    Config("argkmin", 300, k=6, front="Genred", dtype="float64"),
    Config("argkmin", 300, k=6, algorithm="brute"),
    Config("argkmin", 300, k=6, front="estimator"),
    *(Config(case, 300, rhs=2, dtype="float64", front=front)
      for case in ("laplacian", "matern32", "user", "softmax") for front in ("LazyTensor", "Genred")),
    *(Config("kde", 300, dtype="float64", front=front) for front in ("LazyTensor", "Genred", "estimator")),
    Config("gaussian", 300, dtype="float16"),
    Config("gaussian", 300, dtype="bfloat16"),
    Config("gaussian", 300, dtype="float64", offset=100.0),
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.case}-{c.dtype}-{c.front}-{c.algorithm}")
@pytest.mark.parametrize("name", [n for n in CONTENDERS if n not in ("keops", "faiss-haswell")])
def test_every_contender_computes_the_case(name, config):
    if CONTENDERS[name].missing(config):
        pytest.skip(CONTENDERS[name].missing(config))
    data = make_data(config)
    (got,) = build(name, config, data).call()
    want = table(config, data)
    if config.case == "argkmin":
        assert (got.sort(1).values == want.sort(1).values).float().mean() > 0.999
    else:
        tolerance = {"float32": 1e-5, "float64": 1e-12, "float16": 3e-3, "bfloat16": 3e-2}[config.dtype]
        if (name, config.offset > 0) == ("torch", True) or name == "sklearn":
            tolerance = 1e-8  # a matrix product loses digits far from the origin, a tree's bounds some anyway
        elif name == "torch" and config.dtype in ("float16", "bfloat16"):
            tolerance = 0.1  # it rounds every intermediate
        assert got.shape == want.shape
        assert (got.double() - want).norm() < tolerance * want.norm()


def test_half_precision_is_compared_with_float32():
    config = Config("gaussian", 300, dtype="float16")
    data = make_data(config)
    (half,), (single,) = (build(name, config, data).call() for name in ("kernops", "kernops-float32"))
    assert (half.dtype, single.dtype) == (torch.float16, torch.float32)
    torch.testing.assert_close(half.float(), single, rtol=1e-3, atol=1e-3)
    assert CONTENDERS["kernops-float32"].missing(Config("gaussian", 300)) == "does not do float32"


@pytest.mark.parametrize("name", ["kernops", "torch"])
@pytest.mark.parametrize("case", ["gaussian", "logsumexp"])
def test_gradients_by_every_input(name, case):
    config = Config(case, 200, d=4, dtype="float64", backward="xyb" if case == "gaussian" else "xy")
    data = make_data(config)
    value, *gradients = build(name, config, data).call()
    inputs = [t.detach().clone().requires_grad_() for t in (data.x, data.y, data.b)]
    squares = ((inputs[0][:, None] - inputs[1][None]) ** 2).sum(-1)
    want = torch.exp(-squares) @ inputs[2] if case == "gaussian" else torch.logsumexp(-squares, 1, keepdim=True)
    expected = torch.autograd.grad(want, inputs[: len(config.backward)], data.g)
    torch.testing.assert_close(value, want.detach(), rtol=1e-12, atol=1e-12)
    for got, exact in zip(gradients, expected):
        torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", SQUARES)
@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
def test_blocks_do_not_change_the_result(form, rows):
    config = Config("gaussian", 150, dtype="float64", backward="xyb")
    data = make_data(config)
    parts = evaluate_rows(CASES["gaussian"], SQUARES[form], config, data, rows)
    whole = evaluate_rows(CASES["gaussian"], SQUARES["direct"], config, data, 150)
    for a, b in zip(parts, whole):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("config", [Config("gaussian", 700, backward="x"), Config("logsumexp", 700, backward="x")])
def test_errors_are_small_for_a_right_result_and_not_for_a_wrong_one(config):
    data = make_data(config)
    right = build("torch", config, data, ("cdist", 700)).call()
    found = errors(config, data, right)
    assert set(found) == {"error", "error_grad_x"}
    assert max(found.values()) < 1e-5
    wrong = errors(config, data, [right[0] * 1.01, right[1] + 0.01 * right[1].norm()])
    assert wrong["error"] == pytest.approx(0.01, rel=1e-3)
    assert wrong["error_grad_x"] > 0.01


def test_errors_are_those_of_the_inputs_as_given():
    """The reference takes the float32 points for exact: it measures arithmetic, not the rounding of the data."""
    config = Config("gaussian", 500)
    data = make_data(config)
    want = table(config, data)
    assert errors(config, data, [want])["error"] < 1e-14


class TestRecall:
    config = Config("argkmin", 400, k=5, dtype="float64")

    def recall(self, data: Data, index: torch.Tensor) -> float:
        return errors(self.config, data, [index])["recall"]

    def test_right(self):
        data = make_data(self.config)
        assert self.recall(data, table(self.config, data)) == 1.0

    def test_order_does_not_matter(self):
        data = make_data(self.config)
        assert self.recall(data, table(self.config, data).flip(1)) == 1.0

    def test_one_wrong_of_five(self):
        data = make_data(self.config)
        index = table(self.config, data)
        index[:, 2] = table(Config("argkmin", 400, k=9, dtype="float64"), data)[:, 8]
        assert self.recall(data, index) == pytest.approx(0.8)

    def test_missing_and_repeated_columns_are_no_hits(self):
        data = make_data(self.config)
        index = table(self.config, data)
        index[:, 4] = -1
        assert self.recall(data, index) == pytest.approx(0.8)
        index[:, 4] = index[:, 0]
        assert self.recall(data, index) == pytest.approx(0.8)

    def test_ties_count(self):
        data = make_data(self.config)
        twice = Data(data.x, data.y[:200].repeat(2, 1), data.b, data.g)
        index = (torch.cdist(data.x, twice.y[:200]) ** 2).argsort(1)[:, :3]
        either = torch.cat([index[:, :2], index[:, :2] + 200, index[:, 2:] + 200], 1)  # the later of two equal points
        assert self.recall(twice, either) == 1.0


def test_the_fastest_blocks_win(monkeypatch):
    """The search takes what the clock says, and never a table that is too large."""
    monkeypatch.setattr(peers, "CHUNKS", (4, 16, 64, 256))
    monkeypatch.setitem(peers.TABLE_NUMBERS, "cpu", 64 * 300)
    tried = []

    def seconds(case, squares, config, data, chunk):
        tried.append((squares, chunk))
        return 1.0 if (squares, chunk) != (SQUARES["cdist"], 16) else 0.5

    monkeypatch.setattr(peers, "_seconds_per_row", seconds)
    config = Config("gaussian", 300)
    built = build("torch", config, make_data(config))
    assert built.choice == ("cdist", 16) and built.note == "cdist, 16 rows"
    assert {chunk for squares, chunk in tried if squares is SQUARES["matmul"]} == {4, 16, 64}
    assert {chunk for squares, chunk in tried if squares is SQUARES["direct"]} == {4, 16}  # has a third axis


def test_data_is_the_same_in_every_process_and_precision():
    a, b = make_data(Config("gaussian", 50)), make_data(Config("gaussian", 50, dtype="float64"))
    assert torch.equal(a.x, b.x.float())
    assert torch.equal(a.x, make_data(Config("gaussian", 50)).x)
    assert (torch.cdist(b.x, b.y) ** 2).mean() == pytest.approx(2.0, rel=0.2)


def test_rows_of_the_sample():
    assert len(sample_rows(Config("gaussian", 100))) == 100
    assert len(sample_rows(Config("gaussian", 10_000))) == 512
    rows = sample_rows(Config("gaussian", 1_000_000))
    assert len(rows) == 100
    assert len(set(rows.tolist())) == 100
