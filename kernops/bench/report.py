"""Results as one readable table, in text or in Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Any

from .cases import CASES
from .gp import TASKS
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


def _number(name: str, form: str = ".1e") -> Callable[[Row], str]:
    return lambda row: format(row[name], form) if row.get(name) is not None else "–"


#: The same for Gaussian processes.
GP_COLUMNS: dict[str, Callable[[Row], str]] = {
    "points": COLUMNS["points"],
    "D": COLUMNS["D"],
    "by": COLUMNS["by"],
    "time": COLUMNS["time"],
    "ratio": COLUMNS["ratio"],
    "preconditioner": lambda row: row.get("preconditioner") or "–",
    "rank": _number("rank", "d"),
    "iterations": _number("iterations", "d"),
    "residual": _number("residual"),
    "loss": _number("loss", ".5f"),
    "error of the loss": _number("loss_error"),
    "error of the mean": _number("mean_error"),
    "error of the std, at worst": _number("std_error"),
    "RMSE, minutes": _number("rmse", ".2f"),
    "inside 90 %": lambda row: f"{100 * row['coverage']:.1f} %" if "coverage" in row else "–",
    "peak memory": COLUMNS["peak memory"],
    "note": COLUMNS["note"],
}


def _gp_title(config: Row) -> str:
    parts = [f"gp {config['task']}", config["dtype"], config["device"]]
    parts += [f"{config['probes']} probes"] if config["task"] == "likelihood" else [f"{config['queries']:,} new points"]
    parts += [f"tolerance {config['tol']:g}"] if config["task"] in ("likelihood", "predict") else []
    return f"{', '.join(parts)}: {TASKS[config['task']]}"


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
    if result["results"][0]["config"]["case"] == "gp":
        return _gp_title(result["results"][0]["config"])
    if "goal" in result:
        return f"{result['goal']['key']}: {_problem(result['results'][0]['config'])}"
    config = result["results"][0]["config"]
    if result["command"][0] == "overhead":
        return f"a call on {config['n']} points, {config['device']}{_gradients(config)}"
    return _problem(config)


def _problem(config: Row) -> str:
    case = CASES[config["case"]]
    parts = [config["case"], f"D={config['d']}", config["dtype"], config["device"]]
    parts += [f"rhs={config['rhs']}"] if case.uses_b and config["rhs"] > 1 else []
    parts += [f"k={config['k']}"] if config["case"] == "argkmin" else []
    parts += [f"{name}={config[name]:g}" for name in ("offset", "rtol") if config.get(name)]
    return ", ".join(parts) + _gradients(config) + f": {case.doc}"


def _gradients(config: dict[str, Any]) -> str:
    return f", value and gradient by {', '.join(config['backward'])}" if config["backward"] else ""


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    """The table, without columns in which there is nothing to read."""
    columns = {"splat": SPLAT_COLUMNS, "gp": GP_COLUMNS}.get(rows[0]["config"]["case"], COLUMNS)
    table = [list(columns)] + [[text(row) for text in columns.values()] for row in rows]
    keep = [k for k in range(len(columns)) if any(line[k] not in ("", "–") for line in table[1:])]
    if table[0][1] == "D" and len({line[1] for line in table[1:]}) == 1:  # one dimension, which the title tells
        keep.remove(1)
    return [[line[k] for k in keep] for line in table]


def text_table(rows: Sequence[Row]) -> str:
    """Columns aligned for a terminal."""
    return _aligned(_cells(rows))


def _aligned(cells: list[list[str]]) -> str:
    widths = [max(len(line[k]) for line in cells) for k in range(len(cells[0]))]
    lines = [cells[0], ["-" * w for w in widths], *cells[1:]]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in lines)


def markdown_table(rows: Sequence[Row]) -> str:
    """The same for a page."""
    return markdown_cells(_cells(rows))


def markdown_cells(cells: list[list[str]]) -> str:
    """Cells, the headings first, as a table of Markdown."""
    lines = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines)


LEGEND = "time: median; ratio: a peer's time over that of kernops"


def _splat_legend(result: Row) -> str:
    ours = next((r["contender"] for r in result["results"] if r["contender"].startswith("kernops")), "kernops")
    what = "medians; graph: captured calls, eager: with the cost of the call in Python; " if any(
        "graph" in r for r in result["results"]) else "medians; "  # fmt: skip
    return (
        f"{what}ratio: time over that of {ours}; frustum tensor {size(result['results'][0]['sizes']['frustum_bytes'])}"
    )


def _checked(check: Row) -> str:
    """One thing to reach: what was found, what was to be reached, and whether that is so."""
    show = seconds if check["what"] == "seconds" else lambda value: "–" if value is None else f"{value:.3g}"
    name = "" if check["what"] == "seconds" else f"{check['what']} "
    return f"{name}{show(check['found'])} (target {show(check['target'])})"


VERDICTS = {True: "yes", False: "no", None: "?"}


def _goal_cells(result: Row) -> list[str]:
    goal, ours = result["goal"], result["results"][0]
    peers = [
        f"{row['contender']} {seconds(row['seconds'])}" if "seconds" in row else f"{row['contender']}: {row['missing']}"
        for row in result["results"][1:]
    ]
    return [
        goal["key"],
        ours["missing"] or seconds(ours.get("seconds")),
        f"{seconds(ours['floor'])}, {ours['bound']}" if "floor" in ours else "–",
        "; ".join(map(_checked, goal["checks"])) or "–",
        VERDICTS[goal["met"]] if goal["checks"] else "–",
        ", ".join(peers) or "–",
    ]


GOAL_HEADS = ["row", "kernops", "at least", "found (target)", "met", "peers"]


def goal_table(results: Sequence[Row]) -> list[list[str]]:
    """The cells of the table of goals, its headings first."""
    return [GOAL_HEADS, *map(_goal_cells, results)]


def summary(results: Sequence[Row]) -> str:
    """Goals in one table for a terminal, and how many are met."""
    judged = [r["goal"]["met"] for r in results if r["goal"]["checks"]]
    count = f"{judged.count(True)} of {len(judged)} met, {judged.count(None)} not judged"
    return f"{_aligned(goal_table(results))}\n{count}"


def text(result: Row) -> str:
    """One result (see ``__main__.run``) for a terminal."""
    lines = [title(result), text_table(result["results"])]
    if "goal" in result and result["goal"]["checks"]:
        lines.append(f"met: {VERDICTS[result['goal']['met']]}; " + "; ".join(map(_checked, result["goal"]["checks"])))
    legend = _splat_legend(result) if _is_splat(result["results"][0]) else LEGEND
    lines += [f"{legend}; {describe(result['environment'])}"]
    return "\n".join(lines)


def texts(results: Sequence[Row]) -> list[str]:
    """All results for a terminal; goals are summed up in the end."""
    goals = [r for r in results if "goal" in r]
    return [*map(text, results), *([summary(goals)] if goals else [])]


def markdown(results: Sequence[Row]) -> str:
    """Results for a page: the machine once, then a table each, with the command that measures it again."""
    blocks = []
    machine = None
    for result in results:
        if describe(result["environment"]).rsplit("; load", 1)[0] != machine:
            machine = describe(result["environment"]).rsplit("; load", 1)[0]
            blocks.append(f"Measured on {describe(result['environment'])}.")
        blocks.append(f"### {title(result)}")
        blocks.append(f"```\npython -m kernops.bench {shlex.join(result['command'])}\n```")
        blocks.append(markdown_table(result["results"]))
    return "\n\n".join(blocks) + "\n"
