"""The matrix of what was trained on and what was evaluated on."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax.modes import plot
from ragen_jax.plots import matrix
from ragen_jax.plots import runs as runs_lib
from tests.support.made_up_runs import metric_rows, read, run_config, shown, texts_of, write_evaluation, write_run


@pytest.mark.slow
def test_the_matrix_has_a_row_for_what_was_trained_on_and_a_column_for_each_tag(tmp_path):
  for seed, success in ((0, 0.4), (1, 0.5)):
    run = tmp_path / f'lake{seed}'
    write_run(run, run_config(seed), metric_rows(seed, 5, panels=()))
    write_evaluation(run, ['FrozenLake'], 10, {'FrozenLake': 0.0, 'Bandit': 0.9}, name='earlier')
    write_evaluation(
      run, ['FrozenLake'], 40, {'FrozenLake': success, 'Sudoku': 0.1}, random={'FrozenLake': 0.02}, name='a'
    )
  write_run(tmp_path / 'bandit', run_config(train__tags=['Bandit']), metric_rows(0, 5, panels=()))
  write_evaluation(tmp_path / 'bandit', ['Bandit'], 40, {'Bandit': 0.8})
  write_evaluation(tmp_path / 'bandit', ['Bandit'], 40, {'Bandit': 0.7}, sampling='temperature 0.5', name='warm')
  write_evaluation(tmp_path / 'base', [], None, {'Sudoku': 0.3, 'Bandit': None})
  workdirs = [str(tmp_path / name) for name in ('lake0', 'lake1', 'bandit', 'base')]
  paths = plot.plot(workdirs)
  assert {'generalisation_greedy.png', 'generalisation_temperature_0.5.svg', 'curves.svg'} <= {
    path.removeprefix(f'{tmp_path}/plots/') for path in paths
  }
  runs = [read(workdir) for workdir in workdirs]
  found = matrix.tables([(c.label, run.evaluations) for c in runs_lib.group(runs) for run in c.runs])
  table = found['generalisation_greedy']
  assert table.columns == ('FrozenLake', 'Bandit', 'Sudoku')
  assert table.rows == ('FrozenLake (2 seeds)', 'Bandit', 'tiny, as it is', 'random actions')
  nan = np.nan
  # Only a run's last checkpoint counts; seeds are averaged; nothing stands where nothing was played.
  expected = [[0.45, nan, 0.1], [nan, 0.8, nan], [nan, nan, 0.3], [0.02, nan, nan]]
  np.testing.assert_allclose(table.mean, expected)
  np.testing.assert_allclose(table.half, np.where(np.isnan(expected), nan, 0.04))
  assert table.own.tolist() == [[True, False, False], [False, True, False], [False] * 3, [False] * 3]
  warm = found['generalisation_temperature_0.5']
  assert warm.rows == ('Bandit', 'random actions') and np.nanmax(warm.mean) == 0.7
  figure = str(tmp_path / 'plots' / 'generalisation_greedy')
  shown(f'{figure}.png')
  texts = texts_of(f'{figure}.svg')
  assert {
    '0.45',
    '0.80',
    '±0.04',
    'FrozenLake (2 seeds)',
    'Sudoku',
    'Success on held-out levels, greedy',
    '± half of the 95 % interval',
  } <= set(texts)
  assert texts.count('±0.04') == 5  # the cells with data, and no others


def test_of_evaluations_with_different_settings_the_newest_counts(tmp_path, caplog):
  run = tmp_path / 'run'
  write_run(run, run_config(), metric_rows(0, 5, panels=()))
  for number, success in ((1, 0.1), (2, 0.2), (9, 0.9), (11, 0.5)):
    name = 'step_40_Bandit' if number == 1 else f'step_40_Bandit_{number}'
    write_evaluation(run, ['Bandit'], 40, {'Bandit': success}, name=name)
  write_evaluation(run, ['Bandit'], 10, {'Sudoku': 1.0}, name='step_10_Sudoku')
  table = matrix.tables([('run', read(str(run)).evaluations)])['generalisation']
  assert table.columns == ('Bandit',) and table.mean[0].tolist() == [0.5]
  told = [record.getMessage() for record in caplog.records]
  assert sum('whose settings differ' in line for line in told) == 3
  assert sum('step_10_Sudoku.json is left out' in line for line in told) == 1


def test_rows_that_were_trained_on_the_same_are_told_apart(tmp_path):
  for estimator in ('gae', 'grpo'):
    write_run(tmp_path / estimator, run_config(algorithm__adv_estimator=estimator), metric_rows(0, 2))
    write_evaluation(tmp_path / estimator, ['FrozenLake'], 40, {'FrozenLake': 0.4})
  curves = runs_lib.group([read(str(tmp_path / name)) for name in ('gae', 'grpo')])
  (table,) = matrix.tables([(c.label, run.evaluations) for c in curves for run in c.runs]).values()
  assert table.rows == ('FrozenLake: adv_estimator=gae', 'FrozenLake: adv_estimator=grpo')
