"""What a batch of episodes amounts to, under the names that RAGEN's users know."""

from __future__ import annotations

import numpy as np

from ragen_jax.agent.episode import TRUNCATED, Episode, Status


def episode_metrics(episodes: list[Episode], group_size: int, prefix: str) -> dict[str, float]:
  """Means over episodes, for each environment tag.

  Args:
    episodes: groups contiguous.
    group_size: G.
    prefix: 'train' or 'val-env'.

  Returns:
    `<prefix>/<tag>/success`, `.../pass@G`, `.../score` (with penalties), `.../episodic_return` (without),
    `.../num_actions`, `.../num_turns`, `.../action_is_valid` and `.../action_is_effective` (shares of turns and of
    actions), `.../truncated` (share that ran out of turns, actions or context), and, for environments outside JAX and
    wherever there are any, `.../env_errors` (share of episodes that ended because their environment failed).
  """
  metrics = {}
  for tag in dict.fromkeys(e.tag for e in episodes):
    own = [e for e in episodes if e.tag == tag]
    turns = [t for e in own for t in e.turns]
    success = np.asarray([e.success for e in own])
    actions = sum(len(t.actions) for t in turns)
    name = f'{prefix}/{tag}'
    metrics[f'{name}/success'] = float(success.mean())
    metrics[f'{name}/pass@{group_size}'] = float(success.reshape(-1, group_size).any(axis=1).mean())
    metrics[f'{name}/score'] = float(np.mean([e.score for e in own]))
    metrics[f'{name}/episodic_return'] = float(np.mean([e.env_return for e in own]))
    metrics[f'{name}/num_actions'] = actions / len(own)
    metrics[f'{name}/num_turns'] = len(turns) / len(own)
    metrics[f'{name}/action_is_valid'] = float(np.mean([t.valid for t in turns])) if turns else 0.0
    metrics[f'{name}/action_is_effective'] = sum(t.effective for t in turns) / max(actions, 1)
    metrics[f'{name}/truncated'] = float(np.mean([e.status in TRUNCATED for e in own]))
    errors = float(np.mean([e.status == Status.ENV_ERROR for e in own]))
    if own[0].outside or errors:
      metrics[f'{name}/env_errors'] = errors
  return metrics


def transcript(episode: Episode) -> str:
  """An episode as Markdown, for TensorBoard."""
  ending = episode.status.name.lower().replace('_', ' ') + (f' ({episode.error})' if episode.error else '')
  lines = [f'**{episode.tag}**, level {episode.level_seed}: {ending}']
  for i, turn in enumerate(episode.turns):
    lines += [f'turn {i + 1}', _code(turn.observation), _code(turn.reply)]
    carried = ' || '.join(turn.actions) or 'none'
    lines.append(f'carried out: {carried}; reward {turn.reward:g}, penalty {turn.penalty:g}')
  return '\n\n'.join([*lines, 'end', _code(episode.final_observation)])


def boards(episode: Episode, gap: int = 4) -> np.ndarray | None:
  """An episode's boards side by side, u8[H, W, 3], `gap` white columns between them; None where none was drawn."""
  drawn = [turn.picture for turn in episode.turns] + [episode.final_picture]
  drawn = [board for board in drawn if board is not None]
  if not drawn:
    return None
  height = max(len(board) for board in drawn)
  parts = [np.pad(b, ((0, height - len(b)), (0, gap), (0, 0)), constant_values=255) for b in drawn]
  return np.concatenate(parts, axis=1)[:, :-gap]


def _code(text: str) -> str:
  return '\n'.join('    ' + line for line in text.split('\n'))
