"""Progress: scikit-learn's callbacks, a bar by tqdm, lines to stderr."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_diabetes
from sklearn.gaussian_process import kernels as gp
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from kernops.estimators import GaussianProcessClassifier, GaussianProcessRegressor, KernelRidge, _progress

X, Y = load_diabetes(return_X_y=True)
X, Y = X[:100, :4] * 10, Y[:100] / 100
LABELS = (Y > 1.3).astype(int)
KERNEL = gp.RBF(1.0) + gp.WhiteKernel(0.5)

MODELS: dict[str, tuple[Any, np.ndarray, str]] = {
    "GaussianProcessRegressor": (GaussianProcessRegressor(KERNEL), Y, "likelihood"),
    "GaussianProcessRegressor by iteration": (
        GaussianProcessRegressor(KERNEL, solver="cg", rank=20, random_state=0), Y, "likelihood"),
    "GaussianProcessClassifier": (GaussianProcessClassifier(gp.RBF(1.0)), LABELS, "likelihood"),
    "KernelRidge": (KernelRidge(kernel="rbf", solver="cg"), Y, "iteration"),
    "KernelRidge by Cholesky": (KernelRidge(kernel="rbf"), Y, "solution"),
}  # fmt: skip


def made(name: str, **options: Any) -> tuple[Any, np.ndarray, str]:
    model, y, task = MODELS[name]
    return clone(model).set_params(**options), y, task


@pytest.mark.parametrize("name", MODELS)
def test_silence_and_lines(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    model, y, task = made(name)
    model.fit(X, y)
    assert capfd.readouterr() == ("", "")
    talking, _, _ = made(name, verbose=2)
    talking.fit(X, y)
    out, lines = capfd.readouterr()
    rows = lines.splitlines()
    assert out == "" and len(rows) == sum(f": {task} " in row or ": solution " in row for row in rows)
    assert rows[0].split()[1:3] == [task, "1:"] and all(row.endswith(" s") for row in rows)
    if task == "likelihood":
        assert f"{-min(-float(row.split()[3].strip(',')) for row in rows[:-1]):.5g}" == (
            f"{talking.log_marginal_likelihood_value_:.5g}"
        )
        assert ("iterations at rank" in lines) == (getattr(model, "solver", "") == "cg")
    if task == "iteration":
        assert len(rows) == talking.n_iter_ and "residual" in rows[0]
    np.testing.assert_array_equal(talking.predict(X), model.predict(X))


@pytest.mark.parametrize("name", ["GaussianProcessRegressor", "KernelRidge"])
def test_a_bar_where_tqdm_is_installed_and_lines_where_it_is_not(
    name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tqdm")
    model, y, task = made(name, verbose=1)
    model.fit(X, y)
    out, bar = capfd.readouterr()
    assert out == "" and f"{type(model).__name__}: " in bar and "it/s" in bar and f"{task} 1" not in bar
    monkeypatch.setitem(sys.modules, "tqdm", None)
    model.fit(X, y)
    assert f"{type(model).__name__}: {task} 1: " in capfd.readouterr().err


class Recorder:
    """A callback that writes down what happens, and stops at a task."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop, self.events, self.scores = stop, [], []  # type: ignore[var-annotated]

    def setup(self, estimator: Any, context: Any) -> None:
        self.events.append(("setup", type(estimator).__name__))

    def teardown(self, estimator: Any, context: Any) -> None:
        self.events.append(("teardown", type(estimator).__name__))

    def on_fit_task_begin(self, estimator: Any, context: Any) -> None:
        self.events.append(("begin", context.task_name))

    def on_fit_task_end(
        self, estimator: Any, context: Any, *, X: Any = None, y: Any = None, fitted_estimator: Any = None
    ) -> bool:
        self.events.append(("end", context.task_name))
        assert X.shape == (100, 4) and len(y) == 100
        if fitted_estimator is not None:
            self.scores.append(fitted_estimator.score(X, y))
        return context.task_name != "fit" and context.task_id == self.stop

    def count(self, *event: str) -> int:
        return self.events.count(event)


@pytest.mark.parametrize("name", MODELS)
def test_callbacks(name: str) -> None:
    pytest.importorskip("sklearn.callback")
    model, y, task = made(name)
    recorder = Recorder()
    model.set_callbacks(recorder).fit(X, y)
    assert recorder.events[:2] == [recorder.events[0], ("begin", "fit")]
    assert recorder.events[-2:] == [("end", "fit"), ("teardown", recorder.events[0][1])]
    assert recorder.count("begin", task) == recorder.count("end", task) >= 1
    if task == "likelihood":  # the last one is of the model as it is
        assert recorder.count("end", "solution") == 1 and len(recorder.scores) == len(recorder.events) // 2 - 1
        assert recorder.scores[-1] == pytest.approx(model.score(X, y))
    plain, _, _ = made(name)
    np.testing.assert_array_equal(plain.fit(X, y).predict(X), model.predict(X))
    assert not any("callback" in key and key != "_skl_callbacks" for key in vars(model))


@pytest.mark.parametrize("name", ["GaussianProcessRegressor", "KernelRidge"])
def test_callbacks_end_an_iteration(name: str) -> None:
    pytest.importorskip("sklearn.callback")
    model, y, task = made(name)
    recorder = Recorder(stop=1)
    if name == "KernelRidge":
        with pytest.warns(UserWarning, match="the callback asked for the end"):
            model.set_callbacks(recorder).fit(X, y)
        assert model.n_iter_ == 2
    else:
        model.set_callbacks(recorder).fit(X, y)
        best = max(model.log_marginal_likelihood(t) for t in (KERNEL.theta, model.kernel_.theta))
        assert model.log_marginal_likelihood_value_ == pytest.approx(best)
    assert recorder.count("end", task) == 2 and model.predict(X).shape == (100,)


def test_callbacks_of_a_pipeline_reach_the_estimator() -> None:
    pytest.importorskip("sklearn.callback")
    recorder = Recorder()
    make_pipeline(StandardScaler(), GaussianProcessRegressor(KERNEL).set_callbacks(recorder)).fit(X, Y)
    assert recorder.count("end", "likelihood") > 2 and recorder.count("teardown", "GaussianProcessRegressor") == 1


def test_callbacks_are_torn_down_after_an_error() -> None:
    pytest.importorskip("sklearn.callback")
    recorder = Recorder()
    model = GaussianProcessRegressor(gp.PairwiseKernel(metric="sigmoid"), optimizer=None).set_callbacks(recorder)
    with pytest.raises(Exception, match="not positive definite"):
        model.fit(10 * X, Y)
    assert recorder.count("teardown", "GaussianProcessRegressor") == 1 and recorder.count("end", "fit") == 0


def test_callbacks_must_be_callbacks() -> None:
    pytest.importorskip("sklearn.callback")
    with pytest.raises(TypeError, match="FitCallback"):
        KernelRidge().set_callbacks(print)


def test_versions_of_scikit_learn_without_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.callback", None)
    spec = importlib.util.spec_from_file_location("kernops.estimators._progress_before", _progress.__file__)
    assert spec is not None and spec.loader is not None
    before: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(before)

    class Estimator(before.CallbackSupportMixin):
        verbose = 0

        @before.with_callbacks
        def fit(self) -> int:
            with before.Progress(self, X, Y) as progress:
                progress.begin("step")
                progress.end("done")
                assert not progress.listening
            return progress.count

    assert Estimator().fit() == 1 and not hasattr(Estimator(), "set_callbacks")
