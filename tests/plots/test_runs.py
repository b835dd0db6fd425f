"""What is read of runs, what happened to them, and which of them are one curve."""

from __future__ import annotations

import os

import pytest

from ragen_jax.plots import runs as runs_lib
from tests.support.made_up_runs import metric_rows, read, run_config, write_run


def test_marks_are_where_something_begins():
  def rows(warnings, scales=None, stops=()):
    scales = scales or [1.0] * len(warnings)
    return [
      {
        'step': i + 1,
        'echo_trap/warning': w,
        'train/lr_scale': s,
        'early_stopped/empty_filtered_steps': float(i in stops),
      }
      for i, (w, s) in enumerate(zip(warnings, scales, strict=True))
    ]

  warn = {'monitor.echo_trap': 'warn'}
  back = {'monitor.echo_trap': 'rollback', 'monitor.max_rollbacks': 1}
  warnings = [0, 1, 1, 0, 1]
  assert runs_lib.find_marks(rows(warnings), warn) == [(2, 'Echo-Trap warning'), (5, 'Echo-Trap warning')]
  assert runs_lib.find_marks(rows([0, 0], stops=[1]), warn) == [(2, 'run stopped')]
  assert runs_lib.find_marks(rows([0, 1]), {'monitor.echo_trap': 'stop'}) == [(2, 'run stopped')]
  # The iteration after a rollback has the smaller learning rate; the one more than are allowed ends the run.
  scales = [1, 1, 0.5, 0.5, 0.5]
  assert runs_lib.find_marks(rows([0, 1, 0, 0, 1], scales), back) == [(2, 'rollback'), (5, 'run stopped')]
  # Iterations that learn from a rollout again have no signals of their own.
  again = rows([1, 1, 1])
  del again[1]['echo_trap/warning']
  assert runs_lib.find_marks(again, warn) == [(1, 'Echo-Trap warning')]


def _curves(tmp_path, *configs):
  runs = [read(write_run(tmp_path / f'run{i}', config, metric_rows(0, 2))) for i, config in enumerate(configs)]
  return [(curve.label, [os.path.basename(run.workdir) for run in curve.runs]) for curve in runs_lib.group(runs)]


def test_runs_that_differ_in_the_seed_are_one_curve_named_by_what_differs(tmp_path):
  grpo = {'algorithm__adv_estimator': 'grpo'}
  assert _curves(
    tmp_path,
    run_config(0),
    run_config(0, **grpo),
    # None changes what is learnt: where checkpoints go, an environment that is not played, what goes into memory.
    run_config(1, checkpoint__every=2, envs__Sudoku__side=9, optimizer__micro_batch_size=2),
    run_config(1, **grpo),
    run_config(0, **grpo, optimizer__actor_lr=5e-4),
  ) == [
    ('adv_estimator=gae, actor_lr=0.001 (2 seeds)', ['run0', 'run2']),
    ('adv_estimator=grpo, actor_lr=0.001 (2 seeds)', ['run1', 'run3']),
    ('adv_estimator=grpo, actor_lr=0.0005', ['run4']),
  ]


def test_of_many_differences_as_few_are_named_as_tell_the_curves_apart(tmp_path):
  many = {'algorithm__lam': 0.9, 'algorithm__gamma': 0.9, 'optimizer__actor_lr': 1e-4, 'train__groups': 16}
  two_games = run_config(**many, train__tags=['Bandit', 'FrozenLake'])
  assert [label for label, _ in _curves(tmp_path, run_config(), two_games)] == [
    'tags=FrozenLake',
    'tags=Bandit+FrozenLake',
  ]
  names = [
    label for label, _ in _curves(tmp_path, run_config(), run_config(**many), run_config(**many | {'train__groups': 4}))
  ]
  assert names == ['groups=8', 'groups=16', 'groups=4']


def test_the_same_run_again_and_runs_without_a_config_go_by_their_directories(tmp_path):
  assert _curves(tmp_path, run_config(0), run_config(0), run_config(1), None) == [
    ('run0 (2 seeds)', ['run0', 'run2']), ('run1', ['run1']), ('run3', ['run3'])
  ]  # fmt: skip
  assert _curves(tmp_path / 'one', run_config(0)) == [('run0', ['run0'])]
  assert _curves(tmp_path / 'two', run_config(0), run_config(1)) == [('FrozenLake (2 seeds)', ['run0', 'run1'])]
  # The first is of a version without this field, which acted as its default does.
  newer = run_config(1, algorithm__policy_loss='ppo')
  assert _curves(tmp_path / 'new', run_config(0), newer) == [('FrozenLake (2 seeds)', ['run0', 'run1'])]
  other = run_config(1, algorithm__policy_loss='sapo')
  assert len(_curves(tmp_path / 'other', run_config(0), other)) == 2


@pytest.mark.parametrize('config', [run_config(0), None])
def test_directories_of_one_name_are_told_apart_by_those_above(tmp_path, config):
  places = ('old/sokoban', 'new/sokoban', 'new/lake')
  runs = [read(write_run(tmp_path / place, config, metric_rows(0, 2))) for place in places]
  assert [curve.label for curve in runs_lib.group(runs)] == ['old/sokoban', 'new/sokoban', 'lake']


def test_warm_starts_are_told_apart_by_their_own_fields(tmp_path):
  runs = []
  for seed, rate in enumerate((1e-3, 1e-3, 1e-4, 1e-3)):
    config = run_config(seed, algorithm__lam=seed / 8) | {'sft': {'learning_rate': rate}}
    rows = metric_rows(0, 2) if seed == 3 else [{'step': step, 'sft/loss': 0.5} for step in range(2)]
    runs.append(read(write_run(tmp_path / f'run{seed}', config, rows)))
  labels = [curve.label for curve in runs_lib.group(runs[:3])]
  assert labels == ['sft.learning_rate=0.001 (2 seeds)', 'sft.learning_rate=0.0001']
  assert [curve.label for curve in runs_lib.group([runs[0], runs[3]])] == ['mode=sft', 'mode=train']
