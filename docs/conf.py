"""The site: `python3 -m pip install ".[docs]" && python3 -m sphinx docs docs/_build`."""

from importlib.metadata import version as installed_version

project = "kernops"
author = "the kernops developers"
copyright = f"2026, {author}"
version = release = installed_version("kernops")

extensions = ["myst_parser"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_title = f"kernops {release}"
# Pages are plain Markdown that GitHub shows too: the index is a list of links, and tests follow the links.
suppress_warnings = ["toc.not_included", "myst.xref_missing"]
