"""`--mode=plot`: which figures it writes, and what cannot be drawn."""

from __future__ import annotations

import types

import pytest

from ragen_jax.config import command_line
from ragen_jax.modes import plot
from ragen_jax.plots import curves as curves_lib
from ragen_jax.utils.errors import UserError
from tests.support.made_up_runs import (
  metric_rows,
  read,
  run_config,
  shown,
  texts_of,
  two_algorithms,
  write_evaluation,
  write_run,
)
from tests.support.processes import copy_main


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  return two_algorithms(tmp_path_factory.mktemp('runs'))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_figure_of_all_panels_and_one_of_each(runs, tmp_path, caplog):
  caplog.set_level('INFO', logger='ragen_jax.modes.plot')
  paths = plot.plot(runs, str(tmp_path / 'figures'))
  names = ['curves', *(panel.name for panel in curves_lib.PANELS)]
  assert paths == [str(tmp_path / 'figures' / f'{name}.{kind}') for name in names for kind in ('png', 'svg')]
  for path in paths[::2]:
    shown(path)
  legend = {
    'adv_estimator=gae (3 seeds)',
    'adv_estimator=grpo (3 seeds)',
    'lowest to highest seed',
    'Echo-Trap warning',
  }
  assert {*legend, 'best possible', *(panel.title for panel in curves_lib.PANELS)} <= set(texts_of(paths[1]))
  for panel, path in zip(curves_lib.PANELS, paths[3::2], strict=True):
    texts = set(texts_of(path))
    assert {*legend, panel.title} <= texts and ('best possible' in texts) == (panel.name == 'success')
  told = [record.getMessage() for record in caplog.records]
  assert told[0] == f'adv_estimator=gae (3 seeds): {", ".join(runs[:3])}'
  assert told[-1].startswith(f'written to {tmp_path / "figures"}, each as PNG and SVG: curves, success, ')


def test_metrics_that_no_run_has_are_left_out(tmp_path, caplog):
  caplog.set_level('INFO', logger='ragen_jax.modes.plot')
  rows = metric_rows(0, 4, panels=[panel for panel in curves_lib.PANELS if panel.name in ('success', 'grad_norm')])
  rows[2]['actor/grad_norm'] = 'Infinity'
  workdir = write_run(tmp_path / 'run', run_config(), rows)
  paths = plot.plot([workdir])
  assert paths[0] == f'{workdir}/plots/curves.png' and not [path for path in paths if 'entropy' in path]
  assert 'entropy is left out: no run has actor/entropy' in caplog.text
  assert 'observation_score' not in caplog.text  # runs without descriptions have none
  assert read(workdir).series['actor/grad_norm'][0].tolist() == [1, 3, 4]


@pytest.mark.slow
def test_the_mode_draws_and_tells_where(tmp_path):
  runs = [write_run(tmp_path / str(seed), run_config(seed), metric_rows(seed, 5, panels=())) for seed in range(2)]
  workdirs = [f'--workdir={run}' for run in runs]
  result = copy_main('--mode=plot', *workdirs, f'--output={tmp_path / "out"}', check=True)
  assert result.stderr.splitlines()[-1].startswith(f'written to {tmp_path / "out"}, each as PNG and SVG: curves, ')
  assert (tmp_path / 'out' / 'curves.png').exists()


def test_what_cannot_be_drawn_is_told_in_one_line(runs, tmp_path):
  good, missing = runs[0], tmp_path / 'none'
  empty, silent, torn, strange, newer = (tmp_path / name for name in ('empty', 'silent', 'torn', 'strange', 'newer'))
  empty.mkdir()
  write_run(silent, run_config(), [{'step': 0, 'timing_s/testing': 1.0}])
  write_run(torn, rows=[{'step': 1}])
  (torn / 'config.json').write_text('{')
  write_evaluation(strange, ['FrozenLake'], 1, {'Bandit': 0.5})
  (strange / 'evaluation' / 'b.json').write_text('{"version": 1, "rows": [{}]}')
  write_evaluation(newer, ['FrozenLake'], 1, {'Bandit': 0.5})
  (newer / 'evaluation' / 'b.json').write_text('{"version": 2}')
  nothing = write_run(tmp_path / 'nothing', run_config(), [])
  (tmp_path / 'file').touch()
  for workdirs, message in (
    ([good, str(missing)], f'--workdir={missing}: there is no such directory'),
    ([good, str(empty)], f'--workdir={empty}: has no metrics.jsonl'),
    ([nothing], f'--workdir={nothing}: metrics.jsonl has no iterations yet'),
    ([str(silent)], f'--workdir={silent}: the run has not logged any metric'),
    ([good, runs[1], good], f'--workdir={good} is given twice'),
    ([good, f'{good}/'], f'--workdir={good}/ is given twice, also as {good}'),
    ([str(torn)], f'{torn / "config.json"} cannot be read'),
    ([str(strange)], f'{strange / "evaluation" / "b.json"} is not an evaluation of --mode=eval'),
    ([str(newer)], f'{newer / "evaluation" / "b.json"} has version 2; only version 1'),
  ):
    with pytest.raises(UserError) as e:
      plot.plot(workdirs, str(tmp_path / 'out'))
    assert str(e.value).startswith(message) and '\n' not in str(e.value)
  assert not (tmp_path / 'out').exists()
  with pytest.raises(UserError, match=r'were not written: .*; --output names another place'):
    plot.plot([good], str(tmp_path / 'file'))


def test_several_workdirs_are_for_plots_alone():
  def values(**given):
    return types.SimpleNamespace(**{'workdir': ['a'], 'output': None, 'mode': 'train'} | given)

  assert command_line.workdirs(values()) == ['a']
  assert command_line.workdirs(values(mode='plot', workdir=['a', 'b'], output='c')) == ['a', 'b']
  with pytest.raises(UserError, match='--workdir is given 2 times; only --mode=plot takes several, train takes one'):
    command_line.workdirs(values(workdir=['a', 'b']))
  with pytest.raises(UserError, match='--workdir= is empty'):
    command_line.workdirs(values(workdir=['']))
  with pytest.raises(UserError, match='--output has no effect with --mode=view'):
    command_line.workdirs(values(mode='view', output='c'))
  with pytest.raises(UserError, match=r'--config\.seed=1 has no effect with --mode=plot'):
    command_line.parse(['main.py', '--mode=plot', '--workdir=x', '--config.seed=1'])
