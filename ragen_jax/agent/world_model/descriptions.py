"""Descriptions of a state by relations to the player: the true one of a scene, and the claims that a text makes.

A relation has two parts, such as where a thing is vertically and horizontally, seen from the player. The words are a
closed vocabulary, that of boards, of a room's objects or of a table's, and a claim is one sentence of a fixed form:

  the box is above and to the left; the target is in the same row and to the right
  the red ball is ahead to the left and near
  the red cube is at x -40 y 120 and on the table

Text that is no claim has no effect. Claims are found in one pass over the text, so no text takes long or raises.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence

import numpy as np

from ragen_jax.envs.scenes import BOARD, TICK, Scene, Vocabulary

# Between two claims.
CLAIM_SEP = '; '


@functools.lru_cache(maxsize=64)
def _claim_pattern(words: Vocabulary) -> re.Pattern[str]:
  # Blanks of any number between words. Without ASCII, other letters match too, such as the dotless i, whose lower case
  # is no letter of the words.
  kinds, first, second = ('|'.join(part) for part in (words.kinds, words.first, words.second))
  return re.compile(rf'\b({kinds}) is ({first}) and ({second})\b'.replace(' ', r'\s+'), re.IGNORECASE | re.ASCII)


@dataclasses.dataclass(frozen=True)
class Claim:
  """A claim in a text: its characters, from the kind on, and its relation as indices of the words of both parts."""

  start: int
  stop: int
  kind: str
  row: int
  column: int


def true_relations(scene: Scene) -> dict[str, np.ndarray]:
  """Kind -> i64[R, C], number of things by the first and the second part of their relation, in the words' order."""
  counts = {kind: np.zeros(scene.words.shape, np.int64) for kind in scene.things}
  for kind, places in scene.things.items():
    for place in places:
      counts[kind][scene.relation(place)] += 1
  return counts


def find_claims(text: str, words: Vocabulary = BOARD) -> list[Claim]:
  """The claims of a text, in order. Letter case and the number of blanks are ignored."""
  found = []
  for match in _claim_pattern(words).finditer(text):
    kind, first, second = (' '.join(part.lower().split()) for part in match.groups())
    found.append(Claim(match.start(), match.end(), kind, words.first.index(first), words.second.index(second)))
  return found


def read_claims(text: str, words: Vocabulary = BOARD) -> dict[str, np.ndarray]:
  """The claims of a text, in the form of `true_relations`, for every kind."""
  counts = {kind: np.zeros(words.shape, np.int64) for kind in words.kinds}
  for claim in find_claims(text, words):
    counts[claim.kind][claim.row, claim.column] += 1
  return counts


def describe(scene: Scene) -> str:
  """The description of a scene, one claim for each thing."""
  claims = []
  for kind, counts in true_relations(scene).items():
    for row, column in np.argwhere(counts):
      claims += [write_claim(kind, row, column, scene.words)] * int(counts[row, column])
  return CLAIM_SEP.join(claims)


def write_claim(kind: str, row: int, column: int, words: Vocabulary = BOARD) -> str:
  """A claim about a kind of thing, with indices of its relation among the words of both parts."""
  return f'the {kind} is {words.first[row]} and {words.second[column]}'


def possible_claims(words: Vocabulary) -> list[str]:
  """All claims about things of the kinds of a vocabulary."""
  places = list(itertools.product(range(len(words.first)), range(len(words.second))))
  return [write_claim(kind, row, column, words) for kind in words.kinds for row, column in places]


def claim_rules(words: Vocabulary) -> str:
  """The request for descriptions in a prompt, with the kinds that a game has."""
  kinds = words.kinds
  if words.shown_as == 'table':
    return (
      f'To describe a table, write one sentence for the {" and one for the ".join(kinds)}, separated by semicolons, '
      f'such as "the {kinds[0]} is at x X y Y and H". X and Y are its x and y as the nearest multiples of {TICK}; H is '
      f'{_or(words.second)}. Write no other words.'
    )
  if words.shown_as == 'room':
    return (
      'To describe a room, write one sentence for the object that you look for and for each other object in view, '
      f'separated by semicolons, such as "the {kinds[0]} is D and F". D is {_or(words.first)}; F is '
      f'{_or(words.second)}; both are seen from you. Write no other words.'
    )
  return (
    f'To describe a board, write one sentence for each {" and each ".join(kinds)}, separated by semicolons: '
    f'"the {kinds[0]} is V and H". V is {_or(words.first)}; H is {_or(words.second)}; both are seen from the player. '
    'Write no other words.'
  )


def _or(words: Sequence[str]) -> str:
  quoted = [f'"{word}"' for word in words]
  return f'{", ".join(quoted[:-1])} or {quoted[-1]}'
