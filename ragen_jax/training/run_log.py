"""The log of a run: metrics, episodes and evaluations on disk, and lines on the terminal."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

from ragen_jax.agent.episode import Episode
from ragen_jax.runs.metrics import MetricWriter
from ragen_jax.runs.progress import Progress
from ragen_jax.viewer.page import write_page
from ragen_jax.viewer.store import EpisodeWriter
from ragen_jax.viewer.tensorboard import boards, transcript

# The evaluation metric that determines the best checkpoint: success, averaged over tags.
BEST = 'val-env/success'


class Evaluation(Protocol):
  """The result of an evaluation, see `evaluation.evaluator.Evaluation`."""

  metrics: dict[str, float]
  episodes: list[Episode]
  records: list[dict[str, Any]]
  not_finite: str


@dataclasses.dataclass(frozen=True)
class LogSettings:
  """Fields of `config.logging`, tags of environments, and `eval_group_size`: the episodes of a held-out level."""

  trajectories: int
  train_tags: tuple[str, ...]
  eval_tags: tuple[str, ...]
  eval_group_size: int


class RunLog:
  """Writes episodes and evaluations to the files of a run."""

  def __init__(self, settings: LogSettings, metrics: MetricWriter, episodes: EpisodeWriter, progress: Progress):
    self._settings = settings
    self.metrics = metrics
    self.episodes = episodes
    self.progress = progress

  def training_episodes(self, step: int, episodes: list[Episode], records: list[dict[str, Any]]) -> None:
    """Writes the kept episodes of an iteration, and their records for the viewer."""
    self.episodes.write('train', step, records)
    self._show(step, 'train', episodes, self._settings.train_tags)

  def evaluation(self, step: int, evaluation: Evaluation) -> float:
    """Writes an evaluation; returns its success averaged over tags."""
    tags = self._settings.eval_tags
    success = mean_success(evaluation.metrics, tags)
    self.metrics.scalars(step, evaluation.metrics | {BEST: success})
    self._show(step, 'val', evaluation.episodes[:: self._settings.eval_group_size], tags)
    self.episodes.write('eval', step, evaluation.records)
    if self.episodes.enabled:
      self.metrics.page(write_page(self.episodes.workdir))
    self.progress.write(f'held-out success after {step}: {success_line(evaluation.metrics, tags)}')
    return success

  def _show(self, step: int, split: str, episodes: list[Episode], tags: tuple[str, ...]) -> None:
    """Writes the first episodes of each tag to TensorBoard, as text and pictures."""
    count = self._settings.trajectories
    shown = [e for tag in tags for e in [x for x in episodes if x.tag == tag][:count]]
    self.metrics.text(step, {f'{split}/generations/{i}': transcript(e) for i, e in enumerate(shown)})
    pictures = {f'{split}/boards/{i}': boards(e) for i, e in enumerate(shown)}
    self.metrics.images(step, {name: picture for name, picture in pictures.items() if picture is not None})


def success_by_tag(metrics: dict[str, float], tags: tuple[str, ...]) -> dict[str, float]:
  """The sampled success rate of each tag in an evaluation's metrics."""
  return {tag: metrics[f'val-env/{tag}/success'] for tag in tags}


def mean_success(metrics: dict[str, float], tags: tuple[str, ...]) -> float:
  """The sampled success rate averaged over tags."""
  return float(np.mean(list(success_by_tag(metrics, tags).values())))


def success_line(metrics: dict[str, float], tags: tuple[str, ...]) -> str:
  """An evaluation in one line: 'FrozenLake 0.312 sampled, 0.273 greedy, 0.491 best possible'."""
  parts = []
  for tag in tags:
    shown = {'sampled': 'val-env/{}/success', 'greedy': 'val-greedy/{}/success', 'best possible': 'val-env/{}/optimal'}
    shown = {label: name.format(tag) for label, name in shown.items()}
    numbers = [f'{metrics[name]:.3f} {label}' for label, name in shown.items() if name in metrics]
    parts.append(f'{tag} {", ".join(numbers)}')
  return '; '.join(parts)
