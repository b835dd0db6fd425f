"""What docs/svg.md shows is what the program does."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from configs import default, svg_vision_ppo
from ragen_jax import build
from ragen_jax.config.image_checks import check_images
from ragen_jax.envs.svg import program, shapes
from ragen_jax.envs.svg.environment import SvgEnvironment
from ragen_jax.utils.errors import UserError
from tests.support.benchmarks import benchmark
from tests.support.paths import ROOT
from tools import make_svg

PAGE = (ROOT / 'docs' / 'svg.md').read_text(encoding='utf-8')
FLAT = ' '.join(PAGE.split())


def test_tables_are_those_of_the_benchmark():
  found = json.loads((ROOT / 'benchmarks' / 'results' / 'svg.json').read_text())
  for name, scores in found['cases'].items():
    assert f'| {name} | {" | ".join(f"{score:.3f}" for score in scores.values())} |' in PAGE
    assert scores['equal'] == 1 and scores['empty'] == 0 and scores['another target'] < 0.15
    assert scores['off by 2'] > scores['off by 5'] > scores['another target']
  for size, told in found['processor milliseconds'].items():
    assert f'| {size.replace("x", " x ")} | {" | ".join(str(x) for x in told.values())} |' in PAGE


def test_sentences_and_errors_of_the_page():
  limits = f'{program.MOST_CHARS:,} characters, {program.MOST_ELEMENTS} elements, {program.MOST_DEPTH} levels'
  assert limits in FLAT and f'{shapes.MOST_POINTS:,} points, {program.MOST_EDGES:,} edges' in FLAT
  assert f'edges as high as {program.MOST_HEIGHTS:,} canvases together, {program.MOST_PAINTED} painted pictures' in FLAT
  assert all(f'`{name}`' in PAGE for name in (*program.SHAPES, *program._SILENT, 'viewBox'))
  words = {*program._INHERITED, *program._OWN} - {'stroke-dasharray', 'clip-path', 'mask', 'filter'}
  assert all(f'`{name}`' in PAGE for name in words)
  (example,) = re.findall(r'`(<svg viewBox.*?</svg>)`', FLAT)
  assert SvgEnvironment().parse_action(example) == example
  config = default.get_config()
  config.envs.SVG.grid = 3
  with pytest.raises(UserError) as error:
    build.env_specs(config, ('SVG',), (1,))
  assert f'| `{error.value}` |' in PAGE
  config = svg_vision_ppo.get_config('qwen2.5-0.5b')
  with pytest.raises(UserError) as error:
    check_images(config, weights=False)
  assert f'| `{error.value}` |' in PAGE


def test_the_picture_is_fresh():
  shown = np.asarray(Image.open(io.BytesIO(make_svg.SHEET.read_bytes()))).astype(int)
  made = make_svg.sheet().astype(int)
  assert shown.shape == made.shape and (np.abs(shown - made).max(-1) > 1).mean() < 0.001, (
    'run: python tools/make_svg.py'
  )


def test_the_benchmark_measures():
  env = SvgEnvironment(min_shapes=2, image_size=(32, 32))
  with benchmark('svg') as module:
    scores = module.measure(env, 3)
    assert scores['equal'] == 1 > scores['last shape missing'] > scores['empty'] == 0
    assert set(module.speeds(env, 2)) == {'read', 'draw', 'score'}
