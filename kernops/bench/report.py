"""Results as one readable table, in text or in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .cases import CASES
from .machine import describe
from .splat import SETTINGS

Row = dict[str, Any]


def seconds(t: float | None) -> str:
    """A duration with three digits and a unit."""
    if t is None:
        return "–"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if t >= scale:
            return f"{t / scale:.3g} {unit}" if t / scale < 1000 else f"{t / scale:.0f} {unit}"
    return f"{t * 1e6:.2g} µs" if t else "0 s"


def size(count: float | None) -> str:
    """A number of bytes with a unit."""
    if count is None:
        return "–"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def _accuracy(row: Row) -> str:
    if "recall" in row:
        return f"recall {row['recall']:.6g}"
    parts = [f"{row[name]:.1e}" for name in ("error", "error_grad_x") if name in row]
    return " / ".join(parts) or "–"


def _first(row: Row) -> str:
    if "first_call_cold" not in row:
        return "–"
    return " / ".join(seconds(max(0.0, row[name])) for name in ("first_call_cold", "first_call_warm"))


#: Heading -> text of a row.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "points": lambda row: f"{row['config']['n']:,}",
    "D": lambda row: str(row["config"]["d"]),
    "by": lambda row: row["contender"],
    "time": lambda row: seconds(row.get("seconds")),
    "ratio": lambda row: f"{row['ratio']:.2f}" if row.get("ratio") else "–",
    "error": _accuracy,
    "first call cold / warm": _first,
    "peak memory": lambda row: size(row.get("peak_bytes")),
    "note": lambda row: row["missing"] or row.get("note", ""),
}


def _errors(row: Row) -> str:
    """Of a splat: relative L2 of the value and of the gradients, and the worst cell."""
    parts = [f"{row[name]:.1e}" for name in ("error", "error_depth", "error_feat", "error_points") if name in row]
    return " / ".join(parts) + f" (worst cell {row['error_max']:.1e})" if parts else "–"


def _times(name: str, device: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        found = row.get(name) if row["config"]["device"] == device else None
        return f"{seconds(found['seconds'])} ({seconds(found['seconds_min'])})" if found else "–"

    return text


def _splat_note(row: Row) -> str:
    parts = [row["missing"] or row.get("note", "")]
    parts += [f"not captured: {row['not_captured']}"] if row.get("not_captured") else []
    return "; ".join(p for p in parts if p)


#: The same for splats: medians, and minima in parentheses.
SPLAT_COLUMNS: dict[str, Callable[[Row], str]] = {
    "by": lambda row: row["contender"],
    "time (min)": _times("eager", "cpu"),
    "graph (min)": _times("graph", "cuda"),
    "eager (min)": _times("eager", "cuda"),
    "value alone": lambda row: seconds(row.get("forward_seconds")),
    "backward : forward": lambda row: f"{row['backward_by_forward']:.2f}" if "backward_by_forward" in row else "–",
    "ratio": COLUMNS["ratio"],
    "error": _errors,
    "peak memory": COLUMNS["peak memory"],
    "note": _splat_note,
}


def _is_splat(row: Row) -> bool:
    return row["config"]["case"] == "splat"


def _splat_title(row: Row) -> str:
    config, sizes = row["config"], row["sizes"]
    parts = ["splat", config["setting"], config["dtype"], config["device"]]
    parts += ["value and gradients"] if config["backward"] else []
    facts = (
        f"{sizes['points']:,} points, {sizes['kept']:,} kept in {sizes['cells']:,} cells (at most {sizes['longest']:,})"
    )
    return f"{', '.join(parts)}: {SETTINGS[config['setting']].doc}; {facts}"


def title(result: Row) -> str:
    """What a table is about."""
    if _is_splat(result["results"][0]):
        return _splat_title(result["results"][0])
    config = result["results"][0]["config"]
    if result["command"][0] == "overhead":
        return f"a call on {config['n']} points, {config['device']}{_gradients(config)}"
    parts = [config["case"], f"D={config['d']}", config["dtype"], config["device"]]
    parts += [f"rhs={config['rhs']}"] if config["case"] == "gaussian" and config["rhs"] > 1 else []
    parts += [f"k={config['k']}"] if config["case"] == "argkmin" else []
    return ", ".join(parts) + _gradients(config) + f": {CASES[config['case']].doc}"


def _gradients(config: dict[str, Any]) -> str:
    return f", value and gradient by {', '.join(config['backward'])}" if config["backward"] else ""


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    """The table, without columns in which there is nothing to read."""
    columns = SPLAT_COLUMNS if _is_splat(rows[0]) else COLUMNS
    table = [list(columns)] + [[text(row) for text in columns.values()] for row in rows]
    keep = [k for k in range(len(columns)) if any(line[k] not in ("", "–") for line in table[1:])]
    if table[0][1] == "D" and len({line[1] for line in table[1:]}) == 1:  # one dimension, which the title tells
        keep.remove(1)
    return [[line[k] for k in keep] for line in table]


def text_table(rows: Sequence[Row]) -> str:
    """Columns aligned for a terminal."""
    cells = _cells(rows)
    widths = [max(len(line[k]) for line in cells) for k in range(len(cells[0]))]
    cells.insert(1, ["-" * w for w in widths])
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in cells)


def markdown_table(rows: Sequence[Row]) -> str:
    """The same for a page."""
    cells = _cells(rows)
    cells.insert(1, ["---"] * len(cells[0]))
    return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in cells)


LEGEND = "time: median; ratio: a peer's time over that of kernops"


def _splat_legend(result: Row) -> str:
    ours = next((r["contender"] for r in result["results"] if r["contender"].startswith("kernops")), "kernops")
    what = "medians; graph: captured calls, eager: with the cost of the call in Python; " if any(
        "graph" in r for r in result["results"]) else "medians; "  # fmt: skip
    return (
        f"{what}ratio: time over that of {ours}; frustum tensor {size(result['results'][0]['sizes']['frustum_bytes'])}"
    )


def text(result: Row) -> str:
    """One result (see ``__main__.run``) for a terminal."""
    lines = [title(result), text_table(result["results"])]
    legend = _splat_legend(result) if _is_splat(result["results"][0]) else LEGEND
    lines += [f"{legend}; {describe(result['environment'])}"]
    return "\n".join(lines)


def markdown(results: Sequence[Row]) -> str:
    """Results for a page: the machine once, then a table each, with the command that measures it again."""
    blocks = []
    machine = None
    for result in results:
        if describe(result["environment"]).rsplit("; load", 1)[0] != machine:
            machine = describe(result["environment"]).rsplit("; load", 1)[0]
            blocks.append(f"Measured on {describe(result['environment'])}.")
        blocks.append(f"### {title(result)}")
        blocks.append(f"```\npython -m kernops.bench {' '.join(result['command'])}\n```")
        blocks.append(markdown_table(result["results"]))
    return "\n\n".join(blocks) + "\n"
