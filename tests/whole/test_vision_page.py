"""What docs/vision.md shows is what the program does."""

from __future__ import annotations

import io
import json
import re

import jax
import numpy as np
import pytest
from PIL import Image

from configs import default
from ragen_jax.agent.world_model.descriptions import read_claims
from ragen_jax.agent.world_model.formats import FORMATS, read_sections
from tests.support.benchmarks import benchmark
from tests.support.paths import ROOT
from tools import make_tiles

PAGE = (ROOT / 'docs' / 'vision.md').read_text(encoding='utf-8')


@pytest.mark.slow
def test_the_contact_sheet_is_fresh_and_shows_every_tile():
  sheet = make_tiles.sheet()
  shown = np.asarray(Image.open(io.BytesIO(make_tiles.SHEET.read_bytes())))
  np.testing.assert_array_equal(shown, sheet, err_msg='run: python tools/make_tiles.py')
  codes = {}
  for env, state in (board for row in make_tiles.boards() for board in row):
    codes.setdefault(env, set()).update(np.unique(env.cells(state)).tolist())
  for env, seen in codes.items():
    if env.name in ('sokoban', 'frozen_lake', 'game_2048', 'rubik_2x2'):
      assert seen == set(range(len(env.tiles(8)))), env.name
  assert len({env.name for env in codes}) == 5


@pytest.mark.slow
def test_the_example_draws_what_its_comment_says():
  (code,) = [c for c in re.findall(r'```python\n(.*?)```', PAGE, re.DOTALL) if 'pixels' in c]
  names = {}
  exec(code.replace('jax.random.split(jax.random.key(0), 128)', 'jax.random.split(jax.random.key(0), 16)'), names)
  assert names['images'].shape == (16, 168, 168, 3) and names['images'].dtype == np.uint8
  assert '# u8[128, 168, 168, 3]' in code


def test_the_table_of_sizes_is_that_of_the_benchmark():
  with benchmark('images') as module:
    for name, env in module.CASES.items():
      rows, columns = env.image_grid
      for tile in module.TILES:
        assert f'{rows * tile} x {columns * tile}' in PAGE, name
      assert re.search(rf'\b{rows * columns}\b', PAGE), name
    cases = json.loads((ROOT / 'benchmarks' / 'results' / 'images.json').read_text())['cases']
    assert set(cases) == set(module.CASES)
    speeds = [told['images a second'] / 1000 for case in cases.values() for told in case.values()]
    assert f'from {min(speeds):.0f} thousand' in PAGE and f'to {max(speeds):.0f} thousand' in PAGE


@pytest.mark.slow
def test_the_benchmark_draws(monkeypatch):
  with benchmark('images') as module:
    monkeypatch.setattr(module, 'CASES', {'FrozenLake 4x4': module.CASES['FrozenLake 4x4']})
    monkeypatch.setattr(module, 'TILES', (8,))
    found = module.measure(quick=True)['cases']['FrozenLake 4x4']['8 pixels a tile']
    assert found.pop('images a second') > 0 and found == {'height': 32, 'width': 32, 'visual tokens': 16}
    env = module.CASES['FrozenLake 4x4']
    images = module.Program(env, 8).images()
    assert images.shape == (128, 32, 32, 3)
    levels = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 128))
    np.testing.assert_array_equal(images[7], env.pixels(jax.tree.map(lambda x: x[7], levels), 8))


def test_the_forms_and_the_sentences_of_the_page():
  rows = re.findall(r'^\| `(\w+)` \| `(<.*?)` \|$', PAGE, re.MULTILINE)
  assert [name for name, _ in rows] == list(FORMATS)
  for name, reply in rows:
    assert read_sections(reply, name).correct
  assert sum(counts.sum() for counts in read_claims(PAGE.split('## The state reward')[1]).values()) == 2


@pytest.mark.exhaustive
def test_the_table_of_floors_is_that_of_the_benchmark(monkeypatch):
  record = json.loads((ROOT / 'benchmarks' / 'results' / 'description_floors.json').read_text())
  cases, floor = record['cases'], record['floor']
  assert floor == default.get_config().reward.state_floor
  for row in ('another board', 'constant', 'another board after the floor', 'constant after the floor'):
    assert f'| {" | ".join(f"{case[row]:.3f}" for case in cases.values())} |' in PAGE
  with benchmark('description_floors') as module:
    assert list(cases) == list(module.CASES)
    monkeypatch.setattr(module, 'MOST_CLAIMS', 1)
    for told in module.measure(12, 0.0)['cases'].values():
      assert told['constant after the floor'] == told['constant']
      assert told['another board after the floor'] == told['another board']
    for name, told in module.measure(12, 0.5)['cases'].items():
      # A description earns less than its score, and more than its mean score would.
      for key in ('another board', 'constant'):
        assert max(0, 2 * told[key] - 1) <= told[f'{key} after the floor'] < told[key]
      # Neither is always right.
      assert 0 < told['another board'] < 1 and 0.3 < told['constant'] < 1, name
      assert sum(counts.sum() for counts in read_claims(told['constant description']).values()) in (1, 2)
