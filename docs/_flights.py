"""The measurements of the page of flights: ``python docs/_flights.py kernops 20000``, once for each of its rows.

Each is a process of its own, so that its peak of memory is its own; the results are kept in ``gallery/flights.json``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import numpy as np  # noqa: E402
from _gallery import LEVELS  # noqa: E402

from kernops.bench import gp_peers  # noqa: E402
from kernops.bench.flights import flights  # noqa: E402
from kernops.bench.machine import environment  # noqa: E402

FILE = Path(__file__).resolve().parent / "gallery" / "flights.json"
QUERIES = 1000


def peak_bytes() -> int:
    """The most memory that this process ever had, the libraries included."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(library: str, n: int, device: str) -> dict[str, Any]:
    """One row: a regressor of ``n`` flights."""
    from scipy.stats import norm

    own = library == "kernops"
    data = flights(n, QUERIES)
    regressor = gp_peers.LIBRARIES[library]()
    model = regressor(gp_peers.flights_kernel(), optimizer=gp_peers.few_steps, normalize_y=True, random_state=0,
                      **({"device": device} if own else {}))  # fmt: skip
    start, busy = time.perf_counter(), time.process_time()
    model.fit(data.x, data.y)
    fitted = time.perf_counter()
    mean, std = model.predict(data.x_test, return_std=True)
    done, busy = time.perf_counter(), time.process_time() - busy
    error = mean - data.y_test
    inside = [float(np.mean(np.abs(error) <= norm.ppf((1 + level) / 2) * std)) for level in LEVELS]
    return {
        "by": library,
        "flights": n,
        "fit": fitted - start,
        "predict": done - fitted,
        "cores_seconds": busy,
        "rmse": float(np.sqrt(np.mean(error**2))),
        "constant": float(np.sqrt(np.mean((data.y.mean() - data.y_test) ** 2))),
        "loss": float(-np.mean(norm.logpdf(error / std) - np.log(std))),
        "inside": inside,
        "kernel": np.exp(model.kernel_.theta).round(4).tolist(),
        "peak_bytes": peak_bytes(),
        "environment": environment(device),
    }


def main(arguments: list[str]) -> None:
    library, n, *rest = arguments
    row = measure(library, int(n), rest[0] if rest else "cpu")
    rows = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else []
    key = lambda r: (r["by"], r["flights"], "gpu" in r["environment"])  # noqa: E731
    rows = [r for r in rows if key(r) != key(row)] + [row]
    rows.sort(key=lambda r: (r["by"] != "scikit-learn", r["flights"]))
    FILE.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print({k: v for k, v in row.items() if k != "environment"})


if __name__ == "__main__":
    main(sys.argv[1:])
