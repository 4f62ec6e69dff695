"""The parts of the CUDA back end that need no GPU."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernops.backends import cuda
from kernops.backends.launch import pieces_of
from kernops.backends.layout import strides
from kernops.codegen.schedule import MAX_GRID
from kernops.formula.graph import CAT_I


@given(st.data())
def test_collapsed_batches_address_the_same_elements(data: st.DataObject) -> None:
    batch = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=5)))
    steps: list[tuple[int, ...] | None] = [None]
    for _ in range(data.draw(st.integers(1, 3))):
        missing = data.draw(st.integers(0, len(batch)))
        shape = [size if data.draw(st.booleans()) else 1 for size in batch[missing:]]
        steps.append(strides(torch.zeros(*shape, 2, 2), CAT_I, batch))
    sizes, collapsed = cuda.collapse(batch, steps)
    assert len(sizes) == len(collapsed[1]) - 2 and collapsed[0] is None

    def offsets(lengths: tuple[int, ...], step: tuple[int, ...]) -> list[int]:
        return [sum(i * s for i, s in zip(at, step)) for at in itertools.product(*map(range, lengths))]

    for step, short in zip(steps[1:], collapsed[1:]):
        assert step is not None
        assert offsets(batch, step) == offsets(sizes, short) and step[-2:] == short[-2:]


def test_contiguous_batches_collapse_to_one_dimension() -> None:
    step = strides(torch.zeros(2, 3, 4, 5, 6), CAT_I, (2, 3, 4))
    assert cuda.collapse((2, 3, 4), [step, step]) == ((24,), [(30, 6, 1), (30, 6, 1)])
    assert cuda.collapse((1, 1), [(0, 0, 3, 1)]) == ((1,), [(0, 3, 1)])


def test_architectures() -> None:
    names = [cuda.arch_of(c) for c in ((7, 5), (8, 6), (9, 0), (10, 0), (12, 0))]
    assert names == ["sm_75", "sm_86", "sm_90a", "sm_100", "sm_120"]


def test_other_devices_are_refused_with_the_reason() -> None:
    assert cuda.available("cpu") == "the device is cpu, not a CUDA GPU"
    if torch.version.cuda is None:
        assert "without CUDA" in str(cuda.available("cuda"))


def test_grids_beyond_the_limit_are_launched_in_pieces() -> None:
    limit = MAX_GRID
    assert pieces_of(5) == ((0, 5),)
    assert pieces_of(2 * limit + 1) == ((0, limit), (limit, limit), (2 * limit, 1))
