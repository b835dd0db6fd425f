"""StarPO: roll out, select, estimate advantages, update, evaluate, save. Start reading here.

Each step has its own module:

  roll out    agent/agent_proxy.py       episodes in the environments, played by the policy
  select      training/selection.py      the prompt groups that the filter keeps
  estimate    training/estimate.py       from rewards to advantages and returns
  update      training/learner.py        optimiser steps on mini-batches; the loss is training/objective.py
  evaluate    evaluation/evaluator.py    success on held-out levels
  save        training/run.py            logs, checkpoints, rollbacks and the end of a run
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator

import jax
from ml_collections import ConfigDict

from ragen_jax import build, build_agents
from ragen_jax.agent.language_model import LanguageModel
from ragen_jax.config.agreement import check_same_config, check_same_files
from ragen_jax.config.checks import check_config
from ragen_jax.config.run_checks import evaluates_training
from ragen_jax.distributed import processes
from ragen_jax.evaluation.evaluator import Evaluator
from ragen_jax.models import presets
from ragen_jax.planning import ahead
from ragen_jax.planning.host_fit import check_host_memory
from ragen_jax.runs import config_fields
from ragen_jax.runs.compilation_cache import use_compilation_cache
from ragen_jax.runs.interrupt import Interrupt
from ragen_jax.runs.profile import Profile
from ragen_jax.runs.staging import StagedWorkdir
from ragen_jax.runs.summary import summarize
from ragen_jax.runs.trackers import forget_run
from ragen_jax.runs.workdir import need_disk, open_workdir, record_config, set_store_aside
from ragen_jax.training import memory
from ragen_jax.training.run import Iteration, open_run
from ragen_jax.training.trainer import Trainer
from ragen_jax.utils import host_memory, mappings
from ragen_jax.utils.background import Background
from ragen_jax.viewer.page import write_page

_log = logging.getLogger(__name__)

# From this width on, arrays of a layer are so large that the C library keeps the holes that they leave.
_LARGE = 512


def train_and_evaluate(config: ConfigDict, workdir: str) -> dict[str, float]:
  """Trains a policy, or resumes the run in `workdir`; returns the metrics of the last evaluation.

  The workdir has the run's checkpoints, metrics and TensorBoard files, and is on disk or in a bucket.

  Raises:
    UserError: the config cannot be run, or the workdir belongs to another run.
    Diverged: the run's numbers are not finite.
  """
  with _claim(config, workdir) as place:
    use_compilation_cache(config.compilation_cache, place)
    _train(config, place)
    last, e = {}, config.eval
    if processes.is_first():
      page = write_page(place)
      last = summarize(place, tuple(e.tags), levels=e.groups, group_size=e.group_size, page=page)
    return processes.gather(last)[0]


def _train(config: ConfigDict, workdir: str | StagedWorkdir) -> None:
  """Loads the model, opens the server of agent programs if there are any, and trains."""
  plays = build_agents.plays_agents(config)
  step = 'this iteration or evaluation' if config.train.online_k == 1 else 'the last iteration of this rollout'
  interrupt = Interrupt(step + ', or at once while agent programs play' * plays)
  on_cpu = jax.default_backend() == 'cpu'
  if on_cpu:
    check_host_memory(config)
    if presets.shape(config.model.preset, config.model.path).hidden_size >= _LARGE:
      host_memory.return_what_is_freed()
  model = build.load_policy(config)
  limit = memory.usable()  # once, because on a CPU it changes
  count = ahead.threads(config, platform=jax.default_backend(), processes=jax.process_count())
  with (
    contextlib.closing(Background(count)) as background,  # closed last, because it waits for what is being compiled
    build_agents.open_players(config, model, workdir, interrupt) as players,
  ):
    evaluator = build.make_evaluator(config, model, players['eval'])
    trainer = build.make_trainer(config, model, evaluator.held_out(), players['train'], lambda: limit)
    if config.optimizer.packing or not config.optimizer.micro_batch_size:
      _log.info(build.describe_batching(config, trainer, lambda: limit))
    _iterate(config, workdir, model, trainer, evaluator, background, interrupt)


def _iterate(
  config: ConfigDict, workdir: str | StagedWorkdir, model: LanguageModel, trainer: Trainer, evaluator: Evaluator,
  background: Background, interrupt: Interrupt,
) -> None:  # fmt: skip
  """The training loop."""
  probes, monitor = build.make_probes(config, trainer), build.make_monitor(config)
  with processes.same_errors():
    trainer.check()

  name = f'{config.model.path or config.model.preset}: {model.describe()}'
  settings = build.run_settings(config)
  opened = open_run(settings, workdir, name, trainer.init(), trainer.replay, monitor, interrupt, trainer.curriculum)
  with (
    opened as (run, state),
    ahead.open_ahead(config, trainer, state, background),
    contextlib.closing(Profile(config.profile, workdir)) as profile,
  ):
    state = run.catch_up(state, evaluator)
    while run.goes_on(state):
      profile.begin(state.iteration + 1)
      with run.timer('step'):
        fresh = run.needs_rollout(state)
        if fresh:
          # -- ROLL OUT and SELECT: episodes, and the groups that the filter keeps
          with run.timer('gen'), run.saved_if_stopped(state):
            rollout, selection = trainer.collect(state)
          # -- ESTIMATE: from rewards to advantages and returns
          with run.timer('adv'):
            batch, metrics = trainer.estimate(state, selection)
        probed = probes(state, rollout, selection, batch)
        # -- UPDATE: optimiser steps on mini-batches
        with run.timer('update_actor'):
          state, updated = trainer.update(state, batch, selection)

      metrics_of_all = metrics | updated | trainer.rollout_metrics(rollout) | probed
      try_weights = functools.partial(trainer.try_weights, state, batch, selection)
      iteration = Iteration(rollout, selection, batch, fresh, metrics_of_all, try_weights)
      verdict = run.log_iteration(state, iteration)
      if fresh and processes.is_first():
        run.log_episodes(state, *trainer.recorder.records(rollout, selection, batch, state.iteration - 1))
      # -- EVALUATE: success on held-out levels
      evaluation = run.evaluate_if_due(state, iteration, verdict, evaluator)
      # -- SAVE: a checkpoint, or back to an earlier one
      state = run.finish_iteration(state, iteration, evaluation, verdict)
      mappings.drop_programs()


def _begin_anew(workdir: str | StagedWorkdir) -> None:
  """Sets aside what belongs to an earlier run of the workdir, with another config."""
  set_store_aside(workdir)
  forget_run(workdir)


@contextlib.contextmanager
def _claim(config: ConfigDict, workdir: str) -> Iterator[str | StagedWorkdir]:
  """Context manager: checks the config, locks the workdir for this process, and records the config in it."""
  with contextlib.ExitStack() as stack:
    check_same_config(config)
    with processes.same_errors():
      check_config(config)
    check_same_files(config)
    with processes.same_errors():
      if not evaluates_training(config):
        _log.info(
          'train.tags=%s, eval.tags=%s: no training environment is evaluated', config.train.tags, config.eval.tags
        )
      if build_agents.plays_agents(config):
        need_disk(workdir, 'the store of agent programs (tags of the type agent) is a database, which needs a disk')
      place = stack.enter_context(open_workdir(workdir, write=True))
      if processes.is_first():
        anew = functools.partial(_begin_anew, place)
        record_config(place, config.to_dict(), *config_fields.free_in_training(config.to_dict()), anew=anew)
    yield place
