"""Descriptions of a state by relations to the player: the true one of a scene, and the claims that a text makes.

A relation has two parts: where a thing is vertically and horizontally, seen from the player. The words are a closed
vocabulary, and a claim is one sentence of a fixed form:

  the box is above and to the left; the target is in the same row and to the right

Text that is no claim has no effect. Claims are found in one pass over the text, so no text takes long or raises.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

import numpy as np

from ragen_jax.envs.scenes import KINDS, Scene

# The words of the signs -1, 0, 1 of row and column differences, thing minus player.
VERTICAL = ('above', 'in the same row', 'below')
HORIZONTAL = ('to the left', 'in the same column', 'to the right')

# Between two claims.
CLAIM_SEP = '; '

# Blanks of any number between words. Without ASCII, other letters match too, such as the dotless i, whose lower case is
# no letter of the words.
_CLAIM = re.compile(
  rf'\b({"|".join(KINDS)}) is ({"|".join(VERTICAL)}) and ({"|".join(HORIZONTAL)})\b'.replace(' ', r'\s+'),
  re.IGNORECASE | re.ASCII,
)


@dataclasses.dataclass(frozen=True)
class Claim:
  """A claim in a text: its characters, from the kind on, and its relation as indices of `VERTICAL` and `HORIZONTAL`."""

  start: int
  stop: int
  kind: str
  row: int
  column: int


def true_relations(scene: Scene) -> dict[str, np.ndarray]:
  """Kind -> i64[3, 3], number of things by vertical and horizontal relation, in the order of the words."""
  counts = {kind: np.zeros((3, 3), np.int64) for kind in scene.things}
  for kind, places in scene.things.items():
    if places:
      rows, columns = (np.sign(np.array(places) - scene.player) + 1).T
      np.add.at(counts[kind], (rows, columns), 1)
  return counts


def find_claims(text: str) -> list[Claim]:
  """The claims of a text, in order. Letter case and the number of blanks are ignored."""
  found = []
  for match in _CLAIM.finditer(text):
    kind, vertical, horizontal = (' '.join(part.lower().split()) for part in match.groups())
    found.append(Claim(match.start(), match.end(), kind, VERTICAL.index(vertical), HORIZONTAL.index(horizontal)))
  return found


def read_claims(text: str) -> dict[str, np.ndarray]:
  """The claims of a text, in the form of `true_relations`, for every kind."""
  counts = {kind: np.zeros((3, 3), np.int64) for kind in KINDS}
  for claim in find_claims(text):
    counts[claim.kind][claim.row, claim.column] += 1
  return counts


def describe(scene: Scene) -> str:
  """The description of a scene, one claim for each thing."""
  claims = []
  for kind, counts in true_relations(scene).items():
    for (row, column), count in np.ndenumerate(counts):
      claims += [write_claim(kind, row, column)] * int(count)
  return CLAIM_SEP.join(claims)


def write_claim(kind: str, row: int, column: int) -> str:
  """A claim about a kind of thing, with indices of its relation in `VERTICAL` and `HORIZONTAL`."""
  return f'the {kind} is {VERTICAL[row]} and {HORIZONTAL[column]}'


def possible_claims(kinds: Sequence[str]) -> list[str]:
  """All claims about things of some kinds."""
  places = list(itertools.product(range(len(VERTICAL)), range(len(HORIZONTAL))))
  return [write_claim(kind, row, column) for kind in kinds for row, column in places]


def claim_rules(kinds: Sequence[str]) -> str:
  """The request for descriptions in a prompt."""
  return (
    f'To describe a board, write one sentence for each {" and each ".join(kinds)}, separated by semicolons: '
    f'"the {kinds[0]} is V and H". V is {_or(VERTICAL)}; H is {_or(HORIZONTAL)}; both are seen from the player. '
    'Write no other words.'
  )


def _or(words: Sequence[str]) -> str:
  quoted = [f'"{word}"' for word in words]
  return f'{", ".join(quoted[:-1])} or {quoted[-1]}'
