"""`--mode=optimize_prompt`: searches for a better prompt of agent programs. The weights do not change.

The results are in <workdir>/prompt_search, see `prompt_search.report`; journal.jsonl and agents.sqlite there hold all
that was obtained so far. The same command goes on where an interrupted search has stopped.
"""

from __future__ import annotations

import collections
import logging
import os
import sys

import jax
from ml_collections import ConfigDict

from ragen_jax import build, build_agents, build_frozen
from ragen_jax.agent.endpoint_client import EndpointSettings
from ragen_jax.agent.endpoint_speaker import EndpointSpeaker
from ragen_jax.config.agent_checks import check_prompt_search
from ragen_jax.config.checks import check_config, check_eval
from ragen_jax.modes.chosen_checkpoint import compare_with_run, find_step, load_weights, model_name
from ragen_jax.prompt_search import report
from ragen_jax.prompt_search.critic import Critic
from ragen_jax.prompt_search.journal import Journal
from ragen_jax.prompt_search.search import Final, Round, Search, SearchSettings
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.compilation_cache import use_compilation_cache
from ragen_jax.runs.config_fields import read_by_prompt_search
from ragen_jax.runs.metrics import MetricWriter
from ragen_jax.runs.workdir import need_disk, workdir_lock
from ragen_jax.sampling.sampler import Sampling
from ragen_jax.serving.agent_server import LOOPBACK, AgentServer
from ragen_jax.serving.engine.keys import critic_seed
from ragen_jax.serving.play.agent_player import run_agents
from ragen_jax.training.run_log import BEST
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.keys import read_key

_log = logging.getLogger(__name__)

FOLDER = 'prompt_search'


def optimize_prompt(config: ConfigDict, workdir: str, *, given: bool) -> tuple[Round, Final]:
  """Searches for a prompt with which programs score more on the tasks of `eval.tags`.

  Returns the last round and the comparison at the end. For the policy and `given` see chosen_checkpoint.py. Raises
  UserError if the config cannot be run, there is no such checkpoint, the folder belongs to another search, the critic
  cannot be reached, or all attempts with the first prompt fail.
  """
  if jax.process_count() > 1:
    raise UserError(f'--mode=optimize_prompt runs in one process, there are {jax.process_count()}; devices may be many')
  check_eval(config)
  check_config(config)
  check_prompt_search(config)
  need_disk(workdir, '--mode=optimize_prompt keeps rollouts in a database, which needs a disk')
  open_server = build_agents.import_open_server()
  folder, prompt = os.path.join(workdir, FOLDER), build_agents.initial_prompt(config)
  with workdir_lock(folder), Checkpointer(workdir, keep=config.checkpoint.keep, save_best=BEST) as checkpointer:
    step = find_step(config, workdir, checkpointer, given)
    if step is not None:
      compare_with_run(config, workdir, warm_start='data' in checkpointer.meta(step))
    head = {'version': 1, 'first prompt': prompt, 'checkpoint': step} | read_by_prompt_search(config.to_dict())
    journal = Journal(os.path.join(folder, 'journal.jsonl'), head)
    use_compilation_cache(config.compilation_cache, workdir)
    policy, params = load_weights(config, checkpointer, step)
    name = f'checkpoint {step} of {workdir}' if step is not None else f'model {model_name(config)}'
    _log.info('%s: %s', name, policy.describe())
    runner = build_agents.task_runner(config, policy)
    served = build_agents.server_settings(config, policy, trains=True)
    frozen = build_frozen.load_frozen(config, policy)
    with (
      open_server(served, policy, params, step or 0, folder, frozen) as server,
      run_agents(server, runner, max_concurrency=config.serve.max_concurrency, heartbeat_s=config.serve.heartbeat),
      MetricWriter(folder) as writer,
    ):
      _log.info('agents call the policy at %s/v1', server.url)
      player = build_agents.prompt_player(config, policy, server)
      search = Search(
        build.fill(SearchSettings, config.prompt), journal, player, _critic(config, server),
        build_agents.prompt_tasks(config),
      )  # fmt: skip
      rejected: collections.Counter[str] = collections.Counter()

      def on_round(now: Round) -> None:
        rejected.update(now.rejected)
        report.write_results(folder, now, dict(rejected), None)
        report.write_metrics(writer, now)

      now, final = search.run(prompt, on_round)
      report.write_results(folder, now, dict(rejected), final)
      report.write_final_metrics(writer, now, final)
  files = '\n'.join(f'Written: {folder}/{file}' for file in ('best_prompt.txt', 'prompts.md', 'prompts.json'))
  sys.stdout.write(f'\n{report.describe_final(now, final)}\n{files}\ntensorboard --logdir {folder}/tb\n')
  return now, final


def _critic(config: ConfigDict, server: AgentServer) -> Critic:
  """The critic of the config, or the policy itself."""
  p, longest = config.prompt, config.agent.max_response_tokens
  settings = EndpointSettings(
    endpoint=p.critic or f'{server.url}/v1',
    endpoint_model=p.critic_model or config.serve.model,
    endpoint_max_tokens=p.critic_max_tokens if p.critic else min(p.critic_max_tokens or longest, longest),
    endpoint_timeout=p.critic_timeout,
    endpoint_workers=p.critic_workers,
    endpoint_tries=p.critic_tries,
  )
  # Calls of the policy need no key on a loopback address; their draws follow from the seed.
  own_key = '' if config.serve.host in LOOPBACK else server.admin_key
  speaker = EndpointSpeaker(
    settings,
    Sampling(p.critic_temperature, 1.0, 0),
    key=read_key(p.critic_key) if p.critic else own_key,
    seed=None if p.critic else critic_seed(config.seed),
    field='prompt.critic',
  )
  return Critic(speaker, p.critic_workers)
