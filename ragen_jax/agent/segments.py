"""Prompts as tuples of segments: text, images, and tokens that are fed as they were sampled.

A prompt of text alone is one `TextSegment`; an image splits the text around it. `agent.chat` turns segments into ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class TextSegment:
  """Text, with the special tokens of the chat format where it has any."""

  text: str


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSegment:
  """An image, which takes the place of tokens.

  Attributes:
    image: u8[H, W, 3], or a reference to such an array, which the embedding code resolves.
    columns: placeholder tokens, one for each embedding that the image becomes.
  """

  image: Any
  columns: int


@dataclasses.dataclass(frozen=True)
class TokenSegment:
  """Ids that are fed as they are: a reply as it was sampled, whose text may have other tokenizations."""

  ids: tuple[int, ...]


Segment = TextSegment | ImageSegment | TokenSegment
Segments = tuple[Segment, ...]
# What an environment shows: text, or segments where it shows images too.
Observation = str | Segments


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSpan:
  """Where an image lies among the columns of encoded segments.

  Attributes:
    image: as in its `ImageSegment`.
    start: its first placeholder column.
    stop: one past its last.
  """

  image: Any
  start: int
  stop: int


@dataclasses.dataclass(frozen=True)
class Encoded:
  """Segments as token ids.

  Attributes:
    ids: i32 ids, placeholders included.
    images: the images among them, in their order.
  """

  ids: tuple[int, ...]
  images: tuple[ImageSpan, ...] = ()


def join(*parts: Observation) -> Segments:
  """Concatenates texts and segments; adjacent texts become one segment, empty ones are dropped.

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
  """The text of segments that hold nothing else.

  Raises:
    ValueError: there is an image or a sampled reply among them.
  """
  for segment in segments:
    if not isinstance(segment, TextSegment):
      raise ValueError(f'a prompt with a {type(segment).__name__} has no form in text alone')
  return ''.join(segment.text for segment in segments)
