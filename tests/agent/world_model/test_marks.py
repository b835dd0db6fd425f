"""Verdicts on claims: by hand, and in agreement with the score of the whole description."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.agent.world_model.descriptions import describe, find_claims, read_claims, true_relations, write_claim
from ragen_jax.agent.world_model.marks import HALF, RIGHT, WRONG, mark_description
from ragen_jax.agent.world_model.state_reward import f1
from ragen_jax.envs.scenes import KINDS, RoomScene, Scene

SCENE = Scene((2, 2), {'goal': ((0, 2),), 'hole': ((1, 1), (2, 4), (4, 2))})


@pytest.mark.parametrize(
  ('text', 'verdicts', 'missing'),
  [
    ('', [], 4),
    ('the goal is above and in the same column', [(RIGHT, '')], 3),
    ('the GOAL  is\nabove and to the left', [(HALF, 'the goal is above and in the same column')], 3),
    ('the goal is below and to the left', [(WRONG, '')], 4),
    # The second of two right claims about one thing is one too many.
    ('the hole is above and to the left; the hole is above and to the left', [(RIGHT, ''), (WRONG, '')], 3),
    ('the box is above and to the left', [(WRONG, '')], 4),
    (
      'the hole is below and to the right; the hole is above and to the right',
      [(HALF, 'the hole is in the same row and to the right'), (HALF, 'the hole is above and to the left')],
      2,
    ),
    # The first hole fits both claims, and leaves the first claim to the second hole, which fits no other.
    (
      'the hole is above and to the right; the hole is below and to the left',
      [(HALF, 'the hole is in the same row and to the right'), (HALF, 'the hole is above and to the left')],
      2,
    ),
  ],
)
def test_verdicts_by_hand(text, verdicts, missing):
  marks, left = mark_description(text, SCENE)
  assert len(left) == missing and set(left) <= set(describe(SCENE).split('; '))
  assert [(mark.verdict, mark.truth) for mark in marks] == verdicts


def test_a_true_description_is_right_throughout_and_nothing_is_missing():
  text = f'So: {describe(SCENE)}!'
  marks, missing = mark_description(text, SCENE)
  assert [mark.verdict for mark in marks] == [RIGHT] * 4 and not missing
  assert '; the '.join(text[mark.claim.start : mark.claim.stop] for mark in marks) == describe(SCENE)[4:]


_places = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=4, unique=True)
_claims = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2), st.integers(0, 2)), max_size=7)


@settings(deadline=None, max_examples=100)
@given(_places, _places, _claims)
def test_verdicts_add_up_to_the_score(goals, holes, claims):
  scene = Scene((2, 2), {'goal': tuple(goals), 'hole': tuple(holes)})
  text = '; '.join(write_claim(*claim) for claim in claims)
  marks, missing = mark_description(text, scene)
  assert [mark.claim for mark in marks] == find_claims(text)
  for kind, true in true_relations(scene).items():
    own = [mark for mark in marks if mark.claim.kind == kind]
    credit = sum({RIGHT: 1.0, HALF: 0.5, WRONG: 0.0}[mark.verdict] for mark in own)
    claimed = read_claims(text)[kind]
    if claimed.sum() + true.sum():
      assert f1(claimed, true) == pytest.approx(2 * credit / (len(own) + true.sum()))
    paired = sum(mark.verdict != WRONG for mark in own)
    assert sum(kind in sentence for sentence in missing) == true.sum() - paired
    for mark in own:
      if mark.verdict == HALF:
        row, column = np.argwhere(read_claims(mark.truth)[kind])[0]
        assert (row == mark.claim.row) != (column == mark.claim.column)
  assert all(mark.verdict == WRONG for mark in marks if mark.claim.kind == 'box')


def test_verdicts_on_rooms():
  things = {'red ball': ((3, 5),), 'blue cube': ((4, 3),)}
  scene = RoomScene((5, 5), things, heading=0, target='red ball', reach=4, kinds=('red ball', 'blue cube', 'red cube'))
  marks, missing = mark_description('the red ball is ahead and far; the red cube is behind and near', scene)
  assert [(mark.verdict, mark.truth) for mark in marks] == [(HALF, 'the red ball is ahead and near'), (WRONG, '')]
  assert missing == ['the blue cube is ahead to the left and midway']
  assert [mark.verdict for mark in mark_description(describe(scene), scene)[0]] == [RIGHT] * 2
