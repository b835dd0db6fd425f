"""Tables, names and JSON of an evaluation."""

from __future__ import annotations

import json
import math

import pytest

from ragen_jax.evaluation.intervals import Interval
from ragen_jax.evaluation.report import EvaluationRow, describe_sampling, free_name, tables, write_json
from ragen_jax.sampling.draw import GREEDY, Sampling


def _rows():
  def of(policy, kind, sampling, tag='FrozenLake', **means):
    metrics = {name: Interval(x, x - 0.025, x + 0.031) for name, x in means.items()}
    return EvaluationRow(policy, kind, tag, sampling, 256, 1024, metrics)

  known = {'optimal': 0.491, 'fraction_of_optimal': 0.5, 'pass@2': 0.6, 'pass@4': 0.7}
  return [
    of('checkpoint 40', 'model', 'temperature 0.5', success=0.439, response_length=1234.5, **known),
    of('checkpoint 40', 'model', 'greedy', success=0.433, response_length=math.nan, **known),
    of('random', 'random', '', success=0.1, **known),
    of('solver', 'solver', '', success=0.49, **known),
    of('endpoint an-endpoints-model', 'endpoint', 'temperature 0.5', success=0.2, no_reply=0.01, **known),
    of('model /a/long/path', 'model', 'greedy', 'Bandit', success=-0.5, score=12.25),
  ]


def test_the_table():
  first, second = tables(_rows(), 4)
  assert '\n'.join([first, '', second]).split('\n') == [
    'FrozenLake: 256 levels, 4 episodes each, best possible success 0.491',
    '-------------------------------------------------------------------------------------------',
    '              checkpoint 40    checkpoint 40  random         solver         an-endpoints-m…',
    '-------------------------------------------------------------------------------------------',
    '              temperature 0.5  greedy                                       temperature 0.5',
    'success       0.439 ± 0.028    0.433 ± 0.028  0.100 ± 0.028  0.490 ± 0.028  0.200 ± 0.028',
    'of the best   0.500 ± 0.028    0.500 ± 0.028  0.500 ± 0.028  0.500 ± 0.028  0.500 ± 0.028',
    'pass@2        0.600 ± 0.028    0.600 ± 0.028  0.600 ± 0.028  0.600 ± 0.028  0.600 ± 0.028',
    'pass@4        0.700 ± 0.028    0.700 ± 0.028  0.700 ± 0.028  0.700 ± 0.028  0.700 ± 0.028',
    'reply tokens  1234.5 ± 0.0     -              -              -              -',
    'no reply      -                -              -              -              0.010 ± 0.028',
    '',
    'Bandit: 256 levels, 4 episodes each',
    '-----------------------------------',
    '              model',
    '-----------------------------------',
    '              greedy',
    'success       -0.500 ± 0.028',
    'with penalty  12.2 ± 0.0',
  ]
  assert max(map(len, first.split('\n'))) <= 100


def test_sampling_is_described():
  for sampling, text in (
    (GREEDY, 'greedy'),
    (Sampling(temperature=0.5, top_p=1.0, top_k=0), 'temperature 0.5'),
    (Sampling(temperature=1.0, top_p=0.9, top_k=20), 'temperature 1, top-p 0.9, top-k 20'),
  ):
    assert describe_sampling(sampling) == text


def test_another_evaluation_gets_another_name_and_the_same_one_its_own(tmp_path):
  def head(**changes):
    return {'checkpoint': 2, 'eval': {'tags': ['A', 'B'], 'step': '2'}} | changes

  row = EvaluationRow('random', 'random', 'A', '', 1, 2, {'success': Interval(0.5, math.nan, math.nan)})
  assert free_name(tmp_path, head()) == 'step_2_A_B'
  content = write_json(tmp_path / 'step_2_A_B.json', head(), [row])
  assert json.loads((tmp_path / 'step_2_A_B.json').read_text()) == content
  assert content['rows'][0]['metrics'] == {'success': {'mean': 0.5, 'low': None, 'high': None}}
  assert free_name(tmp_path, head()) == 'step_2_A_B' and free_name(tmp_path, head(seed=1)) == 'step_2_A_B_2'
  (tmp_path / 'step_2_A_B.json').write_text('{')
  assert free_name(tmp_path, head()) == 'step_2_A_B_2'


@pytest.mark.parametrize(
  ('step', 'tags', 'name'),
  [('none', ['A'], 'baselines_A'), ('base', ['A'], 'base_A'), ('base', [*'ABCD'], 'base_A_B_and_2_more')],
)
def test_names_say_what_was_evaluated(tmp_path, step, tags, name):
  assert free_name(tmp_path, {'checkpoint': None, 'eval': {'tags': tags, 'step': step}}) == name
