"""The learner a second time, in NumPy and float64: forward pass, loss of a mini-batch, AdamW.

It shares no code with the package and reads like the formulas: loops over tokens, every mean over a list. Tests compare
losses and metrics with it, and gradients with its finite differences.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


def softmax(x: np.ndarray) -> np.ndarray:
  e = np.exp(x - x.max(axis=-1, keepdims=True))
  return e / e.sum(axis=-1, keepdims=True)


# --- the model --------------------------------------------------------------------------------------------------------


def _norm(x, weight):
  return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * weight


def _rotate(x, theta):
  """Rotary embedding of [T, heads, H]: dimension i is paired with i + H/2."""
  half = x.shape[-1] // 2
  angle = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
  a, b = x[..., :half], x[..., half:]
  return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def hidden_states(weights: dict[str, Any], tokens: np.ndarray, theta: float) -> np.ndarray:
  """f64[T, D]: a Qwen2 decoder over one row, i32[T]."""
  x = weights['embed_tokens'][tokens]
  visible = np.tril(np.ones((len(tokens), len(tokens)), bool))
  for _, layer in sorted(weights['layers'].items()):
    of, y = layer['self_attn'], _norm(x, layer['input_layernorm']['weight'])
    q, k, v = (np.einsum('td,dnh->tnh', y, of[n]['kernel']) + of[n]['bias'] for n in ('q_proj', 'k_proj', 'v_proj'))
    q, k = _rotate(q, theta), _rotate(k, theta)
    mixed = np.zeros_like(q)
    for head in range(q.shape[1]):
      shared = head // (q.shape[1] // k.shape[1])
      scores = q[:, head] @ k[:, shared].T / np.sqrt(q.shape[-1])
      mixed[:, head] = softmax(np.where(visible, scores, -np.inf)) @ v[:, shared]
    x = x + np.einsum('tnh,nhd->td', mixed, of['o_proj']['kernel'])
    mlp, y = layer['mlp'], _norm(x, layer['post_attention_layernorm']['weight'])
    gate = y @ mlp['gate_proj']['kernel']
    x = x + (gate / (1 + np.exp(-gate)) * (y @ mlp['up_proj']['kernel'])) @ mlp['down_proj']['kernel']
  return _norm(x, weights['norm']['weight'])


# --- the loss of a mini-batch -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Token:
  """A scored token and all that the batch says of it."""

  episode: int
  row: int
  turn: int
  trained: bool
  valued: bool
  logprob: float
  entropy: float
  value: float
  old_logprob: float
  old_value: float
  advantage: float
  target: float
  ref_logprob: float
  importance: float


def score(weights, batch, rows, episode, *, theta, temperature, vocab_limit) -> list[Token]:
  """The tokens of some rows of a batch under `weights`, a nested dict of arrays."""
  found = []
  for row in rows:
    states = hidden_states(weights['policy'], batch.tokens[row], theta)
    of_critic = hidden_states(weights['critic'], batch.tokens[row], theta) if 'critic' in weights else states
    for i in np.flatnonzero(batch.mask[row]):
      column = batch.columns[row, i]
      logits = (weights['policy']['embed_tokens'] @ states[column - 1])[:vocab_limit] / temperature
      p = softmax(logits)
      found.append(
        Token(
          episode=int(episode[row]), row=int(row), turn=int(batch.turn[row, i]),
          trained=bool(batch.trained[row, i]), valued=bool(batch.valued[row, i]),
          logprob=float(np.log(p[batch.tokens[row, column]])), entropy=float(-(p * np.log(p)).sum()),
          value=float(of_critic[column - 1] @ weights['value_head']['kernel'] + weights['value_head']['bias']),
          old_logprob=float(batch.old_logprobs[row, i]), old_value=float(batch.old_values[row, i]),
          advantage=float(batch.advantages[row, i]), target=float(batch.returns[row, i]),
          ref_logprob=float(batch.ref_logprobs[row, i]), importance=float(batch.importance[row, i]),
        )
      )  # fmt: skip
  return found


def _same_ratio(a: Token, b: Token, level: str) -> bool:
  if level == 'token':
    return a is b
  return a.row == b.row and (level == 'sequence' or a.turn == b.turn)


def _kl(d: float, kind: str) -> float:
  return {'k1': d, 'abs': abs(d), 'k2': d * d / 2, 'k3': min(np.exp(-d) - 1 + d, 10.0)}[kind]


def _weight(token: Token, trained: list[Token], mode: str, norm_length: float) -> float:
  """1 over the tokens, or over the episodes and what stands below their sums."""
  if mode == 'token-mean':
    return 1 / len(trained)
  episodes = len({t.episode for t in trained})
  own = sum(t.episode == token.episode for t in trained)
  below = {'seq-mean-token-mean': own, 'seq-mean-token-sum': 1, 'seq-mean-token-sum-norm': norm_length}
  return 1 / (episodes * below[mode])


def value_loss(tokens: list[Token], clip: float) -> tuple[float, dict[str, float]]:
  """Half the clipped squared error, its mean over the valued tokens, and metrics."""
  losses, clipped = [], []
  valued = [t for t in tokens if t.valued]
  for t in valued:
    near = min(max(t.value, t.old_value - clip), t.old_value + clip)
    plain, other = (t.value - t.target) ** 2, (near - t.target) ** 2
    losses.append(max(plain, other) / 2)
    clipped.append(other > plain)
  return float(np.mean(losses)), {
    'critic/vf_loss': np.mean(losses),
    'critic/vf_clipfrac': np.mean(clipped),
    'critic/vpred_mean': np.mean([t.value for t in valued]),
  }


def value_unit(batch) -> float:
  """The mean square of the returns, or of the old values, of the valued tokens of all rows; at least 0.01."""
  means = []
  for of in (batch.returns, batch.old_values):
    squares = [float(x) ** 2 for x, valued in zip(of.flat, batch.valued.flat, strict=True) if valued]
    means.append(sum(squares) / len(squares))
  return max(*means, 0.01)


def loss(
  tokens: list[Token], base: list[Token], *, low, high, dual, level, kl_coef, kl_kind, value_clip, value_coef,
  entropy_coef, mode, norm_length,
) -> tuple[float, dict[str, float], list[float]]:  # fmt: skip
  """The loss of a mini-batch, its metrics, and the ratios of the trained tokens.

  A ratio over several tokens has the value of their mean, and in each token's loss the gradient of that token alone. So
  the other tokens enter by their numbers at the point of the derivative, `base`, in the order of `tokens`.
  """
  trained = [t for t in tokens if t.trained]
  at = [b for b in base if b.trained]
  moved = [b.logprob - b.old_logprob for b in at]
  total, ratios, of = 0.0, [], []
  for t, b, d in zip(trained, at, moved, strict=True):
    span = np.mean([x for o, x in zip(at, moved, strict=True) if _same_ratio(o, b, level)])
    ratio = np.exp(span - d + (t.logprob - t.old_logprob))
    plain, clipped = -t.advantage * ratio, -t.advantage * min(max(ratio, 1 - low), 1 + high)
    surrogate = max(plain, clipped)
    lower = t.advantage < 0 and surrogate > -t.advantage * dual
    surrogate = -t.advantage * dual if lower else surrogate
    of.append(
      {
        'weight': _weight(t, trained, mode, norm_length),
        'actor/pg_loss': surrogate * t.importance,
        'actor/entropy': t.entropy,
        'actor/kl_loss': _kl(t.logprob - t.ref_logprob, kl_kind),
        'actor/pg_clipfrac': clipped > plain,
        'actor/pg_clipfrac_lower': lower,
        'actor/ppo_kl': t.old_logprob - t.logprob,
        'actor/logprob_gap_mean': abs(t.logprob - t.old_logprob),
      }
    )
    ratios.append(ratio)
  sums = {name: sum(x['weight'] * x[name] for x in of) for name in of[0] if name != 'weight'}
  of_values, metrics = value_loss(tokens, value_clip)
  total = sums['actor/pg_loss'] - entropy_coef * sums['actor/entropy'] + kl_coef * sums['actor/kl_loss']
  # Means over trained tokens have the tokens' weights, but are means under every aggregation.
  means = {name: x / sum(y['weight'] for y in of) for name, x in sums.items() if name != 'actor/pg_loss'}
  means['actor/pg_loss'] = sums['actor/pg_loss']
  means['actor/logprob_gap_max'] = max(abs(t.logprob - t.old_logprob) for t in tokens)
  return total + value_coef * of_values, means | metrics, ratios


# --- the step ---------------------------------------------------------------------------------------------------------


class AdamW:
  """AdamW of one part of the weights, leaves by name; the parts of a model count their own steps."""

  def __init__(self, *, lr, warmup_steps, decay_steps, final_lr_fraction, b1, b2, weight_decay, decayed):
    self.schedule = lr, warmup_steps, decay_steps, final_lr_fraction
    self.betas, self.weight_decay, self.decayed = (b1, b2), weight_decay, decayed
    self.steps, self.moments = 0, {}

  def __call__(self, weights: dict[str, np.ndarray], gradients: dict[str, np.ndarray], scale: float):
    """The weights after a step whose learning rate has the factor `scale`."""
    lr, warmup, decay, least = self.schedule
    n, (b1, b2), after = self.steps, self.betas, {}
    rate = lr * min(1, (n + 1) / warmup) * (1 + (least - 1) * min(1, n / decay)) * scale
    for name, g in gradients.items():
      first, second = self.moments.get(name, (0.0, 0.0))
      first, second = b1 * first + (1 - b1) * g, b2 * second + (1 - b2) * g**2
      self.moments[name] = first, second
      direction = first / (1 - b1 ** (n + 1)) / (np.sqrt(second / (1 - b2 ** (n + 1))) + 1e-8)
      after[name] = weights[name] - rate * (direction + self.weight_decay * self.decayed(name) * weights[name])
    self.steps += 1
    return after


def norm(gradients: dict[str, np.ndarray]) -> float:
  """The global norm of some leaves."""
  return float(np.sqrt(sum((g**2).sum() for g in gradients.values())))


def sampled_in_turn(rollout, index, turn):
  """(row, columns) of what the policy sampled in a turn of an episode, by a loop over all tokens."""
  t = rollout.trajectory
  found = [
    (row, column)
    for row in range(len(t.length))
    if t.episode[row] == index
    for column in range(t.length[row])
    if t.turn[row, column] == turn and t.loss_mask[row, column]
  ]
  assert len({row for row, _ in found}) == 1
  return found[0][0], [column for _, column in found]
