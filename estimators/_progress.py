"""What ``fit`` says while it works: scikit-learn's callbacks, a bar by tqdm, or lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from ._base import OneOf

try:  # scikit-learn >= 1.9
    from sklearn.callback import CallbackSupportMixin, with_callbacks
except ImportError:

    class CallbackSupportMixin:  # type: ignore[no-redef]
        """In place of scikit-learn's, in versions without callbacks: there is no ``set_callbacks`` then."""

    def with_callbacks(method):  # type: ignore[no-redef]
        return method


#: The rule of ``verbose``.
VERBOSE = OneOf((0, 1, 2, False, True))


class Stopped(Exception):
    """A callback asked for the end of an iteration."""


class Progress:
    """Reports the steps of one ``fit``.

    Every step is a task of scikit-learn's callbacks, below that of ``fit``. Besides, ``verbose=1`` shows a bar where
    tqdm is installed and a line for each step where it is not; ``verbose=2`` writes the lines; all to stderr.

    Args:
        estimator: whose ``fit`` it is; its ``verbose`` decides.
        X, y: its data, for callbacks.
        total: number of steps; None where it is unknown.
    """

    def __init__(self, estimator: Any, X: Any, y: Any, total: int | None = None) -> None:
        self.estimator, self.data = estimator, {"X": X, "y": y}
        self.name = getattr(estimator, "_title", type(estimator).__name__)
        self.count = 0
        self.bar = _bar(self.name, total) if estimator.verbose == 1 else None
        self.lines = estimator.verbose == 2 or (estimator.verbose == 1 and self.bar is None)
        self.context: Any = None
        self.below: Any = None
        if hasattr(estimator, "_init_callback_context"):
            self.context = estimator._init_callback_context(max_subtasks=total)
            self.context.call_on_fit_task_begin(estimator=estimator, **self.data)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.below is not None and error is None:  # a step that was not needed
            self.below.call_on_fit_task_end(estimator=self.estimator, **self.data)
        if self.context is not None and error is None:
            self.context.call_on_fit_task_end(
                estimator=self.estimator, **self.data, reconstruction_attributes=lambda: vars(self.estimator)
            )

    @property
    def listening(self) -> bool:
        """Whether anybody wants to know."""
        return self.lines or self.bar is not None or bool(self.context is not None and self.context._callbacks)

    def begin(self, task: str) -> None:
        """A step begins, whose kind is told in a word or two."""
        self.task, self.started = task, time.perf_counter()
        if self.context is not None and self.context._callbacks:
            self.below = self.context.subcontext(task_name=task)
            self.below.call_on_fit_task_begin(estimator=self.estimator, **self.data)

    def end(self, text: str, attributes: Callable[[], Mapping[str, Any]] | None = None) -> None:
        """The step is done.

        Args:
            text: what came out.
            attributes: makes the attributes of an estimator that is fitted as far as this.

        Raises:
            Stopped: a callback asked for the end.
        """
        self.count += 1
        if self.lines:
            took = time.perf_counter() - self.started
            sys.stderr.write(f"{self.name}: {self.task} {self.count}: {text}, {took:.2g} s\n")
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update()
        if self.below is not None:
            below, self.below = self.below, None
            if below.call_on_fit_task_end(estimator=self.estimator, **self.data, reconstruction_attributes=attributes):
                raise Stopped


def _bar(name: str, total: int | None) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(desc=name, total=total, file=sys.stderr, leave=True)
