"""The steps of a training iteration: collect, estimate, update."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from ragen_jax.agent import finite
from ragen_jax.agent.env_manager import first_training_level
from ragen_jax.agent.episode import Episode, Status
from ragen_jax.agent.finite import NotFinite
from ragen_jax.agent.image_table_sizes import image_room
from ragen_jax.agent.language_model import LanguageModel, param_state
from ragen_jax.agent.player import Player
from ragen_jax.agent.rollout import Rollout, concatenate
from ragen_jax.algorithms.diagnostics import RATIO_EDGES
from ragen_jax.distributed import processes
from ragen_jax.distributed.sharding import place
from ragen_jax.models import lora
from ragen_jax.runs.metrics import Counts
from ragen_jax.sampling.sampler import Sampling
from ragen_jax.training import bad_steps, learnable, objective, selection
from ragen_jax.training.batches import MiniBatch, TrainBatch, micro_batches, mini_batches
from ragen_jax.training.curriculum import Curriculum
from ragen_jax.training.estimate import EstimateSettings, TargetEstimator
from ragen_jax.training.images import make_sight
from ragen_jax.training.learner import Learner
from ragen_jax.training.objective import LossSettings, WeightSettings, with_loss_weights
from ragen_jax.training.optimizer import OptimizerSettings, make_optimizer
from ragen_jax.training.optimizer_step import SKIPPED
from ragen_jax.training.packing import PackedBatch, plan_rows, shared_tokens
from ragen_jax.training.records import Recorder, RecordSettings
from ragen_jax.training.replay import ReplayBuffer, ReplaySettings
from ragen_jax.training.rollout_metrics import policy_lag, rollout_metrics
from ragen_jax.training.scoring import Plans, Scorer
from ragen_jax.training.selection import FilterSettings, Selection
from ragen_jax.training.state import TrainState, copy_of_policy
from ragen_jax.utils.errors import UserError, short
from ragen_jax.utils.heartbeat import Heartbeat

# Consecutive rollouts in which all episodes ended because their environments failed, after which a run ends.
_FAILED_ROLLOUTS = 3

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
  """The rollouts of a run. Fields of `config.train` and, for `max_rollouts`, of `config.filter`."""

  groups: int
  group_size: int
  online_k: int
  first_level: int
  sampling: Sampling
  max_rollouts: int


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
  """The optimiser steps of an iteration. Fields of `config.algorithm`, `config.optimizer` and `config.filter`."""

  ppo_epochs: int
  mini_batch_size: int
  critic_warmup: int
  fixed_steps: bool
  weights: WeightSettings


@dataclasses.dataclass(frozen=True)
class TrainerSettings:
  """The settings of a trainer's parts.

  `seed` is that of token draws and of the order of mini-batches. With `reference`, the initial weights are kept as the
  reference of KL terms.
  """

  seed: int
  reference: bool
  rollout: RolloutSettings
  filter: FilterSettings
  replay: ReplaySettings
  estimate: EstimateSettings
  loss: LossSettings
  update: UpdateSettings
  optimizer: OptimizerSettings
  records: RecordSettings


class Trainer:
  """The steps of an iteration; `build.make_trainer` makes one from a config.

  `sight` makes what programs read of images; it is None for a model that reads text only. `curriculum` chooses items of
  data sets; None if they are played in their own order.
  """

  def __init__(
    self, settings: TrainerSettings, model: LanguageModel, player: Player, curriculum: Curriculum | None = None
  ):
    """Combines the parts; nothing is compiled before the first iteration."""
    self.settings = settings
    self.model = model
    self.player = player
    self.curriculum = curriculum
    self._observer, graphdef = model.sampler.observer, nnx.split(model.model)[0]
    self.scorer = Scorer(graphdef, settings.loss.scoring, model.mesh, self._observer)
    self.learner = Learner(
      graphdef,
      make_optimizer(settings.optimizer),
      objective.PolicyAndValueLoss(settings.loss),
      model.mesh,
      critic_loss=objective.CriticLoss(settings.loss),
      observer=self._observer,
    )
    self.sight = make_sight(model, image_room(player.specs, model.processor))
    self.estimator = TargetEstimator(settings.estimate, self.scorer, self.sight)
    self.replay = ReplayBuffer(settings.replay)
    self._shapes: list[tuple[int, int, int]] = []
    self.recorder = Recorder(settings.records, player, model.tokenizer)
    self._warned: set[tuple[str, str]] = set()
    self._failed = 0  # consecutive rollouts without an episode to learn from, because their environments failed

  @property
  def rows(self) -> int:
    """Number of episodes of a rollout."""
    return self.settings.rollout.groups * self.settings.rollout.group_size

  def init(self) -> TrainState:
    """The state before the first iteration."""
    params = param_state(self.model.model)
    params = place(params, lora.shardings(params, self.model.mesh))
    trained, frozen = lora.partition(params)
    reference = copy_of_policy(params) if self.settings.reference else None
    return TrainState(trained, frozen, self.learner.init(trained), reference)

  def check(self) -> None:
    """Raises UserError if episodes cannot begin, as far as that shows before anything large is compiled."""
    self.player.check(self.settings.rollout.first_level)
    if self.curriculum is not None:
      self.curriculum.check()

  def iterate(self, state: TrainState) -> tuple[TrainState, dict[str, float]]:
    """Runs a whole iteration with a new rollout, without `train.py`'s evaluations and checkpoints; donates `state`."""
    rollout, selected = self.collect(state)
    batch, metrics = self.estimate(state, selected)
    state, update_metrics = self.update(state, batch, selected)
    metrics |= update_metrics | rollout_metrics(rollout, self.settings.rollout.group_size)
    return state, finite.scalars({name: x for name, x in metrics.items() if not isinstance(x, Counts)})

  def rollout_metrics(self, rollout: Rollout) -> dict[str, float]:
    """The metrics of a rollout, and those of the player at present."""
    return rollout_metrics(rollout, self.settings.rollout.group_size) | self.player.metrics

  def collect(self, state: TrainState) -> tuple[Rollout, Selection]:
    """Plays fresh episodes and selects the rows to learn from.

    If the filter keeps fewer than `train.groups` groups, more rollouts are played until this number is reached, at most
    `filter.max_rollouts`. With a replay buffer, groups of earlier iterations are added. If a number of the rollout is
    not finite, nothing is kept or added, and the selection's metrics contain a `NotFinite`.

    Raises:
      UserError: the environments failed in all episodes, also in the calls before this one.
    """
    s, iteration = self.settings, state.iteration
    played = [self.rollout(state)]
    rollout, selected = played[0], self.select(played[0])
    while (
      not finite.findings(selected.metrics)
      and selected.groups < s.rollout.groups
      and len(played) < s.rollout.max_rollouts
    ):
      played.append(self.rollout(state, attempt=len(played)))
      rollout = concatenate(played, renumber=True)
      selected = self.select(rollout)
    selected = selection.draw_groups(selected, s.rollout.groups, np.random.default_rng((s.seed, iteration, 2)))
    selected.metrics['rollout/rollouts'] = len(played)
    self._check_environments(rollout.episodes)
    self._warn(rollout.episodes)
    if s.replay.groups:
      rows, scale = np.flatnonzero(selected.keep), selected.scale
      drawn = self.replay.draw(s.replay.groups, np.random.default_rng((s.seed, iteration, 1)), iteration)
      drawn = [] if finite.findings(selected.metrics) else drawn
      selected = selection.with_replayed(selected, drawn, multiple=max(self.rows // 4, 1))
      self.replay.add(rollout, rows, scale, iteration)
    if self.curriculum is not None and not finite.findings(selected.metrics):
      selected.metrics.update(self.curriculum.record(rollout.episodes, iteration))
    self._observer.played(rollout, iteration + 1)
    return rollout, selected

  def _check_environments(self, episodes: list[Episode]) -> None:
    """Ends a run whose environments have failed in all episodes of some consecutive rollouts, in all processes."""
    failed = bool(episodes) and all(e.status == Status.ENV_ERROR for e in episodes)
    self._failed = self._failed + 1 if failed else 0
    if self._failed >= _FAILED_ROLLOUTS:
      last = episodes[-1]
      raise UserError(
        f'the environments failed in all {len(episodes)} episodes of {self._failed} consecutive rollouts; the last '
        f'failure, in {last.tag}: {short(last.error)}',
        everywhere=True,
      )

  def _warn(self, episodes: list[Episode]) -> None:
    """Says when a rollout has little to learn from, or the wrong; each once, until a later rollout is better."""
    scores = learnable.equal_scores(episodes, in_groups=self.settings.filter.needs_groups)
    found = {
      'unplayed': learnable.unplayed_episodes(episodes),
      'invalid': learnable.invalid_replies(episodes),
      'paid': learnable.paid_invalid_replies(episodes),
      'equal': [scores] if scores else [],
    }
    now = {(kind, line.partition(':')[0]): line for kind, lines in found.items() for line in lines}  # by environment
    for kind, line in now.items():
      if kind not in self._warned:
        _log.warning(line)
    self._warned = set(now)

  def rollout(self, state: TrainState, attempt: int = 0) -> Rollout:
    """Plays a fresh level for each group; `attempt`, the number of the iteration's earlier rollouts, gives others."""
    s, iteration = self.settings.rollout, state.iteration
    number = iteration * s.max_rollouts + attempt
    key = jax.random.fold_in(jax.random.key(self.settings.seed), iteration)
    key = jax.random.fold_in(key, attempt) if attempt else key
    first = first_training_level(s.first_level, self.settings.seed, rollout=number, groups=s.groups)
    return self.player.play(
      state.params,
      key,
      s.sampling,
      first,
      policy_version=iteration,
      pictured=() if attempt else self.recorder.rows(iteration),
      level_seeds=None if self.curriculum is None else self.curriculum.level_seeds(first, iteration, attempt),
    )

  def select(self, rollout: Rollout) -> Selection:
    """The prompt groups of a fresh rollout that the filter keeps; none if a number of the rollout is not finite."""
    selected = selection.select_rows(rollout, self.settings.filter)
    found = finite.of_rollout(rollout)
    return selection.without_groups(selected, found) if found else selected

  def estimate(self, state: TrainState, selected: Selection) -> tuple[TrainBatch, dict[str, float | NotFinite]]:
    """Advantages and returns of the selected rows, see `TargetEstimator`."""
    return self.estimator(state, selected)

  def update(
    self, state: TrainState, batch: TrainBatch, selected: Selection
  ) -> tuple[TrainState, dict[str, float | Counts | NotFinite]]:
    """Takes the optimiser steps of an iteration; none if no row is kept, or if a number of the batch is not finite.

    In the first `optimizer.critic_warmup` iterations, the steps train only the critic. A step whose loss, gradient or
    update is not finite is skipped (`Learner.step`). The state's `trained` and `opt_state` are donated.

    Returns:
      The state of the next iteration, and metrics, `policy_lag` among them; 'actor/ratio' is a histogram, of the
      probability ratios of the trained tokens over all steps. `NotFinite` are the numbers of the batch and the skipped
      steps.
    """
    found, steps, taken = not_finite(batch), [], []
    critic_only = state.iteration < self.settings.update.critic_warmup
    planned = [] if found else self._plans(selected, state.iteration)
    heartbeat = Heartbeat('update: %d of %d micro-batches were given to the devices', sum(len(p) for _, p in planned))
    for rows, plans in planned:
      parts = heartbeat.over(self.micro_batches(batch, selected, rows, plans))
      # A process that waits for the devices in this step is ahead of one that hangs before it.
      processes.mark_progress()
      state, sums = self.learner.step(state, parts, critic_only=critic_only)
      steps.append(objective.token_means(sums))
      taken.append([plan.members for plan in plans])
    processes.mark_progress()
    metrics = self._update_metrics(jax.device_get(steps), state, taken) | policy_lag(selected, state.iteration)
    if planned and self.settings.estimate.batching.packing is not None:
      metrics['perf/shared_tokens'] = shared_tokens([plan for _, plans in planned for plan in plans])
    return state.replace(iteration=state.iteration + 1), metrics | found

  def try_weights(self, state: TrainState, batch: TrainBatch, selected: Selection) -> dict[str, NotFinite]:
    """Finds numbers that are not finite in the loss of new weights, on one micro-batch of the last update.

    The weights themselves can be finite and useless. `state` is the one after `update`. This runs the gradient program
    of the update, so it compiles nothing.
    """
    iteration = state.iteration - 1
    found = self._plans(selected, iteration)
    if not found or not_finite(batch):  # there was no update
      return {}
    rows, plans = found[0]
    *_, micro_batch = self.micro_batches(batch, selected, rows, plans[-1:])
    critic_only = iteration < self.settings.update.critic_warmup
    processes.mark_progress()
    _, sums = self.learner.gradients(state, [micro_batch], critic_only=critic_only)
    names = bad_steps.names_of_not_finite(jax.device_get(sums))
    return {'not_finite/new_weights': NotFinite(1, f'{names} under the new weights')} if names else {}

  def _mini_batches(self, selected: Selection, iteration: int, epoch: int) -> list[np.ndarray]:
    """The rows of each optimiser step of an epoch."""
    s, t = self.settings.update, selected.rollout.trajectory
    rng = np.random.default_rng((self.settings.seed, iteration, epoch))
    parts = max(self.rows // s.mini_batch_size, 1) if s.fixed_steps else None
    return mini_batches(np.flatnonzero(selected.keep), t.episode, rng, size=s.mini_batch_size, parts=parts)

  def _plans(self, selected: Selection, iteration: int) -> list[tuple[np.ndarray, Plans]]:
    """The rows of each optimiser step of an iteration, and its micro-batches; if packed, all of one shape."""
    epochs = range(self.settings.update.ppo_epochs)
    steps = [rows for epoch in epochs for rows in self._mini_batches(selected, iteration, epoch)]
    plans = plan_rows(steps, selected.rollout.trajectory, self.settings.estimate.batching)
    if self.settings.estimate.batching.packing is not None and steps:
      self._note(plans[0][0])
    return list(zip(steps, plans, strict=True))

  def _note(self, plan: PackedBatch) -> None:
    """Logs a new shape of the update's bins, because its program takes time to compile."""
    shape = (len(plan.bins), plan.width, plan.replies)
    if shape not in self._shapes:
      self._shapes.append(shape)
      _log.info(
        'update: shape %d, compiled once: %d bins of %d columns with up to %d scored tokens', len(self._shapes), *shape
      )

  def micro_batches(
    self, batch: TrainBatch, selected: Selection, rows: np.ndarray, plans: Plans | None = None
  ) -> Iterator[MiniBatch]:
    """The micro-batches of the mini-batch `rows` i32[M], placed on the mesh.

    `plans` are those of the mini-batch, or some of them; None to cut or pack it by itself.
    """
    t, batching = selected.rollout.trajectory, self.settings.estimate.batching
    mini_batch: MiniBatch = with_loss_weights(
      batch, rows, t.episode, self.settings.update.weights, multiple=batching.micro_batch_size
    )
    if plans is None:
      (plans,) = plan_rows([rows], t, batching)
    return micro_batches(mini_batch, plans, self.model.mesh)

  def _update_metrics(
    self, steps: list[dict[str, Any]], state: TrainState, taken: list[list[np.ndarray]]
  ) -> dict[str, float | Counts | NotFinite]:
    """Means over the steps that were not skipped, or over all if all were skipped.

    `steps` has the metrics of each step, on the host, and `taken` the rows of each micro-batch of each step.
    """
    whole, first = len(steps), steps[:1]
    flags = [bool(step.pop(SKIPPED)) for step in steps]
    parts = [bad_steps.split(step) for step in steps]
    steps = [stats for stats, _ in parts]
    skipped = [i for i, flag in enumerate(flags) if flag]
    text = ''
    if skipped:
      (stats, bad), number = parts[skipped[0]], ', '.join(str(i + 1) for i in skipped)
      what = bad_steps.describe(stats, bad, state.trained, state.opt_state, taken[skipped[0]])
      text = f'{what} in optimiser step{"s" if len(skipped) > 1 else ""} {number} of {whole}'
    steps = [step for step, flag in zip(steps, flags, strict=True) if not flag] or steps
    counts = sum((step.pop('ratio_counts', 0) for step in steps), np.zeros(len(RATIO_EDGES) - 1, np.int64))
    means = {name: float(np.mean([step[name] for step in steps])) for name in steps[0]} if steps else {}
    # Before the first step the weights equal the sampling weights, so a gap is a difference between the two programs.
    recorded = self.settings.estimate.old_logprobs == 'sampler'
    for name in ('mean', 'max'):
      gap = means.pop(f'actor/logprob_gap_{name}', None)
      if gap is not None and recorded and state.iteration % self.settings.rollout.online_k == 0:
        means[f'rollout/logprob_gap_{name}'] = float(first[0][f'actor/logprob_gap_{name}'])
    if not self.settings.estimate.needs_critic:
      means = {name: x for name, x in means.items() if not name.startswith('critic/')}
    means['train/num_mini_batches'] = whole
    means[SKIPPED] = NotFinite(len(skipped), text) if skipped else 0
    means['train/lr_scale'] = state.lr_scale
    return means | {'actor/ratio': Counts(RATIO_EDGES, counts)}


def not_finite(batch: TrainBatch) -> dict[str, NotFinite]:
  """Finds numbers that are not finite in a batch, among those that the loss reads."""
  words = {
    'old_logprobs': 'old log-probs',
    'old_values': 'old values',
    'ref_logprobs': 'log-probs of the reference',
    'importance': 'importance weights',
    'advantages': 'advantages',
    'returns': 'returns',
  }
  found: dict[str, NotFinite] = {}
  for name, x in words.items():
    found |= finite.find(name, x, getattr(batch, name), batch.mask)
  return found
