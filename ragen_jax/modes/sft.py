"""`--mode=sft`: supervised warm start from exact solvers or given conversations; it also made the built-in model."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import ContextSettings
from ragen_jax.agent.language_model import LanguageModel, make_encoders, make_sampler, param_state
from ragen_jax.agent.templates import prompt_pieces
from ragen_jax.algorithms.spikes import SpikeSettings
from ragen_jax.config.checks import check_config, check_sft
from ragen_jax.config.command_line import load_config
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.evaluation.evaluator import Evaluator
from ragen_jax.models import identity
from ragen_jax.models.checkpoint.export import check_output, write_policy
from ragen_jax.models.checkpoint.load import has_value_head
from ragen_jax.models.checkpoint.save import check_target
from ragen_jax.models.vision.processor import read_processor
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.compilation_cache import use_compilation_cache
from ragen_jax.runs.config_fields import free_in_warm_start
from ragen_jax.runs.interrupt import Interrupt, Stopped
from ragen_jax.runs.metrics import MetricWriter
from ragen_jax.runs.progress import Progress
from ragen_jax.runs.staging import StagedWorkdir
from ragen_jax.runs.trackers import TrackerSettings, forget_run, open_tracker
from ragen_jax.runs.workdir import open_workdir, record_config
from ragen_jax.sft import conversations, tiny_tokenizer, tiny_vision
from ragen_jax.sft.data import (
  DemonstrationSettings,
  Lesson,
  SftExamples,
  collect_demonstrations,
  first_turns,
  from_file,
  join,
  split,
  step_rows,
)
from ragen_jax.sft.demonstrations import DemonstrationStyle
from ragen_jax.sft.log import SftLog
from ragen_jax.sft.packing import SftBatch, batches
from ragen_jax.sft.step_watch import GRAD_NORM, StepWatch, WatchSettings, diverged
from ragen_jax.sft.trainer import SftSettings, SftTrainer
from ragen_jax.training.batches import PackingSettings
from ragen_jax.training.images import make_sight
from ragen_jax.training.run_log import RunLog
from ragen_jax.utils.errors import UserError
from ragen_jax.viewer.store import EpisodeWriter

_log = logging.getLogger(__name__)


def train_sft(config: ConfigDict, workdir: str) -> None:
  """Trains on replies of the solvers or of `sft.data`, and writes a Hugging Face checkpoint to `config.sft.output`.

  With LoRA the adapters and the value head are trained, and `config.export.lora` selects the written form. An earlier
  `sft.output` is replaced atomically, once the new one is complete. An interrupted warm start is resumed from the
  workdir, which is on disk or in a bucket.

  Raises:
    UserError: the config cannot be run, the data cannot be learnt from, or the workdir belongs to another config.
    Diverged: the loss, its gradient, the weights or the last evaluation is not finite; `sft.output` is not written.
  """
  check_config(config, model=not config.sft.from_scratch)
  check_sft(config)
  check_target(config.sft.output)
  found = conversations.read(config.sft.data) if config.sft.data else []
  with contextlib.ExitStack() as stack:
    place = stack.enter_context(open_workdir(workdir, write=True))
    record_config(place, config.to_dict(), free_in_warm_start(), anew=functools.partial(forget_run, place))
    use_compilation_cache(config.compilation_cache, place)
    specs = []
    if config.sft.from_scratch or not found:
      specs = build.env_specs(config, config.sft.tags, config.sft.levels, field='sft.tags')
    scratch = stack.enter_context(tempfile.TemporaryDirectory())
    policy = _fresh_policy(config, specs, scratch) if config.sft.from_scratch else build.load_policy(config)
    if config.lora.rank:  # adapters must not replace their base model
      for source in filter(None, (policy.directory, config.lora.path)):
        check_output(config.sft.output, 'sft.output', source)
    evaluator = build.make_evaluator(config, policy)
    data = _examples(config, policy, evaluator, found)
    _learn(config, place, policy, evaluator, data)


def _fresh_policy(config: ConfigDict, specs: list[EnvSpec], directory: str) -> LanguageModel:
  """A new tokenizer, saved to `directory`, and a model with fresh weights."""
  sft, sees = config.sft, bool(config.sft.tower)
  settings = [build.fill(ContextSettings, config.agent, format=form) for form in forms(config)]
  pieces = dict.fromkeys(piece for s in settings for piece in prompt_pieces(specs, s))
  tiny_tokenizer.save(tiny_tokenizer.build(pieces, images=sees), directory)
  tokenizer, mesh = ChatTokenizer(directory, images=sees), make_mesh(**config.mesh)
  tower = tiny_vision.tower_config(sft.tower, sft.shape[0], tokenizer.added) if sees else None
  model = tiny_tokenizer.make_model(
    sft.shape, tokenizer.size, tower=tower, linear_layers=sft.linear_layers, dtype=build.compute_dtype(config),
    attention=config.model.attention, seed=config.seed, mesh=mesh,
  )  # fmt: skip
  sampler = make_sampler(model, tokenizer, mesh)
  if not sees:
    return LanguageModel(directory, model, tokenizer, sampler, mesh)
  tiny_vision.save_processor(directory)
  processor = read_processor(directory, tower)
  encoders = make_encoders(model, processor, mesh, shared=False)
  return LanguageModel(directory, model, tokenizer, sampler, mesh, processor, encoders)


def forms(config: ConfigDict) -> tuple[str, ...]:
  """The forms of replies that are demonstrated."""
  return tuple(config.sft.forms) or (config.agent.format,)


def lessons(config: ConfigDict, tokenizer: ChatTokenizer) -> list[Lesson]:
  """What is demonstrated: the levels of each tag, divided among the forms."""
  found = []
  for i, form in enumerate(forms(config)):
    own = config.copy_and_resolve_references()
    own.agent.format = form
    for spec in build.env_specs(own, tuple(own.sft.tags), _shares(config)):
      context, limits = build.context_manager(own, tokenizer, [spec]), build.episode_limits(own, [spec])
      found.append(Lesson(spec, context, limits, own.sft.first_level + i * spec.num_groups))
  return found


def _shares(config: ConfigDict) -> tuple[int, ...]:
  """Levels of each tag in each form."""
  return tuple(levels // len(forms(config)) for levels in config.sft.levels)


def _examples(
  config: ConfigDict,
  policy: LanguageModel,
  evaluator: Evaluator,
  found: list[conversations.Conversation],
) -> SftExamples:
  """The conversations of the file, or demonstrations; demonstrations are written to `sft.save_data` if it is set."""
  sft, tokenizer, max_context = config.sft, policy.tokenizer, config.agent.max_context
  sight, params = make_sight(policy, None), param_state(policy.model)
  if found:
    prefix = build.context_manager(config, tokenizer, []).reply_prefix
    return join([from_file(sft.data, found, tokenizer, prefix, max_context)], sight, params)
  settings, style = build.fill(DemonstrationSettings, sft, seed=config.seed), build.fill(DemonstrationStyle, sft)
  held_out = _held_out(config, evaluator)
  parts = collect_demonstrations(lessons(config, tokenizer), style, settings, held_out, policy.processor)
  if sft.save_data:
    count = conversations.write(sft.save_data, [part.trajectory for part in parts], tokenizer)
    _log.info('%d conversations written to %s', count, sft.save_data)
  return join(parts, sight, params)


def _held_out(config: ConfigDict, evaluator: Evaluator) -> frozenset[bytes]:
  """Levels that are not demonstrated: those of `config.eval`, and those of the configs in `sft.skip_held_out_of`."""
  if not config.sft.skip_held_out:
    return frozenset()
  others = [load_config(name, flag='sft.skip_held_out_of=') for name in config.sft.skip_held_out_of]
  names = ', '.join(['this config', *config.sft.skip_held_out_of])
  _log.info('finding the levels that are not demonstrated, those of the evaluations of %s', names)
  return evaluator.held_out().union(*(build.held_out_levels(other) for other in others))


def _as_update(config: ConfigDict) -> ConfigDict:
  """The config of a run whose update is as large as a step of this warm start."""
  own = config.copy_and_resolve_references()
  own.optimizer.update({'packing': config.sft.packing, 'mini_batch_size': config.sft.batch_size, 'micro_batch_size': 0})
  own.train.tags = config.sft.tags
  return own


def packing(config: ConfigDict, policy: LanguageModel) -> PackingSettings | None:
  """The bins of packed conversations, as large as memory allows; None if each conversation has a row."""
  return build.batching_settings(_as_update(config), policy).packing if config.sft.packing else None


def make_trainer(config: ConfigDict, policy: LanguageModel) -> SftTrainer:
  """The trainer of a warm start, with fresh optimiser state."""
  o = config.optimizer
  settings = build.fill(SftSettings, config.sft, b1=o.b1, b2=o.b2, weight_decay=o.weight_decay, grad_clip=o.grad_clip)
  scoring = build.scoring_settings(_as_update(config), policy, temperature=1.0)
  return SftTrainer(settings, scoring, policy.model, policy.mesh)


def _learn(
  config: ConfigDict, workdir: str | StagedWorkdir, policy: LanguageModel, evaluator: Evaluator, data: SftExamples
) -> None:
  """Takes the remaining steps, evaluates, saves, and writes the model; also if no step remains."""
  sft = config.sft
  shown, withheld = _split(config, data)
  cut = functools.partial(
    batches, batch_size=sft.batch_size, length_step=config.length_step, packing=packing(config, policy),
    mesh=policy.mesh if policy.mesh.size > 1 else None,
  )  # fmt: skip
  beginnings = first_turns(data) if sft.short_steps else data
  trainer = make_trainer(config, policy)
  with Checkpointer(workdir, keep=config.checkpoint.keep) as checkpointer:
    source = {'data': data.checksum_for(sft.value_coef), 'unsaved': trainer.state.unsaved()}
    done, told = _restore(trainer, checkpointer, source, workdir, sft.steps)
    start_step = done + 1 if done else 0
    kept = EpisodeWriter(workdir, start_step=start_step)
    settings = build.fill(TrackerSettings, config.logging)
    with (
      Interrupt('this step or evaluation') as interrupt,
      open_tracker(settings, workdir, config.to_dict(), start_step, enabled=True) as tracker,
      MetricWriter(workdir, start_step=start_step, tracker=tracker) as writer,
      Progress(sft.steps, start=done, noun='step') as progress,
    ):
      log = SftLog(writer, progress, trainer.schedule, sft.steps, value_loss=sft.value_coef > 0)
      run_log = RunLog(build.log_settings(config), writer, kept, progress)
      watch = _make_watch(config, trainer)
      if told:
        watch.load_state_dict(told['watch'])
        log.load_state_dict(told['log'])
      log.begin(done + 1)
      draws = step_rows(shown, sft.batch_size, config.seed + 1, first_step=done)
      for step in range(done + 1, sft.steps + 1):
        last = step == sft.steps
        with log.timer('step'):
          rows = next(draws)
          examples = beginnings if step <= sft.short_steps else data
          micro_batches = list(cut(examples, rows))
          parts, metrics = trainer.step(micro_batches)
          if log.due(step):
            jax.block_until_ready(parts)
        watch.add(step, metrics)
        save = last or (sft.checkpoint_every and step % sft.checkpoint_every == 0)
        if save or log.due(step):
          log.watched(watch.read())
        log.step(step, parts, metrics[GRAD_NORM], micro_batches, int(examples.length[rows].sum()))
        bad = _bad_numbers(watch, trainer, micro_batches if save else [])
        if bad and (last or watch.too_many):
          writer.flush()
          raise diverged(step, bad, checkpointer.latest_step())
        if last or (sft.eval_every and step % sft.eval_every == 0):
          if len(withheld):
            log.validation(step, trainer.losses(list(cut(data, withheld))))
          evaluation = evaluator(trainer.state.params, step)
          run_log.evaluation(step, evaluation)
          if evaluation.not_finite:
            bad = f'not finite in the evaluation: {evaluation.not_finite}'
            progress.write(f'step {step}: {bad}')
        stop = interrupt.requested  # read once: a signal after this line stops the next step
        if stop and not save:
          log.watched(watch.read())
          bad = bad or _bad_numbers(watch, trainer, micro_batches)
        if bad and (last or watch.too_many):
          writer.flush()
          raise diverged(step, bad, checkpointer.latest_step())
        if (save or stop) and not bad:
          writer.flush()
          told = {'watch': watch.state_dict(), 'log': log.state_dict()}
          checkpointer.save(step, trainer.state.saved(), source | {'told': told}, extra=not save)
        if stop and not last:
          raise Stopped(stop)
      # After the last checkpoint, so that the same command writes an output that failed without training again.
      _write(config, policy, trainer)
  _log.info('checkpoint: %s; metrics and TensorBoard files: %s', os.path.abspath(sft.output), workdir)


def _make_watch(config: ConfigDict, trainer: SftTrainer) -> StepWatch:
  rules = WatchSettings(config.monitor.max_bad_iterations, build.fill(SpikeSettings, config.monitor))
  return StepWatch(rules, trainer.describe_skipped, trainer.watched)


def _split(config: ConfigDict, data: SftExamples) -> tuple[np.ndarray, np.ndarray]:
  """Conversations to train on, and those held out; see `split`."""
  shown, withheld = split(data, config.sft.val_fraction, config.seed)
  if config.sft.batch_size > len(shown):
    raise UserError(
      f'sft.batch_size={config.sft.batch_size}: must be at most the number of training conversations, {len(shown)}'
    )
  return shown, withheld


def _bad_numbers(watch: StepWatch, trainer: SftTrainer, micro_batches: list[SftBatch]) -> str:
  """What is not finite: the last steps that `watch` has read, or the loss on `micro_batches`; '' if all are finite."""
  if watch.skipped_in_a_row:
    return f'not finite: {watch.reason}'
  finite = not micro_batches or trainer.has_finite_loss(micro_batches)
  return '' if finite else 'not finite: the loss under the new weights'


def _restore(
  trainer: SftTrainer, checkpointer: Checkpointer, source: dict[str, Any], workdir: str | StagedWorkdir, steps: int
) -> tuple[int, dict[str, Any] | None]:
  """Restores the trainer from the last undamaged checkpoint, if there is one.

  Returns the number of steps done, and the states of the `StepWatch` and the `SftLog`; None without a checkpoint, and
  for those of earlier versions. Raises UserError if the checkpoint was trained on other data, or with other frozen
  weights, than those that `source` tells.
  """
  checkpointer.set_damaged_aside()
  done, told = checkpointer.latest_step() or 0, None
  if done and 'data' not in checkpointer.meta(done):
    raise UserError(f'--workdir={workdir}: its checkpoints belong to a training run; choose another --workdir')
  if done:
    arrays, meta = checkpointer.restore(trainer.state.saved())
    if meta['data'] != source['data']:
      raise UserError(
        f'--workdir={workdir}: the training data has changed since the checkpoint; choose another --workdir'
      )
    identity.check_unsaved(meta, source['unsaved'], f'--workdir={workdir}')
    trainer.state = trainer.state.with_saved(arrays, iteration=done)
    told = meta.get('told')
    _log.info('resuming %s after step %d' if done < steps else '%s is finished: %d steps', workdir, done)
  return done, told


def _write(config: ConfigDict, policy: LanguageModel, trainer: SftTrainer) -> None:
  """Writes the weights as a Hugging Face directory."""
  nnx.update(policy.model, trainer.state.trained)
  has_head = any(has_value_head(directory) for directory in (policy.directory, config.lora.path))
  settings = build.export_settings(config, policy)
  write_policy(config.sft.output, policy.model, settings, with_value_head=config.sft.value_coef > 0 or has_head)
