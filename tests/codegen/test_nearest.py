"""How the nearest points in many dimensions are found, as decisions."""

from __future__ import annotations

import itertools

import pytest

from kernops.codegen import nearest
from kernops.codegen.schedule import Device

H200 = Device(132, 232448, (9, 0))
A100 = Device(108, 166912, (8, 0))
LAPTOP = Device(40, 101376, (8, 9))


def test_what_is_better_compared_directly() -> None:
    asked = {"dim": 64, "k": 10, "m": 100_000, "n": 100_000, "batch": 1}
    assert nearest.schedule(**asked, device=H200) is not None
    few = ({"dim": 3}, {"dim": 11}, {"m": 100}, {"m": 1000, "n": 1000})
    for change in (*few, {"dim": 10_000}, {"k": 65}, {"n": 2**31}):
        assert nearest.schedule(**{**asked, **change}, device=H200) is None, change
    assert nearest.schedule(**asked, device=Device(40, 65536, (7, 5))) is None
    assert nearest.schedule(**{**asked, "batch": 1000}, device=H200) is None


def test_instructions_of_an_architecture() -> None:
    found = {arch: nearest.schedule(64, 10, 10**5, 10**5, 1, Device(132, 232448, arch)) for arch in
             ((8, 0), (8, 6), (9, 0), (10, 0), (12, 0))}  # fmt: skip
    assert [s and s.products for s in found.values()] == ["warp", "warp", "group", "warp", "warp"]


def test_two_blocks_have_room_on_a_multiprocessor() -> None:
    for device, products, want in ((H200, "group", (4, 4, 3)), (A100, "warp", (3, 2, 2)), (LAPTOP, "warp", (3, 3, 2))):
        assert tuple(nearest.stages(dim, products, device) for dim in (64, 128, 1000)) == want
        for dim in (64, 128, 1000):
            shared = nearest.shared_bytes(dim, products, nearest.stages(dim, products, device))
            assert (2 if device is not LAPTOP else 1) * shared <= device.shared


@pytest.mark.parametrize("device", [H200, A100, LAPTOP], ids=str)
def test_sizes_fit_together(device: Device) -> None:
    sizes, dims = (2**11 + 1, 10**5, 3 * 10**6), (12, 64, 65, 128, 129, 1000, 8192)
    for dim, k, m, n, batch in itertools.product(dims, (1, 10, 33, 64), sizes, sizes, (1, 3)):
        s = nearest.schedule(dim, k, m, n, batch, device)
        if s is None:
            assert m * n * dim < 2 * nearest.FEWEST_PRODUCTS or n < 20_000 or batch > 1
            continue
        assert s.part * s.parts >= n and s.tiles * nearest.COLUMNS >= s.part * s.parts
        assert s.sample_tiles * nearest.COLUMNS >= s.part and s.sample_tiles <= s.tiles
        assert s.groups == nearest.GROUPS_OF_SEGMENT * s.sample_segments and k <= s.groups <= s.space
        assert 1 <= s.sample_segments <= s.sample_tiles and 1 <= s.segments <= s.tiles
        assert k < s.room <= s.space
        assert s.shared <= device.shared and 1 <= s.ahead < s.stages and s.row_blocks * nearest.ROWS >= m
        assert 1 <= s.slab <= batch * s.row_blocks
        assert nearest.scratch(s, batch)["lists"] <= max(nearest.SLAB_BYTES, 4 * s.space * nearest.ROWS)


def test_scratch_grows_with_rows_and_columns_only() -> None:
    def used(size: int) -> int:
        s = nearest.schedule(64, 10, size, size, 1, H200)
        assert s is not None
        return sum(nearest.scratch(s, 1).values())

    assert used(10**6) < 11 * used(10**5)
    assert used(10**7) < 2**33  # of which 2.6 GB are the points in half precision


def test_sizes_are_not_compiled_in() -> None:
    texts = set()
    for m, n, batch in ((10**5, 10**5, 1), (2 * 10**5, 3 * 10**6, 1), (10**4, 10**5, 5)):
        s = nearest.schedule(64, 10, m, n, batch, H200)
        assert s is not None
        texts.add(nearest.source(s, 0))
    assert len(texts) == 1
    unaligned = nearest.schedule(64, 10, 10**5, 10**5, 1, H200, aligned=False)
    assert unaligned is not None and nearest.source(unaligned, 0) not in texts


def test_every_kernel_has_blocks_and_threads() -> None:
    s = nearest.schedule(64, 10, 10**5, 10**5, 1, H200)
    assert s is not None
    assert tuple(nearest.blocks(s, 1, s.slab)) == nearest.KERNELS
    for name in nearest.KERNELS:
        assert nearest.threads(s, name) in (128, 256)
