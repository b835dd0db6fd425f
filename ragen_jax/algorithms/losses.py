"""Losses per token, and the weights of tokens in the total.

Every loss is an array [B, T]. `token_weights` turns the mask of the *global* batch into weights [B, T] that include the
global denominator, so that

    loss = sum over micro-batches, shards and rows of  sum(weights * per_token_loss)

does not depend on the split. Compute the weights once for the whole batch of an optimiser step, slice them with the
rows, and sum gradients.

Entries outside the mask are replaced before any arithmetic, so infinities and NaN there cannot reach a gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ragen_jax.algorithms import masks

AGGREGATIONS = ('token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum', 'seq-mean-token-sum-norm')
POLICY_LOSSES = ('ppo', 'cispo', 'dppo_tv', 'dppo_kl', 'sapo', 'dro')
RATIO_LEVELS = ('token', 'sequence', 'turn')
KL_KINDS = ('k1', 'abs', 'k2', 'k3')
MAX_LOG_RATIO = 20.0  # log-ratios are clipped to this absolute value before they are exponentiated
MAX_K3 = 10.0  # upper limit of the k3 estimate


# --- aggregation ------------------------------------------------------------------------------------------------------


def token_weights(
  mask: jax.Array, mode: str, *, sequence: jax.Array | None = None, norm_length: float | None = None
) -> jax.Array:
  """The weight f32[B, T] of each token in the loss, from the whole batch of an optimiser step; 0 outside the mask.

  With n tokens in total, S sequences that have any, and n_s tokens in sequence s:

    'token-mean'               1 / n             all tokens weigh the same
    'seq-mean-token-mean'      1 / (S n_s)       all sequences weigh the same (GRPO, GSPO)
    'seq-mean-token-sum'       1 / S             sequences weigh in proportion to their length
    'seq-mean-token-sum-norm'  1 / (S L)         the same divided by a constant L (Dr. GRPO)

  Args:
    mask: bool[B, T], the trained tokens of all micro-batches and devices.
    sequence: the sequence of each row, i32[B], or of each token if rows are packed, i32[B, T]; None if every row is
      its own sequence.
    norm_length: L in tokens, a constant of the run such as the length limit of replies; for 'seq-mean-token-sum-norm'.

  Raises:
    ValueError: the mode is unknown, or L is missing or not positive.

  Source: DAPO, arXiv 2503.14476, section 3.3 (token mean); Dr. GRPO, arXiv 2503.20783, section 3.1 (constant L).
  """
  if mode not in AGGREGATIONS:
    raise ValueError(f'algorithm.loss_agg_mode is {mode!r}; it may be one of {", ".join(AGGREGATIONS)}')
  if mode == 'token-mean':
    return mask / jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
  lengths, sequences = _sequence_lengths(mask, sequence)
  if mode == 'seq-mean-token-mean':
    return mask / (sequences * lengths)
  if mode == 'seq-mean-token-sum':
    return mask / sequences
  if norm_length is None or norm_length <= 0:
    raise ValueError(f'algorithm.loss_norm_length is {norm_length}; {mode!r} needs a positive number of tokens')
  return mask / (sequences * norm_length)


def _sequence_lengths(mask: jax.Array, sequence: jax.Array | None) -> tuple[jax.Array, jax.Array]:
  """Length of each token's sequence, f32[B, T] or [B, 1], and the number of sequences, f32[]; both at least 1."""
  if sequence is None:
    lengths = jnp.sum(mask, axis=-1, keepdims=True)
    sequences = jnp.sum(lengths > 0)
  else:
    ids = sequence[:, None] if sequence.ndim == 1 else sequence
    ids = jnp.broadcast_to(ids, mask.shape).ravel()
    _, dense = jnp.unique(ids, return_inverse=True, size=ids.size)
    counts = jax.ops.segment_sum(mask.ravel().astype(jnp.int32), dense.ravel(), num_segments=ids.size)
    lengths, sequences = counts[dense.ravel()].reshape(mask.shape), jnp.sum(counts > 0)
  return jnp.maximum(lengths, 1).astype(jnp.float32), jnp.maximum(sequences, 1).astype(jnp.float32)


def aggregate(per_token: jax.Array, weights: jax.Array) -> jax.Array:
  """sum(weights * per_token): f32[]. Entries with weight 0 are not read and may be infinite or NaN."""
  used = weights != 0
  return jnp.sum(jnp.where(used, per_token, 0.0) * weights)


# --- policy -----------------------------------------------------------------------------------------------------------


def policy_loss(
  logprobs: jax.Array,
  old_logprobs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  policy_loss: str,
  clip_ratio_low: float,
  clip_ratio_high: float,
  clip_ratio_c: float | None,
  ratio_level: str,
  tau_pos: float,
  tau_neg: float,
  dro_beta: float,
  turn: jax.Array | None = None,
  sequence: jax.Array | None = None,
  importance_weights: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The loss of the policy per token.

  With p = exp(logprobs), q = exp(old_logprobs) and rho = exp(clip(logprobs - old_logprobs, +-20)):

    'ppo'      max(-A rho, -A clip(rho, 1 - low, 1 + high)), limited to -A c if A < 0
    'cispo'    -A sg(clip(rho, 1 - low, 1 + high)) log p; sg stops the gradient, and low = 1 is no lower bound
    'dppo_tv'  -A rho, or 0 if D > high, rho > 1 and A > 0, or if D > low, rho < 1 and A < 0, where D = |q - p|
    'dppo_kl'  the same with D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))
    'sapo'     -A (4 / tau) sigmoid(tau (rho - 1)), where tau is tau_pos if A > 0, else tau_neg
    'dro'      -A log p + (beta / 2) (log p - log q)^2

  With `ratio_level` 'sequence', rho is the geometric mean of the token ratios over the tokens of the row in the mask;
  with 'turn', over those of the token's turn. All tokens share its value, and each token contributes its own gradient.
  With 'seq-mean-token-mean' and one advantage per sequence this gives the gradient of GSPO: the sum over the tokens of
  a sequence, divided by their number, is the gradient of its mean log-ratio.

  Args:
    advantages: f32[B, T]; no gradient flows through them.
    mask: bool[B, T], trained tokens.
    clip_ratio_low, clip_ratio_high: limits of the ratio below and above 1; in DPPO, of the divergence.
    clip_ratio_c: bound c of PPO's dual clip, above 1; None switches it off.
    ratio_level: one of `RATIO_LEVELS`; 'token' in losses other than 'ppo'.
    turn: i32[B, T], turn index; required for 'turn'. In packed rows, neighbouring sequences have different indices.
    sequence: i32[B, T], the sequence of each token in packed rows, for 'sequence'; None if every row is one.
    importance_weights: f32[B, T], factors of the loss such as `truncated_importance_weights`; no gradient through them.

  Returns:
    The loss f32[B, T], and statistics f32[B, T] to be averaged over the mask: `clipfrac` (1 where the clipped term of
    'ppo' is larger, 'cispo' clips or DPPO masks), `clipfrac_lower` (1 where the dual clip acts), `approx_kl` (old - new
    log-prob), `ratio`. All 0 outside the mask.

  Raises:
    ValueError: the loss or the ratio level is unknown, or they do not go together; `turn` is missing, or c is not
      above 1.

  Source: PPO, arXiv 1707.06347, eq. 7; dual clip, Ye et al. 2019, arXiv 1912.09729; clip-higher, DAPO, arXiv
  2503.14476, section 3.1; GSPO, arXiv 2507.18071, section 4.1, and its token form, section 4.3. CISPO, MiniMax-M1,
  arXiv 2506.13585, eq. 4 and 5. DPPO, "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv 2602.04879,
  eq. 12 to 14, with a threshold for each sign of the advantage. SAPO, "Soft Adaptive Policy Optimization", arXiv
  2511.20347. DRO, "Offline Regularised Reinforcement Learning for LLMs Alignment", arXiv 2405.19107, eq. 4: this is its
  gradient for the policy, divided by beta, with A for r - V, and for each token instead of the sum over a sequence.
  """
  if policy_loss not in POLICY_LOSSES:
    raise ValueError(f'algorithm.policy_loss is {policy_loss!r}; it may be one of {", ".join(POLICY_LOSSES)}')
  if policy_loss != 'ppo' and ratio_level != 'token':
    raise ValueError(f"algorithm.ratio_level is {ratio_level!r}; algorithm.policy_loss={policy_loss!r} needs 'token'")
  if ratio_level not in RATIO_LEVELS:
    raise ValueError(f'algorithm.ratio_level is {ratio_level!r}; it may be one of {", ".join(RATIO_LEVELS)}')
  if ratio_level == 'turn' and turn is None:
    raise ValueError("algorithm.ratio_level 'turn' needs the turn indices")
  if clip_ratio_c is not None and clip_ratio_c <= 1.0:
    raise ValueError(f'algorithm.clip_ratio_c is {clip_ratio_c}; it must be above 1, or None for no dual clip')

  advantages = jax.lax.stop_gradient(jnp.where(mask, advantages, 0.0))
  log_ratio = jnp.where(mask, logprobs - jax.lax.stop_gradient(old_logprobs), 0.0)
  own = log_ratio
  if ratio_level != 'token':
    spans = turn if ratio_level == 'turn' else sequence
    mean = _row_mean(log_ratio, mask) if spans is None else _span_mean(log_ratio, mask, spans)
    # The value of the mean, with the gradient of the token.
    log_ratio = jnp.where(mask, jax.lax.stop_gradient(mean - own) + own, 0.0)
  ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))

  plain = -advantages * ratio
  bounded = jnp.clip(ratio, 1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
  logprobs = jnp.where(mask, logprobs, 0.0)
  clipped = jnp.zeros_like(mask)
  if policy_loss == 'ppo':
    cut = -advantages * bounded
    loss, clipped = jnp.maximum(plain, cut), cut > plain
  elif policy_loss == 'cispo':
    loss = -advantages * jax.lax.stop_gradient(bounded) * logprobs
    clipped = bounded != ratio
  elif policy_loss == 'sapo':
    tau = jnp.where(advantages > 0, tau_pos, tau_neg)
    loss = -advantages * (4.0 / tau) * jax.nn.sigmoid(tau * (ratio - 1.0))
  elif policy_loss == 'dro':
    loss = -advantages * logprobs + 0.5 * dro_beta * log_ratio**2
  else:
    divergence = _binary_divergence(policy_loss, jnp.where(mask, old_logprobs, 0.0), logprobs)
    up = (advantages > 0) & (ratio > 1) & (divergence > clip_ratio_high)
    clipped = up | (advantages < 0) & (ratio < 1) & (divergence > clip_ratio_low)
    loss = jnp.where(clipped, 0.0, plain)
  stats = {'clipfrac': clipped, 'approx_kl': -own, 'ratio': ratio}
  stats['clipfrac_lower'] = jnp.zeros_like(mask)
  if policy_loss == 'ppo' and clip_ratio_c is not None:
    bound = -advantages * clip_ratio_c
    stats['clipfrac_lower'] = (advantages < 0) & (loss > bound)
    loss = jnp.where(advantages < 0, jnp.minimum(loss, bound), loss)
  if importance_weights is not None:
    loss = loss * jax.lax.stop_gradient(jnp.where(mask, importance_weights, 0.0))
  stats = {key: jax.lax.stop_gradient(jnp.where(mask, x, 0).astype(jnp.float32)) for key, x in stats.items()}
  return jnp.where(mask, loss, 0.0), stats


def _binary_divergence(policy_loss: str, old_logprobs: jax.Array, logprobs: jax.Array) -> jax.Array:
  """DPPO's divergence of the distributions over 'the token' and 'another token': f32[B, T], without gradient."""
  # Below 0, or the logarithm of another token's probability is not finite.
  log_q, log_p = (jnp.minimum(jax.lax.stop_gradient(x), -1e-7) for x in (old_logprobs, logprobs))
  if policy_loss == 'dppo_tv':
    return jnp.abs(jnp.exp(log_q) - jnp.exp(log_p))
  other_q, other_p = (jnp.log(-jnp.expm1(x)) for x in (log_q, log_p))
  return jnp.exp(log_q) * (log_q - log_p) + jnp.exp(other_q) * (other_q - other_p)


def _row_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Mean of x over the mask of each row: f32[B, 1]. x must be 0 outside the mask."""
  return jnp.sum(x, axis=-1, keepdims=True) / jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)


def _span_mean(x: jax.Array, mask: jax.Array, spans: jax.Array) -> jax.Array:
  """Mean of x over the mask of each token's turn or sequence, by differences of running sums: f32[B, T]."""
  columns = x.shape[-1]
  ends = masks.turn_ends(mask, spans)
  at = jnp.arange(columns)
  end = jax.lax.cummin(jnp.where(ends, at, columns - 1), axis=x.ndim - 1, reverse=True)  # of the token's span
  last = jax.lax.cummax(jnp.where(ends, at, -1), axis=x.ndim - 1)
  before = jnp.concatenate([jnp.full_like(last[..., :1], -1), last[..., :-1]], axis=-1)  # of the previous span

  def over_span(y):
    total = jnp.cumsum(y, axis=-1)
    earlier = jnp.where(before >= 0, jnp.take_along_axis(total, jnp.maximum(before, 0), axis=-1), 0)
    return jnp.take_along_axis(total, end, axis=-1) - earlier

  return over_span(x) / jnp.maximum(over_span(mask.astype(jnp.int32)), 1)


def truncated_importance_weights(
  trainer_logprobs: jax.Array, sampler_logprobs: jax.Array, mask: jax.Array, cap: float
) -> jax.Array:
  """min(p_trainer / p_sampler, cap) per token: f32[B, T], 0 outside the mask of sampled tokens, without gradient.

  It corrects differences between sampler and trainer; the log-probs f32[B, T] of the trainer are under the weights that
  the tokens were sampled with.

  Raises:
    ValueError: the cap is not positive.

  Source: truncated importance sampling, Ionides 2008; for sampler and trainer, Yao et al. 2025, "Your efficient RL
  framework secretly brings you off-policy RL training".
  """
  if cap <= 0:
    raise ValueError(f'algorithm.tis_cap is {cap}; it must be positive')
  gap = jnp.where(mask, trainer_logprobs - sampler_logprobs, 0.0)
  weights = jnp.exp(jnp.clip(gap, -MAX_LOG_RATIO, MAX_LOG_RATIO))
  return jax.lax.stop_gradient(jnp.where(mask, jnp.minimum(weights, cap), 0.0))


def kl_penalty(logprobs: jax.Array, ref_logprobs: jax.Array, mask: jax.Array, kind: str) -> jax.Array:
  """Estimates KL(policy || reference) per sampled token in nats: f32[B, T], 0 outside the mask.

  With d = logprobs - ref_logprobs: 'k1' is d, 'abs' |d|, 'k2' d^2 / 2, and 'k3' exp(-d) + d - 1 with d clipped to +-20
  and the result to 10 (low variance, never negative).

  As a loss, only 'k2' has the gradient of the KL divergence in expectation; the expected gradient of 'k1' is 0.

  Raises:
    ValueError: the kind is unknown.

  Source: Schulman 2020, "Approximating KL divergence".
  """
  if kind not in KL_KINDS:
    raise ValueError(f'algorithm.kl_kind is {kind!r}; it may be one of {", ".join(KL_KINDS)}')
  d = jnp.where(mask, logprobs - ref_logprobs, 0.0)
  if kind == 'k1':
    return d
  if kind == 'abs':
    return jnp.abs(d)
  if kind == 'k2':
    return 0.5 * d**2
  d = jnp.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  return jnp.minimum(jnp.expm1(-d) + d, MAX_K3)


def token_logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
  """Log-probs of tokens: logits f32[..., V], tokens i32[...] -> f32[...]."""
  logits = logits.astype(jnp.float32)
  chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
  return chosen - jax.nn.logsumexp(logits, axis=-1)


def token_entropy(logits: jax.Array) -> jax.Array:
  """Entropies of distributions in nats: logits f32[..., V] -> f32[...]. Logits may be -inf."""
  logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
  finite = jnp.isfinite(logprobs)
  return -jnp.sum(jnp.where(finite, jnp.exp(logprobs) * jnp.where(finite, logprobs, 0.0), 0.0), axis=-1)


# --- critic -----------------------------------------------------------------------------------------------------------


def value_loss(
  values: jax.Array, returns: jax.Array, old_values: jax.Array, mask: jax.Array, *, clip: float | None
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Clipped squared error of the critic per token: 1/2 max((V - R)^2, (V_old + clip(V - V_old, +-clip) - R)^2).

  Arrays are [B, T]; the mask has the tokens on which the critic is trained (`Advantages.value_mask`). `old_values` are
  those before the update. No gradient flows through returns. `clip` None switches clipping off. The statistic
  `clipfrac` is 1 where a clipped value has the larger error.

  Source: the critic of OpenAI's PPO implementation, as RAGEN uses it.
  """
  returns = jax.lax.stop_gradient(jnp.where(mask, returns, 0.0))
  values = jnp.where(mask, values, 0.0)
  plain = (values - returns) ** 2
  if clip is None:
    return jnp.where(mask, 0.5 * plain, 0.0), {'clipfrac': jnp.zeros_like(plain)}
  old_values = jax.lax.stop_gradient(jnp.where(mask, old_values, 0.0))
  change = values - old_values
  clipped = (old_values + jnp.clip(change, -clip, clip) - returns) ** 2
  loss = jnp.where(mask, 0.5 * jnp.maximum(plain, clipped), 0.0)
  # Within the bounds, the two errors differ by rounding only.
  larger = mask & (jnp.abs(change) > clip) & (clipped > plain)
  return loss, {'clipfrac': jax.lax.stop_gradient(larger.astype(jnp.float32))}


def explained_variance(values: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
  """1 - Var(R - V) / Var(R) over the mask, f32[]: 1 for a perfect critic, 0 for a constant one or constant returns."""
  variance = masks.masked_variance(returns, mask)
  explained = 1.0 - masks.masked_variance(returns - values, mask) / jnp.where(variance > 0, variance, 1.0)
  return jnp.where(variance > 0, explained, 0.0)
