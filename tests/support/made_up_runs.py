"""Workdirs of runs that were never made, for tests of what is drawn of them."""

from __future__ import annotations

import json
import pathlib
import re

import matplotlib.image
import numpy as np

from ragen_jax.plots.curves import PANELS
from ragen_jax.plots.runs import Run, read_run


def run_config(seed=0, **fields):
  config = {
    'seed': seed,
    'model': {'preset': 'tiny'},
    'train': {'tags': ['FrozenLake'], 'groups': 8},
    'eval': {'tags': ['FrozenLake']},
    'envs': {'FrozenLake': {'size': 4}, 'Sudoku': {'side': 4}},
    'algorithm': {'adv_estimator': 'gae', 'lam': 1.0, 'gamma': 1.0},
    'optimizer': {'actor_lr': 0.001},
    'monitor': {'echo_trap': 'warn', 'max_rollbacks': 1},
    'checkpoint': {'every': 10},
  }
  for name, value in fields.items():
    *sections, field = name.split('__')
    part = config
    for section in sections:
      part = part[section]
    part[field] = value
  return config


def metric_rows(seed, steps=20, best=0.49, panels=PANELS):
  rng = np.random.default_rng(seed)
  rows = []
  for step in range(steps + 1):
    row = {'step': step}
    if step % 5 == 0:
      row |= {
        'val-env/success': 0.2 + 0.01 * step,
        'val-env/FrozenLake/success': 0.2,
        'val-env/FrozenLake/optimal': best,
      }
    if step:
      row |= {panel.metric: float(rng.random()) for panel in panels if panel.every_iteration}
    rows.append(row)
  return rows


def write_run(workdir, config=None, rows=None):
  workdir.mkdir(parents=True, exist_ok=True)
  if config is not None:
    (workdir / 'config.json').write_text(json.dumps(config))
  if rows is not None:
    (workdir / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return str(workdir)


def write_evaluation(workdir, trained_on, checkpoint, success, *, random=None, name='evaluation', sampling='greedy'):
  """An evaluation as `--mode=eval` writes it; `success` and `random` are by tag."""

  def row(policy, kind, tag, sampling, x):
    metrics = {'success': {'mean': x, 'low': x and x - 0.03, 'high': x and x + 0.05}}  # None: there is none
    return {'policy': policy, 'kind': kind, 'tag': tag, 'sampling': sampling, 'metrics': metrics}

  rows = [row(f'checkpoint {checkpoint}', 'model', tag, sampling, x) for tag, x in success.items()]
  rows += [row('random', 'random', tag, '', x) for tag, x in (random or {}).items()]
  content = {'version': 1, 'model': 'tiny', 'checkpoint': checkpoint, 'trained_on': trained_on, 'seed': 0, 'rows': rows}
  (workdir / 'evaluation').mkdir(parents=True, exist_ok=True)
  (workdir / 'evaluation' / f'{name}.json').write_text(json.dumps(content))


def read(workdir) -> Run:
  """A run with the metrics that are drawn."""
  return read_run(str(workdir), [panel.metric for panel in PANELS])


def two_algorithms(root) -> list[str]:
  """Two algorithms of three seeds; one run is shorter, one was warned."""
  found = []
  for estimator in ('gae', 'grpo'):
    for seed in range(3):
      rows = metric_rows(seed, steps=10 if (estimator, seed) == ('grpo', 2) else 20)
      for row in rows[1:]:
        row['echo_trap/warning'] = float((estimator, seed) == ('gae', 1) and row['step'] in (7, 8, 15))
      config = run_config(seed, algorithm__adv_estimator=estimator, checkpoint__every=seed + 1)
      found.append(write_run(root / f'{estimator}_{seed}', config, rows))
  return found


def shown(path):
  """A PNG with something on it: f32[H, W, 4]."""
  image = matplotlib.image.imread(path)
  assert image.shape[0] > 200 and len(np.unique(image.reshape(-1, image.shape[-1]), axis=0)) > 20, path
  return image


def texts_of(path):
  """The text of an SVG, which is text and not outlines."""
  return re.findall(r'<text[^>]*>([^<]*)</text>', pathlib.Path(path).read_text(encoding='utf-8'))
