"""Turns and rotations of the cube as arrays, against stickers that turn in space."""

from __future__ import annotations

import functools

import numpy as np

from ragen_jax.envs import rubik_cube
from tests.support.games.rubik import WHOLE, is_solved, moved, orientations


def test_every_turn_has_order_4_and_its_inverse_beside_it():
  turns, same = rubik_cube.turn_sources(), np.arange(24)
  for i, turn in enumerate(turns):
    powers = [functools.reduce(lambda a, b: a[b], [turn] * k) for k in range(1, 5)]
    assert [np.array_equal(power, same) for power in powers] == [False, False, False, True]
    np.testing.assert_array_equal(turn[turns[i ^ 1]], same)
    assert (turn != same).sum() == 12


def test_rotations_are_those_of_a_cube_in_space():
  ours = {tuple(np.array(WHOLE)[rotation].tolist()) for rotation in rubik_cube.rotation_sources()}
  assert len(rubik_cube.rotation_sources()) == 24 and ours == {moved(WHOLE, to) for to in orientations()}
  assert all(is_solved(cube) for cube in ours)
