"""What needs a process of its own: the first call (cold and warm cache) and the peak of memory.

``python -m kernops.bench.probe REQUEST`` with a request in JSON prints its answer in JSON as the last line.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

#: Rows of the problem that is used for first calls: small, so that compiling is what is measured.
FIRST_ROWS = 1000
#: Seconds after which a probe is given up.
PATIENCE = 900


class Failed(RuntimeError):
    """A probe that gave no answer; the message says why."""


def ask(what: str, contender: str, config: Any, environment: dict[str, str] | None = None, choice: Any = None) -> dict:
    """Run a probe in a new process.

    Raises:
        Failed: it died or gave no answer, for example because the library's own start-up crashed.
    """
    request = json.dumps({"what": what, "contender": contender, "config": config.to_json(), "choice": choice})
    command = [sys.executable, "-m", "kernops.bench.probe", request]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, **(environment or {})}
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"no answer within {PATIENCE} s") from None
    if done.returncode < 0:
        raise Failed(f"crashed ({signal.Signals(-done.returncode).name})")
    if done.returncode:
        raise Failed((done.stderr.strip().splitlines() or ["no message"])[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def first_calls(contender: str, config: Any, cache_variable: str) -> dict[str, float]:
    """Seconds of import and first call with an empty cache, then in a new process with what the first one left."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="kernops-bench-") as folder:
        environment = {cache_variable: folder} if cache_variable else {}
        for state in ("cold", "warm"):
            answer = ask("first", contender, config, environment)
            found.update({f"{name}_{state}": value for name, value in answer.items()})
    return found


def _first(contender: str, config: Any) -> dict[str, float]:
    """Times of a first call on a problem so small that little but compiling is measured."""
    from .peers import CONTENDERS, build, synchronize
    from .problem import make_data

    config = replace(config, n=min(config.n, FIRST_ROWS))
    data = make_data(config)  # starts torch and, on a GPU, its context
    synchronize(config.device)
    start = time.perf_counter()
    for module in CONTENDERS[contender].modules:
        importlib.import_module(module)
    imported = time.perf_counter()
    built = build(contender, config, data)
    built.call()
    synchronize(config.device)
    first = time.perf_counter()
    again = float("inf")
    for _ in range(3):
        start_again = time.perf_counter()
        built.call()
        synchronize(config.device)
        again = min(again, time.perf_counter() - start_again)
    return {"import": imported - start, "first_call": first - imported - again, "first_call_total": first - imported}


def _memory(contender: str, config: Any, choice: Any) -> dict[str, int | None]:
    """Growth of memory during one call, over what was there before it."""
    from .peers import build
    from .problem import make_data

    small = replace(config, n=min(config.n, 256))
    build(contender, small, make_data(small), choice and (choice[0], min(choice[1], small.n))).call()
    data = make_data(config)
    built = build(contender, config, data, choice and tuple(choice))
    gc.collect()
    peak = cuda_peak if config.device == "cuda" else resident_peak
    return {"peak_bytes": peak(built.call)}


def _time(contender: str, config: Any, limits: dict[str, Any]) -> dict[str, Any]:
    """Times and errors of a contender that is measured alone."""
    from .cases import CASES
    from .peers import start
    from .problem import make_data, sample_rows
    from .protocol import interleave

    data, sample = make_data(config), sample_rows(config)
    built, got = start(contender, config, data)
    errors = CASES[config.case].error([t.detach()[sample] for t in got], data.double_rows(sample), config)
    timing = interleave({contender: built.call}, config.device, **limits)[contender]
    return {"note": built.note, **errors, **timing.to_json()}


def cuda_peak(call: Any) -> int:
    """As torch's allocator sees it, in any process; what a library allocates beside it is not counted."""
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def resident_peak(call: Any) -> int | None:
    """Growth of the resident set; None where the system does not tell (only Linux can reset the peak)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = _status("VmRSS")
    result = call()
    peak = _status("VmHWM")
    del result
    return max(0, peak - before)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def main(text: str) -> None:
    request = json.loads(text)
    import torch  # noqa: F401  before the clock starts: every contender needs it

    from .problem import Config
    from .splat import SplatConfig
    from .splat_memory import resident

    if request["what"] == "splat":
        answer: dict[str, Any] = resident(
            request["contender"], SplatConfig.from_json(request["config"]), request["choice"]
        )
    elif request["what"] == "first":
        answer = dict(_first(request["contender"], Config.from_json(request["config"])))
    elif request["what"] == "time":
        answer = _time(request["contender"], Config.from_json(request["config"]), request["choice"])
    else:
        answer = dict(_memory(request["contender"], Config.from_json(request["config"]), request["choice"]))
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
