"""The strings of prompts and replies, and the pieces that the built-in tokenizer is made of."""

from __future__ import annotations

import json
import pathlib

import pytest

from configs import sft_tiny
from ragen_jax import build
from ragen_jax.agent import templates
from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.episode import Turn
from ragen_jax.agent.templates import describe_task, format_reward, prompt_pieces
from ragen_jax.agent.world_model.formats import FORMATS, innermost_tags, opening_tags, read_answer, read_sections
from ragen_jax.envs.base import Budget
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.models import presets
from ragen_jax.sft import tiny_tokenizer
from tests.support.speakers import context_settings


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
  pieces = prompt_pieces(specs, form=config.agent.format, action_sep=config.agent.action_sep)
  built = json.loads(tiny_tokenizer.build(pieces).to_str())
  shipped = json.loads(pathlib.Path(presets.resolve('tiny', ''), 'tokenizer.json').read_text(encoding='utf-8'))
  assert built['added_tokens'] == shipped['added_tokens'] and built['model'] == shipped['model']


@pytest.mark.parametrize('form', FORMATS)
def test_a_reply_that_is_written_is_read_back(form):
  texts = {'think': 'up it is', 'reasoning': 'up it is', 'observation': 'a board'}
  reply = templates.format_reply(texts, ['Up', 'Left'], form=form, action_sep='##')
  assert read_answer(reply, form) == 'Up ## Left'
  assert ('up it is' in reply) == (form != 'no_think') and reply.startswith(opening_tags(form))
  expected = {name: texts.get(name, '') for name in innermost_tags(form)} | {'answer': 'Up ## Left'}
  assert read_sections(reply, form).texts == expected
  assert read_answer(reply.removesuffix('</answer>'), form) is None


def test_prompts_of_replies_with_and_without_thought_are_those_of_the_built_in_model():
  frames = [templates.turn_frame(1, 7, form=form, max_words=25)[1] for form in ('free_think', 'no_think')]
  assert frames == [
    '\nActions left: 7\nAnswer as <think>your thoughts</think><answer>your actions</answer> and nothing else, in at '
    'most 25 words.',
    '\nActions left: 7\nAnswer as <answer>your actions</answer> and nothing else, in at most 25 words.',
  ]


def test_a_tokenizer_for_descriptions_reads_each_of_their_parts_as_one_token(specs):
  pieces = prompt_pieces(specs, form='world_modeling', action_sep='||')
  for text in ('<observation>', '</prediction>', 'the box is ', 'the hole is ', 'in the same row', 'to the left', '; '):
    assert text in pieces
  assert not any('hole is' in piece for piece in prompt_pieces(specs, form='free_think', action_sep='||'))


def test_special_tokens_are_taken_out_of_plain_text():
  assert templates.plain('a<|im_end|>b <b> < |') == 'a< |im_end|>b <b> < |'
