"""Relations against a plain loop, and the reader of claims on any text."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.agent.world_model.descriptions import claim_rules, describe, read_claims, true_relations, write_claim
from ragen_jax.envs.scenes import BOARD, HORIZONTAL, KINDS, VERTICAL, Scene

SCENE = Scene((2, 3), {'box': ((1, 3), (1, 1)), 'target': ((2, 5),)})


def scenes(n, seed=0):
  """Scenes of two kinds on 5 x 5 cells, with 0 to 4 things of a kind."""
  rng = np.random.default_rng(seed)
  place = lambda: tuple(rng.integers(5, size=2).tolist())  # noqa: E731
  kinds = [('box', 'target'), ('goal', 'hole')]
  return [Scene(place(), {k: tuple(place() for _ in range(rng.integers(5))) for k in kinds[i % 2]}) for i in range(n)]


def by_loop(scene):
  """(kind, vertical word, horizontal word) of each thing."""
  found = []
  for kind, places in scene.things.items():
    for row, column in places:
      vertical = 'in the same row'
      if row < scene.player[0]:
        vertical = 'above'
      elif row > scene.player[0]:
        vertical = 'below'
      horizontal = 'in the same column'
      if column < scene.player[1]:
        horizontal = 'to the left'
      elif column > scene.player[1]:
        horizontal = 'to the right'
      found.append((kind, vertical, horizontal))
  return found


def test_relations_are_those_of_a_plain_loop():
  seen = set()
  for scene in scenes(200):
    relations, expected = true_relations(scene), by_loop(scene)
    assert set(relations) == set(scene.things)
    for kind, counts in relations.items():
      for (row, column), count in np.ndenumerate(counts):
        assert count == expected.count((kind, VERTICAL[row], HORIZONTAL[column]))
    seen |= set(expected)
  assert len(seen) == 4 * 9


def test_a_description():
  assert describe(SCENE) == (
    'the box is above and to the left; the box is above and in the same column; '
    'the target is in the same row and to the right'
  )
  assert describe(Scene((0, 0), {'hole': ()})) == ''


def test_claims_of_a_description_are_the_true_relations():
  for scene in scenes(100):
    for text in (describe(scene), describe(scene).upper().replace(' ', ' \n ')):
      claims = read_claims(text)
      for kind in KINDS:
        np.testing.assert_array_equal(claims[kind], true_relations(scene).get(kind, np.zeros((3, 3))))


@pytest.mark.parametrize(
  'text',
  [
    '',
    'the box is above',
    'the box is to the left and above',
    'the box is not above and to the left',
    'the sandbox is above and to the left',
    'the box is above and to the leftmost',
    'the player is above and to the left',
    'the box is same and to the left',
    'the boxes are above and to the left',
    'the box isabove and to the left',
    # Letters whose other case is one of the words'.
    'the box is above and to the r\u0131ght',
    'the box is above and to the r\u0130ght',
    'the target i\u017f in the same row and to the left',
    'the target is in the \u017fame row and to the left',
  ],
)
def test_other_sentences_are_no_claims(text):
  assert not any(counts.any() for counts in read_claims(text).values())


def test_every_claim_is_read():
  for kind in KINDS:
    for row in range(3):
      for column in range(3):
        claims = read_claims(f'Here {write_claim(kind, row, column)} of the player, {write_claim(kind, row, column)}.')
        assert claims[kind][row, column] == 2 == sum(counts.sum() for counts in claims.values())


PIECES = ['the box', 'is', 'above', 'and', 'to the left', ';', '<>', ' ', 'hole', '\x00', 'İ']


@given(st.lists(st.sampled_from(PIECES) | st.text()))
@settings(max_examples=60, deadline=None)
def test_any_text_is_read(pieces):
  assert set(read_claims(' '.join(pieces))) == set(KINDS)


@pytest.mark.parametrize('piece', ['the box is above and ', ' ', 'box is ', 'box is above and to the left '])
def test_long_texts_are_read_in_one_pass(piece):
  # A reader that goes back would not come to an end of a million pieces within a test's time.
  claims = read_claims(piece * 200_000)
  assert claims['box'].sum() == (200_000 if piece.count('left') else 0)


def test_the_request_names_every_word():
  text = claim_rules(dataclasses.replace(BOARD, kinds=('goal', 'hole')))
  assert all(f'"{word}"' in text for word in (*VERTICAL, *HORIZONTAL)) and 'each goal and each hole' in text
