"""Prompts as tuples of segments: text, images, and sampled tokens.

A prompt of text only is one `TextSegment`; an image splits the text around it. `agent.chat` turns segments into ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class TextSegment:
  """Text, which may contain special tokens of the chat format."""

  text: str


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSegment:
  """An image, represented by placeholder tokens.

  Attributes:
    image: u8[H, W, 3], or a reference to such an array, which the embedding code resolves.
    columns: number of placeholder tokens, one for each embedding of the image.
  """

  image: Any
  columns: int


@dataclasses.dataclass(frozen=True)
class TokenSegment:
  """The ids of a sampled reply, which are fed unchanged, because its text may have other tokenizations."""

  ids: tuple[int, ...]


Segment = TextSegment | ImageSegment | TokenSegment
Segments = tuple[Segment, ...]
# An environment's observation: text, or segments if it contains images.
Observation = str | Segments


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSpan:
  """The columns of an image in encoded segments.

  Attributes:
    image: the image of its `ImageSegment`.
    start: the first placeholder column.
    stop: the column after the last placeholder.
  """

  image: Any
  start: int
  stop: int


@dataclasses.dataclass(frozen=True)
class Encoded:
  """Segments as token ids.

  Attributes:
    ids: i32 ids, including placeholders.
    images: the images, in order.
  """

  ids: tuple[int, ...]
  images: tuple[ImageSpan, ...] = ()


def join(*parts: Observation) -> Segments:
  """Concatenates texts and segments; adjacent texts are merged, and empty texts are dropped.

  join('a', (TextSegment('b'), image), 'c')  ->  (TextSegment('ab'), image, TextSegment('c'))
  """
  joined: list[Segment] = []
  for part in parts:
    for segment in (TextSegment(part),) if isinstance(part, str) else part:
      if not isinstance(segment, TextSegment):
        joined.append(segment)
      elif segment.text and joined and isinstance(joined[-1], TextSegment):
        joined[-1] = TextSegment(joined[-1].text + segment.text)
      elif segment.text:
        joined.append(segment)
  return tuple(joined)


def map_text(function: Callable[[str], str], observation: Observation) -> Segments:
  """The observation as segments, with a function applied to each text."""
  return tuple(TextSegment(function(s.text)) if isinstance(s, TextSegment) else s for s in join(observation))


def as_text(segments: Segments) -> str:
  """The text of segments that contain only text.

  Raises:
    ValueError: a segment is an image or a sampled reply.
  """
  for segment in segments:
    if not isinstance(segment, TextSegment):
      raise ValueError(f'a prompt with a {type(segment).__name__} cannot be written as text')
  return ''.join(segment.text for segment in segments)
