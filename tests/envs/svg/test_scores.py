"""Scores of drawings: ends, order, and each part by a plain count."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax.envs.svg.program import read_program
from ragen_jax.envs.svg.raster import draw
from ragen_jax.envs.svg.scores import PARTS, score_parts, weighted
from tests.envs.svg.test_program import svg


def picture(content: str, size: int = 64) -> np.ndarray:
  return draw(read_program(svg(content)), size)


SHAPES = '<rect x="20" y="20" width="40" height="40" fill="red"/><circle cx="75" cy="75" r="15" fill="blue"/>'
TARGET = picture(SHAPES)


def test_an_equal_drawing_has_1_and_an_empty_one_0_in_every_part():
  assert score_parts(TARGET, TARGET.copy()) == dict.fromkeys(PARTS, 1.0)
  assert score_parts(TARGET, picture('')) == dict.fromkeys(PARTS, 0.0)
  assert score_parts(picture(''), TARGET) == dict.fromkeys(PARTS, 0.0)
  gray = picture('<rect width="100" height="100" fill="#888"/>')
  assert score_parts(TARGET, gray)['pixels'] == 0.0 == score_parts(TARGET, gray)['edges']


def test_what_is_farther_scores_less():
  def moved(by: float) -> dict[str, float]:
    return score_parts(TARGET, picture(f'<g transform="translate({by})">{SHAPES}</g>'))

  scores = [moved(by) for by in (0, 1, 4, 10, 25)]
  for name in ('pixels', 'edges'):
    values = [x[name] for x in scores]
    assert values == sorted(values, reverse=True) and values[0] == 1 and values[-1] < 0.5, name
  assert scores[1]['edges'] > 0.99  # within a pixel
  assert scores[3]['colours'] > 0.9  # which do not depend on places
  faded = [SHAPES.replace('red', f'rgb(255,{green},{green})') for green in (0, 40, 120)]
  other = [score_parts(TARGET, picture(content)) for content in faded]
  assert [x['colours'] for x in other] == sorted((x['colours'] for x in other), reverse=True)
  assert other[0]['colours'] > other[1]['colours'] + 0.05


def test_parts_are_those_of_plain_counts():
  drawing = picture('<rect x="25" y="20" width="40" height="35" fill="red"/>')
  parts = score_parts(TARGET, drawing)
  wanted, own = TARGET.astype(float), drawing.astype(float)
  assert parts['pixels'] == pytest.approx(1 - np.mean((wanted - own) ** 2) / wanted.reshape(-1, 3).var(0).mean())
  edges = []
  for levels in (TARGET.astype(int), drawing.astype(int)):
    edges.append({
      (y, x) for y in range(64) for x in range(64)
      if any(abs(levels[y, x] - levels[v, u]).max() >= 24 for v, u in ((y + 1, x), (y, x + 1)) if max(u, v) < 64)
    })  # fmt: skip

  def beside(some, others):
    return np.mean([any((y + i, x + j) in others for i in (-1, 0, 1) for j in (-1, 0, 1)) for y, x in some])

  precision, recall = beside(edges[1], edges[0]), beside(edges[0], edges[1])
  assert parts['edges'] == pytest.approx(2 * precision * recall / (precision + recall))
  # Without smooth edges, red and blue are levels of the histogram, which count whole pixels.
  sharp = picture('<rect width="50" height="20" fill="red"/><rect y="50" width="25" height="40" fill="blue"/>', 100)
  other = picture('<rect x="50" width="50" height="30" fill="red"/>', 100)
  assert score_parts(sharp, other)['colours'] == pytest.approx(2 * 1000 / (2000 + 1500))


def test_weights_are_relative():
  parts = {'pixels': 0.5, 'edges': 1.0, 'colours': 0.0}
  assert weighted(parts, {'pixels': 1.0, 'edges': 1.0, 'colours': 2.0}) == 0.375
  assert weighted(parts, {'pixels': 0.0, 'edges': 3.0, 'colours': 0.0}) == 1.0
