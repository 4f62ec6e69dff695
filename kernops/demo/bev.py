"""Bird's-eye view: a photograph on the ground, seen by the six cameras of a car, and put together again from above.

The calibration is that of a real vehicle; what the cameras see is computed. Each pixel knows its colour and how far
away the ground is, as a distribution over depth bins: what a network of the Lift-Splat-Shoot kind predicts. The splat
takes the colours back to the cells of a grid, and the mean colour of a cell is its sum over its weight.
"""

from __future__ import annotations

import numpy as np
import torch

from ..geometric import BEVGrid, Frustum, SplatPlan, frustum, nuscenes_rig, splat
from .inpainting import psnr
from .jobs import Result, Setting
from .meter import Meter, Progress
from .pictures import Panel, side_by_side

PHOTO = "flower"
HALF, CELL = 25.6, 0.4  # metres: the grid covers -HALF .. HALF in cells of CELL
LEAST = 0.05  # weight of a cell that counts as seen
TOLERANCE = 1e-4  # of the sums, against float64


def run(setting: Setting) -> Result:
    """Render what the cameras see, splat it, compare with the photograph."""
    stride, step = (4, 0.8) if setting.quick else (2, 0.4)
    rig = nuscenes_rig().resized(scale=0.44, crop=(140, 0))
    points = frustum(rig.image_size, tuple(n // stride for n in rig.image_size), dbound=(1.0, 37.0, step))
    bounds = (-HALF, HALF, CELL)
    grid = BEVGrid(bounds, bounds, (-2.0, 2.0, 4.0))
    ground = Ground(setting.photo(PHOTO))
    feat, depth = seen(rig.projection(), points, ground)
    feat, depth = feat.to(setting.device), depth.to(setting.device)
    with Meter(setting.device) as meter, Progress("bird's-eye view"):
        plan = SplatPlan(rig, points, grid, device=setting.device)
        sums = splat(depth, feat, plan)[0, :, 0].permute(1, 2, 0).double().cpu().numpy()
    report = plan.report()
    error = np.abs(sums - reference(depth, feat, plan)).max() / np.abs(sums).max()
    truth = ground.colours(*grid.cell_centers()[0, ..., :2].unbind(-1)).numpy()
    weight = sums[..., 3:]
    known = weight[..., 0] > LEAST
    bev = np.where(known[..., None], sums[..., :3] / np.maximum(weight, LEAST), 0)
    quality = psnr(as_bytes(bev[known]), as_bytes(truth[known]))
    panels = [
        Panel(
            mosaic(feat[0, ..., :3].cpu().numpy(), bev.shape[0]), "what six cameras see", "of a photograph on the road"
        ),
        Panel(from_above(bev), f"splatted: {quality:.1f} dB", f"{report.kept:,} points kept"),
        Panel(from_above(truth), "the road from above", f"{2 * HALF:.0f} m by {2 * HALF:.0f} m"),
    ]
    side_by_side(panels).save(setting.out / "bev.png", optimize=True)
    table = plan.n_points * feat.shape[-1] * feat.element_size()
    result = Result(
        "six cameras: bird's-eye view", plan.n_points, table, meter.seconds, meter.peak_bytes, setting.backend
    )
    result.checks = {"PSNR in dB": quality, "cells seen": float(known.mean()), "error against float64": float(error)}
    result.agrees = bool(error < TOLERANCE)
    result.picture = "bev.png"
    return result


class Ground:
    """A photograph on the plane z = 0 under the whole grid, its top to the front (x) and its left to the left (y)."""

    def __init__(self, photo: np.ndarray) -> None:
        side = min(photo.shape[:2])
        square = photo[(photo.shape[0] - side) // 2 :, (photo.shape[1] - side) // 2 :][:side, :side]
        self.square = torch.from_numpy(np.ascontiguousarray(square)).float().movedim(-1, 0)[None] / 255

    def colours(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Colours (..., 3) at places in metres; grey outside."""
        place = torch.stack((-y / HALF, -x / HALF), -1).float()
        found = torch.nn.functional.grid_sample(
            self.square, place.reshape(1, -1, 1, 2), align_corners=False, padding_mode="border"
        )[0, :, :, 0].T.reshape(*x.shape, 3)
        outside = (place.abs() > 1).any(-1, keepdim=True)
        return torch.where(outside, torch.full_like(found, 0.5), found)


def seen(projection: torch.Tensor, points: Frustum, ground: Ground) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (1, N, h, w, 4), colour and 1, and depths (1, N, D, h, w) that the ground has in the pixels."""
    v, u = torch.meshgrid(points.v, points.u, indexing="ij")
    ray = projection[..., :3] @ torch.stack((u, v, torch.ones_like(u))).flatten(1)  # (1, N, 3, h w)
    shift = projection[..., 3:]
    distance = -shift[..., 2:, :] / ray[..., 2:, :]  # where z = 0
    x, y, _ = (shift + distance * ray).unbind(2)
    shape = (*projection.shape[:2], *u.shape)
    colour = ground.colours(x, y).reshape(*shape, 3)
    feat = torch.cat((colour, torch.ones_like(colour[..., :1])), -1)
    bins = points.d.reshape(-1, 1, 1)
    step = points.d[1] - points.d[0]
    depth = (1 - (bins - distance.reshape(shape)[:, :, None]).abs() / step).clamp(min=0)  # between two bins
    sky = ~((distance > 0) & torch.isfinite(distance)).reshape(shape)
    feat[..., :3][sky] = torch.tensor([0.6, 0.75, 0.9])
    return feat, depth.masked_fill(sky[:, :, None], 0).float()


def reference(depth: torch.Tensor, feat: torch.Tensor, plan: SplatPlan) -> np.ndarray:
    """The splat as its definition says, in float64, of the points that have any weight."""
    cells = plan.cells.cpu().numpy()
    weights = depth.cpu().double().numpy()
    _, camera, _, row, column = used = np.nonzero((cells >= 0) & (weights != 0))
    sums = np.zeros((cells.max() + 1 if cells.size else 1, feat.shape[-1]))
    np.add.at(sums, cells[used], weights[used][:, None] * feat[0].cpu().double().numpy()[camera, row, column])
    whole = np.zeros((np.prod(plan.shape), feat.shape[-1]))
    whole[: len(sums)] = sums
    return whole.reshape(*plan.shape[2:], -1)


# --- pictures ---------------------------------------------------------------------------------------------------------
def as_bytes(colours: np.ndarray) -> np.ndarray:
    return np.clip(np.round(255 * colours), 0, 255).astype(np.uint8)


def from_above(colours: np.ndarray) -> np.ndarray:
    """Cells (Y, X, 3) with the car's front up and its left to the left, three pixels a cell."""
    return as_bytes(colours.swapaxes(0, 1)[::-1, ::-1]).repeat(3, 0).repeat(3, 1)


def mosaic(images: np.ndarray, size: int) -> np.ndarray:
    """Six images (6, h, w, 3), three above three, on a square of the pictures' height."""
    rows = np.concatenate([np.concatenate(list(images[k : k + 3]), 1) for k in (0, 3)])
    height = 3 * size
    width = round(rows.shape[1] * height / rows.shape[0] / 2)
    picked = rows[np.linspace(0, rows.shape[0] - 1, height // 2).astype(int)][
        :, np.linspace(0, rows.shape[1] - 1, width).astype(int)
    ]
    sheet = np.zeros((height, width, 3), np.uint8)
    top = (height - len(picked)) // 2
    sheet[top : top + len(picked)] = as_bytes(picked)
    return sheet
