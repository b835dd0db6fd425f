"""How episodes are rewarded, recorded and ended, whoever speaks."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.episode import TRUNCATED, Status, TextReply
from ragen_jax.agent.metrics import episode_metrics
from ragen_jax.agent.world_model.descriptions import describe
from ragen_jax.agent.world_model.formats import described_sections, innermost_tags, write_reply
from ragen_jax.agent.world_model.state_reward import ReplyRewardSettings, score_description
from tests.support.speakers import ScriptedText, context_settings, limits, make_proxy, scripted_tokens


def test_sokoban_pays_a_tenth_for_each_step_and_replies_without_form_their_penalty(tiny):
  proxy = make_proxy(tiny, ('SimpleSokoban',), 1, 1, format_penalty=-0.25)
  steps = ['<think></think><answer>Up || Up</answer>', 'Up', '<think></think><answer>Up || Hop</answer>', '', 'no']
  (episode,) = proxy.rollout(ScriptedText(steps), 70).episodes
  assert [t.reward for t in episode.turns] == pytest.approx([-0.2, 0.0, -0.1, 0.0, 0.0])
  assert [t.penalty for t in episode.turns] == [0.0, -0.25, -0.25, -0.25, -0.25]
  assert [t.actions for t in episode.turns] == [['Up', 'Up'], [], ['Up'], [], []]
  assert [t.actions_left for t in episode.turns] == [10, 8, 8, 7, 7]
  assert episode.env_return == pytest.approx(-0.3) and episode.score == pytest.approx(-1.3)
  assert episode.status == Status.OUT_OF_TURNS


def test_an_episode_out_of_actions_is_truncated_before_its_turns_are_over(tiny):
  proxy = make_proxy(tiny, ('SimpleSokoban',), 1, 1)
  script = ['<think></think><answer>' + ' || '.join(['Up'] * 5) + '</answer>'] * 5
  (episode,) = proxy.rollout(ScriptedText(script), 70).episodes
  assert episode.status == Status.OUT_OF_ACTIONS and episode.status in TRUNCATED
  assert len(episode.turns) == 2 and episode.score == pytest.approx(-1.0)


def test_the_limit_of_the_rollout_and_the_environment_s_own_both_bind(tiny):
  script = ['<think></think><answer>Up</answer>'] * 5
  proxy = make_proxy(tiny, ('SimpleSokoban', 'Bandit'), 1, 1, max_turns=3)
  sokoban, bandit = proxy.rollout(ScriptedText(script), 70).episodes
  assert (sokoban.status, len(sokoban.turns)) == (Status.OUT_OF_TURNS, 3)
  assert (bandit.status, len(bandit.turns)) == (Status.OUT_OF_TURNS, 1)  # its budget has one turn


def test_a_prompt_that_outgrows_the_context_ends_the_episode_of_speakers_in_tokens_alone(tiny):
  proxy = make_proxy(tiny, ('SimpleSokoban',), 2, 2, max_context=200)
  script = ['</think><answer>Up</answer>'] * 5
  rollout = proxy.rollout(scripted_tokens(tiny, [script] * 4), 70)
  assert {e.status for e in rollout.episodes} == {Status.OUT_OF_CONTEXT}
  assert 0 < rollout.trajectory.length.max() <= 200
  assert 1 <= len(rollout.episodes[0].turns) < 5
  in_text = proxy.rollout(ScriptedText(['<think>' + reply for reply in script]), 70)
  assert {e.status for e in in_text.episodes} == {Status.OUT_OF_TURNS}


class Leaver:
  """Leaves its second row before the second turn."""

  writes_tokens = False

  def reply(self, log):
    if log.turn == 1:
      log.leave(1, Status.ABANDONED)
    return {row: TextReply('<think></think><answer>Up</answer>') for row in log.live} or None


def test_a_row_that_leaves_is_recorded_no_further_and_the_others_go_on(tiny):
  stays, leaves = make_proxy(tiny, ('SimpleSokoban',), 2, 1).rollout(Leaver(), 70).episodes
  assert (leaves.status, len(leaves.turns)) == (Status.ABANDONED, 1)
  assert (stays.status, len(stays.turns)) == (Status.OUT_OF_TURNS, 5)


def test_anchors_are_equal_for_equal_observations_of_one_level_and_for_them_alone(tiny):
  proxy = make_proxy(tiny, ('SimpleSokoban',), 2, 3)
  script = ['<think></think><answer>Up</answer>', 'nothing', *['<think></think><answer>Down</answer>'] * 3]
  rollout = proxy.rollout(ScriptedText(script), 70)
  seen = {}
  for row, episode in enumerate(rollout.episodes):
    count = len(episode.turns)
    assert (rollout.anchors[row, count:] == -1).all()
    for turn, anchor in zip(episode.turns, rollout.anchors[row, :count], strict=True):
      assert seen.setdefault((episode.group, turn.observation), anchor) == anchor
  assert len(set(seen.values())) == len(seen) and min(seen.values()) == 0
  # The reply without actions changed nothing.
  assert (rollout.anchors[:, 1] == rollout.anchors[:, 2]).all()


def test_rows_of_tokens_carry_the_scores_of_their_turns_and_the_anchors_of_their_episode(tiny):
  """With a prompt of its own in each turn, an episode has as many rows as turns."""
  proxy = make_proxy(tiny, ('SimpleSokoban', 'Bandit'), 1, 2, {'context': 'single_turn'}, format_penalty=-0.25)
  script = ['</think><answer>Up || Up</answer>', 'Up', '</think><answer>Down || Hop</answer>', 'no', '']
  rollout = proxy.rollout(scripted_tokens(tiny, [script] * 4), 70)
  t = rollout.trajectory
  assert [len(e.turns) for e in rollout.episodes] == [5, 5, 1, 1] and len({e.group for e in rollout.episodes}) == 2
  seen = []
  for index, episode in enumerate(rollout.episodes):
    rows = np.flatnonzero((t.episode == index) & (t.length > 0))
    assert len(rows) == len(episode.turns)
    for number, (row, turn) in enumerate(zip(rows, episode.turns, strict=True)):
      last = np.flatnonzero(t.loss_mask[row])[-1]
      assert t.rewards[row, last] == np.float32(turn.score) and np.count_nonzero(t.rewards[row]) == (turn.score != 0)
      assert set(t.turn[row, : t.length[row]]) == {number}
      np.testing.assert_array_equal(rollout.anchors[row], rollout.anchors[rows[0]])
    seen.append(rollout.anchors[rows[0]].tolist())
  assert seen[0] == seen[1] and seen[2] == seen[3] and not {*seen[0]} & {*seen[2]} - {-1}
  np.testing.assert_array_equal(rollout.scores, rollout.episode_scores[t.episode])


def test_replies_in_text_are_as_long_as_the_tokenizer_makes_them_unless_they_say_so(tiny):
  class Counted(ScriptedText):
    def reply(self, log):
      replies = super().reply(log)
      return replies and replies | {0: TextReply(replies[0].text, tokens=99)}

  text = '<think></think><answer>Up</answer>'
  told, counted = make_proxy(tiny, ('SimpleSokoban',), 1, 2).rollout(Counted([text] * 5), 70).episodes
  assert [t.tokens for t in told.turns] == [99] * 5
  assert [t.tokens for t in counted.turns] == [len(tiny.encode(text))] * 5


# -- rewards of replies ------------------------------------------------------------------------------------------------

WRONG = 'the box is above and to the left; the goal is below and in the same column'
# Actions of the turns, and whether the reply is spoilt by text after it.
TURNS = (('Up', False), ('Left || Hop', False), ('Down || Down', True), ('Right', False))


@pytest.fixture(scope='module')
def make(tiny):
  """A maker of rollout loops over one level of a tag, which share the compiled programs of its environment."""
  envs = {}

  def loop(tag, form, tokenizer=tiny, context=None, **changes):
    if tag not in envs:
      envs[tag] = make_proxy(tiny, (tag,), 1, 1).envs
    room = {'max_response_tokens': 768, 'decode_chunk': 768, 'max_context': 8192}
    own = ContextManager(tokenizer, envs[tag].specs, context_settings(**{'format': form} | (context or {})))
    return AgentProxy(envs[tag].fresh_copy(), own, limits(**room | changes))

  return loop


@pytest.fixture(scope='module')
def said(make):
  """The sections of `TURNS` on a level: true in even turns, and wrong in odd ones. They are found by playing it."""

  @functools.cache
  def texts(tag):
    empty = dict.fromkeys(innermost_tags('world_modeling'), '')
    script = [write_reply('world_modeling', empty | {'answer': actions}) for actions, _ in TURNS]
    (episode,) = make(tag, 'world_modeling').rollout(ScriptedText([*script, '']), 70).episodes
    sections = []
    for number, turn in enumerate(episode.turns[: len(TURNS)]):
      true = [f'I see: {describe(scene)}.' for scene in turn.scenes]
      observation, prediction = true if number % 2 == 0 else (WRONG, WRONG)
      sections.append({'think': 'so', 'observation': observation, 'reasoning': 'é 日本', 'prediction': prediction})
    return sections

  def script(tag, form, prefix):
    replies = [
      write_reply(form, texts | {'answer': actions}) + ' really' * spoilt
      for texts, (actions, spoilt) in zip(texts(tag), TURNS, strict=True)
    ]
    return [*(reply.removeprefix(prefix) for reply in replies), 'no']

  return script


def _paid_by_a_loop(tokenizer, turn, settings):
  """f32[n], the reward of each sampled token of a turn: decodes ever longer parts of the reply."""
  paid = np.zeros(len(turn.ids), np.float32)
  if not (turn.sections and turn.valid):
    return paid
  paid[-1] += np.float32(settings.format_reward)
  if turn.scenes is None:
    return paid
  for name, scene in zip(('observation', 'prediction'), turn.scenes, strict=True):
    if name not in turn.sections:
      continue
    share = (score_description(turn.sections[name], scene) - settings.state_floor) / (1 - settings.state_floor)
    at = len(turn.ids) - 1
    if settings.state_place == 'section':
      at = next(i for i in range(len(turn.ids)) if f'</{name}>' in tokenizer.decode(turn.ids[: i + 1]))
    paid[at] += np.float32(settings.state_reward * max(share, 0.0))
  return paid


@pytest.mark.parametrize(
  ('tag', 'form', 'place', 'tokenizer', 'context'),
  [
    ('SimpleSokoban', 'world_modeling', 'section', 'tiny', {}),
    ('SimpleSokoban', 'world_modeling', 'section', 'qwen', {'force_prefix': False}),
    ('SimpleSokoban', 'world_modeling', 'turn', 'tiny', {'context': 'single_turn'}),
    ('CoordFrozenLake', 'state_estimation', 'section', 'tiny', {'context': 'single_turn', 'force_prefix': False}),
    ('SimpleSokoban', 'transition_modeling', 'section', 'qwen', {}),
    ('SimpleSokoban', 'free_think', 'turn', 'tiny', {}),
  ],
)
def test_rewards_of_replies_are_those_of_a_loop_over_their_tokens(
  tiny, qwen_tokenizer, make, said, tokenizer, tag, form, place, context
):
  tokenizer = tiny if tokenizer == 'tiny' else qwen_tokenizer
  settings = ReplyRewardSettings(format_reward=0.5, state_reward=0.3, state_floor=0.2, state_place=place)
  proxy = make(tag, form, tokenizer, context, replies=settings)
  script = said(tag, form, proxy.context.reply_prefix)
  rollout = proxy.rollout(scripted_tokens(tokenizer, [script]), 70)
  (episode,), t = rollout.episodes, rollout.trajectory
  graded = described_sections(form)
  assert episode.form == form and episode.graded == graded
  total = 0.0
  for number, turn in enumerate(episode.turns):
    (row,) = np.flatnonzero(((t.turn == number) & t.loss_mask).any(axis=1))
    columns = np.flatnonzero(t.loss_mask[row] & (t.turn[row] == number))
    expected = _paid_by_a_loop(tokenizer, turn, settings)
    np.testing.assert_array_equal(t.reply_rewards[row, columns], expected)
    total += float(expected.astype(np.float64).sum())
    # The rewards of actions are as ever, on the last token.
    assert t.rewards[row, columns[-1]] == np.float32(turn.score) and not t.rewards[row, columns[:-1]].any()
    true = number % 2 == 0
    assert set(turn.reply_reward.scores) == (set(graded) if turn.valid else set())
    assert all((score == 1) == true for score in turn.reply_reward.scores.values())
  assert np.count_nonzero(t.reply_rewards[~t.loss_mask]) == 0
  assert [turn.valid for turn in episode.turns[:4]] == [True, False, False, True][: len(episode.turns)]
  assert bool(episode.turns[1].sections) and not episode.turns[2].sections and len(episode.turns[2].actions) > 0
  np.testing.assert_allclose(rollout.trained_scores[t.length > 0], rollout.scores[0] + total, rtol=1e-6)
  assert rollout.episode_scores[0] == np.float32(episode.score)
  found = episode_metrics([episode], 1, 'train')
  assert found[f'train/{tag}/format_correct'] == 3 / 5
  paid = [value for turn in episode.turns for value in turn.reply_reward.rewards.values()]
  assert found.get(f'train/{tag}/state_reward') == (pytest.approx(sum(paid)) if graded else None)


def test_sokoban_pays_a_tenth_for_each_step_beside_the_rewards_of_replies(make, said):
  """The score of VAGEN's turns: -0.1 a step, 0.5 for the form, and up to 0.25 for each section."""
  settings = ReplyRewardSettings(format_reward=0.5, state_reward=0.25, state_floor=0.2, state_place='turn')
  proxy = make('SimpleSokoban', 'world_modeling', replies=settings, format_penalty=-0.05)
  (episode,) = proxy.rollout(ScriptedText(said('SimpleSokoban', 'world_modeling', '')), 70).episodes
  assert [turn.reward for turn in episode.turns] == pytest.approx([-0.1, -0.1, -0.2, -0.1, 0.0])
  assert [turn.penalty for turn in episode.turns] == [0.0, -0.05, -0.05, 0.0, -0.05]
  assert [turn.reply_reward.format_reward for turn in episode.turns] == [0.5, 0.0, 0.0, 0.5, 0.0]
  assert episode.turns[0].reply_reward.rewards == {'observation': 0.25, 'prediction': 0.25}
  assert episode.turns[0].reply_reward.state_reward == 0.5 and episode.turns[1].reply_reward.state_reward == 0
  assert episode.score == pytest.approx(-0.5 - 0.15) and episode.env_return == pytest.approx(-0.5)


def test_scenes_are_those_before_and_after_all_actions_of_a_turn_in_a_mixed_batch(tiny):
  proxy = make_proxy(tiny, ('Bandit', 'SimpleSokoban'), 1, 2, {'format': 'world_modeling'})
  texts = dict.fromkeys(innermost_tags('world_modeling'), '')
  script = [write_reply('world_modeling', texts | {'answer': 'Up || Left'})] * 5
  episodes = proxy.rollout(ScriptedText(script), 70).episodes
  assert [bool(e.graded) for e in episodes] == [False, False, True, True]
  assert all(turn.scenes is None and not turn.reply_reward.scores for e in episodes[:2] for turn in e.turns)
  for e in episodes[2:]:
    assert all(a.scenes[1] == b.scenes[0] for a, b in zip(e.turns, e.turns[1:], strict=False))
    for turn in e.turns:
      for text, scene in zip((turn.observation, None), turn.scenes, strict=True):
        rows = (text or '').split('\n')
        assert text is None or rows[scene.player[0]][scene.player[1]] in 'PS'
    moved = [turn.scenes[0].player != turn.scenes[1].player for turn in e.turns]
    assert moved == [bool(turn.effective) for turn in e.turns] and any(moved)


def test_actions_behind_the_end_of_an_episode_are_not_recorded(tiny):
  proxy = make_proxy(tiny, ('FrozenLake',), 8, 1)
  wanted = ['Right', 'Down', 'Right', 'Down', 'Right']
  script = [f'<think></think><answer>{" || ".join(wanted)}</answer>'] * 5
  last = [episode.turns[-1] for episode in proxy.rollout(ScriptedText(script), 70).episodes]
  assert all(turn.actions == wanted[: len(turn.rewards)] for turn in last)
  assert min(len(turn.actions) for turn in last) < len(wanted)
