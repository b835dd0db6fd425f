"""How episodes are rewarded, recorded and ended, whoever speaks."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax.agent.episode import TRUNCATED, Status, TextReply
from tests.support.speakers import ScriptedText, make_proxy, scripted_tokens


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
