"""A pruned search of neighbours on a GPU: its schedule, and the CUDA source that instantiates ``cuda/search.cuh``."""

from __future__ import annotations

from dataclasses import dataclass

from ..formula.plan import Plan
from .instantiate import ITEM_THREADS, TYPES, bounds, compiled, preamble
from .schedule import Schedule
from .search import worth_on_gpu

#: Numbers of a sorted sample, threads of the block that sorts it, columns or boxes of a box (cuda/boxes.cuh).
TABLE, TABLE_THREADS, FAN = 1024, 512, 32
#: In so few dimensions keys of 31 bits are long enough, and quicker to sort.
SHORT_KEYS = 3
#: A trial searches for so many rows, each of which gives up when it has looked at this share of the boxes.
TRIALS, TRIAL_SHARE = 2048, 1 / 16


@dataclass(frozen=True)
class Searching:
    """How a search runs.

    Attributes:
        k, dim: neighbours of each row, coordinates.
        key: bytes of a key.
        trial: whether the search is tried first, and all pairs are compared if that finds too much work.
        batch, rows: batch elements, and rows of all of them together.
        levels: boxes of each level of a batch element, the lowest first; the uppermost has at most ``FAN``.
        stride, most_work, all_work: of the trial (``cuda/boxes.cuh``).
    """

    k: int
    dim: int
    key: int
    trial: bool
    batch: int
    rows: int
    levels: tuple[int, ...]
    stride: int
    most_work: int
    all_work: int


def searching(k: int, dim: int, m: int, n: int, batch: int, trial: bool) -> Searching:
    """How to search the ``k`` nearest of ``n`` columns for each of ``m`` rows of each of ``batch`` batch elements."""
    levels = [-(-n // FAN)]
    while levels[-1] > FAN:
        levels.append(-(-levels[-1] // FAN))
    rows, boxes = batch * m, sum(levels)
    stride = max(1, rows // TRIALS)
    return Searching(
        k=k,
        dim=dim,
        key=4 if dim <= SHORT_KEYS else 8,
        trial=trial,
        batch=batch,
        rows=rows,
        levels=tuple(levels),
        stride=stride,
        most_work=int(TRIAL_SHARE * boxes) + 1,
        all_work=int(worth_on_gpu(dim) * -(-rows // stride) * boxes),
    )


@dataclass(frozen=True)
class Step:
    """One kernel of a search: its name, threads of a block, work items, and blocks."""

    name: str
    threads: int
    items: int
    blocks: int


def _warps(name: str, warps: int) -> Step:
    return Step(name, ITEM_THREADS, warps, -(-warps * 32 // ITEM_THREADS))


def before_sort(s: Searching, m: int, n: int) -> list[Step]:
    """The kernels that make keys; ``m`` is 0 where the rows are the columns."""
    items = s.batch * (m + n)
    return [
        Step("sample_tables", TABLE_THREADS, 0, (1 + (m > 0)) * s.batch * s.dim),
        Step("point_keys", ITEM_THREADS, items, -(-items // ITEM_THREADS)),
    ]


def after_sort(s: Searching) -> list[Step]:
    """The kernels that make boxes and search; those of brute force have to follow if there is a trial."""
    steps = [_warps("pack_points", s.batch * s.levels[0])]
    steps += [_warps(f"pack_boxes_{level}", s.batch * count) for level, count in enumerate(s.levels) if level]
    if s.trial:
        steps.append(_warps("try_search", -(-s.rows // s.stride)))
    return [*steps, _warps("search", s.rows)]


def scratch(s: Searching, itemsize: int) -> list[int]:
    """Bytes of tables, points, their numbers, corners of boxes, lowest numbers in them, and the count of a trial."""
    points, boxes = s.batch * s.levels[0] * FAN, s.batch * sum(s.levels)
    return [
        2 * s.batch * s.dim * TABLE * itemsize,
        points * s.dim * itemsize,
        points * 4,
        boxes * 2 * s.dim * itemsize,
        boxes * 4,
        8,
    ]


def source(plan: Plan, brute: Schedule, s: Searching, itemsize: int, batch_dims: int) -> str:
    """A translation unit with the kernels of a search, and of brute force where a trial may lead to it."""
    rows, cols = plan.points  # type: ignore[misc]
    search = {
        "sample_tables": "sample_tables<kn::S>",
        "point_keys": "point_keys<kn::S>",
        "pack_points": "pack_points<kn::S>",
        **{f"pack_boxes_{level}": f"pack_boxes<kn::S, {level}>" for level in range(1, len(s.levels))},
        **({"try_search": "search_rows<kn::S, true>"} if s.trial else {}),
        "search": "search_rows<kn::S, false>",
    }
    one = f"{ITEM_THREADS}, 1"  # without the 1, the compiler spills so that more blocks might fit
    threads = {"sample_tables": str(TABLE_THREADS), "try_search": one, "search": one}
    return "\n".join([
        preamble(plan, brute, itemsize, batch_dims),
        "namespace kn {",
        "struct S {",
        f"    typedef Formula F; typedef {TYPES[itemsize]} T; typedef {'int' if s.key == 4 else 'long long'} Key;",
        f"    static constexpr int K = {s.k}, D = {s.dim}, ROWS = {rows}, COLS = {cols}, LEVELS = {len(s.levels)},",
        "                         BATCH = G::BATCH;",
        "    typedef G::Arguments Arguments; typedef SearchArguments<Arguments> Search;",
        "    typedef T E;",
        "    KN_FN static bool scalar(int) { return false; }",
        "};",
        "}  // namespace kn",
        *(_kernel(name, threads.get(name, str(ITEM_THREADS)), f"kn::{template}(s);")
          for name, template in search.items()),
        *(_kernel(name, bounds(brute, name), "kn::otherwise<kn::S>(s, [](const kn::G::Arguments& a) { "
                  f"kn::{name}<kn::G>(a); }});") for name in (compiled(brute) if s.trial else ())),
        "",
    ])  # fmt: skip


def _kernel(name: str, launch_bounds: str, body: str) -> str:
    return (
        f'extern "C" __global__ void __launch_bounds__({launch_bounds}) '
        f"kn_{name}(const __grid_constant__ kn::S::Search s) {{ {body} }}"
    )
