"""The strings of prompts and replies, and the pieces that the built-in tokenizer is made of."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from configs import default, sft_tiny
from ragen_jax import build
from ragen_jax.agent import templates
from ragen_jax.agent.context_manager import ContextManager, ContextSettings
from ragen_jax.agent.episode import Turn
from ragen_jax.agent.segments import ImageSegment
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


def test_the_task_begins_with_the_rules_and_ends_with_the_limits():
  spec = EnvSpec('x', FrozenLake(size=4), Budget(5, 10, 5), 40, 1)
  env, task = spec.env, describe_task(spec, '||')
  parts = [env.rules(), 'Symbols: ', 'Actions: ', 'The episode has at most 5 turns and 10 actions.']
  places = [task.find(part) for part in parts]
  assert places[0] == 0 and places == sorted(places) and -1 not in places
  assert task.endswith('separated by ||.')


@pytest.mark.parametrize('legend', [{}, {'#': 'wall', 'P': 'player'}])
def test_an_image_is_said_to_show_what_the_legend_names(legend, specs):
  env = types.SimpleNamespace(
    rules=lambda: 'Rules.', legend=lambda: legend, shown_as='room', action_names=(), action_help='', counts_turns=False,
    whole_answer=True,
  )  # fmt: skip
  task = describe_task(dataclasses.replace(specs[0], env=env, tile=8, budget=Budget(1, 1, 1)), '||')
  shown = ' It shows: wall, player.' if legend else ''
  assert task.splitlines()[:2] == ['Rules.', f'Each state is an image of the room.{shown}']


def test_a_summary_tells_the_actions_of_a_turn_or_that_there_were_none(specs):
  for actions, told in ((['Up', 'Left'], 'Up || Left'), ([], 'nothing')):
    before, after = templates.memory_frame(specs[0], 2, actions, 0.5, '||')
    assert before == f'Turn 3: {told} in\n' and after == '\nbrought reward 0.5.'


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


@pytest.mark.slow
def test_the_built_in_tokenizer_is_made_of_the_pieces_of_the_prompts(tiny):
  """Else its model would pay tens of tokens for stretches that it was trained to read as one."""
  config = sft_tiny.get_config()
  specs = build.env_specs(config, tuple(config.sft.tags), (1,) * len(config.sft.tags))
  pieces = prompt_pieces(specs, build.fill(ContextSettings, config.agent))
  built = json.loads(tiny_tokenizer.build(pieces, images=False).to_str())
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


def test_the_request_is_filled_with_the_form_the_words_and_an_example(specs):
  settings = context_settings(request='{{As}} {form} in {max_words}, say {example}', action_sep='##', format='no_think')
  before, behind = templates.turn_frame(dataclasses.replace(specs[0], max_words=57), 1, 7, 'P', settings)
  told = re.fullmatch(r'\nActions left: 7\n\{As\} (.*) in 57, say (.*)', behind)
  assert before == 'Turn 2:\nState:\n' and told[1] == '<answer>your actions</answer>'
  example = ContextManager(None, specs, settings).parse(0, told[2])
  assert example.valid and len(example.names) == 2


@functools.cache
def _boards(tag):
  """The game of a tag, and the different boards that 400 of its levels begin with."""
  (spec,) = build.env_specs(default.get_config(), (tag,), (1,))
  keys = jax.vmap(jax.random.key)(jnp.arange(400, dtype=jnp.uint32))
  return spec, tuple(dict.fromkeys(spec.env.render(jax.device_get(jax.jit(jax.vmap(spec.env.reset))(keys)))))


@pytest.mark.parametrize(
  'tag', ['FrozenLake', 'SimpleSokoban', 'Bandit', 'Countdown', 'Game2048', 'Rubik2x2', 'Sudoku']
)
@pytest.mark.slow_cases('SimpleSokoban', 'Game2048', 'Rubik2x2', 'Countdown')
def test_examples_are_valid_replies_and_show_each_action_as_often_as_the_others(tag):
  spec, boards = _boards(tag)
  context = ContextManager(None, [spec], context_settings(request='{example}'))
  shown, firsts = collections.Counter(), collections.Counter()
  for turn, board in itertools.product(range(3), boards):
    _, behind = templates.turn_frame(spec, turn, 0, board, context.settings)
    example = context.parse(0, behind.removeprefix('\nActions left: 0\n'))
    assert example.valid and len(example.names) == min(2, spec.budget.max_actions_per_turn)
    assert behind.count('||') == len(example.names) - 1  # none that the budget would cut
    assert behind == templates.turn_frame(spec, turn, 9, board, context.settings)[1].replace('left: 9', 'left: 0')
    shown.update(example.names)
    firsts.update(example.names[:1])
  if tag == 'Bandit':  # two boards in one turn; the others show no order
    assert set(shown) == {'Phoenix', 'Dragon'}
    return
  for counts in (shown, firsts):
    assert len(counts) == len(spec.env.example_actions(''))
    assert scipy.stats.chisquare([*counts.values()]).pvalue > 1e-3


@pytest.mark.parametrize('tag', ['FrozenLake', 'SimpleSokoban', 'Bandit', 'Game2048'])
@pytest.mark.slow_cases('SimpleSokoban')
def test_a_request_lists_all_actions_and_each_is_the_first_as_often_as_the_others(tag):
  spec, boards = _boards(tag)
  settings = context_settings(request='{actions}; {example}')
  firsts, pairs = collections.Counter(), collections.Counter()
  for turn, board in itertools.product(range(3), boards):
    _, behind = templates.turn_frame(spec, turn, 0, board, settings)
    listed, _, example = behind.removeprefix('\nActions left: 0\n').partition('; ')
    names = listed.split(' or ' if tag == 'Bandit' else ' || ')
    assert sorted(names) == sorted(spec.env.example_actions(board))
    firsts[names[0]] += 1
    pairs[names[0], ContextManager(None, [spec], settings).parse(0, example).names[0]] += 1
  if tag == 'Bandit':  # two boards in one turn
    assert set(firsts) <= {'Phoenix', 'Dragon'}
    return
  for counts, expected in ((firsts, len(names)), (pairs, len(names) ** 2)):  # the list tells nothing of the example
    assert len(counts) == expected
    assert scipy.stats.chisquare([*counts.values()]).pvalue > 1e-3


@pytest.mark.parametrize('tag', ['Countdown', 'Sudoku'])
def test_a_request_refers_to_the_rules_where_actions_are_free_text(tag):
  (spec,) = build.env_specs(default.get_config(), (tag,), (1,))
  _, behind = templates.turn_frame(spec, 0, 3, 'a board', context_settings(request='Only {actions}.'))
  assert behind == '\nActions left: 3\nOnly those that the rules describe.'


def test_a_bandit_s_example_and_list_show_arms_on_offer():
  (spec,) = build.env_specs(default.get_config(), ('BanditPairs',), (1,))
  for pair in spec.env.arms:
    board = '\n'.join(['Arms on offer:', *pair, 'Think'])
    assert set(spec.env.example_actions(board)) == set(pair)
    _, behind = templates.turn_frame(spec, 0, 1, board, context_settings(request='{actions}'))
    assert {*behind.removeprefix('\nActions left: 1\n').split(' or ')} == set(pair)


@pytest.mark.parametrize('tag', [tag for tag in default.get_config().envs if tag.startswith('Bandit')])
@pytest.mark.exhaustive_cases('BanditPairsTest', 'BanditProfessionsTest', 'BanditRev', 'BanditRevTest', 'BanditTest')
def test_the_two_orders_of_a_bandit_s_pair_show_each_of_its_arms_once(tag):
  spec, boards = _boards(tag)
  assert len(boards) == 2 * len(spec.env.arms)
  for part in range(2):  # the example, and the first of the list
    shown = [
      (tuple(sorted(board.splitlines()[1:3])), templates.shown_actions(spec, 0, board)[part][0]) for board in boards
    ]
    assert collections.Counter(shown) == {(tuple(sorted(pair)), arm): 1 for pair in spec.env.arms for arm in pair}


def test_the_example_of_a_board_shown_as_an_image_depends_on_the_image(specs):
  """Else an environment of images would show one example for ever."""
  boards = [ImageSegment(np.full((4, 4, 3), shade, np.uint8), 1) for shade in range(40)]
  frames = {
    templates.turn_frame(specs[0], 0, 10, (board,), context_settings(request='{example}'))[1] for board in boards
  }
  assert len(frames) > 8


@pytest.mark.slow
def test_a_tokenizer_for_descriptions_reads_each_of_their_parts_as_one_token(specs):
  pieces = prompt_pieces(specs, context_settings(format='world_modeling'))
  claim = 'the hole is in the same row and to the left'
  for text in ('<observation>', '</prediction>', 'the box is above and to the right', claim, f'; {claim}'):
    assert text in pieces
  assert not any('hole is' in piece for piece in prompt_pieces(specs, context_settings()))


def test_special_tokens_are_taken_out_of_plain_text():
  assert templates.plain('a<|im_end|>b <b> < |') == 'a< |im_end|>b <b> < |'
