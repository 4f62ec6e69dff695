"""Pictures of the demo: panels with captions, maps of numbers in colour, sheets of digits. Made with Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageDraw, ImageFont

BACKGROUND, INK, FAINT = (16, 16, 20), (235, 235, 235), (150, 150, 160)
MARGIN = 16

#: Colour maps: perceptually even ramps (matplotlib's inferno and viridis at nine places), dark to bright.
RAMPS = {
    "inferno": ("000004", "1b0c41", "4a0c6b", "781c6d", "a52c60", "cf4446", "ed6925", "fb9b06", "fcffa4"),
    "viridis": ("440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725"),
}


def in_colour(values: np.ndarray, ramp: str, low: float, high: float) -> np.ndarray:
    """Numbers as colours (..., 3): ``low`` and below the darkest, ``high`` and above the brightest."""
    stops = np.array([[int(c[k : k + 2], 16) for k in (0, 2, 4)] for c in RAMPS[ramp]], dtype=np.float64)
    place = np.clip((values - low) / max(high - low, 1e-12), 0, 1) * (len(stops) - 1)
    return np.stack([np.interp(place, range(len(stops)), stops[:, k]) for k in range(3)], axis=-1).astype(np.uint8)


@dataclass(frozen=True)
class Panel:
    """One picture of a row: pixels (h, w, 3), a caption of two lines, and a colour bar with words at its ends."""

    pixels: np.ndarray
    title: str
    note: str = ""
    ramp: str | None = None
    ends: tuple[str, str] = ("", "")


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)


def side_by_side(panels: Sequence[Panel]) -> Image.Image:
    """Panels of one height in a row, each above its caption; small ones enlarged, so that captions fit."""
    zoom = max(1, round(600 / panels[0].pixels.shape[1]))
    panels = [replace(p, pixels=p.pixels.repeat(zoom, axis=0).repeat(zoom, axis=1)) for p in panels]
    height, strip = panels[0].pixels.shape[0], 64
    width = sum(p.pixels.shape[1] + MARGIN for p in panels) + MARGIN
    sheet = Image.new("RGB", (width, height + strip + 2 * MARGIN), BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    x, y = MARGIN, MARGIN + height + 10
    for panel in panels:
        wide = panel.pixels.shape[1]
        sheet.paste(Image.fromarray(panel.pixels), (x, MARGIN))
        draw.text((x, y), panel.title, INK, font(19))
        draw.text((x, y + 28), panel.note, FAINT, font(14))
        if panel.ramp is not None:
            _bar(sheet, draw, panel, x + wide, y)
        x += wide + MARGIN
    return sheet


def _bar(sheet: Image.Image, draw: ImageDraw.ImageDraw, panel: Panel, right: int, y: int, size: int = 110) -> None:
    """The panel's colour bar, right-aligned, with the words for its ends on both sides."""
    ramp = in_colour(np.broadcast_to(np.linspace(0, 1, size), (12, size)), panel.ramp or "viridis", 0, 1)
    low, high = panel.ends
    words = font(14)
    x = right - size - int(draw.textlength(high, words)) - 8
    sheet.paste(Image.fromarray(ramp), (x, y + 6))
    draw.text((x - int(draw.textlength(low, words)) - 8, y + 3), low, FAINT, words)
    draw.text((x + size + 8, y + 3), high, FAINT, words)


@dataclass(frozen=True)
class Mistake:
    """A misread digit (8×8, values 0 .. 16), what it is, what it was taken for, and its nearest neighbours."""

    image: np.ndarray
    truth: int
    answer: int
    neighbours: np.ndarray


def sheet_of_mistakes(mistakes: Sequence[Mistake], title: str, columns: int = 5) -> Image.Image:
    """A grid of misread digits, each large beside a column of its nearest neighbours."""
    big, gap = 114, 6
    n_near = len(mistakes[0].neighbours) if mistakes else 1
    small = (big - gap * (n_near - 1)) // n_near
    cell_w, cell_h = big + gap + small + 32, big + 50
    rows = max(1, -(-len(mistakes) // columns))
    sheet = Image.new("RGB", (columns * cell_w + 2 * MARGIN, rows * cell_h + 64), BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN), title, INK, font(19))
    for k, mistake in enumerate(mistakes):
        x, y = MARGIN + k % columns * cell_w, 60 + k // columns * cell_h
        sheet.paste(_digit(mistake.image, big), (x, y))
        for j, neighbour in enumerate(mistake.neighbours):
            sheet.paste(_digit(neighbour, small), (x + big + gap, y + j * (small + gap)))
        draw.text((x, y + big + 4), f"{mistake.truth}, read as {mistake.answer}", INK, font(15))
    return sheet


def _digit(image: np.ndarray, size: int) -> Image.Image:
    pixels = np.clip(image.reshape(8, 8) * (255 / 16), 0, 255).astype(np.uint8)
    return Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC).convert("RGB")
