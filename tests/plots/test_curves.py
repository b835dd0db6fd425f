"""The figures of runs: the numbers that are drawn, which runs are one curve, and what cannot be drawn."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import types

import matplotlib.image
import numpy as np
import pytest

from ragen_jax.config import command_line
from ragen_jax.plots import curves as plot
from ragen_jax.plots import matrix as plot_matrix
from ragen_jax.utils.errors import UserError
from tests.support.paths import ROOT


def _config(seed=0, **fields):
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


def _rows(seed, steps=20, best=0.49, panels=plot.PANELS):
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


def _write(workdir, config=None, rows=None):
  workdir.mkdir(parents=True, exist_ok=True)
  if config is not None:
    (workdir / 'config.json').write_text(json.dumps(config))
  if rows is not None:
    (workdir / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return str(workdir)


def _evaluate(workdir, trained_on, checkpoint, success, *, random=None, name='evaluation', sampling='greedy'):
  """An evaluation as `--mode=eval` writes it; `success` and `random` are by tag."""

  def row(policy, kind, tag, sampling, x):
    metrics = {'success': {'mean': x, 'low': x and x - 0.03, 'high': x and x + 0.05}}  # None: there is none
    return {'policy': policy, 'kind': kind, 'tag': tag, 'sampling': sampling, 'metrics': metrics}

  rows = [row(f'checkpoint {checkpoint}', 'model', tag, sampling, x) for tag, x in success.items()]
  rows += [row('random', 'random', tag, '', x) for tag, x in (random or {}).items()]
  content = {'version': 1, 'model': 'tiny', 'checkpoint': checkpoint, 'trained_on': trained_on, 'seed': 0, 'rows': rows}
  (workdir / 'evaluation').mkdir(parents=True, exist_ok=True)
  (workdir / 'evaluation' / f'{name}.json').write_text(json.dumps(content))


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """Two algorithms of three seeds; one run is shorter, one was warned."""
  root = tmp_path_factory.mktemp('runs')
  found = []
  for estimator in ('gae', 'grpo'):
    for seed in range(3):
      rows = _rows(seed, steps=10 if (estimator, seed) == ('grpo', 2) else 20)
      for row in rows[1:]:
        row['echo_trap/warning'] = float((estimator, seed) == ('gae', 1) and row['step'] in (7, 8, 15))
      config = _config(seed, algorithm__adv_estimator=estimator, checkpoint__every=seed + 1)
      found.append(_write(root / f'{estimator}_{seed}', config, rows))
  return found


# -- The numbers -------------------------------------------------------------------------------------------------------


def test_the_moving_average_is_a_weighted_mean():
  x = np.random.default_rng(0).normal(size=30)
  expected = [np.average(x[: i + 1], weights=0.9 ** np.arange(i, -1, -1)) for i in range(30)]
  np.testing.assert_allclose(plot.ema(x), expected, rtol=1e-12)


def test_bands_go_from_the_lowest_to_the_highest_seed():
  rng = np.random.default_rng(1)
  seeds = [{int(s): rng.normal() for s in steps} for steps in (range(1, 9), range(1, 5), (1, 3, 8))]
  series = [(np.array(list(seed)), np.array(list(seed.values()))) for seed in seeds]
  for smooth in (True, False):
    band = plot.band(series, smooth)
    assert band.steps.tolist() == list(range(1, 9)) and band.runs.tolist() == [3, 2, 3, 2, 1, 1, 1, 2]
    for i, step in enumerate(band.steps.tolist()):
      there = [seed for seed in seeds if step in seed]
      raw, lines = [seed[step] for seed in there], []
      for seed in there:
        past = [x for s, x in seed.items() if s <= step]
        lines.append(np.average(past, weights=0.9 ** np.arange(len(past))[::-1]) if smooth else seed[step])
      assert (band.raw[i], band.mean[i]) == pytest.approx((np.mean(raw), np.mean(lines)))
      assert (band.low[i], band.high[i]) == pytest.approx((min(lines), max(lines)))


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
  assert plot.find_marks(rows(warnings), warn) == [(2, 'Echo-Trap warning'), (5, 'Echo-Trap warning')]
  assert plot.find_marks(rows([0, 0], stops=[1]), warn) == [(2, 'run stopped')]
  assert plot.find_marks(rows([0, 1]), {'monitor.echo_trap': 'stop'}) == [(2, 'run stopped')]
  # The iteration after a rollback has the smaller learning rate; the one more than are allowed ends the run.
  scales = [1, 1, 0.5, 0.5, 0.5]
  assert plot.find_marks(rows([0, 1, 0, 0, 1], scales), back) == [(2, 'rollback'), (5, 'run stopped')]
  # Iterations that learn from a rollout again have no signals of their own.
  again = rows([1, 1, 1])
  del again[1]['echo_trap/warning']
  assert plot.find_marks(again, warn) == [(1, 'Echo-Trap warning')]


# -- Which runs are one curve ------------------------------------------------------------------------------------------


def _curves(tmp_path, *configs):
  runs = [plot.read_run(_write(tmp_path / f'run{i}', config, _rows(0, 2))) for i, config in enumerate(configs)]
  return [(curve.label, [run.name for run in curve.runs]) for curve in plot.group(runs)]


def test_runs_that_differ_in_the_seed_are_one_curve_named_by_what_differs(tmp_path):
  grpo = {'algorithm__adv_estimator': 'grpo'}
  assert _curves(
    tmp_path,
    _config(0),
    _config(0, **grpo),
    # None changes what is learnt: where checkpoints go, an environment that is not played, what goes into memory.
    _config(1, checkpoint__every=2, envs__Sudoku__side=9, optimizer__micro_batch_size=2),
    _config(1, **grpo),
    _config(0, **grpo, optimizer__actor_lr=5e-4),
  ) == [
    ('adv_estimator=gae, actor_lr=0.001 (2 seeds)', ['run0', 'run2']),
    ('adv_estimator=grpo, actor_lr=0.001 (2 seeds)', ['run1', 'run3']),
    ('adv_estimator=grpo, actor_lr=0.0005', ['run4']),
  ]


def test_of_many_differences_as_few_are_named_as_tell_the_curves_apart(tmp_path):
  many = {'algorithm__lam': 0.9, 'algorithm__gamma': 0.9, 'optimizer__actor_lr': 1e-4, 'train__groups': 16}
  two_games = _config(**many, train__tags=['Bandit', 'FrozenLake'])
  assert [label for label, _ in _curves(tmp_path, _config(), two_games)] == [
    'tags=FrozenLake',
    'tags=Bandit+FrozenLake',
  ]
  names = [label for label, _ in _curves(tmp_path, _config(), _config(**many), _config(**many | {'train__groups': 4}))]
  assert names == ['groups=8', 'groups=16', 'groups=4']


def test_the_same_run_again_and_runs_without_a_config_go_by_their_directories(tmp_path):
  assert _curves(tmp_path, _config(0), _config(0), _config(1), None) == [
    ('run0 (2 seeds)', ['run0', 'run2']), ('run1', ['run1']), ('run3', ['run3'])
  ]  # fmt: skip
  assert _curves(tmp_path / 'one', _config(0)) == [('run0', ['run0'])]
  assert _curves(tmp_path / 'two', _config(0), _config(1)) == [('FrozenLake (2 seeds)', ['run0', 'run1'])]


# -- The figures -------------------------------------------------------------------------------------------------------


def _shown(path):
  """A PNG with something on it: f32[H, W, 4]."""
  image = matplotlib.image.imread(path)
  assert image.shape[0] > 200 and len(np.unique(image.reshape(-1, image.shape[-1]), axis=0)) > 20, path
  return image


def _texts(path):
  """The text of an SVG, which is text and not outlines."""
  return re.findall(r'<text[^>]*>([^<]*)</text>', pathlib.Path(path).read_text(encoding='utf-8'))


def test_a_figure_of_all_panels_and_one_of_each(runs, tmp_path, caplog):
  caplog.set_level('INFO', logger='ragen_jax.plots.curves')
  paths = plot.plot(runs, str(tmp_path / 'figures'))
  names = ['curves', *(panel.name for panel in plot.PANELS)]
  assert paths == [str(tmp_path / 'figures' / f'{name}.{kind}') for name in names for kind in ('png', 'svg')]
  for path in paths[::2]:
    _shown(path)
  legend = {
    'adv_estimator=gae (3 seeds)',
    'adv_estimator=grpo (3 seeds)',
    'lowest to highest seed',
    'Echo-Trap warning',
  }
  assert {*legend, 'best possible', *(panel.title for panel in plot.PANELS)} <= set(_texts(paths[1]))
  for panel, path in zip(plot.PANELS, paths[3::2], strict=True):
    texts = set(_texts(path))
    assert {*legend, panel.title} <= texts and ('best possible' in texts) == (panel.name == 'success')
  told = [record.getMessage() for record in caplog.records]
  assert told[0] == f'adv_estimator=gae (3 seeds): {", ".join(runs[:3])}'
  assert told[-1].startswith(f'written to {tmp_path / "figures"}, each as PNG and SVG: curves, success, ')


def test_what_is_drawn_are_the_numbers(runs):
  curves = plot.group([plot.read_run(run) for run in runs])
  success, entropy = plot.PANELS[0], next(p for p in plot.PANELS if p.name == 'entropy')
  axes = plot.draw_panels([success, entropy], curves, width=7).axes
  for axis, panel in zip(axes, (success, entropy), strict=True):
    for curve, colour in zip(curves, plot.COLOURS, strict=False):
      band = plot.band([run.series[panel.metric] for run in curve.runs], panel.every_iteration)
      lines = [line for line in axis.lines if line.get_color() == colour and len(line.get_xdata()) > 2]
      # The whole mean, where all seeds are there, and behind it the thinner one of those that are left.
      thick = next(line for line in lines if line.get_linewidth() == 1.5)
      whole = int((band.runs == 3).sum())
      np.testing.assert_allclose(np.array(thick.get_data()), [band.steps[:whole], band.mean[:whole]])
      thin = [line for line in lines if line.get_linewidth() == 0.8]
      assert len(thin) == (whole < len(band.steps))
      for line in thin:
        np.testing.assert_allclose(line.get_ydata(), band.mean[whole - 1 :])
  levels = [line.get_ydata()[0] for line in axes[0].lines if line.get_color() == 'black']
  assert levels == [0.49] and not [line for line in axes[1].lines if line.get_color() == 'black']
  for axis in axes:  # two warnings began, at 7 and at 15
    assert sorted({line.get_xdata()[0] for line in axis.lines if line.get_marker() == 'v'}) == [7, 15]


def test_only_gradient_norms_may_be_on_a_logarithmic_axis_which_hides_zeros_and_what_is_below(runs):
  values = np.array([-1.0, 0.0, 0.01, 0.01, 0.01, 0.3])
  for panel in plot.PANELS:
    run = dataclasses.replace(plot.read_run(runs[0]), series={panel.metric: (np.arange(6), values)}, marks=[])
    (axis,) = plot.draw_panels([panel], [plot.Curve('a', (run,))], width=3.5).axes
    assert (axis.get_yscale() == 'log') == (panel.name == 'grad_norm'), panel.name


def test_metrics_that_no_run_has_are_left_out(tmp_path, caplog):
  caplog.set_level('INFO', logger='ragen_jax.plots.curves')
  rows = _rows(0, 4, panels=[panel for panel in plot.PANELS if panel.name in ('success', 'grad_norm')])
  rows[2]['actor/grad_norm'] = 'Infinity'
  workdir = _write(tmp_path / 'run', _config(), rows)
  paths = plot.plot([workdir])
  assert paths[0] == f'{workdir}/plots/curves.png' and not [path for path in paths if 'entropy' in path]
  assert 'entropy is left out: no run has actor/entropy' in caplog.text
  assert plot.read_run(workdir).series['actor/grad_norm'][0].tolist() == [1, 3, 4]


def test_the_same_figures_are_the_same_files(runs, tmp_path):
  pictures = [plot.PANELS[0]]
  curves = plot.group([plot.read_run(run) for run in runs])
  files = []
  for name in ('a', 'b'):
    with plot._style():
      paths = plot._save(plot.draw_panels(pictures, curves, 3.5), tmp_path / name)
    files.append([pathlib.Path(path).read_bytes() for path in paths])
  assert files[0] == files[1]


# -- The matrix --------------------------------------------------------------------------------------------------------


def test_the_matrix_has_a_row_for_what_was_trained_on_and_a_column_for_each_tag(tmp_path):
  for seed, success in ((0, 0.4), (1, 0.5)):
    run = tmp_path / f'lake{seed}'
    _write(run, _config(seed), _rows(seed, 5, panels=()))
    _evaluate(run, ['FrozenLake'], 10, {'FrozenLake': 0.0, 'Bandit': 0.9}, name='earlier')
    _evaluate(run, ['FrozenLake'], 40, {'FrozenLake': success, 'Sudoku': 0.1}, random={'FrozenLake': 0.02}, name='a')
  _write(tmp_path / 'bandit', _config(train__tags=['Bandit']), _rows(0, 5, panels=()))
  _evaluate(tmp_path / 'bandit', ['Bandit'], 40, {'Bandit': 0.8})
  _evaluate(tmp_path / 'bandit', ['Bandit'], 40, {'Bandit': 0.7}, sampling='temperature 0.5', name='warm')
  _evaluate(tmp_path / 'base', [], None, {'Sudoku': 0.3, 'Bandit': None})
  workdirs = [str(tmp_path / name) for name in ('lake0', 'lake1', 'bandit', 'base')]
  paths = plot.plot(workdirs)
  assert {'generalisation_greedy.png', 'generalisation_temperature_0.5.svg', 'curves.svg'} <= {
    path.removeprefix(f'{tmp_path}/plots/') for path in paths
  }
  runs = [plot.read_run(workdir) for workdir in workdirs]
  found = plot_matrix.tables([(c.label, run.evaluations) for c in plot.group(runs) for run in c.runs])
  table = found['generalisation_greedy']
  assert table.columns == ('FrozenLake', 'Bandit', 'Sudoku')
  assert table.rows == ('FrozenLake (2 seeds)', 'Bandit', 'tiny, as it is', 'random actions')
  nan = np.nan
  # Of a run's checkpoints the last counts for each tag; seeds are averaged; nothing stands where nothing was played.
  expected = [[0.45, 0.9, 0.1], [nan, 0.8, nan], [nan, nan, 0.3], [0.02, nan, nan]]
  np.testing.assert_allclose(table.mean, expected)
  np.testing.assert_allclose(table.half, np.where(np.isnan(expected), nan, 0.04))
  assert table.own.tolist() == [[True, False, False], [False, True, False], [False] * 3, [False] * 3]
  warm = found['generalisation_temperature_0.5']
  assert warm.rows == ('Bandit', 'random actions') and np.nanmax(warm.mean) == 0.7
  shown = str(tmp_path / 'plots' / 'generalisation_greedy')
  _shown(f'{shown}.png')
  texts = _texts(f'{shown}.svg')
  assert {
    '0.45',
    '0.90',
    '±0.04',
    'FrozenLake (2 seeds)',
    'Sudoku',
    'Success on held-out levels, greedy',
    '± half of the 95 % interval',
  } <= set(texts)
  assert texts.count('±0.04') == 6  # the cells with data, and no others


def test_rows_that_were_trained_on_the_same_are_told_apart(tmp_path):
  for estimator in ('gae', 'grpo'):
    _write(tmp_path / estimator, _config(algorithm__adv_estimator=estimator), _rows(0, 2))
    _evaluate(tmp_path / estimator, ['FrozenLake'], 40, {'FrozenLake': 0.4})
  curves = plot.group([plot.read_run(str(tmp_path / name)) for name in ('gae', 'grpo')])
  (table,) = plot_matrix.tables([(c.label, run.evaluations) for c in curves for run in c.runs]).values()
  assert table.rows == ('FrozenLake: adv_estimator=gae', 'FrozenLake: adv_estimator=grpo')


# -- The command line and its errors -----------------------------------------------------------------------------------


def test_the_mode_draws_and_tells_where(tmp_path):
  runs = [_write(tmp_path / str(seed), _config(seed), _rows(seed, 5, panels=())) for seed in range(2)]
  command = [sys.executable, 'main.py', '--mode=plot', *(f'--workdir={run}' for run in runs)]
  result = subprocess.run(
    [*command, f'--output={tmp_path / "out"}'], cwd=ROOT, capture_output=True, text=True, check=True
  )
  assert result.stderr.splitlines()[-1].startswith(f'written to {tmp_path / "out"}, each as PNG and SVG: curves, ')
  assert (tmp_path / 'out' / 'curves.png').exists()


def test_what_cannot_be_drawn_is_told_in_one_line(runs, tmp_path):
  good, missing = runs[0], tmp_path / 'none'
  empty, silent, torn, strange, newer = (tmp_path / name for name in ('empty', 'silent', 'torn', 'strange', 'newer'))
  empty.mkdir()
  _write(silent, _config(), [{'step': 0, 'timing_s/testing': 1.0}])
  _write(torn, rows=[{'step': 1}])
  (torn / 'config.json').write_text('{')
  _evaluate(strange, ['FrozenLake'], 1, {'Bandit': 0.5})
  (strange / 'evaluation' / 'b.json').write_text('{"version": 1, "rows": [{}]}')
  _evaluate(newer, ['FrozenLake'], 1, {'Bandit': 0.5})
  (newer / 'evaluation' / 'b.json').write_text('{"version": 2}')
  nothing = _write(tmp_path / 'nothing', _config(), [])
  (tmp_path / 'file').touch()
  for workdirs, message in (
    ([good, str(missing)], f'--workdir={missing}: there is no such directory'),
    ([good, str(empty)], f'--workdir={empty}: has no metrics.jsonl'),
    ([nothing], f'--workdir={nothing}: metrics.jsonl has no iterations yet'),
    ([str(silent)], f'--workdir={silent}: the run has logged nothing yet'),
    ([good, runs[1], good], f'--workdir={good} is given twice'),
    ([good, f'{good}/'], f'--workdir={good}/ is given twice, also as {good}'),
    ([str(torn)], f'{torn / "config.json"} cannot be read'),
    ([str(strange)], f'{strange / "evaluation" / "b.json"} is no evaluation of --mode=eval'),
    ([str(newer)], f'{newer / "evaluation" / "b.json"} has version 2; 1 is the one'),
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
