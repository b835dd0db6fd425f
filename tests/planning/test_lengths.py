"""Assumed lengths of episodes."""

from __future__ import annotations

import dataclasses

from ragen_jax.planning import lengths
from ragen_jax.planning.lengths import Lengths
from tests.support.configs import small_config

FULL = Lengths(prompt=100, observation=20, reply=30, longest=50, turns=3, whole=True, limit=400, common=0)


def test_rows_hold_prompt_observations_and_replies():
  assert (FULL.row, FULL.sampled, FULL.rows) == (100 + 3 * 30 + 2 * 20, 90, 1)
  short = dataclasses.replace(FULL, limit=150)
  assert short.row == 150


def test_without_the_full_context_each_turn_is_a_row():
  window = dataclasses.replace(FULL, whole=False)
  assert (window.row, window.sampled, window.rows) == (130, 30, 3)


def test_assumptions_stay_within_the_limits_of_the_agent():
  config = small_config(agent__max_context=200, agent__max_response_tokens=40)
  config.update_from_flattened_dict({'plan.prompt_tokens': 500, 'plan.turns': 9, 'plan.reply_tokens': 60})
  found = lengths.from_config(config, max_turns=4)
  assert found == Lengths(prompt=160, observation=80, reply=40, longest=40, turns=4, whole=True, limit=200, common=120)
  config.plan.turns = 0
  assert lengths.from_config(config, max_turns=4).turns == 4
  config.plan.turns = 2
  assert lengths.from_config(config, max_turns=4).turns == 2


def test_the_limit_of_replies_of_a_tag_goes_before_that_of_the_run():
  config = small_config(agent__max_context=200, agent__max_response_tokens=40)
  config.update_from_flattened_dict({'plan.prompt_tokens': 500, 'plan.reply_tokens': 60, 'plan.longest_reply': 90})
  with config.unlocked():
    for tag in {*config.train.tags, *config.eval.tags}:
      config.envs[tag].max_response_tokens = 15
  found = lengths.from_config(config, max_turns=4)
  assert (found.prompt, found.reply, found.longest) == (185, 15, 15)
  with config.unlocked():  # of several, the widest prompt and the longest reply
    config.envs.Other = config.envs[config.train.tags[0]].copy_and_resolve_references()
    config.envs.Other.max_response_tokens = 0
  config.eval.tags = ('Other',)
  found = lengths.from_config(config, max_turns=4)
  assert (found.prompt, found.longest) == (185, 40)
