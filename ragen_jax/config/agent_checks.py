"""Checks of the sections `serve` and `prompt`, and of tags that agent programs play."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import jax
from ml_collections import ConfigDict

from ragen_jax import build, build_agents, build_frozen
from ragen_jax.agent.reply_reader import BadCalls
from ragen_jax.build_environments import played_by_programs
from ragen_jax.config import rules
from ragen_jax.envs import VerifiersTasks
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.prompt_search.wording import LEAST_SHOWN
from ragen_jax.serving.play.env_program import ENVIRONMENT
from ragen_jax.serving.play.episodes import INCOMPLETE
from ragen_jax.utils.errors import UserError

_MODEL = re.compile(r'[A-Za-z0-9_./-]{1,100}')
# Clients choose another endpoint for models of these names.
_TAKEN = re.compile(r'gpt|codex|o[0-9]', re.IGNORECASE)
_NAME = re.compile(r'[\w-]*')


def check_serve(config: ConfigDict) -> None:
  """Checks the section `serve`, and that agents play all tags or none; raises UserError for the first wrong field."""
  s = config.serve
  rules.check(config, 'serve.host', bool(s.host) and s.host.strip() == s.host, "must be an address such as '127.0.0.1'")
  rules.check(config, 'serve.port', 0 <= s.port < 65536, 'must be from 0, any free port, to 65535')
  right = _MODEL.fullmatch(s.model) is not None and not _TAKEN.match(s.model)
  rules.check(
    config, 'serve.model', right, "must be letters, digits and _./-, and must not begin like a name of OpenAI's models"
  )
  rules.at_least(
    config, 1, 'serve.slots', 'serve.max_queue', 'serve.max_connections', 'serve.max_body', 'serve.max_concurrency',
    'serve.max_attempts', 'serve.image_tokens',
  )  # fmt: skip
  rules.at_least(config, 0, 'serve.grace', 'serve.heartbeat', 'serve.max_staleness', 'serve.max_images')
  rules.above(config, 0, 'serve.timeout', 'serve.keep')
  try:
    re.compile(s.trained)
  except re.error as e:
    raise UserError(f'serve.trained={s.trained!r}: must be a regular expression ({e})') from e
  _check_frozen(config)
  rules.one_of(config, 'serve.incomplete', INCOMPLETE)
  rules.one_of(config, 'serve.bad_calls', tuple(map(str, BadCalls)))
  agents = build_agents.plays_agents(config)
  _check_staleness(config, agents)
  if not agents:
    return
  processes = jax.process_count()
  rules.check(
    config, 'train.tags', processes == 1, f'agent programs play in runs of one process, and there are {processes}'
  )
  rules.check(
    config, 'eval.greedy_too', not config.eval.greedy_too or config.eval.temperature > 0,
    'must be False if eval.temperature is 0',
  )  # fmt: skip
  rules.check(config, 'filter.max_rollouts', config.filter.max_rollouts == 1, 'must be 1 if agent programs play')
  replayed = config.algorithm.replay_experts
  rules.check(
    config,
    'algorithm.replay_experts',
    not replayed,
    'must be False if agent programs play: calls do not record experts',
  )
  for tag in (*config.train.tags, *config.eval.tags):
    _check_environment(config, tag)


def _check_staleness(config: ConfigDict, agents: bool) -> None:
  """Checks that tokens sampled ahead are corrected for their age, and that nothing else keeps old rollouts."""
  ahead = config.serve.max_staleness > 0
  for ok, allowed in (
    (agents, "must be 0 unless agent programs play (envs.TAG.type='agent')"),
    (config.algorithm.tis_cap > 0, "above 0 needs algorithm.tis_cap above 0, with algorithm.old_logprobs='trainer'"),
    (config.train.online_k == 1, f'must be 0 with train.online_k={config.train.online_k}'),
    (config.replay.groups == 0, f'must be 0 with replay.groups={config.replay.groups}'),
    (config.monitor.echo_trap != 'rollback', "must be 0 with monitor.echo_trap='rollback'"),
  ):
    rules.check(config, 'serve.max_staleness', ok or not ahead, allowed)


def _check_environment(config: ConfigDict, tag: str) -> None:
  """Checks the environment that a built-in runner plays, if the tag has one."""
  runner, field = config.envs[tag].get('runner', ''), f'envs.{tag}.runner'
  if not runner.startswith(ENVIRONMENT):
    return
  name = runner.removeprefix(ENVIRONMENT)
  others = [other for other, options in config.envs.items() if not played_by_programs(options.get('type'))]
  rules.check(config, field, name in others, f'{ENVIRONMENT}TAG names an environment of envs: {", ".join(others)}')
  build.env_specs(config, (name,), (1,), field=field)
  rules.check(config, f'envs.{tag}.tasks', not config.envs[tag].tasks, f"must be '' with {field}={runner!r}")
  turns, enough = config.envs[name].max_turns, config.envs[tag].max_turns >= config.envs[name].max_turns
  rules.check(config, f'envs.{tag}.max_turns', enough, f'must be at least envs.{name}.max_turns={turns}')
  trained = re.fullmatch(config.serve.trained, '') is not None
  rules.check(config, 'serve.trained', trained, f"must match '', the name of the agent of {field}={runner!r}")


def _check_frozen(config: ConfigDict) -> None:
  """Checks that the frozen models can be found, and that no agent whose name is spelled out is frozen and trained."""
  build_frozen.frozen_models(config)
  trained = config.serve.trained
  for agents, _ in build_frozen.frozen_agents(config):
    both = [name for name in _names(agents) if re.fullmatch(trained, name)]
    both += [name for name in _names(trained) if re.fullmatch(agents, name)]
    if both:
      raise UserError(
        f'serve.trained={trained!r}: must not match the frozen agent {both[0]!r} (serve.frozen={config.serve.frozen!r})'
      )


def _names(expression: str) -> list[str]:
  """The names that are alternatives of an expression without other operators than |."""
  parts = expression.split('|')
  return parts if all(_NAME.fullmatch(part) for part in parts) else []


def check_prompt(config: ConfigDict) -> None:
  """Raises UserError if there are two prompts, or one and no agent programs play which read it."""
  prompt, field = build_agents.initial_prompt(config), 'prompt.file' if config.prompt.file else 'prompt.text'
  # Arguments that are no UTF-8 reach Python as surrogates.
  right = not any('\ud800' <= character <= '\udfff' for character in prompt)
  rules.check(config, field, right, 'is not Unicode text')
  if prompt and not build_agents.plays_agents(config):
    rules.check(config, field, False, "is for agent programs; must be empty unless train.tags are of the type 'agent'")
  for tag in (*config.train.tags, *config.eval.tags) if prompt else ():
    runner = config.envs[tag].get('runner', '')
    rules.check(
      config, field, not runner.startswith(ENVIRONMENT),
      f'is not read by envs.{tag}.runner={runner!r}, whose prompts are those of the environment; must be empty',
    )  # fmt: skip
    reads = config.envs[tag].type != VerifiersTasks.name
    rules.check(config, field, reads, f"is not read by envs.{tag}.type='{VerifiersTasks.name}'; must be empty")


def check_held_out(config: ConfigDict, specs: Sequence[EnvSpec]) -> None:
  """Raises UserError if training and evaluation have a task of a package of `verifiers` in common."""
  parts = {spec.tag: spec.env.part for spec in specs if isinstance(spec.env, VerifiersTasks)}
  for train, test in itertools.product(config.train.tags, config.eval.tags):
    shared = [identity for identity in parts.get(train, ()) if identity in parts.get(test, ())]
    if shared:
      one, other = parts[train][shared[0]], parts[test][shared[0]]
      raise UserError(
        f'envs.{test}: {len(shared)} of its {len(parts[test])} tasks are among those of envs.{train}, such as its task '
        f"{other}, task {one} there; allowed: split='train' and 'test' of the same options, or options with other tasks"
      )


def check_prompt_search(config: ConfigDict) -> None:
  """Checks a search, after `check_config`; raises UserError for the first field that cannot be used."""
  p = config.prompt
  if not build_agents.plays_agents(config):
    raise UserError(f"train.tags={config.train.tags}: must be of the type 'agent' with --mode=optimize_prompt")
  for tag in (*config.train.tags, *config.eval.tags):
    own = config.envs[tag].type
    if own == VerifiersTasks.name:
      raise UserError(
        f"envs.{tag}.type={own!r}: must be 'agent' with --mode=optimize_prompt: packages have own prompts"
      )
  rules.check(config, 'eval.step', config.eval.step != 'none', 'must name a model: latest, best, a number or base')
  rules.at_least(
    config, 1, 'prompt.rounds', 'prompt.beam', 'prompt.branches', 'prompt.tasks', 'prompt.attempts', 'prompt.held_out',
    'prompt.final', 'prompt.max_chars', 'prompt.critic_workers', 'prompt.critic_tries',
  )  # fmt: skip
  rules.at_least(config, LEAST_SHOWN, 'prompt.shown_chars')
  rules.at_least(config, 0, 'prompt.critic_temperature', 'prompt.critic_max_tokens')
  rules.check(config, 'prompt.critic_timeout', 0 < p.critic_timeout < math.inf, 'must be above 0, in seconds')
  rules.check(
    config, 'prompt.critic', not p.critic or rules.is_address(p.critic),
    "must be an address such as 'http://localhost:8001/v1', or empty for the policy itself",
  )  # fmt: skip
  rules.check(
    config, 'prompt.critic_model', bool(p.critic_model) == bool(p.critic),
    f'must name a model of prompt.critic={p.critic!r}, and must be empty without an address',
  )  # fmt: skip
  rules.check(config, 'prompt.critic_key', p.critic_key.isidentifier(), 'must be the name of an environment variable')
  prompt = build_agents.initial_prompt(config)
  rules.check(config, 'prompt.text', bool(prompt), 'must be the first prompt, unless prompt.file has it')
  rules.check(
    config, 'prompt.max_chars', len(prompt) <= p.max_chars, f'the first prompt has {len(prompt)} characters already'
  )
  tasks = build_agents.prompt_tasks(config)
  tasks.check(p.rounds * p.beam * p.branches * p.tasks, p.final)
