"""Generated pages are what would be generated now, and links lead somewhere."""

from __future__ import annotations

import re

import pytest

from kernops.environment import VARIABLES
from kernops.formula.ops import OPS
from kernops.formula.reductions import REDUCTIONS
from tests.docs.site import DOCS, PAGES, ROOT, module

generate = module("generate")


@pytest.mark.parametrize("page", generate.PAGES)
def test_committed_pages_are_up_to_date(page):
    written = (DOCS / page).read_text(encoding="utf-8")
    assert written == generate.PAGES[page](), "run `python docs/generate.py`"


def test_an_outdated_page_is_found_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    monkeypatch.setattr(generate, "charts", dict)
    monkeypatch.setattr(generate, "PAGES", {"a.md": lambda: "new\n", "b.md": lambda: "same\n"})
    (tmp_path / "a.md").write_text("old\n")
    (tmp_path / "b.md").write_text("same\n")
    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().out == "out of date: docs/a.md\n"
    assert (tmp_path / "a.md").read_text() == "old\n"
    assert generate.main([]) == 0
    assert (tmp_path / "a.md").read_text() == "new\n"
    assert generate.main(["--check"]) == 0


def test_every_row_of_the_tables_is_on_its_page():
    ops, reductions = generate.PAGES["reference/ops.md"](), generate.PAGES["reference/reductions.md"]()
    assert all(f"| `{name}(" in ops for name in OPS)
    assert all(f"| `{name}` |" in reductions for name in REDUCTIONS)


def test_environment_variables_of_the_pages_exist():
    named = {
        name for page in PAGES for name in re.findall(r"KERNOPS_[A-Z_]+", (ROOT / page).read_text(encoding="utf-8"))
    }
    assert named == set(VARIABLES)


def anchors(text: str) -> set[str]:
    """Anchors that GitHub gives to the headings of a page."""
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", plain, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        other = (path.parent / file).resolve() if file else path
        assert other.is_file(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(other.read_text(encoding="utf-8")), f"{page}: {target}"


def test_every_page_is_linked_from_the_index():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    pages = {(ROOT / page).relative_to(DOCS).as_posix() for page in PAGES if page.startswith("docs/")} - {"index.md"}
    assert pages <= set(re.findall(r"\]\(([^)#\s]+)", index))


def test_public_names_have_docstrings():
    api = module("_api")
    for name in api.MODULES:
        for public in api.public_names(name):
            thing = getattr(__import__(name, fromlist=["x"]), public)
            assert (thing.__doc__ or "").strip(), f"{name}.{public}"
