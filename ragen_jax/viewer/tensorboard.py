"""Episodes for TensorBoard, as text and as a strip of pictures.

TensorBoard shows Markdown. Texts of policies and environments are written so that none of them is read as Markdown or
as HTML: a transcript contains no link, no image and no markup but its own.
"""

from __future__ import annotations

import re

import numpy as np

from ragen_jax.agent.episode import Episode
from ragen_jax.agent.segments import images_of, written

_LINE_END = re.compile(r'\r\n|[\r\v\f\x1c-\x1e\x85\u2028\u2029]')
_CONTROL = re.compile(r'[\x00-\x08\x0e-\x1f\x7f-\x9f]')
_MARK = re.compile(r'[]!#$&*+<=>@[\\^_`{}~]')


def transcript(episode: Episode) -> str:
  """An episode as Markdown, for TensorBoard's text page."""
  ending = episode.status.name.lower().replace('_', ' ') + (f' ({_inline(episode.error)})' if episode.error else '')
  lines = [f'**{_inline(episode.tag)}**, level {episode.level_seed}: {ending}']
  for i, turn in enumerate(episode.turns):
    lines += [f'turn {i + 1}', _block(written(turn.observation)), _block(turn.reply)]
    executed = _inline(' || '.join(turn.actions)) or 'none'
    lines.append(f'carried out: {executed}; reward {turn.reward:g}, penalty {turn.penalty:g}')
    if turn.metrics:
      lines.append('reported: ' + ', '.join(f'{_inline(name)} {x:g}' for name, x in turn.metrics.items()))
    scores = [f'{name} {score:.2f}' for name, score in turn.reply_reward.scores.items()]
    if scores:
      lines.append(f'described: {", ".join(scores)}; state reward {turn.reply_reward.state_reward:.3g}')
  return '\n\n'.join([*lines, 'end', _block(written(episode.final_observation))])


def boards(episode: Episode, gap: int = 4) -> np.ndarray | None:
  """u8[H, W, 3], the boards of an episode side by side, `gap` white columns apart; None if it has no pictures.

  They are the images that the policy saw, or else pictures of the boards.
  """
  seen = [images_of(turn.observation) or [turn.picture] for turn in episode.turns]
  seen.append(images_of(episode.final_observation) or [episode.final_picture])
  drawn = [board for images in seen for board in images if board is not None]
  if not drawn:
    return None
  height = max(len(board) for board in drawn)
  parts = [np.pad(b, ((0, height - len(b)), (0, gap), (0, 0)), constant_values=255) for b in drawn]
  return np.concatenate(parts, axis=1)[:, :-gap]


def _block(text: str) -> str:
  """Text as it is, in lines of fixed width. Its marks are entities, so nothing ends the block."""
  return f'<pre>{_escape(text)}</pre>'


def _inline(text: str) -> str:
  return _escape(' '.join(text.split()))


def _escape(text: str) -> str:
  """Text in UTF-8 without control characters, with an entity for each mark that Markdown or HTML could read."""
  text = text.encode('utf-8', 'replace').decode()
  return _MARK.sub(lambda match: f'&#{ord(match[0])};', _CONTROL.sub('\ufffd', _LINE_END.sub('\n', text)))
