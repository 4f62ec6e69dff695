"""The least time that a machine can take for a reduction: one pure function of what a pair needs and of the machine.

Every unit of a processor delivers so many operations a cycle. A reduction needs so many of each for every pair; the
unit that takes longest bounds it, however well the kernel is written. The rates are those of the vendors' documents, or
what was measured where that is less; real kernels take from a little more than the floor to twice as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..formula.graph import topological
from ..formula.plan import Plan
from .facts import SPECIAL, Facts, instructions, special
from .products import products

EXP, FMA, SHARED, MATRIX = "exponential unit", "multiply-add units", "shared memory reads", "matrix unit"
VECTOR, MEMORY = "vector units", "memory"

#: Instructions in which plain cores compute a power of 2 in float32 (`plain_exp2` in cuda/math.cuh).
PLAIN_POWER = 12
#: Instructions in which an exponential and its kin are computed where there is no unit for it: in float64 on a GPU, and
#: on a CPU by the bytes of a number.
SOFT_DOUBLE = 25
HOST_SPECIAL = {4: 9, 8: 13}
#: Instructions for a component of a squared distance that is computed from products, in pairs or not.
PAIRED, SINGLE = 1.5, 1.0


@dataclass(frozen=True)
class Rates:
    """What a machine delivers.

    Attributes:
        name: of the machine.
        processors: multiprocessors of a GPU, cores of a CPU.
        hertz: cycles a second.
        per_cycle: operations of a unit that one processor does in a cycle, in float32.
        double: the same of the multiply-add units in float64.
        memory: bytes a second.
    """

    name: str
    processors: int
    hertz: float
    per_cycle: Mapping[str, float]
    double: float
    memory: float

    def of(self, processors: int, hertz: float | None = None, name: str = "") -> Rates:
        """The same for another number of processors or another clock."""
        return replace(self, processors=processors, hertz=hertz or self.hertz, name=name or self.name)


def _gpu(name: str, processors: int, ghz: float, fma: float, matrix: float, double: float, tb: float) -> Rates:
    # A warp reads one number of its tile, the same for all its pairs, in a cycle.
    units = {EXP: 16.0, FMA: fma, SHARED: 32.0, MATRIX: matrix}
    return Rates(name, processors, ghz * 1e9, units, double, tb * 1e12)


#: Compute capability -> a GPU of that kind. The matrix unit's rate is of half-precision products with float32 sums.
GPUS: dict[tuple[int, int], Rates] = {
    (7, 5): _gpu("T4", 40, 1.59, 64, 512, 2, 0.3),
    (8, 0): _gpu("A100", 108, 1.41, 64, 1024, 32, 1.9),
    (8, 6): _gpu("RTX 3090", 82, 1.70, 128, 256, 2, 0.9),
    (8, 9): _gpu("RTX 4090", 128, 2.52, 128, 256, 2, 1.0),
    (9, 0): _gpu("H200", 132, 1.98, 128, 1424, 64, 4.1),  # matrix unit and memory as measured
    (10, 0): _gpu("B200", 148, 1.97, 128, 4096, 64, 7.7),
    (12, 0): _gpu("RTX 5090", 170, 2.41, 128, 256, 2, 1.8),
}
#: Bytes a second of main memory: what a few cores of a server or a laptop get.
_HOST_MEMORY = 20e9


def gpu(arch: tuple[int, int]) -> Rates:
    """The rates of a compute capability; of the next older one that the table knows."""
    older = [known for known in GPUS if known <= arch]
    return GPUS[max(older, default=min(GPUS))]


def host(cores: int, hertz: float, vector_bytes: int) -> Rates:
    """The rates of a CPU that starts two vector instructions a cycle."""
    return Rates("CPU", cores, hertz, {VECTOR: 2 * vector_bytes / 4}, 2 * vector_bytes / 8, _HOST_MEMORY)


def plain(plan: Plan) -> int:
    """Other instructions for a pair, at least: signs are free, and a product and its sum are one."""
    nodes = topological(*plan.program.pair)
    root = plan.program.pair[-1]
    fused = plan.core == "Sum" and root.op == "Mul"
    return sum(instructions(n) for n in nodes if n.op not in SPECIAL and n.op != "Neg") + (0 if fused else root.dim)


def gpu_work(plan: Plan, f: Facts, rows: int, itemsize: int, share: float = 0) -> dict[str, float]:
    """What a pair needs of a GPU's units, where a thread has so many rows for each column that it reads, and leaves
    this share of the powers of 2 to the plain cores."""
    exps, others = special(plan) - share * f.powers, plain(plan) + share * f.powers * PLAIN_POWER
    read = (f.fixed.cols + f.dim * f.each.cols) / rows
    if itemsize == 8:
        return {FMA: others + SOFT_DOUBLE * exps, SHARED: 2 * read}
    return {EXP: exps, FMA: others, SHARED: read}


def host_work(plan: Plan, itemsize: int, paired: bool = False) -> dict[str, float]:
    """What a pair needs of a CPU's vector units: instructions, each for as many pairs as a vector has numbers.

    ``paired`` is that of ``products_text``.
    """
    saved = products(plan)[0] * (2 - (PAIRED if paired else SINGLE))
    return {VECTOR: plain(plan) - saved + HOST_SPECIAL[itemsize] * special(plan)}


def floors(work: Mapping[str, float], pairs: float, moved: float, rates: Rates, itemsize: int) -> dict[str, float]:
    """Seconds that each unit takes at least, the longest first.

    Args:
        work: operations of each unit for a pair.
        pairs: number of pairs.
        moved: bytes that are read and written at least: inputs and results.
        rates: of the machine.
        itemsize: 4 or 8 bytes of a number.
    """
    double = {FMA: rates.double, VECTOR: rates.double} if itemsize == 8 else {}
    speed = {unit: rates.processors * rates.hertz * double.get(unit, rates.per_cycle[unit]) for unit in work}
    seconds = {unit: count * pairs / speed[unit] for unit, count in work.items()}
    seconds[MEMORY] = moved / rates.memory
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))
