"""The figures of one or several runs: RAGEN's curves, and what was evaluated after training on what.

Runs that differ in nothing but the seed are one curve. docs/plots.md says how to read the figures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ragen_jax.plots import matrix as plot_matrix
from ragen_jax.runs.config_fields import flatten, has_effect
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.utils.errors import UserError

_log = logging.getLogger(__name__)

DECAY = 0.9  # of the moving averages


@dataclasses.dataclass(frozen=True)
class Panel:
  """One quantity over the iterations.

  Attributes:
    name: of its file.
    metric: in metrics.jsonl.
    title: what is drawn, with its unit.
    every_iteration: it is noisy and gets a moving average; otherwise its few points are marked.
    from_zero: the axis begins at 0.
    spikes: some values may be far above the others, and then the axis is logarithmic.
  """

  name: str
  metric: str
  title: str
  every_iteration: bool = True
  from_zero: bool = True
  spikes: bool = False


PANELS = (
  Panel('success', 'val-env/success', 'Success on held-out levels', every_iteration=False),
  Panel('reward_mean', 'critic/score/mean', 'Reward, mean', from_zero=False),
  Panel('reward_std', 'rollout/in_group_reward_std', 'Reward deviation in a group'),
  Panel('entropy', 'actor/entropy', 'Entropy (nats)'),
  Panel('grad_norm', 'actor/grad_norm', 'Gradient norm', spikes=True),
  Panel('response_length', 'response_length/mean', 'Response length (tokens)'),
)

# What runs are told apart by, before all else.
_TELLING = ('train.tags', 'model.preset', 'algorithm.adv_estimator')
# Sections whose fields are clear without them.
_CLEAR = ('algorithm', 'optimizer', 'train', 'model')

# Okabe and Ito's colours, which people with any colour vision can tell apart, without yellow and black.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')
_DASHES = ('-', (0, (5, 1.5)), (0, (1, 1)))  # for more curves than there are colours
_POINTS = ('o', 's', '^', 'D', 'v', 'P')
# Kinds of events and the lines that mark them.
_MARKS = {'Echo-Trap warning': (0, (4, 2)), 'rollback': (0, (1, 1.5)), 'run stopped': '-'}

STYLE = {
  'font.size': 8,
  'axes.titlesize': 8,
  'axes.titlelocation': 'left',
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.grid': True,
  'grid.alpha': 0.3,
  'grid.linewidth': 0.5,
  'axes.axisbelow': True,
  'legend.frameon': False,
  'legend.fontsize': 7,
  'legend.labelspacing': 0.35,
  'savefig.dpi': 200,
  'svg.fonttype': 'none',  # text stays text: it can be searched and restyled
  'svg.hashsalt': 'ragen-jax',  # the same figure is the same file
}


@dataclasses.dataclass(frozen=True)
class Run:
  """What is drawn of a run.

  Attributes:
    workdir: where it is kept.
    config: dotted name -> value; empty where config.json is missing.
    series: metric -> (steps i64[K], values f64[K]), finite values only.
    marks: (step, kind) of what happened, kinds as in the legend.
    best: the best possible held-out success, mean over tags; None where it is not known.
    evaluations: of `--mode=eval`, by file name.
  """

  workdir: str
  config: dict[str, Any]
  series: dict[str, tuple[np.ndarray, np.ndarray]]
  marks: list[tuple[int, str]]
  best: float | None
  evaluations: dict[str, dict[str, Any]]

  @property
  def name(self) -> str:
    return os.path.basename(os.path.abspath(self.workdir))


@dataclasses.dataclass(frozen=True)
class Curve:
  """Runs that differ in nothing but the seed, under the name that tells them from the others."""

  label: str
  runs: tuple[Run, ...]


def plot(workdirs: Sequence[str], output: str | None = None) -> list[str]:
  """Draws the figures of some runs, each as PNG and SVG, and tells where they are, for `--mode=plot`.

  Args:
    workdirs: the runs' directories; runs may be going on in them.
    output: directory of the figures; by default `plots` in the workdir of a single run, or beside that of the first.

  Returns:
    The figures' paths.

  Raises:
    UserError: a workdir is missing, given twice, or has nothing to draw, or the figures cannot be written.
  """
  curves = group([read_run(workdir) for workdir in _distinct(workdirs)])
  tables = plot_matrix.tables([(curve.label, run.evaluations) for curve in curves for run in curve.runs])
  panels = [p for p in PANELS if any(p.metric in run.series for curve in curves for run in curve.runs)]
  if not panels and not tables:
    raise UserError(f'--workdir={workdirs[0]}: the run has logged nothing yet that a figure shows')
  first = os.path.abspath(workdirs[0])
  directory = pathlib.Path(output or os.path.join(first if len(workdirs) == 1 else os.path.dirname(first), 'plots'))
  for panel in PANELS:
    if panels and panel not in panels:
      _log.info('%s is left out: no run has %s', panel.name, panel.metric)
  paths: list[str] = []
  drawn = [curve for curve in curves if any(run.series for run in curve.runs)]
  with _style():
    if panels:
      paths += _save(draw_panels(panels, drawn, width=7.2), directory / 'curves')
    for panel in panels:
      paths += _save(draw_panels([panel], drawn, width=3.5), directory / panel.name)
    for name, table in tables.items():
      paths += _save(plot_matrix.draw(table), directory / name)
  for curve in curves:
    _log.info('%s: %s', curve.label, ', '.join(run.workdir for run in curve.runs))
  names = ', '.join(pathlib.Path(path).stem for path in paths[::2])
  _log.info('written to %s, each as PNG and SVG: %s', directory, names)
  return paths


# -- Runs --------------------------------------------------------------------------------------------------------------


def _distinct(workdirs: Sequence[str]) -> Sequence[str]:
  seen: dict[str, str] = {}
  for workdir in workdirs:
    if not os.path.isdir(workdir):
      raise UserError(f'--workdir={workdir}: there is no such directory')
    place = os.path.realpath(workdir)
    if place in seen:
      also = f', also as {seen[place]}' if seen[place] != workdir else ''
      raise UserError(f'--workdir={workdir} is given twice{also}')
    seen[place] = workdir
  return workdirs


def read_run(workdir: str) -> Run:
  """Reads what is drawn of a run.

  Raises:
    UserError: the directory holds neither metrics nor evaluations, or one of its files is damaged.
  """
  root = pathlib.Path(workdir)
  evaluations = plot_matrix.read_evaluations(root)
  if not (root / 'metrics.jsonl').exists() and not evaluations:
    raise UserError(
      f'--workdir={workdir}: has no metrics.jsonl, as the workdir of a run has, and no evaluation/*.json of --mode=eval'
    )
  rows = read_metrics(root) if (root / 'metrics.jsonl').exists() else []
  if not rows and not evaluations:
    raise UserError(f'--workdir={workdir}: metrics.jsonl has no iterations yet')
  config: dict[str, Any] = {}
  if (root / 'config.json').exists():
    try:
      config = flatten(json.loads((root / 'config.json').read_text()))
    except (OSError, ValueError, AttributeError) as e:
      raise UserError(f'{root / "config.json"} cannot be read: {e}') from e
  series = {}
  for panel in PANELS:
    points = [(row['step'], row[panel.metric]) for row in rows if np.isfinite(row.get(panel.metric, np.nan))]
    if points:
      steps, values = zip(*points, strict=True)
      series[panel.metric] = np.asarray(steps, np.int64), np.asarray(values, np.float64)
  return Run(workdir, config, series, find_marks(rows, config), _best_possible(rows), evaluations)


def find_marks(rows: Sequence[dict[str, float]], config: dict[str, Any]) -> list[tuple[int, str]]:
  """What happened to a run, from its metrics: at most one kind a step, the gravest.

  A warning counts where it begins. A rollback is told by the smaller learning rate of the iteration after it. A warning
  ends the run where `monitor.echo_trap` says so.
  """
  found: dict[int, str] = {}
  warned, scale, rollbacks, before = False, None, 0, 0
  action, most = config.get('monitor.echo_trap'), config.get('monitor.max_rollbacks', len(rows))
  for row in rows:
    step = int(row['step'])
    if scale is not None and row.get('train/lr_scale', scale) < scale:
      found[before] = 'rollback'
      rollbacks, warned = rollbacks + 1, False
    scale = row.get('train/lr_scale', scale)
    if 'echo_trap/warning' in row:
      fresh, warned = row['echo_trap/warning'] > 0 and not warned, row['echo_trap/warning'] > 0
      last = action == 'stop' or (action == 'rollback' and rollbacks >= most)
      if fresh:
        found[step] = 'run stopped' if last else 'Echo-Trap warning'
    if any(value > 0 for name, value in row.items() if name.startswith('early_stopped/')):
      found[step] = 'run stopped'
    before = step
  return sorted(found.items())


def _best_possible(rows: Sequence[dict[str, float]]) -> float | None:
  """The mean over tags in the last evaluation; None where some tag's is not known."""
  last = next((row for row in reversed(rows) if 'val-env/success' in row), {})
  tags = [match[1] for name in last if (match := re.fullmatch('val-env/(.+)/success', name))]
  best = [last.get(f'val-env/{tag}/optimal', np.nan) for tag in tags]
  return float(np.mean(best)) if best and np.all(np.isfinite(best)) else None


# -- Which runs are one curve, and what it is called -------------------------------------------------------------------


def group(runs: Sequence[Run]) -> list[Curve]:
  """Puts runs together that differ in nothing but `seed`, in the order in which the first of each is given.

  Runs with the same config and the same seed are not put together, and neither are those without config.json. Fields
  that change nothing in what a run learns (where checkpoints go, what is logged) do not count.
  """
  groups: dict[Any, list[Run]] = {}
  for run in runs:
    fields = {name: value for name, value in _telling_fields(run).items() if name != 'seed'}
    key = json.dumps(fields, sort_keys=True) if run.config else run.workdir
    number = 0
    while any(other.config.get('seed') == run.config.get('seed') for other in groups.get((key, number), [])):
      number += 1
    groups.setdefault((key, number), []).append(run)
  parts = list(groups.values())
  labels = name_differences([_telling_fields(part[0]) for part in parts])
  labels = [label if part[0].config else part[0].name for label, part in zip(labels, parts, strict=True)]
  if len(parts) == 1 and parts[0][0].config:
    tags = parts[0][0].config.get('train.tags')
    labels = [_told(tags) if tags and len(parts[0]) > 1 else parts[0][0].name]
  curves = []
  for label, part in zip(labels, parts, strict=True):
    if labels.count(label) > 1 or not label:  # the same settings
      label = f'{label} ({part[0].name})' if label else part[0].name
    curves.append(Curve(f'{label} ({len(part)} seeds)' if len(part) > 1 else label, tuple(part)))
  return curves


def _telling_fields(run: Run) -> dict[str, Any]:
  """The config without what has no effect on what is learnt: options of environments that are not played too."""
  used = {*run.config.get('train.tags', ()), *run.config.get('eval.tags', ())}
  return {
    name: value
    for name, value in run.config.items()
    if has_effect(name) and not (name.startswith('envs.') and name.split('.')[1] not in used)
  }


def name_differences(configs: Sequence[dict[str, Any]]) -> list[str]:
  """A short name for each config from the fields in which they differ; `seed` is none.

  Up to three such fields are all named. Of more, as few as tell the configs apart, environment, model and estimator
  first. A field that some config has not (it is of an older version) is left out.
  """
  known = [c for c in configs if c]
  shared = [name for name in (known or [{}])[0] if name != 'seed' and all(name in c for c in known)]
  differing = [name for name in shared if any(c[name] != known[0][name] for c in known)]
  differing.sort(key=lambda name: _TELLING.index(name) if name in _TELLING else len(_TELLING))
  if len(differing) > 3:
    chosen: list[str] = []
    for name in differing:
      if len({_values(c, [*chosen, name]) for c in known}) > len({_values(c, chosen) for c in known}):
        chosen.append(name)
    differing = chosen
  parts = [name.rpartition('.') for name in differing]
  last = [field for _, _, field in parts]
  shown = [
    field if section in _CLEAR and last.count(field) == 1 else name
    for (section, _, field), name in zip(parts, differing, strict=True)
  ]
  return [
    ', '.join(f'{short}={_told(c[name])}' for short, name in zip(shown, differing, strict=True)) if c else ''
    for c in configs
  ]


def _values(config: dict[str, Any], names: Sequence[str]) -> tuple[str, ...]:
  return tuple(json.dumps(config[name]) for name in names)


def _told(value: Any) -> str:
  text = (
    '+'.join(map(str, value)) if isinstance(value, list) else f'{value:g}' if isinstance(value, float) else str(value)
  )
  return text if len(text) <= 32 else f'{text[:31]}…'


# -- Numbers -----------------------------------------------------------------------------------------------------------


def ema(values: np.ndarray, decay: float = DECAY) -> np.ndarray:
  """f64[K] -> f64[K]: at each point the mean of all points up to it, with weights decay^age."""
  total, weight, out = 0.0, 0.0, np.empty(len(values))
  for i, x in enumerate(values):
    total, weight = decay * total + x, decay * weight + 1
    out[i] = total / weight
  return out


@dataclasses.dataclass(frozen=True)
class Band:
  """Several runs' values of a metric, all arrays [K].

  Attributes:
    steps: those that any run has.
    raw: the mean of the values.
    mean: the mean of the runs' moving averages, or `raw` again.
    low, high: the lowest and the highest of them.
    runs: how many runs have the step.
  """

  steps: np.ndarray
  raw: np.ndarray
  mean: np.ndarray
  low: np.ndarray
  high: np.ndarray
  runs: np.ndarray


def band(series: Sequence[tuple[np.ndarray, np.ndarray]], smooth: bool) -> Band:
  """Puts several runs' (steps, values) together; a step counts the runs that have it."""
  steps = np.unique(np.concatenate([s for s, _ in series]))
  raw, lines = np.full((2, len(series), len(steps)), np.nan)
  for i, (s, values) in enumerate(series):
    at = np.searchsorted(steps, s)
    raw[i, at], lines[i, at] = values, ema(values) if smooth else values
  return Band(
    steps,
    np.nanmean(raw, axis=0),
    np.nanmean(lines, axis=0),
    np.nanmin(lines, axis=0),
    np.nanmax(lines, axis=0),
    np.isfinite(raw).sum(axis=0),
  )


# -- Drawing -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _style() -> Iterator[None]:
  """The figures do not depend on the user's own settings of matplotlib."""
  import matplotlib

  with matplotlib.rc_context():
    matplotlib.rcdefaults()
    matplotlib.rcParams.update(STYLE)
    yield


def _save(figure: Any, path: pathlib.Path) -> list[str]:
  """Writes PATH.png and PATH.svg."""
  paths = [f'{path}.png', f'{path}.svg']
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(paths[0], bbox_inches='tight')
    figure.set_layout_engine('none')  # it is laid out, which takes longer than to draw it
    figure.savefig(paths[1], bbox_inches='tight', metadata={'Date': None})
  except OSError as e:
    raise UserError(f'{path}.png and .svg were not written: {e.strerror or e}; --output names another place') from e
  return paths


def draw_panels(panels: Sequence[Panel], curves: Sequence[Curve], width: float) -> Any:
  """A figure of one or several panels with one legend below.

  Args:
    panels: what to draw.
    curves: of which runs.
    width: of the figure in inches.
  """
  from matplotlib.figure import Figure

  columns = min(len(panels), 3)
  rows = -(-len(panels) // columns)
  handles = _legend(panels, curves)
  across = max(1, int(width * 72 // (max(len(label) for label in handles) * 3.7 + 34)))
  below = -(-len(handles) // across) * 0.14 + 0.1
  height = (1.75 if columns > 1 else 2.2) * rows + below
  figure = Figure(figsize=(width, height), layout='constrained')
  axes = figure.subplots(rows, columns, squeeze=False, sharex=True).ravel()
  last = max(int(steps[-1]) for c in curves for r in c.runs for steps, _ in r.series.values())
  for i, axis in enumerate(axes):
    if i >= len(panels):
      axis.set_axis_off()
      continue
    _draw(axis, panels[i], curves)
    axis.set_xlim(-0.015 * max(last, 1), 1.015 * max(last, 1))
    axis.tick_params(labelbottom=i + columns >= len(panels))
    if i + columns >= len(panels):
      axis.set_xlabel('iteration')
  figure.legend(handles.values(), handles.keys(), loc='outside lower center', ncols=across, columnspacing=1.5)
  return figure


def _draw(axis: Any, panel: Panel, curves: Sequence[Curve]) -> None:
  from matplotlib.ticker import MaxNLocator

  axis.set_title(panel.title)
  axis.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
  greatest, usual = 0.0, []
  for i, curve in enumerate(curves):
    colour, dashes, point = _look(i)
    series = [run.series[panel.metric] for run in curve.runs if panel.metric in run.series]
    if not series:
      continue
    b = band(series, panel.every_iteration)
    greatest, usual = max(greatest, float(b.raw.max())), [*usual, *b.raw]
    if panel.every_iteration:
      axis.plot(b.steps, b.raw, color=colour, linewidth=0.6, alpha=0.35, zorder=1.5)
    if len(series) > 1:
      axis.fill_between(b.steps, b.low, b.high, color=colour, alpha=0.18, linewidth=0)
    # Behind the end of the shortest run the mean is one of fewer runs, and thinner.
    whole = b.steps <= min(steps[-1] for steps, _ in series)
    marker = {} if panel.every_iteration else {'marker': point, 'markersize': 3}
    axis.plot(b.steps[whole], b.mean[whole], color=colour, linestyle=dashes, linewidth=1.5, **marker)
    rest = np.arange(len(b.steps)) >= whole.sum() - 1
    if rest.sum() > 1:
      axis.plot(b.steps[rest], b.mean[rest], color=colour, linestyle=dashes, linewidth=0.8, zorder=1.9, **marker)
    for step, kind in [mark for run in curve.runs for mark in run.marks]:
      axis.axvline(step, color=colour, linestyle=_MARKS[kind], linewidth=0.9, zorder=1.2)
      axis.plot(step, 1, 'v', color=colour, markersize=3.5, transform=axis.get_xaxis_transform(), clip_on=False)
  if panel.name == 'success':
    for best, colour in _best_lines(curves):
      axis.axhline(best, color=colour, linewidth=1, linestyle=(0, (6, 2)), zorder=1.3)
  if panel.spikes and usual and greatest > 20 * np.median(usual) > 0:
    axis.set_yscale('log')
    axis.yaxis.set_major_formatter('{x:g}')
  elif panel.from_zero:
    axis.set_ylim(0, 1.05 * axis.get_ylim()[1])


def _look(i: int) -> tuple[str, Any, str]:
  """Colour, dashes and point of the i-th curve, in all panels."""
  return COLOURS[i % len(COLOURS)], _DASHES[i // len(COLOURS) % len(_DASHES)], _POINTS[i % len(_POINTS)]


def _best_lines(curves: Sequence[Curve]) -> list[tuple[float, str]]:
  """The best possible success, once in black where it is the same for all, otherwise in the curves' colours."""
  found = [(run.best, _look(i)[0]) for i, c in enumerate(curves) for run in c.runs[:1] if run.best is not None]
  return [(found[0][0], 'black')] if found and np.ptp([best for best, _ in found]) < 1e-6 else found


def _legend(panels: Sequence[Panel], curves: Sequence[Curve]) -> dict[str, Any]:
  """Label -> handle, of what the panels show."""
  from matplotlib.lines import Line2D
  from matplotlib.patches import Patch

  grey = '0.35'
  handles: dict[str, Any] = {}
  for i, curve in enumerate(curves):
    colour, dashes, point = _look(i)
    label = curve.label.replace('$', r'\$')  # what is between two of them would be taken for a formula
    handles[label] = Line2D([], [], color=colour, linestyle=dashes, linewidth=1.5, marker=point, markersize=3)
  if any(p.every_iteration for p in panels):
    handles[f'moving average, decay {DECAY:g}'] = Line2D([], [], color=grey, linewidth=1.5)
    handles['each iteration'] = Line2D([], [], color=grey, linewidth=0.6, alpha=0.5)
  if any(len(c.runs) > 1 for c in curves):
    handles['lowest to highest seed'] = Patch(color=grey, alpha=0.25, linewidth=0)
  if any(p.name == 'success' for p in panels) and _best_lines(curves):
    handles['best possible'] = Line2D([], [], color='black', linewidth=1, linestyle=(0, (6, 2)))
  kinds = {kind for c in curves for run in c.runs for _, kind in run.marks}
  for kind, dashes in _MARKS.items():
    if kind in kinds:
      handles[kind] = Line2D([], [], color=grey, linewidth=0.9, linestyle=dashes, marker='v', markersize=3.5)
  return handles
