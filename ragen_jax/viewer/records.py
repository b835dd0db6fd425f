"""Episodes written down token by token, for people who want to see what the policy did and what it was taught."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import numpy as np

from ragen_jax.agent.agent_proxy import Rollout
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.env_manager import EnvGroup
from ragen_jax.agent.text_policy import Played
from ragen_jax.agent.trajectory import Episode, Turn
from ragen_jax.viewer.schema import EpisodeRecord, EpisodeSummary

# Significant digits of what is kept of a number: enough to look at.
_DIGITS = 4


def first_rows(specs: list[EnvGroup], group_size: int, count: int, *, one_a_level: bool) -> list[int]:
  """Rows of a batch to look at, the first of each environment.

  Args:
    specs: the environments of the batch, in the order of its rows.
    group_size: G.
    count: the most rows of each environment.
    one_a_level: the first member of each group only, else groups as a whole, one after the other.

  Returns:
    Row numbers, ascending.
  """
  rows, start = [], 0
  for spec in specs:
    end = start + spec.groups * group_size
    rows += list(range(start, end, group_size if one_a_level else 1))[:count]
    start = end
  return rows


def episode_records(
  rollout: Rollout,
  rows: Collection[int],
  tokenizer: ChatTokenizer,
  *,
  step: int,
  split: str,
  group_size: int,
  reply_prefix: str = '',
  advantages: np.ndarray | None = None,
  learnt: np.ndarray | None = None,
  prompts_trained: bool = False,
  values: np.ndarray | None = None,
) -> list[EpisodeRecord]:
  """Some episodes of a rollout as JSON, but for their pictures.

  Args:
    rollout: with its texts.
    rows: which of its episodes.
    tokenizer: that the rollout was played with.
    step: iterations behind the weights that played.
    split: 'train', 'val' or 'val-greedy'.
    group_size: G.
    reply_prefix: what was put there for the policy before each reply.
    advantages: f32[B, T], on the trajectory's columns; None in evaluations.
    learnt: bool[B], the rows that the update learnt from; None in evaluations.
    prompts_trained: the loss is on all tokens, not on the sampled ones alone.
    values: f32[B, T], the critic's, on the trajectory's columns; None where there are none. Those that are not the
      sampler's own (`trajectory.values`) are known of `learnt` rows only.

  Returns:
    A record of each episode, see `viewer.schema`. The pieces of a reply, joined, are the reply as sampled, its stop
    token included.
  """
  t, records = rollout.trajectory, []
  for index in rows:
    episode = rollout.episodes[index]
    own = np.flatnonzero((t.episode == index) & (t.length > 0))
    turns = []
    for i, turn in enumerate(episode.turns):
      row = int(own[(t.turn[own] == i).any(axis=1)][0])
      columns = np.flatnonzero(t.turn[row] == i)
      sampled = columns[t.loss_mask[row, columns]]
      ids = t.tokens[row, sampled].tolist()
      prompt = tokenizer.decode(t.tokens[row, columns[~t.loss_mask[row, columns]]])
      forced = reply_prefix if reply_prefix and prompt.endswith(reply_prefix) else ''
      numbers = {'logprob': t.logprobs, 'entropy': t.entropies}
      if values is not None and (values is t.values or learnt is None or learnt[row]):
        numbers['value'] = values
      if advantages is not None and (learnt is None or learnt[row]):
        numbers['advantage'] = advantages
      turns.append(
        {
          'prompt': prompt.removesuffix(forced),
          'prompt_tokens': len(columns) - len(sampled),
          'fresh': bool(columns[0] == 0),
          'forced': forced,
          'pieces': token_pieces(tokenizer, ids),
          **{name: _short(x[row, sampled]) for name, x in numbers.items()},
          'closed': ids[-1] in tokenizer.stop_ids,
          **_played(turn),
        }
      )
    summary = _summary(episode, step, split, index % group_size)
    if learnt is not None:
      summary |= {'learnt': bool(learnt[own].any()), 'prompts_trained': prompts_trained}
    end = {'final_observation': episode.final_observation, 'final_picture': episode.final_picture}
    records.append(summary | {'turns': turns} | end)
  return records


def text_records(
  played: Played, *, step: int, split: str, group_size: int, tokenizer: ChatTokenizer, whole: bool
) -> list[EpisodeRecord]:
  """As `episode_records`, for episodes of a text policy that were pictured; of their tokens only the number is known.

  Args:
    played: the episodes.
    step: that they are listed under.
    split: 'random', 'solver' or 'endpoint'.
    group_size: G.
    tokenizer: counts the tokens of prompts.
    whole: each prompt continues the one before (full context), so that only the last message is new.
  """
  records = []
  for row, chats in played.chats.items():
    episode, turns = played.episodes[row], []
    for i, (turn, chat) in enumerate(zip(episode.turns, chats, strict=True)):
      fresh = not whole or i == 0
      new = chat if fresh else chat[-1:]
      turns.append(
        {
          'prompt': '\n\n'.join(f'[{message["role"]}]\n{message["content"]}' for message in new),
          'prompt_tokens': sum(len(tokenizer.encode(message['content'])) for message in new),
          'fresh': fresh,
          'forced': '',
          # The thought and the answer.
          'pieces': [piece for piece in re.split('(?<=</think>)', turn.reply) if piece],
          'tokens': turn.tokens,
          'closed': None,
          **_played(turn),
        }
      )
    end = {'final_observation': episode.final_observation, 'final_picture': episode.final_picture}
    records.append(_summary(episode, step, split, row % group_size) | {'turns': turns} | end)
  return records


def _played(turn: Turn) -> dict[str, Any]:
  """What happened in a turn, whoever spoke."""
  return {
    'observation': turn.observation,
    'picture': turn.picture,
    'actions': list(turn.actions),
    'valid': turn.valid,
    'effective': int(turn.effective),
    'reward': turn.reward,
    'penalty': turn.penalty,
  }


def _summary(episode: Episode, step: int, split: str, member: int) -> EpisodeSummary:
  return {
    'step': step,
    'split': split,
    'tag': episode.tag,
    'level': int(episode.level_seed),
    'group': int(episode.group),
    'member': member,
    'status': episode.status.name.lower(),
    'score': float(f'{episode.score:.{_DIGITS}g}'),
    'actions': sum(len(turn.actions) for turn in episode.turns),
    'error': episode.error,
  }


def on_timeline(values: np.ndarray, columns: np.ndarray, mask: np.ndarray, width: int) -> np.ndarray:
  """Numbers of gathered columns back on the columns that they came from: the inverse of `batches.at_columns`.

  Args:
    values: f32[B, R].
    columns: i32[B, R], where each belongs.
    mask: bool[B, R], False where there is nothing.
    width: T.

  Returns:
    f32[B, T], 0 elsewhere. Values [[5, 7, 0]] at columns [[2, 3, 1]] under [[1, 1, 0]] become [[0, 0, 5, 7]] for T = 4.
  """
  out = np.zeros((len(values), width), np.float32)
  row, at = np.nonzero(mask)
  out[row, columns[row, at]] = np.asarray(values)[row, at]
  return out


def token_pieces(tokenizer: ChatTokenizer, ids: list[int]) -> list[str]:
  """The text of each token; joined they are the text of all.

  A character that several tokens share belongs to the last of them, the others are empty.
  """
  whole = tokenizer.decode(ids)
  pieces = tokenizer.decode_batch([[i] for i in ids])
  if ''.join(pieces) == whole:
    return pieces
  told, pieces = '', []
  for end in range(1, len(ids) + 1):
    # What is not yet a whole character decodes to the replacement sign.
    text = whole if end == len(ids) else tokenizer.decode(ids[:end]).rstrip('\ufffd')
    piece = text[len(told) :] if text.startswith(told) and whole.startswith(text) else ''
    pieces.append(piece)
    told += piece
  return pieces


def _short(x: np.ndarray) -> list[float | None]:
  """Numbers of few digits; None for those that are not finite, which JSON does not have."""
  return [float(f'{v:.{_DIGITS}g}') if np.isfinite(v) else None for v in x.tolist()]
