"""The main job, on photographs made small so that it takes seconds; the whole of it is marked slow."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kernops import demo
from kernops.demo import jobs, meter, pictures
from kernops.demo.inpainting import psnr

JOBS = [
    "flower: 10 nearest colours",
    "flower: colour density",
    "china: 10 nearest colours",
    "china: colour density",
    "flower: inpainting",
    "digits: nearest neighbours",
    "six cameras: bird's-eye view",
]
PICTURES = {"flower_colours.png", "china_colours.png", "inpainting.png", "digits.png", "bev.png"}


@pytest.fixture
def small_photos(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = jobs.Setting.photo
    monkeypatch.setattr(jobs.Setting, "photo", lambda self, name: whole(self, name)[::4, ::4])


def verify(folder: Path) -> dict:
    """The report of a run, after checking what it says and the pictures."""
    report = json.loads((folder / "results.json").read_text())
    assert [job["job"] for job in report["jobs"]] == JOBS
    assert {path.name for path in folder.iterdir()} == PICTURES | {"results.json"}
    for job in report["jobs"]:
        assert job["agrees"]
        assert job["pairs"] > 0 < job["table_bytes"]
        assert job["seconds"] > 0 < job["peak_bytes"]
        picture = np.asarray(Image.open(folder / job["picture"]))
        assert picture.shape[1] > 600
        assert picture.std() > 20  # not one colour
    by_name = {job["job"]: job for job in report["jobs"]}
    digits = by_name["digits: nearest neighbours"]["checks"]
    assert digits["score"] == digits["scikit-learn's score"] > 0.97
    assert by_name["flower: inpainting"]["checks"]["PSNR in dB"] > 20
    bev = by_name["six cameras: bird's-eye view"]["checks"]
    assert bev["PSNR in dB"] > 18 and bev["cells seen"] > 0.3 and bev["error against float64"] < 1e-5
    return report


def test_runs_and_reports(small_photos: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--quick", "--device", "cpu", "--out", str(tmp_path / "new" / "folder")]) == 0
    report = verify(tmp_path / "new" / "folder")
    out, err = capsys.readouterr()
    assert err == ""  # progress is for terminals
    lines = out.splitlines()
    assert lines[0].split()[:2] == ["job", "pairs"]
    assert [line[: len(name)] for line, name in zip(lines[2:9], JOBS)] == JOBS
    assert len({len(line) for line in lines[:9]}) == 1  # aligned
    n = 54 * 80
    assert report["jobs"][0]["pairs"] == n * n
    assert report["jobs"][0]["table_bytes"] == 4 * n * n


def test_an_answer_unlike_scikit_learns_is_a_failure(
    small_photos: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kernops.demo.colours.TOLERANCE", 0.0)
    assert demo.main(["--quick", "--out", str(tmp_path)]) == 1
    assert "unlike scikit-learn's: flower: 10 nearest colours" in capsys.readouterr().err


def test_bad_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert demo.main(["--out", str(tmp_path / "file")]) == 2
    assert "kernops demo: " in capsys.readouterr().err
    assert demo.main(["--device", "abacus", "--out", str(tmp_path)]) == 2
    assert "device must be 'auto', 'cpu', 'cuda' or another torch device; got 'abacus'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        demo.main(["--fast"])
    assert stop.value.code == 2


@pytest.mark.slow
@pytest.mark.parametrize(("options", "seconds"), [(["--quick"], 30), ([], 180)], ids=["quick", "whole"])
def test_time_and_memory(options: list[str], seconds: float, tmp_path: Path) -> None:
    start = time.perf_counter()
    command = [sys.executable, "-m", "kernops", "demo", "--device", "cpu", "--out", str(tmp_path), *options]
    subprocess.run(command, check=True, timeout=600)
    assert time.perf_counter() - start < seconds
    report = verify(tmp_path)
    assert max(job["peak_bytes"] for job in report["jobs"]) < 1.5e9
    if not options:
        assert report["jobs"][0]["pairs"] == 273_280**2


def test_photographs_are_halved_for_a_quick_run(tmp_path: Path) -> None:
    whole = jobs.Setting(torch.device("cpu"), False, tmp_path).photo("china")
    half = jobs.Setting(torch.device("cpu"), True, tmp_path).photo("china")
    assert whole.shape == (427, 640, 3)
    assert half.shape == (213, 320, 3)
    assert half.dtype == np.uint8
    assert np.array_equal(half[5, 7], np.round(whole[10:12, 14:16].reshape(4, 3).mean(axis=0)))


def test_memory_is_the_peak_within() -> None:
    with meter.Meter(torch.device("cpu")) as small:
        pass
    with meter.Meter(torch.device("cpu")) as large:
        np.ones(40_000_000).sum()
    assert large.peak_bytes - small.peak_bytes + 1e8 > 2.5e8
    assert large.seconds > 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with meter.Progress("work") as progress:
        assert [s.stop - s.start for s in progress.chunks(10, 4)] == [4, 4, 2]
        time.sleep(0.5)
    shown = screen.getvalue()
    assert "work  [########################] 100%" in shown
    assert shown.endswith("\x1b[K")


def test_progress_is_silent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with meter.Progress("work"):
        time.sleep(0.3)
    assert log.getvalue() == ""


def test_colour_maps_run_from_dark_to_bright() -> None:
    for ramp in pictures.RAMPS:
        colours = pictures.in_colour(np.linspace(-1, 2, 300), ramp, 0, 1).astype(int)
        light = colours @ [2, 7, 1]
        assert (np.diff(light) >= 0).all()
        assert np.array_equal(colours[0], colours[99])  # below the limit
        assert np.array_equal(colours[-1], colours[201])


def test_psnr() -> None:
    a = np.zeros((4, 4, 3), np.uint8)
    assert psnr(a, a) == float("inf")
    assert psnr(a, a + 255) == pytest.approx(0)
    assert psnr(a, a + 1) == pytest.approx(20 * np.log10(255))
