"""StarPO, from top to bottom: roll out, choose, estimate advantages, update, watch, evaluate, save."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.episode import Episode
from ragen_jax.config.checks import check_config
from ragen_jax.distributed import processes
from ragen_jax.evaluation.evaluator import Evaluation, mean_success, success_by_tag
from ragen_jax.models import lora
from ragen_jax.runs import config_fields
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.interrupt import Interrupt, Stopped
from ragen_jax.runs.metrics import MetricWriter
from ragen_jax.runs.progress import Progress
from ragen_jax.runs.summary import summarize
from ragen_jax.runs.timing import Timer, memory
from ragen_jax.runs.workdir import record_config, workdir_lock
from ragen_jax.training.monitor import Monitor, Verdict
from ragen_jax.training.probes import probe
from ragen_jax.training.trainer import Trainer
from ragen_jax.utils.errors import UserError
from ragen_jax.viewer.page import write_page
from ragen_jax.viewer.store import EpisodeWriter
from ragen_jax.viewer.tensorboard import boards, transcript

_log = logging.getLogger(__name__)

# The evaluation's metric that the best checkpoint is chosen by.
BEST = 'val-env/success'


def train_and_evaluate(config: ConfigDict, workdir: str) -> dict[str, float]:
  """Trains a policy, or goes on with the run in `workdir`.

  Args:
    config: see configs/default.py.
    workdir: checkpoints, metrics and TensorBoard files are kept here.

  Returns:
    The last evaluation's metrics.

  Raises:
    UserError: the config cannot be run, or the workdir is another run's.
  """
  with contextlib.ExitStack() as stack:
    with processes.same_errors():
      check_config(config)
      if not set(config.train.tags) & set(config.eval.tags):
        _log.info(
          'train.tags=%s, eval.tags=%s: what is trained on is not evaluated', config.train.tags, config.eval.tags
        )
      if processes.is_first():
        stack.enter_context(workdir_lock(workdir))
        record_config(workdir, config.to_dict(), *config_fields.free_in_training(config.to_dict()))
    use_compilation_cache(config, workdir)
    return _run(config, workdir)


def _run(config: ConfigDict, workdir: str) -> dict[str, float]:
  policy = build.load_policy(config)
  evaluator = build.make_evaluator(config, policy)
  trainer = Trainer(config, policy, evaluator.held_out())
  with processes.same_errors():
    trainer.proxy.check_first_prompts(config.train.first_level)
  monitor = Monitor(config)
  with Checkpointer(workdir, keep=config.checkpoint.keep, save_best=BEST) as checkpointer:
    params, opt_state, done = trainer.init()
    frozen = lora.partition(params)[1]  # never changes, and is no part of checkpoints
    steps = processes.gather(checkpointer.latest_step())
    if len(set(steps)) > 1:
      raise UserError(f'--workdir={workdir}: the processes see different checkpoints, {steps}; they must share a disk')
    stopped = ''
    if checkpointer.latest_step() is not None:
      described = checkpointer.meta().get('replay')
      if described is None:
        raise UserError(f'--workdir={workdir}: its checkpoints are those of a warm start; choose another --workdir')
      like = {'params': lora.partition(params)[0], 'opt_state': opt_state}
      state, meta = checkpointer.restore(like | {'replay': trainer.replay.empty_state(described)})
      # What the run began with would stay on the devices beside what it goes on with.
      jax.tree.map(lambda x: x.delete(), like)
      params, opt_state = lora.join(state['params'], frozen), state['opt_state']
      done, stopped = meta['iteration'], meta['stopped']
      trainer.replay.load_state(state['replay'], described)
      monitor.load_state_dict(meta['monitor'])
    _log.info(_greeting(config, policy, workdir, done, stopped))
    start_step = done + 1 if done else 0
    timer = Timer()
    kept = EpisodeWriter(workdir, start_step=start_step, enabled=processes.is_first())
    with (
      Interrupt() as interrupt,
      MetricWriter(workdir, start_step=start_step, enabled=processes.is_first()) as writer,
      Progress(config.num_iterations, start=done, enabled=processes.is_first()) as progress,
    ):
      writer.hparams(*_hparams(config))
      if done == 0:
        _log.info('evaluating before training; most of the first minute is compilation')
        with timer('testing'):
          evaluation = evaluator(params)
        log_evaluation(writer, kept, progress, 0, evaluation, config)
        writer.scalars(0, timer.pop())
        if interrupted := processes.largest([interrupt.requested])[0]:
          raise Stopped(interrupted)  # before there is anything to save
      collect = True
      for iteration in range(done, config.num_iterations if not stopped else done):
        with timer('step'):
          if collect := collect or iteration % config.train.online_k == 0:
            with timer('gen'):
              rollout, selection = trainer.collect(params, iteration)
            with timer('adv'):
              batch, batch_metrics = trainer.make_batch(params, selection)
          probes = probe(trainer, params, batch, rollout, selection, iteration)
          with timer('update_actor'):
            params, opt_state, update_metrics = trainer.update(
              params, opt_state, batch, selection, iteration, monitor.lr_scale
            )
        step = iteration + 1
        metrics = batch_metrics | update_metrics | trainer.rollout_metrics(rollout) | probes
        watched, verdict = monitor.after_iteration(metrics, empty=not selection.groups) if collect else ({}, Verdict())
        writer.scalars(step, metrics | watched)
        writer.histograms(step, trainer.histograms(batch))
        if collect and processes.is_first():
          episodes, records = trainer.records(rollout, selection, batch, iteration)
          kept.write('train', step, records)
          _log_episodes(writer, step, 'train', episodes, config.train.tags, config.logging.trajectories)
        collect = False
        scores = {}
        if _due(step, config.eval.every, config.num_iterations) or verdict.action == 'stop':
          with timer('testing'):
            evaluation = evaluator(params, step)
          scores[BEST] = log_evaluation(writer, kept, progress, step, evaluation, config)
          watched, hopeless = monitor.after_evaluation(success_by_tag(evaluation.metrics, tuple(config.eval.tags)))
          writer.scalars(step, watched)
          verdict = hopeless if hopeless.action == 'stop' else verdict
        if verdict.action == 'rollback' and checkpointer.best_step() is not None and step < config.num_iterations:
          back = checkpointer.best_step()
          like = {'params': lora.partition(params)[0], 'opt_state': opt_state}
          state, _ = checkpointer.restore(like, step=back, partial=True)
          params, opt_state, scores = lora.join(state['params'], frozen), state['opt_state'], {}
          monitor.rolled_back()
          trainer.replay.clear()
          collect = True  # what the abandoned weights sampled is not learnt from
          progress.write(f'iteration {step}: {verdict.reason}; back to {back}, learning rate x {monitor.lr_scale:g}')
        elif verdict.action != 'go_on':
          progress.write(f'iteration {step}: {verdict.reason}; ' + _TOLD[verdict.action])
        stopped = verdict.reason if verdict.action == 'stop' else ''
        interrupted = processes.largest([interrupt.requested])[0]
        # A run that goes on in the middle of a rollout's iterations would not have that rollout.
        save_now = stopped or (interrupted and step % config.train.online_k == 0)
        if _due(step, config.checkpoint.every, config.num_iterations) or save_now:
          with timer('save_checkpoint'):
            writer.flush()
            replay, described = trainer.replay.state()
            meta = {'iteration': step, 'monitor': monitor.state_dict(), 'stopped': stopped, 'replay': described}
            state = {'params': lora.partition(params)[0], 'opt_state': opt_state, 'replay': replay}
            checkpointer.save(step, state, meta, metrics=scores)
        times = timer.pop() | memory()
        tokens = int(rollout.trajectory.length.sum())
        times['perf/total_num_tokens'] = tokens
        times['perf/throughput'] = tokens / times['timing_s/step']
        if 'timing_s/gen' in times:
          times['perf/sampled_tokens_per_s'] = rollout.tokens_sampled / times['timing_s/gen']
        writer.scalars(step, times)
        progress.update(
          step,
          {
            'train success': float(np.mean([e.success for e in rollout.episodes])),
            'reward': metrics['critic/score/mean'],
          },
          tokens=tokens,
        )
        if interrupted:
          raise Stopped(interrupted)
        if stopped:
          break
  # The first process has written all there is, and tells the others.
  last = {}
  if processes.is_first():
    e, page = config.eval, write_page(workdir)
    last = summarize(workdir, tuple(e.tags), levels=e.groups, group_size=e.group_size, page=page)
  return processes.gather(last)[0]


_TOLD = {
  'warn': 'a warning only (monitor.echo_trap)',
  'stop': 'the run ends here',
  'rollback': 'there is no evaluated checkpoint to roll back to, or nothing left to train',
}


def _greeting(config: ConfigDict, policy: build.Policy, workdir: str, done: int, stopped: str) -> str:
  if stopped:
    return f'{workdir} was stopped after iteration {done}: {stopped}'
  if done:
    finished = done >= config.num_iterations
    return f'{workdir} is finished: {done} iterations' if finished else f'going on in {workdir} after iteration {done}'
  model = config.model.path or config.model.preset
  return f'model {model}: {policy.describe()}; the run is kept in {workdir}'


def _due(step: int, every: int, last: int) -> bool:
  return step == last or (every > 0 and step % every == 0)


def log_evaluation(
  writer: MetricWriter, kept: EpisodeWriter, progress: Progress, step: int, evaluation: Evaluation, config: ConfigDict
) -> float:
  """Writes an evaluation down; returns its mean success over tags."""
  tags = tuple(config.eval.tags)
  success = mean_success(evaluation.metrics, tags)
  writer.scalars(step, evaluation.metrics | {'val-env/success': success})
  firsts = evaluation.episodes[:: config.eval.group_size]
  _log_episodes(writer, step, 'val', firsts, tags, config.logging.trajectories)
  kept.write('eval', step, evaluation.records)
  if kept.enabled:
    write_page(kept.workdir)
  progress.write(f'held-out success after {step}: {_told(evaluation.metrics, config)}')
  return success


def _log_episodes(
  writer: MetricWriter, step: int, split: str, episodes: list[Episode], tags: tuple[str, ...], count: int
) -> None:
  """Writes the first `count` episodes of each tag to TensorBoard, as text and pictures."""
  shown = [e for tag in tags for e in [x for x in episodes if x.tag == tag][:count]]
  writer.text(step, {f'{split}/generations/{i}': transcript(e) for i, e in enumerate(shown)})
  pictures = {f'{split}/boards/{i}': boards(e) for i, e in enumerate(shown)}
  writer.images(step, {name: picture for name, picture in pictures.items() if picture is not None})


def _told(metrics: dict[str, float], config: ConfigDict) -> str:
  """An evaluation in a few words: 'FrozenLake 0.312 sampled, 0.273 greedy, 0.491 best possible'."""
  parts = []
  for tag in config.eval.tags:
    shown = {'sampled': 'val-env/{}/success', 'greedy': 'val-greedy/{}/success', 'best possible': 'val-env/{}/optimal'}
    shown = {label: name.format(tag) for label, name in shown.items()}
    numbers = [f'{metrics[name]:.3f} {label}' for label, name in shown.items() if name in metrics]
    parts.append(f'{tag} {", ".join(numbers)}')
  return '; '.join(parts)


def _hparams(config: ConfigDict) -> tuple[dict[str, Any], list[str]]:
  """The rows of TensorBoard's table of runs: the fields that this run reads, and the metrics to compare."""
  splits = ('val-env', 'val-greedy') if config.eval.greedy_too else ('val-env',)
  metrics = [BEST, *(f'{split}/{tag}/success' for tag in config.eval.tags for split in splits)]
  return config_fields.read_by_training(config.to_dict()), metrics


def use_compilation_cache(config: ConfigDict, workdir: str) -> None:
  """Keeps compiled programs where `config.compilation_cache` says."""
  directory = config.compilation_cache
  if not directory:
    return
  if directory == 'auto':
    directory = os.path.join(workdir, 'xla_cache')
  jax.config.update('jax_compilation_cache_dir', os.path.abspath(directory))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.3)
