"""What docs/manipulation.md shows is what the program does."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from configs import default
from ragen_jax import build
from ragen_jax.agent.world_model.descriptions import find_claims
from ragen_jax.envs.manipulation import Manipulation
from ragen_jax.envs.manipulation_tasks import TASKS
from ragen_jax.utils.errors import UserError
from tests.support.benchmarks import benchmark
from tests.support.games.manipulation import levels
from tests.support.paths import ROOT
from tools import make_tables

PAGE = (ROOT / 'docs' / 'manipulation.md').read_text(encoding='utf-8')
RESULTS = ROOT / 'benchmarks' / 'results'


def test_tables_are_those_of_the_benchmarks():
  for case, told in json.loads((RESULTS / 'images.json').read_text())['tables']['cases'].items():
    numbers = [f'{told[unit]:,.0f}' for unit in ('images a processor second', 'images a second')]
    assert f'| `{case.replace(", ", "`, ").replace("x", " x ")} | {" | ".join(numbers)} |' in PAGE
  found = json.loads((RESULTS / 'manipulation.json').read_text())
  assert f'On {found["levels"]} levels' in PAGE and set(found['cases']) == set(TASKS)
  for task, told in found['cases'].items():
    for names in (('random', 'average', 'solver'), ('another table', 'average table')):
      assert f'| `{task}` | {" | ".join(f"{told[name]:.3f}" for name in names)} |' in PAGE


def test_examples_and_errors_of_the_page():
  example, *_ = [x for x in re.findall(r'```\n(.*?)```', PAGE, re.DOTALL) if ' and in the hand' in x]
  assert len(find_claims(example, Manipulation().scene_words)) == 2
  (text,) = [x for x in re.findall(r'```\n(.*?)\n```', PAGE, re.DOTALL) if x.startswith('Positions')]
  assert text == Manipulation().render(levels('place'))[0]
  (reply,) = re.findall(r'<answer>(.*?)</answer>', PAGE)
  assert [Manipulation().read_action(piece.strip())[1] for piece in reply.split('||')] == [
    *map(str.strip, reply.split('||'))
  ]
  config = default.get_config()
  config.envs.PlaceTwoCube.cameras = 3
  with pytest.raises(UserError) as error:
    build.env_specs(config, ('PlaceTwoCube',), (1,))
  assert f'```\n{error.value}\n```' in PAGE


def test_rows_of_the_tasks_have_their_tags():
  envs = default.get_config().envs
  for tag, task in re.findall(r'^\| `(\w+)`, `(\w+)` \|', PAGE, re.MULTILINE):
    assert envs[tag].task == envs[f'{tag}Test'].task == task
    assert (envs[tag].split, envs[f'{tag}Test'].split) == ('train', 'test')
  assert {options.task for options in envs.values() if options.type == 'manipulation'} == set(TASKS)


@pytest.mark.exhaustive
def test_the_picture_is_fresh():
  shown = np.asarray(Image.open(io.BytesIO(make_tables.SHEET.read_bytes()))).astype(int)
  made = make_tables.sheet().astype(int)
  assert shown.shape == made.shape, 'run: python tools/make_tables.py'
  # Rounding differs between processors and may move an edge by a pixel.
  assert (np.abs(shown - made).max(-1) > 1).mean() < 0.01, 'run: python tools/make_tables.py'


@pytest.mark.slow
def test_the_benchmarks_measure():
  with benchmark('manipulation') as module:
    told = module.measure('place', 32)
    assert told['solver'] == 1.0 > told['random'] and 0 <= told['average'] < 0.5
    assert 0 < told['another table'] <= told['average table'] + 0.2 < 1
  with benchmark('images') as module:
    (told,) = module.measure_pictures({'16x16': (Manipulation(picture=2), 8)}, quick=True)['cases'].values()
    assert min(told.values()) > 0
    assert {side: env.picture * tile for side, (env, tile) in module.TABLES.items()} == {
      name: int(name.rsplit('x', 1)[1]) for name in module.TABLES
    }
