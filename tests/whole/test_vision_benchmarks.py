"""benchmarks/vision_learning.py and vision_ablation.py: their flags are read, and their verdicts are of the runs."""

from __future__ import annotations

import pytest

from ragen_jax.config.checks import check_config
from ragen_jax.config.command_line import load_config
from tests.support.benchmarks import benchmark


@pytest.fixture(scope='module')
def learning():
  with benchmark('vision_learning') as module:
    yield module


@pytest.fixture(scope='module')
def ablation():
  with benchmark('vision_ablation') as module:
    yield module


def _run(before: float, after: float) -> dict:
  return {'optimal': 0.5, 'step': [0, 5], 'sampled': [before, after], 'greedy': [before, after], 'wall_s': 1.0}


def test_success_is_a_fraction_of_the_best_and_a_rise_shows_by_a_t_test(learning, tmp_path):
  rises = {'images': (0.10, 0.12, 0.14), 'text': (0.0, 0.2, -0.1)}
  runs = {
    f'FrozenLake / {kind} / {seed}': _run(0.2, 0.2 + rise)
    for kind, own in rises.items()
    for seed, rise in zip(learning.SEEDS, own, strict=True)
  }
  told = learning.verdicts(runs)
  assert told['FrozenLake, images']['before'] == {'mean': 0.4, 'standard_error': 0.0}
  # Over seeds 0.0231; and of 1,024 episodes with a success of 0.2, sqrt(0.2 * 0.8 / 1024) / 0.5 = 0.025.
  assert told['FrozenLake, images']['rise'] == {'mean': 0.24, 'standard_error': 0.034}
  of_seeds = {'mean': 0.24, 'standard_error': 0.02}
  assert learning.with_noise_of_before(of_seeds, [_run(0.2, 0.3), _run(0.25, 0.3)], 1024) == of_seeds
  assert told['FrozenLake, images']['learning'] == 'shows' and told['FrozenLake, text']['learning'] == 'not seen'
  assert told['FrozenLake, images - text']['mean'] == pytest.approx(0.1733, abs=1e-4)
  assert learning.verdict({'mean': 0.29, 'standard_error': 0.1}, 3) == 'not seen'
  assert learning.verdict({'mean': 0.30, 'standard_error': 0.1}, 3) == 'shows'
  assert learning.verdict({'mean': 0.60, 'standard_error': 0.1}, 2) == 'not seen'
  assert not any('Sokoban' in key for key in told)
  one = {'Sokoban / images / 0': _run(0.1, 0.5)}
  assert learning.verdicts(one)['Sokoban, images']['learning'] == 'one seed only'
  learning.draw(runs | one, tmp_path / 'figure.png')
  assert (tmp_path / 'figure.png').stat().st_size > 5000


def test_the_state_reward_is_compared_in_the_forms_that_describe_the_board(ablation, tmp_path):
  assert len(ablation.settings()) == 8
  runs = {
    f'frozenlake / {form} / {reward} / {seed}': _run(0.2, 0.3 + 0.05 * (reward == 'with') + 0.01 * seed)
    for form, reward in ablation.settings()
    for seed in ablation.SEEDS
  }
  told = ablation.verdicts(runs, 'frozenlake')
  assert told['no_think, without state reward']['after'] == {'mean': 0.62, 'standard_error': 0.0115}
  changes = {key: x['mean'] for key, x in told.items() if key.endswith('with - without')}
  assert set(changes) == {f'{form}, with - without' for form, reward in ablation.settings() if reward == 'with'}
  assert all(x == pytest.approx(0.1) for x in changes.values())
  ablation.draw(told, tmp_path / 'figure.png')
  assert (tmp_path / 'figure.png').stat().st_size > 5000


def test_a_run_with_other_flags_is_repeated(learning):
  record = {'runs': {'a': {'flags': ['--config.num_iterations=20']}, 'b': {}}}
  assert learning.is_done(record, 'a', ['--config.num_iterations=20'])
  assert not learning.is_done(record, 'a', ['--config.num_iterations=40'])
  assert not learning.is_done(record, 'b', []) and not learning.is_done(record, 'c', [])


def test_seeds_are_compared_with_themselves(learning, ablation):
  ours, others = {0: _run(0, 0.1), 2: _run(0, 0.4)}, {1: _run(0, 0.2), 2: _run(0, 0.3)}
  expected = {'mean': pytest.approx(0.2), 'standard_error': None}
  runs = {f'Sokoban / images / {s}': r for s, r in ours.items()} | {
    f'Sokoban / text / {s}': r for s, r in others.items()
  }
  assert learning.verdicts(runs)['Sokoban, images - text'] == expected
  of_form = {'with': ours, 'without': others}
  runs = {f'sokoban / world_modeling / {x} / {s}': r for x, own in of_form.items() for s, r in own.items()}
  assert ablation.verdicts(runs, 'sokoban')['world_modeling, with - without'] == expected
  for setting in ('images / 2', 'text / 2'):
    left = {f'Sokoban / {kind} / {s}': r for kind, own in (('images', ours), ('text', others)) for s, r in own.items()}
    del left[f'Sokoban / {setting}']
    assert 'Sokoban, images - text' not in learning.verdicts(left)


def test_the_flags_of_the_benchmarks_are_those_of_a_run(learning, ablation):
  for game, (_, configs) in learning.GAMES.items():
    for quick in (False, True):
      for config in configs.values():
        check_config(_with_flags(config, learning.flags(game, quick)))
  for game, (config, _) in ablation.GAMES.items():
    for form, reward in ablation.settings():
      check_config(_with_flags(config, ablation.flags(game, form, reward, quick=True)))


def _with_flags(name: str, flags: list[str]):
  """A config with flags of main.py, `--config.FIELD=VALUE`."""
  config = load_config(name, flag='')
  for flag in flags:
    field, _, value = flag.removeprefix('--config.').partition('=')
    section, _, last = field.rpartition('.')
    kind = type(config[section][last] if section else config[last])
    parsed = value == 'True' if kind is bool else eval(value) if kind is tuple else kind(value)
    (config[section] if section else config)[last] = parsed
  return config
