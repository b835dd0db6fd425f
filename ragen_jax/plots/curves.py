"""The figures of metrics over iterations: RAGEN's curves, with bands over seeds. docs/plots.md explains them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ragen_jax.plots.runs import Curve

DECAY = 0.9  # decay of the moving averages


@dataclasses.dataclass(frozen=True)
class Panel:
  """One quantity over the iterations.

  Attributes:
    name: name of the panel's file.
    metric: name in metrics.jsonl.
    title: title of the panel, with the unit.
    every_iteration: whether the metric is logged in every iteration and gets a moving average; otherwise its few points
      are marked.
    from_zero: whether the axis begins at 0.
    spikes: whether the axis becomes logarithmic if some values are far above the others.
    optional: whether only some kinds of runs have the metric, so that it is not missed.
  """

  name: str
  metric: str
  title: str
  every_iteration: bool = True
  from_zero: bool = True
  spikes: bool = False
  optional: bool = False


PANELS = (
  Panel('success', 'val-env/success', 'Success on held-out levels', every_iteration=False),
  Panel('reward_mean', 'critic/score/mean', 'Reward, mean', from_zero=False),
  Panel('reward_std', 'rollout/in_group_reward_std', 'Reward deviation in a group'),
  Panel('entropy', 'actor/entropy', 'Entropy (nats)'),
  Panel('grad_norm', 'actor/grad_norm', 'Gradient norm', spikes=True),
  Panel('response_length', 'response_length/mean', 'Response length (tokens)'),
  Panel('observation_score', 'train/observation_score', 'Score of described boards', optional=True),
  Panel('prediction_score', 'train/prediction_score', 'Score of predicted boards', optional=True),
  Panel('state_reward', 'train/state_reward', 'State reward of an episode', optional=True),
)

# Okabe and Ito's colours, which are distinguishable with any colour vision, without yellow and black.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')
_DASHES = ('-', (0, (5, 1.5)), (0, (1, 1)))  # for more curves than there are colours
_POINTS = ('o', 's', '^', 'D', 'v', 'P')
# Kind of an event, see `find_marks` -> dashes of its line.
_MARKS = {'Echo-Trap warning': (0, (4, 2)), 'rollback': (0, (1, 1.5)), 'run stopped': '-'}


# -- Numbers -----------------------------------------------------------------------------------------------------------


def ema(values: np.ndarray, decay: float = DECAY) -> np.ndarray:
  """Moving average, f64[K] -> f64[K]: the mean of all points up to each one, with weights decay^age."""
  total, weight, out = 0.0, 0.0, np.empty(len(values))
  for i, x in enumerate(values):
    total, weight = decay * total + x, decay * weight + 1
    out[i] = total / weight
  return out


@dataclasses.dataclass(frozen=True)
class Band:
  """A metric of several runs; all arrays are [K].

  Attributes:
    steps: the steps of all runs.
    raw: mean of the values.
    mean: mean of the runs' moving averages; equal to `raw` without moving averages.
    low, high: minimum and maximum of the runs' moving averages, or of their values without moving averages.
    runs: number of runs that have the step.
  """

  steps: np.ndarray
  raw: np.ndarray
  mean: np.ndarray
  low: np.ndarray
  high: np.ndarray
  runs: np.ndarray


def band(series: Sequence[tuple[np.ndarray, np.ndarray]], smooth: bool) -> Band:
  """The band of several runs' (steps, values), with moving averages if `smooth`."""
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


def draw_panels(panels: Sequence[Panel], curves: Sequence[Curve], width: float) -> Any:
  """A matplotlib `Figure` of one or several panels with one legend below, `width` inches wide."""
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
    # After the end of the shortest run, the mean is over fewer runs, and its line is thinner.
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
  """Colour, dashes and point marker of the i-th curve, equal in all panels."""
  return COLOURS[i % len(COLOURS)], _DASHES[i // len(COLOURS) % len(_DASHES)], _POINTS[i % len(_POINTS)]


def _best_lines(curves: Sequence[Curve]) -> list[tuple[float, str]]:
  """(best possible success, colour): one black line if equal for all curves, else a line in each curve's colour."""
  found = [(run.best, _look(i)[0]) for i, c in enumerate(curves) for run in c.runs[:1] if run.best is not None]
  return [(found[0][0], 'black')] if found and np.ptp([best for best, _ in found]) < 1e-6 else found


def _legend(panels: Sequence[Panel], curves: Sequence[Curve]) -> dict[str, Any]:
  """Label -> handle, for all elements of the panels."""
  from matplotlib.lines import Line2D
  from matplotlib.patches import Patch

  grey = '0.35'
  handles: dict[str, Any] = {}
  for i, curve in enumerate(curves):
    colour, dashes, point = _look(i)
    label = curve.label.replace('$', r'\$')  # matplotlib reads text between two of them as a formula
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
