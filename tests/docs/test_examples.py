"""The examples of the pages run: each block of Python, one after the other, in the page's own namespace."""

from __future__ import annotations

import doctest
import logging
import re
from collections.abc import Iterator

import pytest

from tests.docs.site import PAGES, ROOT


def blocks(page: str) -> Iterator[tuple[int, str]]:
    """``(line, text)`` of every block of Python of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in re.finditer(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        yield text.count("\n", 0, match.start()) + 2, match[1]


def run(page: str) -> None:
    names: dict = {"__name__": "page"}
    for line, text in blocks(page):
        if text.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(text, names, page, page, line - 1)
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
            runner.run(test, clear_globs=False)
            assert runner.failures == 0
        else:  # padded, so that a traceback names the page's line
            exec(compile("\n" * (line - 1) + text, str(ROOT / page), "exec"), names)


#: The reference shows signatures, not programs.
WITH_EXAMPLES = [p for p in PAGES if list(blocks(p)) and not p.startswith("docs/reference/") and p != "README.md"]


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A page may show how to switch logging on."""
    root, ours = logging.getLogger(), logging.getLogger("kernops")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


#: A dozen formulas and their derivatives, which would take a minute to compile.
TILED = ("docs/guide/gaussian-processes.md", "docs/gallery/flights.md")


@pytest.mark.parametrize("page", WITH_EXAMPLES)
def test_examples_run(page, monkeypatch):
    if page in TILED:
        monkeypatch.setenv("KERNOPS_BACKEND", "tiled")
    run(page)


def test_the_guide_has_examples():
    assert {p for p in PAGES if p.startswith("docs/guide/")} <= set(WITH_EXAMPLES)


def test_a_wrong_example_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.docs.test_examples.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError):
        run("page.md")
    page.write_text("```python\n>>> 1 + 1\n3\n```\n")
    with pytest.raises(AssertionError):
        run("page.md")
