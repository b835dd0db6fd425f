"""Records of episodes for the trajectory viewer: prompts, replies token by token, boards and rewards."""

from __future__ import annotations

import codecs
import dataclasses
import math
import re
from collections.abc import Collection
from typing import Any

import numpy as np

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.episode import Episode, Turn
from ragen_jax.agent.rollout import Rollout
from ragen_jax.agent.segments import images_of, written
from ragen_jax.agent.world_model.formats import OBSERVATION, PREDICTION
from ragen_jax.agent.world_model.marks import mark_description
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.viewer.schema import DescriptionRecord, EpisodeRecord, EpisodeSummary

# Number of significant digits in a record.
_DIGITS = 4


@dataclasses.dataclass(frozen=True)
class Played:
  """A rollout, and the place in a run that its records are listed under.

  Attributes:
    tokenizer: of the rollout; for speakers without tokens it counts the tokens of prompts.
    step: number of iterations behind the weights that played.
    split: 'train', 'val' or 'val-greedy'; 'random', 'solver' or 'endpoint' for speakers without tokens.
  """

  rollout: Rollout
  tokenizer: ChatTokenizer
  step: int
  split: str
  group_size: int


def first_rows(specs: list[EnvSpec], group_size: int, count: int, *, one_a_level: bool) -> list[int]:
  """The first rows of each environment in a batch, at most `count` of each, for the viewer; ascending.

  With `one_a_level`, only the first member of each group is taken, instead of whole groups.
  """
  rows, start = [], 0
  for spec in specs:
    end = start + spec.num_groups * group_size
    rows += list(range(start, end, group_size if one_a_level else 1))[:count]
    start = end
  return rows


def episode_records(
  played: Played,
  rows: Collection[int],
  *,
  reply_prefix: str = '',
  advantages: np.ndarray | None = None,
  learnt: np.ndarray | None = None,
  prompts_trained: bool = False,
  values: np.ndarray | None = None,
) -> list[EpisodeRecord]:
  """Makes records of some episodes of a speaker with tokens; JSON values except for the pictures.

  The joined pieces of a reply are the sampled reply, including its stop token. A reply that is not in the loss has no
  numbers.

  Args:
    advantages: f32[B, T], on the trajectory's columns; None in evaluations.
    learnt: bool[B], the rows that the update learnt from; None in evaluations.
    prompts_trained: whether the loss covers all tokens, instead of sampled tokens only.
    values: f32[B, T], the critic's values on the trajectory's columns; None without a critic. Values that the sampler
      did not record (`trajectory.values`) are valid in `learnt` rows only.
  """
  t, tokenizer, records = played.rollout.trajectory, played.tokenizer, []
  for index in rows:
    episode = played.rollout.episodes[index]
    own = np.flatnonzero((t.episode == index) & (t.length > 0))
    turns = []
    for i, turn in enumerate(episode.turns):
      row = int(own[(t.turn[own] == i).any(axis=1)][0])
      columns = np.flatnonzero(t.turn[row] == i)
      sampled = columns[t.loss_mask[row, columns]]
      in_loss = len(sampled) > 0
      if not in_loss:  # a reply that is context, such as that of an agent that is not trained
        sampled = columns[len(columns) - len(turn.ids) :]
      ids = t.tokens[row, sampled].tolist()
      prompt = tokenizer.decode(t.tokens[row, columns[: len(columns) - len(sampled)]])
      forced = reply_prefix if reply_prefix and prompt.endswith(reply_prefix) else ''
      numbers = {'logprob': t.logprobs, 'entropy': t.entropies} if in_loss else {}
      if in_loss and values is not None and (values is t.values or learnt is None or learnt[row]):
        numbers['value'] = values
      if in_loss and advantages is not None and (learnt is None or learnt[row]):
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
          **_outcome(turn),
        }
      )
    training = None if learnt is None else {'learnt': bool(learnt[own].any()), 'prompts_trained': prompts_trained}
    records.append(_record(played, index, turns, training))
  return records


def text_records(played: Played, rows: Collection[int], *, whole: bool) -> list[EpisodeRecord]:
  """Records of some pictured episodes of a speaker without tokens, see `episode_records`.

  With `whole`, each prompt continues the one before (full context), so that only the last message is new.
  """
  records = []
  for row in rows:
    turns = []
    for i, turn in enumerate(played.rollout.episodes[row].turns):
      fresh = not whole or i == 0
      new = turn.chat if fresh else turn.chat[-1:]
      turns.append(
        {
          'prompt': '\n\n'.join(f'[{message["role"]}]\n{message["content"]}' for message in new),
          'prompt_tokens': sum(len(played.tokenizer.encode(message['content'])) for message in new),
          'fresh': fresh,
          'forced': '',
          # The thought and the answer.
          'pieces': [piece for piece in re.split('(?<=</think>)', turn.reply) if piece],
          'tokens': turn.tokens,
          'closed': None,
          **_outcome(turn),
        }
      )
    records.append(_record(played, row, turns))
  return records


def _record(
  played: Played, row: int, turns: list[dict[str, Any]], training: dict[str, bool] | None = None
) -> EpisodeRecord:
  episode = played.rollout.episodes[row]
  summary = _summary(episode, played.step, played.split, row % played.group_size)
  end = {'final_observation': written(episode.final_observation), 'final_picture': episode.final_picture}
  return summary | (training or {}) | {'turns': turns} | end


def _outcome(turn: Turn) -> dict[str, Any]:
  """The part of a turn's record that is common to all speakers: the board, the outcome, and the descriptions."""
  paid = math.fsum((turn.reply_reward.format_reward, turn.reply_reward.state_reward))
  described, images = _descriptions(turn), images_of(turn.observation)
  return {
    **({'reply_reward': float(f'{paid:.{_DIGITS}g}')} if paid else {}),
    **({'descriptions': described} if described else {}),
    **({'images': images} if images else {}),
    **({'metrics': {name: float(f'{x:.{_DIGITS}g}') for name, x in turn.metrics.items()}} if turn.metrics else {}),
    'observation': written(turn.observation),
    'picture': turn.picture,
    'actions': list(turn.actions),
    'valid': turn.valid,
    'effective': int(turn.effective),
    'reward': turn.reward,
    'penalty': turn.penalty,
  }


def _descriptions(turn: Turn) -> list[DescriptionRecord]:
  """The descriptions of a turn's reply with the verdicts on their claims."""
  records = []
  for name, scene in zip((OBSERVATION, PREDICTION), turn.scenes or (), strict=False):
    if name not in turn.sections:
      continue
    text = turn.sections[name]
    marks, missing = mark_description(text, scene)
    parts, end = [], 0
    for mark in marks:
      parts += [
        (text[end : mark.claim.start], '', ''),
        (text[mark.claim.start : mark.claim.stop], mark.verdict, mark.truth),
      ]
      end = mark.claim.stop
    parts.append((text[end:], '', ''))
    numbers = [x.get(name) for x in (turn.reply_reward.scores, turn.reply_reward.rewards)]
    score, reward = (None if x is None else float(f'{x:.{_DIGITS}g}') for x in numbers)
    shown = [part for part in parts if part[0]]
    records.append(DescriptionRecord(section=name, score=score, reward=reward, parts=shown, missing=missing))
  return records


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
  """Scatters f32[B, R] back to the columns i32[B, R]: the inverse of `training.batches.at_columns`. Returns f32[B, T].

  Entries without mask are not used; other columns are 0. For instance [[5, 7, 0]] at columns [[2, 3, 1]] under [[1, 1,
  0]] becomes [[0, 0, 5, 7]] for a width T = 4.
  """
  out = np.zeros((len(values), width), np.float32)
  row, at = np.nonzero(mask)
  out[row, columns[row, at]] = np.asarray(values)[row, at]
  return out


def token_pieces(tokenizer: ChatTokenizer, ids: list[int]) -> list[str]:
  """The text of each token; the joined pieces are the text of all tokens.

  A character of several tokens belongs to the last of them; the pieces of the others are empty.
  """
  whole = tokenizer.decode(ids)
  pieces = tokenizer.decode_batch([[i] for i in ids])
  if ''.join(pieces) == whole:
    return pieces
  decoder = codecs.getincrementaldecoder('utf-8')('replace')
  last = len(ids) - 1
  pieces = [decoder.decode(tokenizer.token_bytes(id_), final=at == last) for at, id_ in enumerate(ids)]
  # Another decoder of bytes could write characters that are not valid otherwise.
  return pieces if ''.join(pieces) == whole else [*[''] * last, whole]


def _short(x: np.ndarray) -> list[float | None]:
  """The numbers with few digits; None for numbers that are not finite, because JSON does not have them."""
  return [float(f'{v:.{_DIGITS}g}') if np.isfinite(v) else None for v in x.tolist()]
