"""Images of the cube tell its stickers, in a net."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax.envs.rubik import COLOURS, Rubik2x2, State
from tests.support.images import draw, nearest_tiles, noisy

ENV = Rubik2x2(scramble_depth=9)
NET = ['  UU    ', '  UU    ', 'LLFFRRBB', 'LLFFRRBB', '  DD    ', '  DD    ']


@pytest.mark.parametrize('tile', [8, 32])
def test_the_text_is_read_from_the_pixels(tile):
  stickers, no = np.random.default_rng(0).integers(6, size=(32, 24)).astype(np.int8), np.zeros(32, bool)
  states = State(no, no, stickers)
  for image, text in zip(noisy(draw(ENV, states, tile)), ENV.render(states), strict=True):
    letters = np.array(list(' ' + COLOURS))[nearest_tiles(image, ENV.tiles(tile))]
    read = {face: [letters[r, c] for r in range(6) for c in range(8) if NET[r][c] == face] for face in 'UDLRFB'}
    assert [f'{f}: {a} {b} / {c} {d}' for f, (a, b, c, d) in read.items()] == text.splitlines()
    assert all(letters[r, c] == ' ' for r in range(6) for c in range(8) if NET[r][c] == ' ')
