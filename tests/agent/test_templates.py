"""The strings of prompts and replies, and the pieces that the built-in tokenizer is made of."""

from __future__ import annotations

import json
import pathlib

import pytest

from configs import default, sft_tiny
from ragen_jax import build
from ragen_jax.agent import templates
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.episode import Turn
from ragen_jax.agent.templates import describe_task, format_reward, prompt_pieces
from ragen_jax.envs.base import Budget
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.models import presets
from ragen_jax.sft import tiny_tokenizer
from tests.support.speakers import context_settings


@pytest.fixture(scope='module')
def tiny():
  return ChatTokenizer(presets.resolve('tiny', ''))


@pytest.fixture(scope='module')
def specs():
  return build.env_specs(default.get_config(), ('FrozenLake', 'SimpleSokoban', 'Bandit'), (1, 1, 1))


def test_the_prompt_tells_the_environment_s_real_configuration(specs):
  spec = EnvSpec('x', FrozenLake(size=6, symbols='ABCDEF', is_slippery=False), Budget(3, 7, 2), 40, 1)
  task = describe_task(spec, '##')
  for told in ('6 by 6', 'A player', 'D goal', 'Left, Down, Right, Up', '3', '7', '2', '##'):
    assert told in task
  assert 'slippery' not in task and 'slippery' in describe_task(specs[0], '||')


def test_rewards_are_told_without_noise():
  assert [format_reward(x) for x in (0.0, -0.0, 1.0, -0.1, 10.799999, -0.30000001, 0.001)] == [
    '0', '0', '1', '-0.1', '10.8', '-0.3', '0',
  ]  # fmt: skip


def test_boilerplate_costs_few_tokens_and_no_text_of_the_default_prompts_falls_to_bytes(tiny, specs):
  context = ContextManager(tiny, specs, context_settings())
  board = 'P_O_\n____\n_O__\n___G'
  before = Turn(board, '', ['Up', 'Left'], (0.0, 0.0), 0.0, True, 2)
  assert len(context.first_prompt(0, board, 10).ids) < 64
  assert len(context.next_prompt(0, [before], board, 8).ids) < 40
  assert len(context.first_prompt(1, '\n'.join(['######'] * 6), 10).ids) < 90


def test_the_built_in_tokenizer_is_made_of_the_pieces_of_the_prompts(tiny):
  """Else its model would pay tens of tokens for stretches that it was trained to read as one."""
  config = sft_tiny.get_config()
  specs = build.env_specs(config, tuple(config.sft.tags), (1,) * len(config.sft.tags))
  pieces = prompt_pieces(specs, think=config.agent.think, action_sep=config.agent.action_sep)
  built = json.loads(tiny_tokenizer.build(pieces).to_str())
  shipped = json.loads(pathlib.Path(presets.resolve('tiny', ''), 'tokenizer.json').read_text(encoding='utf-8'))
  assert built['added_tokens'] == shipped['added_tokens'] and built['model'] == shipped['model']


@pytest.mark.parametrize('think', [True, False])
def test_a_reply_that_is_written_is_read_back(think):
  reply = templates.format_reply('up it is', ['Up', 'Left'], think=think, action_sep='##')
  assert templates.read_answer(reply, think=think) == 'Up ## Left'
  assert ('up it is' in reply) == think and reply.startswith(templates.first_tag(think))
  assert templates.read_answer(reply.removesuffix('</answer>'), think=think) is None


def test_special_tokens_are_taken_out_of_plain_text():
  assert templates.plain('a<|im_end|>b <b> < |') == 'a< |im_end|>b <b> < |'
