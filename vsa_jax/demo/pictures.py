"""The demo's pictures: frames, which tiles are kept, how much they cover, and the course of training."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from vsa_jax import TileLayout
from vsa_jax.demo.clip import PATCH, Clip

_COLOURS = {"dense": "#4c566a", "sparse": "#d08770", "sparse + gate": "#5e81ac"}
_QUERY, _KEPT = "#d62828", "#2b6cb0"


def draw(
  out: pathlib.Path, clip: Clip, layout: TileLayout, arrays: dict[str, Any], report: dict[str, Any]
) -> None:
  """Writes four PNGs of what `compare` returned."""
  tiles = tile_of_pixels(layout)
  figures = {
    "frames.png": _draw_frames(clip, arrays, report),
    "block_map.png": _draw_block_map(clip, tiles, arrays),
    "coverage.png": _draw_coverage(clip, tiles, arrays),
    "training.png": _draw_training(arrays, report),
  }
  for name, figure in figures.items():
    figure.savefig(out / name, dpi=120, facecolor="white")


# Where tiles are.  Videos of one tile's frames are a slab.


def tile_of_pixels(layout: TileLayout) -> np.ndarray:
  """int [T, Y, X]: the tile of each pixel of a window."""
  (grid,) = layout.segments
  tiles = (layout.slots // layout.tile_size).reshape(grid)
  return np.kron(tiles, np.ones(PATCH, int))


def _slabs(tiles: np.ndarray) -> list[np.ndarray]:
  """The frames that each layer of tiles spans."""
  first = tiles[:, 0, 0]
  return [np.flatnonzero(first == tile) for tile in np.unique(first)]


def _frames(slab: np.ndarray) -> str:
  return f"frame {slab[0]}" if len(slab) == 1 else f"frames {slab[0]}-{slab[-1]}"


# Drawing.


def _figure(width: float, height: float, layout: Any = "constrained") -> Any:
  from matplotlib.figure import Figure

  return Figure(figsize=(width, height), layout=layout)


def _show(axes: Any, image: np.ndarray, **options: Any) -> None:
  axes.imshow(image, interpolation="nearest", **options)
  axes.set(xticks=[], yticks=[])
  for spine in axes.spines.values():
    spine.set_visible(False)


def _label_row(axes: Any, label: str) -> None:
  axes.set_ylabel(label, rotation=0, ha="right", va="center")


def _draw_frames(clip: Clip, arrays: dict[str, Any], report: dict[str, Any]) -> Any:
  rows = {
    "original": arrays["original"],
    f"noised\n{report['noised_psnr']:.1f} dB": arrays["noised"],
  }
  for name, video in arrays["denoised"].items():
    rows[f"{name}\n{report['variants'][name]['trained on']['psnr']:.1f} dB"] = video
  times = np.unique(np.linspace(0, clip.length - 1, min(5, clip.length)).round().astype(int))
  height, width = clip.frames.shape[1:3]
  figure = _figure(2 * len(times) + 1, 2 * len(rows) * height / width + 0.6)
  axes = figure.subplots(len(rows), len(times), squeeze=False)
  for row, (label, video) in zip(axes, rows.items(), strict=True):
    for cell, t in zip(row, times, strict=True):
      _show(cell, clip.pixels(video[0, t]))
    _label_row(row[0], label)
  for cell, t in zip(axes[0], times, strict=True):
    cell.set_title(f"frame {t}", fontsize=9)
  figure.suptitle("Held-out frames, noised, and denoised again (PSNR against the original)")
  return figure


def _draw_block_map(clip: Clip, tiles: np.ndarray, arrays: dict[str, Any]) -> Any:
  mask = arrays["mask"]  # [depth, N, J, J]
  depth, heads = mask.shape[:2]
  video, slabs = arrays["original"][0], _slabs(tiles)
  figure = _figure(13, 4.6)
  left, right = figure.subfigures(1, 2, width_ratios=(1, 1.35))

  for head, row in enumerate(left.subplots(heads, depth, squeeze=False)):
    for block, axes in enumerate(row):
      axes.imshow(mask[block, head], cmap="Blues", vmin=-0.1, vmax=1.2, interpolation="nearest")
      axes.set(xticks=[], yticks=[])
      axes.set_title(f"block {block}, head {head}", fontsize=9)
  left.suptitle("Sparse model: key tiles (across) that\neach query tile (down) keeps (blue)")

  motion = np.abs(np.diff(video, axis=0)).mean((0, 3))
  query = tiles[0][np.unravel_index(motion.argmax(), motion.shape)]
  for head, row in enumerate(right.subplots(heads, len(slabs), squeeze=False)):
    for slab, axes in zip(slabs, row, strict=True):
      t = slab[len(slab) // 2]
      _show_kept(axes, clip.pixels(video[t]), tiles[t], mask[-1, head, query], query)
      axes.set_title(f"head {head}, {_frames(slab)}", fontsize=9)
  right.suptitle(
    "Last block: the key tiles (in colour) that one query tile\n(red, where most moves) keeps"
  )
  return figure


def _show_kept(
  axes: Any, frame: np.ndarray, tiles: np.ndarray, kept: np.ndarray, query: int
) -> None:
  """A frame [Y, X, 3] with tiles [Y, X]: what is kept [J] is in colour, the query's tile is outlined."""
  grey = 0.75 + 0.2 * frame.mean(-1, keepdims=True)
  _show(axes, np.where(kept[tiles][..., None], frame, grey))
  here = np.unique(tiles)
  for tile in here[kept[here]]:
    _outline(axes, tiles == tile, edgecolor=_KEPT, linewidth=1.2)
  if query in here:
    _outline(axes, tiles == query, edgecolor=_QUERY, linewidth=2.5)


def _outline(axes: Any, inside: np.ndarray, **options: Any) -> None:
  """A box around the True pixels of [Y, X]."""
  from matplotlib.patches import Rectangle

  y, x = np.nonzero(inside)
  left, right, top, bottom = x.min() - 0.5, x.max() + 0.5, y.min() - 0.5, y.max() + 0.5
  box = Rectangle((left, top), right - left, bottom - top, fill=False, clip_on=False, **options)
  axes.add_patch(box)


def _draw_coverage(clip: Clip, tiles: np.ndarray, arrays: dict[str, Any]) -> Any:
  slabs = _slabs(tiles)
  height, width = clip.frames.shape[1:3]
  names = ("swapped in", "trained on")
  figure = _figure(3.4 * len(slabs) + 2, 3 * (3.4 * height / width + 0.35), "compressed")
  axes = figure.subplots(3, len(slabs), squeeze=False)
  values = np.concatenate([arrays[name] for name in names])
  scale = {"vmin": float(values.min()), "vmax": float(values.max()), "cmap": "viridis"}
  for column, slab in zip(axes.T, slabs, strict=True):
    t = slab[len(slab) // 2]
    _show(column[0], clip.pixels(arrays["original"][0, t]))
    column[0].set_title(_frames(slab), fontsize=9)
    for cell, name in zip(column[1:], names, strict=True):
      _show(cell, arrays[name][tiles[t]], **scale)
      for tile in np.unique(tiles[t]):
        y, x = np.nonzero(tiles[t] == tile)
        cell.text(
          x.mean(), y.mean(), f"{arrays[name][tile]:.0%}",
          ha="center", va="center", fontsize=7, color="white",
          bbox={"boxstyle": "round,pad=0.15", "facecolor": "black", "alpha": 0.35, "linewidth": 0},
        )  # fmt: skip
  for row, label in zip(axes, ("video", *(f"sparse,\n{name}" for name in names)), strict=True):
    _label_row(row[0], label)
  colours = axes[1, 0].images[0]
  figure.colorbar(colours, ax=axes, shrink=0.6, format=lambda x, _: f"{x:.0%}")
  figure.suptitle(
    "Coverage: share of dense attention inside the kept\ntiles, by query tile, mean over blocks and heads"
  )
  return figure


def _draw_training(arrays: dict[str, Any], report: dict[str, Any]) -> Any:
  from matplotlib.ticker import NullLocator

  figure = _figure(13, 3.6)
  losses, times, budgets = figure.subplots(1, 3, width_ratios=(1.3, 1, 1))
  first = arrays["first losses"]
  losses.plot(_smooth(first), color="#aab2c0", label="dense, before the swap")
  for name, values in arrays["losses"].items():
    steps = len(first) + np.arange(len(values))
    losses.plot(steps, _smooth([*first, *values])[len(first) :], color=_COLOURS[name], label=name)
  losses.set(
    xlabel="step",
    ylabel="mean squared error, running mean",
    yscale="log",
    title="Training loss",
  )
  losses.legend(frameon=False, fontsize=8)

  names = list(report["variants"])
  bars = times.barh(
    names,
    [report["variants"][name]["step_ms"] for name in names],
    color=[_COLOURS[name] for name in names],
  )
  times.bar_label(bars, fmt="%.0f ms", padding=3, fontsize=8)
  times.invert_yaxis()
  times.margins(x=0.25)
  times.set(xlabel="milliseconds, median", title="Training step")

  sweep = report["budgets"]
  share = np.array(sweep["kept tiles"]) / report["tiles"]
  for (name, values), style in zip(sweep["loss"].items(), ("--", "-"), strict=True):
    budgets.plot(
      share, values, style, marker="o", markersize=4, color=_COLOURS["sparse"], label=name
    )
  compiled = sweep["compilations"]
  budgets.set(
    xscale="log",
    ylabel="held-out loss, sparse model",
    xlabel="share of tiles kept",
    title=f"{len(share)} budgets, compiled {'once' if compiled == 1 else f'{compiled} times'}",
  )
  budgets.set_xticks(share, [f"{x:.0%}" for x in share], fontsize=7)
  budgets.xaxis.set_minor_locator(NullLocator())
  budgets.legend(frameon=False, fontsize=8)
  for axes in (losses, times, budgets):
    axes.spines[["top", "right"]].set_visible(False)
  return figure


def _smooth(values: list[float]) -> np.ndarray:
  """A running mean over 9 steps, narrower at the ends."""
  window = np.ones(min(9, len(values)))
  total = np.convolve(values, window, "same")
  return total / np.convolve(np.ones(len(values)), window, "same")
