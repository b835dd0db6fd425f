"""Prompts as tuples of segments: text, images, and sampled tokens.

A prompt of text only is one `TextSegment`; an image splits the text around it. `agent.chat` turns segments into ids.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from ragen_jax.envs.drawing.tiles import IMAGE_MARK
from ragen_jax.models.vision.encoder import digest


@dataclasses.dataclass(frozen=True)
class TextSegment:
  """Text, which may contain special tokens of the chat format."""

  text: str


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSegment:
  """An image, represented by placeholder tokens. Images of equal pixels are equal.

  Attributes:
    image: u8[H, W, 3], of a size that the vision tower reads.
    columns: number of placeholder tokens, one for each embedding of the image.
  """

  image: np.ndarray
  columns: int

  @functools.cached_property
  def digest(self) -> bytes:
    """Identifies the pixels."""
    return digest(self.image)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, ImageSegment) and (self.columns, self.digest) == (other.columns, other.digest)

  def __hash__(self) -> int:
    return hash((self.columns, self.digest))


@dataclasses.dataclass(frozen=True)
class TokenSegment:
  """The ids of a sampled reply, which are fed unchanged, because its text may have other tokenizations."""

  ids: tuple[int, ...]


Segment = TextSegment | ImageSegment | TokenSegment
Segments = tuple[Segment, ...]
# An environment's observation: text, or segments if it contains images.
Observation = str | Segments


@dataclasses.dataclass(frozen=True)
class ImageSpan:
  """The columns of an image in encoded segments, from the first placeholder to the column after the last."""

  segment: ImageSegment
  start: int
  stop: int


@dataclasses.dataclass(frozen=True)
class Encoded:
  """Segments as token ids, including placeholders, with their images in order."""

  ids: tuple[int, ...]
  images: tuple[ImageSpan, ...] = ()


def join(*parts: Observation) -> Segments:
  """Concatenates texts and segments; adjacent texts are merged, and empty texts are dropped.

  join('a', (TextSegment('b'), image), 'c')  ->  (TextSegment('ab'), image, TextSegment('c'))
  """
  joined: list[Segment] = []
  text = ''
  for part in parts:
    for segment in (part,) if isinstance(part, str) else part:
      if isinstance(segment, str):
        text += segment
      elif isinstance(segment, TextSegment):
        text += segment.text
      else:
        joined += [TextSegment(text), segment] if text else [segment]
        text = ''
  return (*joined, TextSegment(text)) if text else tuple(joined)


def map_text(function: Callable[[str], str], observation: Observation) -> Segments:
  """The observation as segments, with a function applied to each text."""
  return tuple(TextSegment(function(s.text)) if isinstance(s, TextSegment) else s for s in join(observation))


def stripped(segments: Segments) -> Segments:
  """The segments without white space at both ends."""
  parts = list(segments)
  if parts and isinstance(parts[0], TextSegment):
    parts[0] = TextSegment(parts[0].text.lstrip())
  if parts and isinstance(parts[-1], TextSegment):
    parts[-1] = TextSegment(parts[-1].text.rstrip())
  return join(parts)


def images_of(observation: Observation) -> list[np.ndarray]:
  """The images of an observation, u8[H, W, 3] each, in order."""
  return [segment.image for segment in join(observation) if isinstance(segment, ImageSegment)]


def written(observation: Observation) -> str:
  """An observation as text for people, with a mark in the place of each image."""
  return ''.join(IMAGE_MARK if isinstance(s, ImageSegment) else s.text for s in join(observation))


def as_text(segments: Segments) -> str:
  """The text of segments that contain only text; ValueError for an image or a sampled reply."""
  for segment in segments:
    if not isinstance(segment, TextSegment):
      raise ValueError(f'a prompt with a {type(segment).__name__} cannot be written as text')
  return ''.join(segment.text for segment in segments)
