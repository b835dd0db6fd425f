"""A training run on disk: opened and restored, logged and saved after each iteration, rolled back or stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ragen_jax.agent import finite
from ragen_jax.agent.episode import Episode
from ragen_jax.agent.finite import NotFinite
from ragen_jax.agent.rollout import Rollout
from ragen_jax.distributed import processes
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.interrupt import Interrupt, Stopped
from ragen_jax.runs.metrics import Counts, MetricWriter
from ragen_jax.runs.progress import Progress
from ragen_jax.runs.timing import Timer, memory
from ragen_jax.runs.trackers import TrackerSettings, open_tracker
from ragen_jax.training.batches import TrainBatch
from ragen_jax.training.curriculum import Curriculum
from ragen_jax.training.learnable import invalid_replies, unplayed_episodes
from ragen_jax.training.monitor import Monitor, Verdict
from ragen_jax.training.replay import ReplayBuffer
from ragen_jax.training.restore import restore
from ragen_jax.training.run_lines import CONSEQUENCES, diverged, greeting
from ragen_jax.training.run_log import BEST, Evaluation, LogSettings, RunLog, success_by_tag
from ragen_jax.training.selection import Selection
from ragen_jax.training.state import TrainState
from ragen_jax.utils.errors import Diverged, UserError
from ragen_jax.viewer.store import EpisodeWriter

_log = logging.getLogger(__name__)

# evaluate(params, iteration), such as an `Evaluator`.
Evaluate = Callable[[Any, int], Evaluation]

# Metric: number of iterations of the run so far in which a number was not finite.
BAD_ITERATIONS = 'train/bad_iterations'


@dataclasses.dataclass(frozen=True)
class RunSettings:
  """The schedule of a run. Fields of `config` and its `train`, `eval`, `checkpoint` and `monitor`, and the following.

  Attributes:
    hparams: the run's row of TensorBoard's table: config fields by name, nested.
    compared: metrics that the table shows.
    config: the whole config, nested; checkpoints contain it, and one of another config is refused.
    files: digests of the run's data, see `data_digests`; checkpoints contain them, and one of other data is refused.
  """

  num_iterations: int
  online_k: int
  eval_every: int
  checkpoint_every: int
  keep: int
  rollback_lr: float
  log: LogSettings
  tracker: TrackerSettings
  hparams: Mapping[str, Any]
  compared: tuple[str, ...]
  config: Mapping[str, Any]
  files: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Iteration:
  """What an iteration played and learnt; `fresh`: whether it played the rollout.

  `try_weights` finds numbers that are not finite under the new weights.
  """

  rollout: Rollout
  selection: Selection
  batch: TrainBatch
  fresh: bool
  metrics: Mapping[str, float | Counts | NotFinite]
  try_weights: Callable[[], Mapping[str, NotFinite]]


@contextlib.contextmanager
def open_run(
  settings: RunSettings, workdir: str, model: str, state: TrainState, replay: ReplayBuffer, monitor: Monitor,
  interrupt: Interrupt, curriculum: Curriculum | None = None,
) -> Iterator[tuple[Run, TrainState]]:  # fmt: skip
  """Opens the checkpoints and logs of a run, and restores its last checkpoint; yields the state to continue from, too.

  The checkpoint fills `replay`, `monitor` and `curriculum`; if there is one, the arrays of the initial `state` are
  deleted. `model` describes the model in the first line. `interrupt` notices signals while the run is open.

  Raises:
    UserError: the checkpoints belong to a warm start, to another config, model or data, or the processes see different
      checkpoints.
  """
  first, unsaved = processes.is_first(), state.unsaved()
  with Checkpointer(workdir, keep=settings.keep, save_best=BEST) as checkpointer:
    state, stopped, unevaluated = restore(
      checkpointer, workdir, settings.config, settings.files, state, replay, monitor, curriculum, unsaved
    )
    done = state.iteration
    _log.info(greeting(workdir, model, done, settings.num_iterations, stopped, unevaluated=bool(unevaluated)))
    start_step = done + 1 if done else 0
    episodes = EpisodeWriter(workdir, start_step=start_step, enabled=first)
    with (
      interrupt,
      open_tracker(settings.tracker, workdir, dict(settings.hparams), start_step, enabled=first) as tracker,
      MetricWriter(workdir, start_step=start_step, enabled=first, tracker=tracker) as writer,
      Progress(settings.num_iterations, start=done, enabled=first) as progress,
    ):
      writer.hparams(settings.hparams, list(settings.compared))
      log = RunLog(settings.log, writer, episodes, progress)
      run = Run(settings, checkpointer, log, interrupt, replay, monitor, curriculum, stopped, unevaluated, unsaved)
      yield run, state


def _ends_all(error: Stopped | UserError) -> bool:
  """Whether an error ends all processes of the run."""
  return isinstance(error, Stopped) or processes.raised_by_all(error)


def _bad_numbers(
  verdict: Verdict, evaluation: Evaluation | None, try_weights: Callable[[], Mapping[str, NotFinite]] | None
) -> str:
  """Text about the numbers that are not finite in an iteration, its evaluation or its new weights; '' for none."""
  parts = [verdict.reason] if verdict.action == 'bad' else []
  if evaluation is not None and evaluation.not_finite:
    parts.append(f'in the evaluation {evaluation.not_finite}')
  if not parts and try_weights is not None:
    parts = [x.text for x in try_weights().values()]
  return ', '.join(parts)


class Run:
  """An open run; `open_run` makes one.

  Attributes:
    timer: seconds of the phases of an iteration.
    unevaluated: the verdict of the last iteration if its evaluation was cut off before the run was resumed; it must be
      evaluated, see `finish_evaluation`. None otherwise.
  """

  def __init__(
    self,
    settings: RunSettings,
    checkpointer: Checkpointer,
    log: RunLog,
    interrupt: Interrupt,
    replay: ReplayBuffer,
    monitor: Monitor,
    curriculum: Curriculum | None,
    stopped: str,
    unevaluated: Verdict | None,
    unsaved: Mapping[str, str],
  ):
    """Takes open parts.

    `stopped` is the reason why the run was stopped earlier, '' if it was not stopped; `unsaved` is that of the state.
    """
    self._settings = settings
    self._checkpointer = checkpointer
    self._log = log
    self._interrupt = interrupt
    self._replay = replay
    self._monitor = monitor
    self._curriculum = curriculum
    self._stopped = stopped
    self._unsaved = dict(unsaved)
    self._try_weights: Callable[[], Mapping[str, NotFinite]] | None = None  # of the state that the run goes on from
    self._discarded = True  # whether the last rollout is of weights that are no more, or of a bad iteration
    self.unevaluated = unevaluated
    self.timer = Timer(processes.mark_progress)

  def catch_up(self, state: TrainState, evaluator: Evaluate) -> TrainState:
    """Makes the evaluation before training, or one that was cut off; returns the state to continue from."""
    if state.iteration == 0:
      _log.info('evaluating before training; most of the first minute is compilation')
      with self.timer('testing'), self._interrupt.before_learning():
        evaluation = evaluator(state.params, 0)
      self.log_first_evaluation(evaluation)
    if self.unevaluated is not None:
      with self.timer('testing'):
        evaluation = evaluator(state.params, state.iteration)
      state = self.finish_evaluation(state, evaluation)
    self._log.progress.restart()
    return state

  def goes_on(self, state: TrainState) -> bool:
    """Whether there is another iteration."""
    return state.iteration < self._settings.num_iterations and not self._stopped

  def needs_rollout(self, state: TrainState) -> bool:
    """Whether the next iteration plays; with `train.online_k` above 1, several learn from one rollout."""
    return self._discarded or state.iteration % self._settings.online_k == 0

  @contextlib.contextmanager
  def saved_if_stopped(self, state: TrainState) -> Iterator[None]:
    """Context manager of a fresh rollout: if a signal or a `UserError` ends it, the state before it is saved.

    Nothing is saved before the first iteration, after iterations with numbers that are not finite, and if a `UserError`
    ends only some of several processes.
    """
    try:
      yield
    except (Stopped, UserError) as e:
      if not _ends_all(e):  # first, because the other processes do not take part in what follows
        raise
      new = state.iteration > 0 and state.iteration != self._checkpointer.latest_step()
      if new and not self._monitor.bad_iterations and not (self._try_weights and self._try_weights()):
        self._save_at_end(e, state)
      raise

  @contextlib.contextmanager
  def saved_if_evaluation_stopped(
    self, state: TrainState, verdict: Verdict, try_weights: Callable[[], Mapping[str, NotFinite]]
  ) -> Iterator[None]:
    """Context manager of an evaluation: if it is ended, the state is saved, to be evaluated when the run resumes.

    It is ended as in `saved_if_stopped`. Nothing is saved between two iterations of one rollout, if numbers are not
    finite, and if a `UserError` ends only some of several processes. The arguments are those of `finish_iteration`.
    """
    try:
      yield
    except (Stopped, UserError) as e:
      if not _ends_all(e):  # first, because the other processes do not take part in what follows
        raise
      whole = state.iteration % self._settings.online_k == 0
      if whole and not _bad_numbers(verdict, None, try_weights):
        self._save_at_end(e, state, unevaluated=verdict)
      raise

  def finish_evaluation(self, state: TrainState, evaluation: Evaluation) -> TrainState:
    """Finishes the iteration whose evaluation was cut off, see `unevaluated`, as `finish_iteration` would have.

    Raises:
      Stopped: a signal was received.
      Diverged: the policy's numbers are not finite in the evaluation.
    """
    verdict, self.unevaluated = self.unevaluated, None

    def log_times(done: TrainState) -> None:
      self._log.metrics.scalars(done.iteration, self.timer.pop())

    return self._finish(state, evaluation, verdict, dict, log_times)

  def evaluation_due(self, state: TrainState, verdict: Verdict) -> bool:
    """Whether the weights are evaluated after this iteration: on schedule, or because the run ends."""
    return self._due(state, self._settings.eval_every) or verdict.action == 'stop'

  def evaluate_if_due(
    self, state: TrainState, iteration: Iteration, verdict: Verdict, evaluator: Evaluate
  ) -> Evaluation | None:
    """Evaluates the weights if this is due after the iteration."""
    if not self.evaluation_due(state, verdict):
      return None
    with self.timer('testing'), self.saved_if_evaluation_stopped(state, verdict, iteration.try_weights):
      return evaluator(state.params, state.iteration)

  def log_first_evaluation(self, evaluation: Evaluation) -> None:
    """Writes the evaluation before training.

    Raises:
      Stopped: a signal was received in the meantime.
      Diverged: the numbers of the initial model are not finite, so that no update could be taken.
    """
    self._log.evaluation(0, evaluation)
    self._log.metrics.scalars(0, self.timer.pop())
    # Advice is for what is trained, unless it is evaluated under other tags.
    tags = self._settings.log.train_tags
    episodes = [e for e in evaluation.episodes if e.tag in tags] or evaluation.episodes
    for line in (*unplayed_episodes(episodes), *invalid_replies(episodes)):
      _log.warning('before training, %s', line)
    self._log.metrics.flush()  # the first iteration of a large model can take long
    if evaluation.not_finite:
      raise Diverged(
        f'iteration 0: not finite: in the evaluation {evaluation.not_finite}; the initial model cannot be trained, '
        'check the weights of model.path and lora.path, and model.dtype'
      )
    if interrupted := self._interrupted():
      raise Stopped(interrupted)  # there is nothing to save yet

  def log_iteration(self, state: TrainState, iteration: Iteration) -> Verdict:
    """Writes the metrics and histograms of an iteration; `state` is the state after the update.

    The verdict is 'bad' if a number of the iteration is not finite, otherwise the monitor's; 'go_on' for iterations
    that reuse a rollout.
    """
    metrics, batch = iteration.metrics, iteration.batch
    scalars = finite.scalars({name: x for name, x in metrics.items() if not isinstance(x, Counts)})
    watched, verdict = {}, Verdict()
    if found := finite.findings(metrics):
      verdict = Verdict('bad', finite.describe(found))
    else:
      watched, spikes = self._monitor.after_update(scalars)
      for spike in spikes:
        self._log.progress.write(spike.line(f'iteration {state.iteration}'))
      if iteration.fresh:
        more, verdict = self._monitor.after_iteration(scalars, empty=not iteration.selection.groups)
        watched |= more
    self._log.metrics.scalars(state.iteration, scalars | watched)
    histograms = {name: x for name, x in metrics.items() if isinstance(x, Counts)}
    self._log.metrics.histograms(state.iteration, {'critic/advantages': batch.advantages[batch.trained]} | histograms)
    return verdict

  def log_episodes(self, state: TrainState, episodes: list[Episode], records: list[dict[str, Any]]) -> None:
    """Writes the kept episodes of an iteration, see `Recorder.records`; `state` is the state after its update."""
    self._log.training_episodes(state.iteration, episodes, records)

  def finish_iteration(
    self, state: TrainState, iteration: Iteration, evaluation: Evaluation | None, verdict: Verdict
  ) -> TrainState:
    """Writes the evaluation, rolls back or records the end of the run, saves, and writes the times of an iteration.

    An iteration with a number that is not finite is not saved, and new weights are tried before a save, so checkpoints
    contain only finite numbers. `state` is the state after the update, `verdict` the result of `log_iteration`. The
    returned state is that to continue from.

    Raises:
      Stopped: a signal was received.
      Diverged: numbers were not finite in too many consecutive iterations, or in the last iteration.
    """
    return self._finish(
      state, evaluation, verdict, iteration.try_weights, lambda done: self._log_times(done, iteration.rollout)
    )

  def _finish(
    self,
    state: TrainState,
    evaluation: Evaluation | None,
    verdict: Verdict,
    try_weights: Callable[[], Mapping[str, NotFinite]],
    log_times: Callable[[TrainState], None],
  ) -> TrainState:
    """See `finish_iteration`; `log_times` writes the times of the iteration of a state."""
    step, scores, rolled_back = state.iteration, {}, False
    self._discarded = verdict.action == 'bad'
    if evaluation is not None:
      scores[BEST] = self._log.evaluation(step, evaluation)
      tags = self._settings.log.eval_tags
      watched, hopeless = self._monitor.after_evaluation(success_by_tag(evaluation.metrics, tags))
      self._log.metrics.scalars(step, watched)
      verdict = hopeless if hopeless.action == 'stop' else verdict
    # Checkpoints do not contain the rollout, so a run cannot resume between two iterations of one rollout: a signal
    # waits for the last of them.
    interrupted, within = self._interrupted(), step % self._settings.online_k != 0
    save_now = verdict.action == 'stop' or (interrupted and not within)
    due = self._due(state, self._settings.checkpoint_every)
    save = due or save_now
    if not due and verdict.action != 'stop':
      scores = {}  # an uninterrupted run has no checkpoint of this step, so it must not become the best
    not_finite = _bad_numbers(verdict, evaluation, try_weights if save else None)
    answer = self._monitor.after_numbers(not_finite)
    self._log.metrics.scalars(step, {BAD_ITERATIONS: self._monitor.all_bad_iterations})
    if not_finite:
      verdict = Verdict(answer, f'not finite: {not_finite}')
    last = step == self._settings.num_iterations
    best = self._checkpointer.intact_best_step() if verdict.action == 'rollback' and not last else None
    if best is not None:
      state, scores, rolled_back = self._roll_back(state, best, verdict), {}, True
      self._discarded = True
    elif verdict.action != 'go_on':
      consequence = CONSEQUENCES['bad' if not_finite else verdict.action]
      self._log.progress.write(f'iteration {step}: {verdict.reason}; {consequence}')
    self._stopped = verdict.reason if verdict.action == 'stop' and not not_finite else ''
    known = step == self._checkpointer.latest_step()  # its evaluation was cut off before
    saved = save and (not known if rolled_back else not not_finite)
    if saved:
      self._save(state, scores)
    self._try_weights = None if rolled_back else try_weights
    log_times(state)
    if saved:
      self._log.metrics.flush()  # the times, which include the save's
    if not_finite and not rolled_back and (answer != 'bad' or last):
      self._log.metrics.flush()
      raise Diverged(self._farewell(step, not_finite))
    if interrupted and (self._discarded or not within):
      raise Stopped(interrupted)
    return state

  def _farewell(self, step: int, not_finite: str) -> str:
    """The message of a run that ends after bad iterations."""
    first = step - self._monitor.bad_iterations + 1
    # The checkpoint of a step whose evaluation was cut off may be of a bad iteration.
    good = max((saved for saved in self._checkpointer.steps() if saved < first), default=None)
    return diverged(first, step, not_finite, good)

  def _due(self, state: TrainState, every: int) -> bool:
    step = state.iteration
    return step == self._settings.num_iterations or (every > 0 and step % every == 0)

  def _interrupted(self) -> int:
    """The number of the signal that any process received; 0 for none."""
    return processes.largest([self._interrupt.requested])[0]

  def _roll_back(self, state: TrainState, best: int, verdict: Verdict) -> TrainState:
    """The weights and the optimiser's state of the best checkpoint, with smaller learning rates; deletes the others.

    The curriculum goes back, too: its success rates are those of the policy with these weights.
    """
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state.saved())
    if self._curriculum is not None:
      like['curriculum'] = self._curriculum.state()[0]
    jax.tree.map(lambda x: x.delete(), state.saved())  # the devices may have no room for both
    arrays, _ = self._checkpointer.restore(like, step=best, partial=True)
    scale = state.lr_scale * self._settings.rollback_lr
    self._monitor.rolled_back()
    self._replay.clear()
    if self._curriculum is not None:
      self._curriculum.load_state(arrays['curriculum'])
    line = f'iteration {state.iteration}: {verdict.reason}; back to {best}, learning rate x {scale:g}'
    self._log.progress.write(line)
    return state.with_saved(arrays, lr_scale=scale)

  def _save_at_end(self, error: Stopped | UserError, state: TrainState, unevaluated: Verdict | None = None) -> None:
    """`_save` while `error` ends all processes of the run. An error of the save only replaces a signal."""
    try:
      self._save(state, {}, unevaluated)
    except UserError as e:
      if isinstance(error, Stopped):
        raise
      _log.warning('no checkpoint of iteration %d: %s', state.iteration, e)

  def _save(self, state: TrainState, scores: dict[str, float], unevaluated: Verdict | None = None) -> None:
    """Saves a checkpoint, of which the metrics `scores` choose the best; of one that is there already, the arrays stay.

    `unevaluated` is the verdict of the iteration if its evaluation was cut off.
    """
    with self.timer('save_checkpoint'):
      self._log.metrics.flush()
      replay, described = self._replay.state()
      kept: dict[str, Any] = {'replay': replay}
      monitor = self._monitor.state_dict() | {'lr_scale': state.lr_scale}
      meta = {'iteration': state.iteration, 'monitor': monitor, 'stopped': self._stopped, 'replay': described}
      meta |= {'config': dict(self._settings.config), 'files': dict(self._settings.files), 'unsaved': self._unsaved}
      if self._curriculum is not None:
        kept['curriculum'], meta['curriculum'] = self._curriculum.state()
      if unevaluated is not None:
        meta['unevaluated'] = dataclasses.asdict(unevaluated)
      if state.iteration == self._checkpointer.latest_step():
        self._checkpointer.amend(meta, metrics=scores)
      else:
        extra = not (self._stopped or self._due(state, self._settings.checkpoint_every))
        self._checkpointer.save(state.iteration, state.saved() | kept, meta, metrics=scores, extra=extra)

  def _log_times(self, state: TrainState, rollout: Rollout) -> None:
    """Writes the times of an iteration, and updates the progress line."""
    times = self.timer.pop() | memory()
    tokens = int(rollout.trajectory.length.sum())
    times['perf/throughput'] = tokens / times['timing_s/step']
    if 'timing_s/gen' in times:
      times['perf/sampled_tokens_per_s'] = rollout.tokens_sampled / times['timing_s/gen']
    self._log.metrics.scalars(state.iteration, times)
    shown = {
      'train success': float(np.mean([e.success for e in rollout.episodes])),
      'reward': float(np.mean([e.score for e in rollout.episodes])),
    }
    self._log.progress.update(state.iteration, shown, tokens=tokens)
