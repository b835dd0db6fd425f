"""Checks of the section `prompt`: the prompt itself for every run, the others for --mode=optimize_prompt."""

from __future__ import annotations

import math

from ml_collections import ConfigDict

from ragen_jax import build_agents
from ragen_jax.config import rules
from ragen_jax.prompt_search.wording import LEAST_SHOWN
from ragen_jax.serving.env_program import ENVIRONMENT
from ragen_jax.utils.errors import UserError


def check_prompt(config: ConfigDict) -> None:
  """Checks that there is at most one prompt, and that agent programs play which read it if there is one.

  Raises:
    UserError: a field has a value that is not allowed; the first such field is named.
  """
  prompt, field = build_agents.initial_prompt(config), 'prompt.file' if config.prompt.file else 'prompt.text'
  # Arguments that are no UTF-8 reach Python as surrogates.
  right = not any('\ud800' <= character <= '\udfff' for character in prompt)
  rules.check(config, field, right, 'is not Unicode text')
  if prompt and not build_agents.plays_agents(config):
    rules.check(config, field, False, "is for agent programs; must be empty unless train.tags are of the type 'agent'")
  for tag in (*config.train.tags, *config.eval.tags) if prompt else ():
    runner = config.envs[tag].runner
    rules.check(
      config, field, not runner.startswith(ENVIRONMENT),
      f'is not read by envs.{tag}.runner={runner!r}, whose prompts are those of the environment; must be empty',
    )  # fmt: skip


def check_prompt_search(config: ConfigDict) -> None:
  """Checks a search, after `check_config`.

  Raises:
    UserError: a field has a value that is not allowed; the first such field is named.
  """
  p = config.prompt
  if not build_agents.plays_agents(config):
    raise UserError(f"train.tags={config.train.tags}: must be of the type 'agent' with --mode=optimize_prompt")
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
