"""Targets that are made: their difficulty, their parts, and what is told of them."""

from __future__ import annotations

import dataclasses
import random
import re

import numpy as np
import pytest

from ragen_jax.envs.svg import targets
from ragen_jax.envs.svg.program import read_program
from ragen_jax.envs.svg.raster import draw
from ragen_jax.envs.svg.targets import describe, identity, make_program, make_target
from tests.support.environments import raises_one_line

RECIPE = targets.Recipe(2, 4, ('rect', 'circle', 'line'), ('red', 'teal'), True, False, 10)
ALL = dataclasses.replace(RECIPE, kinds=targets.KINDS, outlines=True, grid=1)


def programs(recipe: targets.Recipe, count: int = 60) -> list[str]:
  return [make_target(recipe, seed, 'all', 0.1, 64).program for seed in range(count)]


def test_a_target_follows_its_recipe():
  numbers = set()
  for text in programs(RECIPE):
    marks = re.findall(r'<(\w+) ([^>]*)/>', text)
    numbers.add(len(marks))
    assert {kind for kind, _ in marks} <= set(RECIPE.kinds)
    assert set(re.findall(r'"([a-z]+)"', text)) <= {'red', 'teal'}
    assert all(int(x) % 10 == 0 for x in re.findall(r' (?:x|y|cx|cy|r|x1|y2|width|height)="(\d+)"', text))
    assert 'fill="none"' not in text and '\n' not in text
  assert numbers == {2, 3, 4}
  everything = ' '.join(programs(ALL))
  assert all(f'<{kind} ' in everything for kind in targets.KINDS)
  outlined = everything.count('fill="none"') / everything.count('fill=')
  assert 0.2 < outlined < 0.45 and re.search(r' r="\d*[1-9]"', everything)


def test_shapes_are_on_the_canvas_apart_if_they_must_be_and_visible():
  for overlap in (True, False):
    recipe = dataclasses.replace(ALL, overlap=overlap)
    for text in programs(recipe, 30):
      layer = read_program(text)
      assert len(layer.parts) == text.count('/>')
      points = np.concatenate([mark.edges for mark in layer.parts])
      assert points.min() >= -0.15 and points.max() <= 1.15  # strokes may reach over the border
      whole = draw(layer, 100)
      areas = []
      for i in range(len(layer.parts)):
        alone = dataclasses.replace(layer, parts=[layer.parts[i]])
        areas.append(draw(alone, 100).min(-1) < 200)
        others = dataclasses.replace(layer, parts=layer.parts[:i] + layer.parts[i + 1 :])
        assert areas[-1].sum() > 8 and (overlap or not np.array_equal(draw(others, 100), whole))
      assert overlap or np.sum(areas, 0).max() == 1


def test_a_shape_does_not_hide_one_before_it():
  small, large, beside = (np.array(x) for x in ((20, 20, 40, 40), (10, 20, 50, 40), (41, 20, 60, 40)))
  assert not targets._may_stand(large, small, overlap=True) and targets._may_stand(small, large, overlap=True)
  assert not targets._may_stand(small, large, overlap=False) and targets._may_stand(beside, small, overlap=False)


def test_no_shape_is_a_line_also_on_a_coarse_grid():
  for kind, least in (('polygon', 1 / 4), ('path', 1 / 6)):
    recipe = targets.Recipe(1, 1, (kind,), ('black',), True, False, 10)
    for text in programs(recipe, 120):
      x, y = np.array(re.findall(r'[\d.]+', text.split('="')[2]), float).reshape(-1, 2).T
      covered = (255 - draw(read_program(text), 100)[..., 0].astype(float)).sum() / 255
      assert covered > least * np.ptp(x) * np.ptp(y) - 4 and covered > 20, text


def test_equal_seeds_give_equal_targets_and_parts_share_no_picture():
  parts = {split: {make_target(RECIPE, seed, split, 0.3, 64).id for seed in range(50)} for split in ('train', 'test')}
  assert not parts['train'] & parts['test'] and min(map(len, parts.values())) > 40
  first = [make_target(RECIPE, seed, 'all', 0.3, 64).id for seed in range(50)]
  targets._numbered.cache_clear()
  assert first == [make_target(RECIPE, seed, 'all', 0.3, 64).id for seed in range(50)]
  kept = [x for x in first if x in parts['train']]
  assert 20 < len(kept) < 48  # a seed of a part has its first target if that is in the part
  two = '<svg viewBox="0 0 100 100"><rect width="9" height="9"/><rect x="20" width="9" height="9"/></svg>'
  other = '<svg viewBox="0 0 10 10"><g><rect x="2" width=".9" height=".9"/></g><rect width=".9" height=".9"/></svg>'
  assert identity(two) == identity(other) != identity(two.replace('20', '30'))


def test_the_first_targets_are_the_same_on_every_machine():
  rng = random.Random(7)
  assert make_program(RECIPE, rng) == FIRST


FIRST = (
  '<svg viewBox="0 0 100 100"><rect x="0" y="40" width="40" height="30" fill="teal"/>'
  '<rect x="80" y="0" width="10" height="30" fill="red"/></svg>'
)


def test_a_part_without_targets_is_told_in_one_line():
  few = targets.Recipe(1, 1, ('rect',), ('red',), True, False, 10)
  with raises_one_line(
    r"svg: split='test': none of 512 targets is in this part and seen at 64 pixels; .* test_share=1e-09"
  ):
    make_target(few, 0, 'test', 1e-9, 64)


def test_a_target_that_is_white_at_the_size_of_the_pictures_is_not_made(monkeypatch):
  thin = '<svg viewBox="0 0 100 100"><rect y="0.15" width="100" height="0.1"/></svg>'
  programs = iter([thin, FIRST])
  made = {}

  def make(recipe, rng):
    del recipe
    return made.setdefault(rng.getstate(), next(programs, FIRST))

  targets._numbered.cache_clear()
  monkeypatch.setattr(targets, 'make_program', make)
  assert [make_target(RECIPE, 0, 'all', 0.3, side).program for side in (64, 48, 16)] == [thin, FIRST, FIRST]
  targets._numbered.cache_clear()


def test_shapes_are_told_with_their_colours_and_places():
  text = (
    '<svg viewBox="0 0 100 100"><rect x="0" y="0" width="20" height="20" fill="orange"/>'
    '<circle cx="50" cy="50" r="10" fill="none" stroke="red" stroke-width="2"/>'
    '<line x1="70" y1="80" x2="100" y2="100" stroke="blue" stroke-width="4"/></svg>'
  )
  assert describe(text) == (
    'I see an orange rect at the top left, then a red circle in the middle, then a blue line at the bottom right.'
  )
  for text in programs(ALL, 20):
    assert describe(text).count(' then ') == text.count('/>') - 1


@pytest.mark.parametrize(
  ('name', 'known'),
  [('red', True), ('White', False), ('ivory', False), ('#f00', False), ('no', False), ('none', False)],
)
def test_colours_can_be_seen_on_white(name, known):
  assert targets.is_visible(name) is known
