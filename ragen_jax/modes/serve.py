"""`--mode=serve`: serves a policy over an OpenAI-compatible endpoint, until it is interrupted."""

from __future__ import annotations

import logging
import os
import threading

import jax
from ml_collections import ConfigDict

from ragen_jax import build_agents, build_frozen
from ragen_jax.config.checks import check_config, check_eval
from ragen_jax.modes.chosen_checkpoint import compare_with_run, find_step, load_weights, model_name
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.compilation_cache import use_compilation_cache
from ragen_jax.runs.workdir import need_disk
from ragen_jax.serving.agent_server import ADMIN_KEY
from ragen_jax.training.run_log import BEST
from ragen_jax.utils.errors import UserError

_log = logging.getLogger(__name__)


def serve(config: ConfigDict, workdir: str, *, given: bool, stop: threading.Event) -> None:
  """Serves the checkpoint that `eval.step` names, or the config's model if there is none, until `stop` is set.

  The store of rollouts is in the folder serve/ of the workdir; for `given` see chosen_checkpoint.py. Raises UserError
  if the config cannot be run, there is no such checkpoint, or the address cannot be bound.
  """
  if jax.process_count() > 1:
    raise UserError(f'--mode=serve runs in one process, there are {jax.process_count()}; devices may be many')
  if config.eval.step == 'none':
    raise UserError("eval.step='none': must name a model to serve: latest, best, the number of an iteration or base")
  check_eval(config)
  check_config(config)
  need_disk(workdir, '--mode=serve keeps rollouts in a database, which needs a disk')
  open_server = build_agents.import_open_server()
  with Checkpointer(workdir, keep=config.checkpoint.keep, save_best=BEST) as checkpointer:
    step = find_step(config, workdir, checkpointer, given)
    if step is not None:
      compare_with_run(config, workdir, warm_start='data' in checkpointer.meta(step))
    use_compilation_cache(config.compilation_cache, workdir)
    policy, params = load_weights(config, checkpointer, step)
  settings = build_agents.server_settings(config, policy, trains=False)
  frozen = build_frozen.load_frozen(config, policy)
  name = f'checkpoint {step} of {workdir}' if step is not None else f'model {model_name(config)}'
  with open_server(settings, policy, params, step or 0, os.path.join(workdir, 'serve'), frozen) as server:
    _log.info('%s: %s', name, policy.describe())
    server.engines.compile()
    _log.info('serving %r at %s/v1; rollouts are at %s', config.serve.model, server.url, server.url)
    if not os.environ.get(ADMIN_KEY):
      _log.info('the rollout API is closed: %s is not set in the environment', ADMIN_KEY)
    while not stop.wait(1.0):
      server.sweep()
