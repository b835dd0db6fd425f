"""Episodes for TensorBoard, as text and as a strip of pictures."""

from __future__ import annotations

import numpy as np

from ragen_jax.agent.episode import Episode
from ragen_jax.agent.segments import images_of, written


def transcript(episode: Episode) -> str:
  """An episode as Markdown, for TensorBoard's text page."""
  ending = episode.status.name.lower().replace('_', ' ') + (f' ({episode.error})' if episode.error else '')
  lines = [f'**{episode.tag}**, level {episode.level_seed}: {ending}']
  for i, turn in enumerate(episode.turns):
    lines += [f'turn {i + 1}', _code(written(turn.observation)), _code(turn.reply)]
    executed = ' || '.join(turn.actions) or 'none'
    lines.append(f'carried out: {executed}; reward {turn.reward:g}, penalty {turn.penalty:g}')
    scores = [f'{name} {score:.2f}' for name, score in turn.reply_reward.scores.items()]
    if scores:
      lines.append(f'described: {", ".join(scores)}; state reward {turn.reply_reward.state_reward:.3g}')
  return '\n\n'.join([*lines, 'end', _code(written(episode.final_observation))])


def boards(episode: Episode, gap: int = 4) -> np.ndarray | None:
  """The boards of an episode side by side: the images that the policy saw, or else pictures of the boards.

  Args:
    episode: the episode with the pictures of its turns.
    gap: white columns between two pictures.

  Returns:
    u8[H, W, 3]; None if the episode has no pictures.
  """
  seen = [images_of(turn.observation) or [turn.picture] for turn in episode.turns]
  seen.append(images_of(episode.final_observation) or [episode.final_picture])
  drawn = [board for images in seen for board in images if board is not None]
  if not drawn:
    return None
  height = max(len(board) for board in drawn)
  parts = [np.pad(b, ((0, height - len(b)), (0, gap), (0, 0)), constant_values=255) for b in drawn]
  return np.concatenate(parts, axis=1)[:, :-gap]


def _code(text: str) -> str:
  """A Markdown block of code."""
  return '\n'.join('    ' + line for line in text.split('\n'))
