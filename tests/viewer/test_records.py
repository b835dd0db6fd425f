"""What is written down of an episode is what its trajectory holds, token by token."""

from __future__ import annotations

import types

import numpy as np
import pytest

from ragen_jax import build
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.episode import Episode, Turn
from ragen_jax.agent.rollout import Rollout
from ragen_jax.agent.segments import ImageSegment, TextSegment
from ragen_jax.agent.trajectory import Timeline
from ragen_jax.agent.world_model.state_reward import ReplyReward
from ragen_jax.envs.scenes import Scene
from ragen_jax.models import presets
from ragen_jax.training.batches import at_columns
from ragen_jax.viewer.records import Played, episode_records, first_rows, on_timeline, text_records, token_pieces
from ragen_jax.viewer.tensorboard import boards
from tests.support.configs import small_config
from tests.support.plain import sampled_in_turn


def _iteration(**fields):
  """An iteration of training up to its update: (trainer, rollout, selection, batch, episodes, records)."""
  config = small_config(
    train__tags=('FrozenLake', 'Bandit'), train__groups=4, agent__max_response_tokens=32, logging__episodes=6, **fields
  )
  trainer = build.make_trainer(config, build.load_policy(config))
  state = trainer.init()
  rollout, selection = trainer.collect(state)
  batch, _ = trainer.estimate(state, selection)
  return trainer, rollout, selection, batch, *trainer.recorder.records(rollout, selection, batch, 0)


@pytest.fixture(scope='module')
def iteration():
  return _iteration(filter__value=0.5)  # half of the groups are filtered out


@pytest.fixture(scope='module')
def iteration_in_windows():
  return _iteration(agent__context='limited_multi_turn', agent__context_turns=2)


@pytest.mark.slow
@pytest.mark.parametrize('which', ['iteration', 'iteration_in_windows'])
def test_pieces_are_the_sampled_tokens_and_numbers_belong_to_them(which, request):
  trainer, rollout, _, _, episodes, records = request.getfixturevalue(which)
  t, tokenizer = rollout.trajectory, trainer.model.tokenizer
  for episode, record in zip(episodes, records, strict=True):
    index = next(i for i, e in enumerate(rollout.episodes) if e is episode)
    assert len(record['turns']) == len(episode.turns) > 0
    for i, (turn, kept) in enumerate(zip(episode.turns, record['turns'], strict=True)):
      row, columns = sampled_in_turn(rollout, index, i)
      ids = t.tokens[row, columns].tolist()
      assert ''.join(kept['pieces']) == tokenizer.decode(ids) and len(kept['pieces']) == len(ids)
      assert kept['closed'] == (ids[-1] in tokenizer.stop_ids)
      reply = kept['forced'] + ''.join(kept['pieces'][: -1 if kept['closed'] else None])
      assert reply == turn.reply and kept['forced'] == '<think>'
      for name, x in (('logprob', t.logprobs), ('entropy', t.entropies), ('value', t.values)):
        np.testing.assert_allclose(kept[name], x[row, columns], rtol=5e-4)
      fields = ('observation', 'actions', 'reward', 'penalty', 'valid', 'effective')
      assert {name: kept[name] for name in fields} == {name: getattr(turn, name) for name in fields}


@pytest.mark.slow
def test_prompts_and_replies_add_up_to_what_the_model_was_fed(iteration):
  trainer, rollout, _, _, episodes, records = iteration
  t = rollout.trajectory
  for episode, record in zip(episodes, records, strict=True):
    row = next(i for i, e in enumerate(rollout.episodes) if e is episode)
    told = ''.join(turn['prompt'] + turn['forced'] + ''.join(turn['pieces']) for turn in record['turns'])
    assert told == trainer.model.tokenizer.decode(t.tokens[row, : t.length[row]])
    counts = sum(turn['prompt_tokens'] + len(turn['pieces']) for turn in record['turns'])
    assert counts == t.length[row]
    assert [turn['fresh'] for turn in record['turns']] == [i == 0 for i in range(len(record['turns']))]


@pytest.mark.slow
def test_a_prompt_of_its_own_begins_a_turn_that_sees_the_last_ones_only(iteration_in_windows):
  records = iteration_in_windows[-1]
  turns = [turn for record in records for turn in record['turns']]
  assert len(turns) > len(records) and all(turn['fresh'] for turn in turns)
  assert all(turn['prompt'].startswith('<|im_start|>system') for turn in turns)


def test_a_reply_outside_the_loss_has_its_text_and_no_numbers():
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))
  prompts = [tokenizer.encode(f'<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n') for text in 'ab']
  replies = [(*tokenizer.encode(text), tokenizer.stop_ids[0]) for text in ('Left', 'Up and down')]
  timeline = Timeline(1, 200)
  timeline.append_context(0, prompts[0] + replies[0], 0)  # the turn of a frozen agent
  timeline.append_context(0, prompts[1], 1)
  timeline.append_reply(0, replies[1], 1, logprobs=-0.5, entropies=0.25)
  zero = np.zeros(1, np.int32)
  trajectory = timeline.trajectory(group=zero, episode=zero, env=zero, status=zero, policy_version=0, pad_id=0)
  turns = [
    Turn('', text, [], (), 0.0, True, 0, ids=ids) for text, ids in zip(('Left', 'Up and down'), replies, strict=True)
  ]
  rollout = Rollout(trajectory, [Episode('Duel', 0, 0, turns)], zero[:, None], np.zeros(1), 4, 0)
  table = np.ones(trajectory.tokens.shape, np.float32)
  told = {'advantages': table, 'learnt': np.ones(1, bool), 'values': table}
  (record,) = episode_records(Played(rollout, tokenizer, 1, 'train', 1), [0], **told)
  for turn, prompt, reply, text in zip(record['turns'], prompts, replies, ('Left', 'Up and down'), strict=True):
    assert (turn['prompt'], turn['prompt_tokens']) == (tokenizer.decode(prompt), len(prompt))
    assert turn['closed'] and ''.join(turn['pieces'][:-1]) == text and len(turn['pieces']) == len(reply)
  numbers = {'logprob', 'entropy', 'value', 'advantage'}
  assert not numbers & set(record['turns'][0]) and numbers <= set(record['turns'][1])


@pytest.mark.slow
def test_pictures_are_those_of_the_boards(iteration):
  trainer, _, _, _, episodes, records = iteration
  env = trainer.player.proxy.envs.specs[0].env
  for episode, record in zip(episodes[:6], records[:6], strict=True):
    shown = [(turn['observation'], turn['picture']) for turn in record['turns']]
    shown.append((record['final_observation'], record['final_picture']))
    for text, picture in shown:
      np.testing.assert_array_equal(picture, env.render_rgb(env.from_text(text)))
    strip = boards(episode)
    assert strip.shape == (64, 64 * len(shown) + 4 * (len(shown) - 1), 3)
    np.testing.assert_array_equal(strip[:, -64:], shown[-1][1])


@pytest.mark.slow
def test_one_member_a_level_or_whole_groups(iteration):
  specs = iteration[0].player.proxy.envs.specs  # 2 groups each
  assert first_rows(specs, 4, 3, one_a_level=False) == [0, 1, 2, 8, 9, 10]
  assert first_rows(specs, 4, 3, one_a_level=True) == [0, 4, 8, 12]
  assert first_rows(specs, 4, 0, one_a_level=True) == []


def test_on_timeline_is_the_inverse_of_gather():
  rng = np.random.default_rng(0)
  mask = np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0]], bool)
  columns = np.array([[1, 4, 5], [2, 1, 1], [1, 1, 1]], np.int32)
  values = np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32)
  line = on_timeline(values, columns, mask, 7)
  np.testing.assert_array_equal(at_columns(line, columns, mask), values)
  assert (line != 0).sum() == mask.sum()


@pytest.mark.parametrize('text', ['plain words', 'ein Gruß 你好 🙂!', '🙂🙂', ''])
def test_pieces_join_where_characters_are_spread_over_tokens(text):
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))
  ids = list(tokenizer.encode(text))
  pieces = token_pieces(tokenizer, ids)
  assert ''.join(pieces) == text and len(pieces) == len(ids)


def test_pieces_join_where_bytes_are_no_characters():
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))
  smile = list(tokenizer.encode('🙂'))
  assert len(smile) == 4
  for ids in (smile[:2], [*smile[:3], *tokenizer.encode('ab')], [smile[1], *smile, smile[0]]):
    pieces = token_pieces(tokenizer, ids)
    assert ''.join(pieces) == tokenizer.decode(ids) and len(pieces) == len(ids)


@pytest.mark.slow
def test_numbers_that_are_not_finite_are_left_empty(iteration):
  trainer, rollout, *_ = iteration
  t = rollout.trajectory
  broken = np.where(t.loss_mask, np.nan, t.logprobs)
  rollout.trajectory = t.replace(logprobs=broken)
  (record,) = episode_records(Played(rollout, trainer.model.tokenizer, 1, 'val', 4), [0])
  rollout.trajectory = t
  assert all(x is None for turn in record['turns'] for x in turn['logprob'])


@pytest.mark.slow
def test_descriptions_are_recorded_with_verdicts_scores_and_the_images_that_the_policy_saw():
  before = Scene((1, 1), {'box': ((0, 1),), 'target': ((1, 2),)})
  after = Scene((0, 1), {'box': ((1, 1),), 'target': ((1, 2),)})
  observation = 'The box is above and in the same column; the target is above and to the right.'
  prediction = 'é <b> the box is below and in the same column'
  reward = ReplyReward(0.5, {'observation': 0.75, 'prediction': 2 / 3}, {'observation': 0.123456, 'prediction': 0.1})
  images = [np.full((8, 8, 3), shade, np.uint8) for shade in (0, 9)]
  seen = (TextSegment('see '), ImageSegment(images[0], 1), ImageSegment(images[1], 1))
  chat = [{'role': 'user', 'content': 'play'}]
  sections = {'observation': observation, 'reasoning': '', 'prediction': prediction, 'answer': 'Up'}
  turns = [
    Turn(
      seen, 'r', ['Up'], (0.0,), 0.0, True, 1, sections=sections, scenes=(before, after), reply_reward=reward, chat=chat
    ),
    # Of its form, with an unknown action: it is not scored.
    Turn('board', 'r', [], (), -0.1, False, 0, sections=sections, scenes=(before, after), chat=chat),
    Turn('board', 'r', [], (), -0.1, False, 0, scenes=(before, after), chat=chat),
  ]
  played = types.SimpleNamespace(episodes=[Episode('A', 0, 7, turns)])
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))
  (record,) = text_records(Played(played, tokenizer, 3, 'random', 1), [0], whole=False)
  first, second, third = record['turns']
  assert [(d['section'], d['score'], d['reward']) for d in first['descriptions']] == [
    ('observation', 0.75, 0.1235), ('prediction', 0.6667, 0.1),
  ]  # fmt: skip
  assert first['reply_reward'] == 0.7235 and 'reply_reward' not in second
  assert first['descriptions'][0]['parts'] == [
    ('The ', '', ''), ('box is above and in the same column', 'right', ''), ('; the ', '', ''),
    ('target is above and to the right', 'half', 'the target is in the same row and to the right'), ('.', '', ''),
  ]  # fmt: skip
  assert first['descriptions'][1]['missing'] == ['the target is below and to the right']
  assert ''.join(text for text, *_ in first['descriptions'][1]['parts']) == prediction
  assert [(d['score'], d['reward']) for d in second['descriptions']] == [(None, None)] * 2
  assert [d['parts'] for d in second['descriptions']] == [d['parts'] for d in first['descriptions']]
  assert 'descriptions' not in third and 'images' not in second
  assert first['images'] == images and first['observation'] == 'see <image><image>'
