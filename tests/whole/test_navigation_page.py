"""What docs/navigation.md shows is what the program does."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from configs import default, navigation_vision_ppo
from ragen_jax import build
from ragen_jax.agent.world_model.descriptions import find_claims
from ragen_jax.envs.base import Budget
from ragen_jax.envs.navigation import Navigation
from ragen_jax.utils.errors import UserError
from tests.support.benchmarks import benchmark
from tests.support.paths import ROOT
from tools import make_rooms

PAGE = (ROOT / 'docs' / 'navigation.md').read_text(encoding='utf-8')
RESULTS = ROOT / 'benchmarks' / 'results'


def test_tables_are_those_of_the_benchmarks():
  for size, told in json.loads((RESULTS / 'images.json').read_text())['rooms']['cases'].items():
    numbers = [f'{told[unit]:,.0f}' for unit in ('images a processor second', 'images a second')]
    assert f'| {size.replace("x", " x ")} | {" | ".join(numbers)} |' in PAGE
  found = json.loads((RESULTS / 'navigation.json').read_text())
  assert f'on {found["levels"]} rooms' in PAGE
  for told in found['cases'].values():
    ways = [told[way] for way in ('forward', 'random', 'sweep', 'solver')]
    assert f'| {" | ".join(str(x) for x in ways)} |' in PAGE
    floors = [told['descriptions'][name] for name in ('another room', 'constant claim')]
    assert f'| {" | ".join(f"{x:.3f}" for x in floors)} |' in PAGE


def test_sentences_and_errors_of_the_page():
  (example,) = [x for x in re.findall(r'```\n(.*?)```', PAGE, re.DOTALL) if ' and near;' in x]
  assert len(find_claims(example, Navigation().scene_words)) == 2 == example.count(' is ')
  config = default.get_config()
  config.envs.Navigation.radius = 0.4
  with pytest.raises(UserError) as error:
    build.env_specs(config, ('Navigation',), (1,))
  assert f'```\n{error.value}\n```' in PAGE
  (spec,) = build.env_specs(navigation_vision_ppo.get_config(), ('NavigationValidation',), (1,))
  assert f'{spec.env.picture} x {spec.env.picture} tiles of 8 pixels' in PAGE and spec.budget == Budget(4, 12, 3)


@pytest.mark.slow
def test_the_picture_is_fresh():
  shown = np.asarray(Image.open(io.BytesIO(make_rooms.SHEET.read_bytes()))).astype(int)
  made = make_rooms.sheet().astype(int)
  assert shown.shape == made.shape, 'run: python tools/make_rooms.py'
  # Rounding differs between processors and may move an edge by a pixel.
  assert (np.abs(shown - made).max(-1) > 1).mean() < 0.01, 'run: python tools/make_rooms.py'


@pytest.mark.slow
def test_the_benchmarks_measure(monkeypatch):
  env = Navigation(dim=(6, 6), num_objects=3, picture=2, max_path=6)
  with benchmark('navigation') as module:
    monkeypatch.setattr(module, 'SWEEPS', [[0], [0, 4]])
    told = module.measure(env, Budget(2, 6, 3), 16)
    assert told['solver'] == 1.0 > told['sweep'] and 0 <= told['forward'] <= told['sweep'] + 0.5
    assert (
      set(told['descriptions']) == {'another room', 'constant claim'} and told['descriptions']['constant claim'] > 0
    )
  with benchmark('images') as module:
    (told,) = module.measure_pictures({'16x16': (env, 8)}, quick=True)['cases'].values()
    assert min(told.values()) > 0
