"""Training in environments outside JAX that fail: faults are counted and not learnt from, and a run can be resumed."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax import train
from tests.support.configs import small_config
from tests.support.datasets import write_lines
from tests.support.metrics import comparable_metrics


def moody(gold: str, answer: str) -> float:
  """A verifier that fails on some answers."""
  if len(answer) % 3 == 0:
    raise RuntimeError('no verdict today')
  return float(len(answer) % 2)


def _config(tmp_path, **fields):
  rows = [{'question': f'Say {i}', 'answer': str(i)} for i in range(24)]
  fields = {
    'train__tags': ('Shaky', 'Dataset'), 'train__groups': 12, 'train__tag_groups': (10, 2), 'eval__tags': ('Shaky',),
    'eval__greedy_too': False, 'eval__every': 1, 'agent__format': 'no_think',
    'envs__Dataset__path': write_lines(tmp_path / 'q.jsonl', rows), 'envs__Dataset__verifier': f'{__name__}:moody',
  } | fields  # fmt: skip
  config = small_config()
  with config.unlocked():
    config.envs.Shaky = {
      'type': 'python', 'class_path': 'tests.support.light_games:Shaky', 'processes': 2, 'step_timeout_s': 60.0,
      'max_turns': 3, 'max_actions': 4, 'max_actions_per_turn': 2, 'max_words': 30,
    }  # fmt: skip
    config.update_from_flattened_dict({k.replace('__', '.'): x for k, x in fields.items()})
  return config


@pytest.mark.slow
def test_a_run_goes_on_as_if_it_had_not_been_stopped_whatever_fails_in_its_environments(tmp_path):
  train.train_and_evaluate(_config(tmp_path, num_iterations=2), str(tmp_path / 'whole'))
  train.train_and_evaluate(_config(tmp_path, num_iterations=1), str(tmp_path / 'parts'))
  train.train_and_evaluate(_config(tmp_path, num_iterations=2), str(tmp_path / 'parts'))
  whole, parts = (comparable_metrics(tmp_path / run) for run in ('whole', 'parts'))
  assert whole == parts  # floats, to the last bit
  for line in whole[1:]:
    for tag in ('Shaky', 'Dataset'):
      assert 0 < line[f'train/{tag}/env_errors'] < 1, tag
    assert line['actor/grad_norm'] > 0 and np.isfinite(line['actor/pg_loss'])
