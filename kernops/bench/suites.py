"""Benchmarks that belong together: the pages under ``docs/benchmarks`` are these, measured."""

from __future__ import annotations

SUITES: dict[str, tuple[str, ...]] = {
    "splat": (
        "splat --setting lss100 --device cuda --budget 3",
        "splat --setting lss100 --backward --device cuda --peer torch,bev_pool_v2 --budget 3",
        "splat --setting lss100 --dtype float16 --device cuda --plan cached --peer torch,conch --budget 3",
        "splat --setting lss100 --dtype float16 --backward --device cuda --peer none --budget 3 --no-probes",
        "splat --setting bevdet118 --device cuda --plan cached,refreshed --budget 3 --no-probes",
        "splat --setting bevdet118 --backward --device cuda --peer bev_pool_v2 --budget 3 --no-probes",
        "splat --setting bevdet59 --device cuda --plan cached,refreshed --budget 3",
        "splat --setting bevdet59 --backward --device cuda --peer bev_pool_v2 --budget 3 --no-probes",
    ),
    "splat-cpu": (
        "splat --setting lss100 --device cpu --budget 10",
        "splat --setting lss100 --backward --device cpu --budget 10 --no-probes",
        "splat --setting bevdet118 --device cpu --budget 10",
        "splat --setting bevdet59 --device cpu --budget 10",
        "splat --setting bevdet59 --backward --device cpu --budget 10 --no-probes",
    ),
    "gp-cuda": (
        "gp likelihood --n 20000,100000 --device cuda --budget 3",
        "gp likelihood --n 50000 --d 9 --device cuda --budget 3",
        "gp likelihood --n 20000 --d 32 --device cuda --budget 3",
        "gp likelihood --n 1000000 --device cuda --peer none --budget 1",
        "gp predict --n 20000,100000 --tol 0.001 --device cuda --budget 5 --repeats 3",
        "gp predict --n 50000 --d 9 --tol 0.001 --device cuda --budget 5 --repeats 3",
        "gp predict --n 20000 --d 32 --tol 0.001 --device cuda --budget 5 --repeats 3",
    ),
    "gp-cpu": (
        "gp likelihood --n 5000 --device cpu --budget 10",
        "gp regressor --n 2000,20000 --queries 1000 --device cpu --budget 10",
        "gp ridge --n 10000,100000 --device cpu --budget 10",
    ),
}
