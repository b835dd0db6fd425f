"""Breaks the program on purpose, one place at a time, and shows that each break fails a test.

  python benchmarks/mutants.py                        # all; about two hours on 2 cores
  python benchmarks/mutants.py --only=losses --jobs=1 # breaks whose file or text contains 'losses'
  python benchmarks/mutants.py --check                # only checks that every break can still be made

A break (a mutation, as in mutation testing) replaces one piece of text of a module by another: a sign, a bound, a mask,
an argument. It is made in a copy of the repository, and the tests named for it run there, slow ones too. The break is
'killed' if a test fails. A break that survives needs a new test, because no test would notice such a mistake. A break
whose text does not occur exactly once is refused, so that a change of the code cannot make it obsolete unnoticed.

The exit status is 1 if a break survives, or if a test fails without a break.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / 'ragen_jax'
RESULT = ROOT / 'benchmarks' / 'results' / 'mutants.json'
COPIED = (
  'ragen_jax', 'tests', 'configs', 'docs', 'launch', 'benchmarks', 'pyproject.toml', 'main.py', 'README.md',
  'CHANGELOG.md', *sorted(path.name for path in ROOT.glob('requirements*')),
)  # fmt: skip
SECONDS = 900  # for the tests of one break; a break may also make a program run forever


@dataclasses.dataclass(frozen=True)
class Mutation:
  """A break.

  Attributes:
    file: path relative to `ragen_jax`.
    old: the replaced text, which occurs exactly once in the file.
    new: the text that replaces it.
    tests: the tests that should fail, as arguments of pytest relative to `tests`.
  """

  file: str
  old: str
  new: str
  tests: tuple[str, ...]

  @property
  def name(self) -> str:
    """The file and the replacement, in one line."""
    old, new = (re.sub(r'\s+', ' ', x) for x in (self.old, self.new))
    return f'{self.file}: {old} -> {new or "(nothing)"}'

  def applied(self) -> str:
    """The text of the broken file.

    Raises:
      ValueError: the old text does not occur exactly once, or the new text equals it.
    """
    text = (PACKAGE / self.file).read_text()
    if text.count(self.old) != 1:
      raise ValueError(f'{self.name}: the text to replace is found {text.count(self.old)} times; it must be once')
    if self.old == self.new:
      raise ValueError(f'{self.name}: nothing would change')
    return text.replace(self.old, self.new)


def _of(file: str, tests: str, *breaks: tuple[str, str] | tuple[str, str, str]) -> list[Mutation]:
  """The breaks (old, new) of a file, which `tests` should kill; a third entry of a break names other tests."""
  return [Mutation(file, old, new, tuple((other[0] if other else tests).split())) for old, new, *other in breaks]


_OBJECTIVE = 'training/test_objective.py'
_PACKING = 'training/test_packing.py::test_'
_GRADIENT = f'{_OBJECTIVE}::test_loss_metrics_and_gradient_are_those_of_the_plain_form'
_STEPS = f'{_OBJECTIVE}::test_steps_are_adamw_with_two_schedules'
_WARM_UP = f'{_OBJECTIVE}::test_the_critic_s_warm_up_has_no_gradient_in_the_policy'
_HOSTILE = 'whole/test_hostile_text.py::test_no_text_breaks_a_property'
_LIES = 'whole/test_lies.py::test_'

MUTATIONS = [
  *_of(
    'training/objective.py', _GRADIENT,
    ('loss = loss + s.kl_loss_coef * kl', 'loss = loss - s.kl_loss_coef * kl'),
    ('importance_weights=batch.importance,', 'importance_weights=None,'),
    ('losses.aggregate(value, batch.value_weights)', 'losses.aggregate(value, batch.weights)'),
    ('ratio_level=s.ratio_level,', "ratio_level='token',"),
    ('- s.entropy_coef * entropy', '+ s.entropy_coef * entropy'),
    ('    batch.trained,\n    clip_ratio_low', '    batch.mask,\n    clip_ratio_low'),
    ('clip_ratio_low=s.clip_ratio_low', 'clip_ratio_low=s.clip_ratio_high'),
    ('clip=settings.value_clip)', 'clip=None)'),
    ('loss = loss + s.value_coef * vf_loss', 'loss = loss + vf_loss'),
    ("_token_weights(valued, mode='token-mean')", "_token_weights(trained, mode='token-mean')"),
    ("several = settings.loss_agg_mode != 'token-mean' and", 'several = False and'),
    ('means[name] / whole for name in', 'means[name] for name in'),
    ('freeze_policy=True, images', 'freeze_policy=False, images', _WARM_UP),
    ('return settings.value_coef * vf_loss', 'return vf_loss', _WARM_UP),
  ),
  *_of(
    'training/objective.py', _PACKING + 'packing_changes_neither_loss_nor_gradient',
    ('batch.columns, axis=1) if packed else None', 'batch.columns, axis=1) if False else None'),
  ),
  *_of(
    'training/scoring.py', _GRADIENT,
    ('module.policy.logits(hidden) / settings.temperature', 'module.policy.logits(hidden)'),
    ('rest).logits(hidden) / settings.temperature', 'rest).logits(hidden)'),
    ('(columns - 1)[:, :, None]', 'columns[:, :, None]'),
    ('settings.vocab_limit, settings.banned, -jnp.inf)', '0, (), -jnp.inf)'),
    ('settings.vocab_limit, settings.banned, _IMPOSSIBLE)', '0, (), _IMPOSSIBLE)'),
    ('jnp.moveaxis(x, 0, 2).reshape(b, -1)[:, :r]', 'x.reshape(b, -1)[:, :r]'),
    ('(module.policy, POLICY) if module.critic is None else', '(module.policy, POLICY) if True else', _WARM_UP),
    ('jax.lax.stop_gradient(hidden) if freeze_policy', 'hidden if freeze_policy', _WARM_UP),
  ),
  *_of(
    'training/optimizer.py', _STEPS,
    ('(step + 1) / s.warmup_steps', 'step / s.warmup_steps'),
    ('1.0 - (1.0 - s.final_lr_fraction) *', '1.0 -'),
    ("x.ndim >= 2 and 'bias'", "x.ndim >= 1 and 'bias'"),
    ("x.ndim >= 2 and 'bias' not in jax.tree_util.keystr(path[-2:])", 'x.ndim >= 2'),
    ('optax.chain(clip_by_norm(s.grad_clip, of), update) if s.separate_critic else update', 'update'),
    ('optax.identity() if s.separate_critic else clip', 'clip'),
    ('jnp.where(norm < max_norm, g,', 'jnp.where(norm > max_norm, g,'),
    ('norm.astype(g.dtype)', 'norm', 'training/test_optimizer.py'),
    ('s.decay_steps - s.critic_steps', 's.decay_steps'),
    ('adamw(s.critic_lr, s.decay_steps,', 'adamw(s.actor_lr, s.decay_steps,'),
    ('weight_decay=s.weight_decay', 'weight_decay=0.0'),
    ('b1=s.b1, b2=s.b2', 'b1=s.b2, b2=s.b1'),
  ),
  *_of(
    'training/learner.py', _STEPS,
    ('jax.tree.map(jnp.add, gradients, self._divided(new))', 'self._divided(new)', _GRADIENT),
    ('found[name] + x if name in found else x', 'x', _GRADIENT),
    ('jnp.maximum(found[name], x)', 'jnp.minimum(found[name], x)', _GRADIENT),
  ),
  *_of(
    'training/optimizer_step.py', 'training/test_optimizer_step.py',
    ('lr_scale * u', 'u'),
    ('return x if is_critic_weight(path) else before', 'return x'),
    ("norms['policy' if separate_critic else 'all']", "norms['policy']"),
    ('finite &= ~jnp.concatenate(list(flags.values())).any()', 'pass'),
    ('~jnp.isfinite(squares), ~bad_steps.not_finite((found, norms))', '~jnp.isfinite(squares), jnp.bool_(True)'),
    ('finite = ~bad_steps.not_finite((found, norms))\n', 'finite = ~bad_steps.not_finite(norms)\n'),
    ('squares = jnp.concatenate(squares)[order]', 'squares = jnp.concatenate(squares)[order[::-1]]'),
    ('state = state[np.argsort(parts.floats)]', 'pass'),
    ('weights = weights[np.argsort([i', 'weights = weights[([i'),
    ('self._critic_only and not part.trains_critic and part.trees.shared', 'False'),
    ("'policy': jnp.sum(squares[~own])", "'policy': jnp.sum(squares)"),
    ("if _MOMENT.sub('', state[i][0]) not in names", 'if not np.shape(state[i][1])'),
    ('if len(layers) < _FROM_LAYERS', 'if len(layers) < 3'),
    ('static_argnums=0, donate_argnums=(1, 2)', 'static_argnums=0'),
    ('bad_steps.bad_arrays(x) for x in (trees.state_leaves(state), weights)',
     'bad_steps.bad_arrays(x) for x in (own_state, own_weights)'),
    ('jnp.where(finite, x, before), new, old)', 'x, new, old)'),
  ),
  *_of(
    'training/batches.py', 'training/test_batches.py',
    ('return np.where(present.reshape(-1, *(1,) * (x.ndim - 1)), x, fill).astype', 'return x.astype'),
    ('round_up(int(length[part].max()), length_step)', 'int(length[part].max()) // length_step * length_step'),
    ('columns = np.ones(mask.shape, np.int32)', 'columns = np.zeros(mask.shape, np.int32)'),
    ('kept[episode[kept] == e]', 'kept[kept == e]'),
    ("FILL = {'columns': 1, 'turn': -1,", "FILL = {'columns': 1,"),
  ),
  *_of(
    'training/packing.py', _PACKING + 'bins_hold_each_token_once_with_all_that_stands_before_it',
    ("{'columns': columns.start, 'turn'", "{'turn'"),
    ('segments[at, columns] = number', 'segments[at, columns] = 0'),
    ('column, reply = column + n, reply + r', 'column, reply = column + n, reply'),
    ("'turn': number * turns}", '}', _PACKING + 'turns_and_rows_of_a_bin_have_numbers_of_their_own'),
    (
      'into[row, :r] = x[at, replies]', 'into[row, :r] = x[at, :r]',
      _PACKING + 'packing_changes_no_scores_and_no_gradient_of_the_critic_alone',
    ),
    ('>= sizes[i]).all(axis=1)', '>= sizes[i]).any(axis=1)', _PACKING + 'items_with_two_sizes_fit_in_both'),
    (
      'if s[1] >= longest and s[2] >= scores', 'if s[1] >= longest',
      _PACKING + 'a_row_with_only_scored_tokens_has_room_for_them',
    ),
    (
      '(1 + width / _WIDE)', '1', _PACKING + 'rows_of_one_length_fill_nine_tenths_of_one_call',
    ),
    (
      'if cost < lowest:', 'if cost > lowest:',
      _PACKING + 'the_shape_is_the_one_that_takes_least_time',
    ),
  ),
  *_of(
    'training/memory.py', 'training/test_memory.py::test_what_is_kept_is_counted_exactly',
    ('kept += 3 * _bytes', 'kept += 2 * _bytes'),
    (
      '_bytes(frozen, mesh) + _bytes(trained, mesh, shardings=trained_shardings)', '_bytes(params, mesh)',
      'training/test_memory.py::test_each_device_keeps_its_part_of_what_is_trained',
    ),
    (
      "layers'], mesh, size, optimizer_shardings)", "layers'], mesh, size)",
      'training/test_memory.py::test_the_whole_is_within_a_tenth_of_what_compilers_of_accelerators_need',
    ),
    ("kept += _bytes(trained['policy'], mesh, shardings=trained_shardings)", 'kept += 0'),
    ('max(found - 1, 0)', 'found', 'training/test_memory.py::test_columns_are_the_most_that_fit'),
  ),
  *_of(
    'training/batch_sizes.py', 'training/test_memory.py::test_micro_batches_are_the_largest_even_division_that_fits',
    ('if n <= most)', 'if n < most)'),
    ('if s.mini_batch_size % n == 0', 'if True'),
  ),
  *_of(
    'training/selection.py', 'training/test_selection.py',
    ('.any(axis=1) & (trajectory.status', '.any(axis=1) | (trajectory.status'),
    ('np.asarray(episodes)[t.group] > 1', 'np.asarray(episodes)[t.group] >= 1'),
    ('share = min(kept / settings.groups, 1.0)', 'share = 1.0'),
    ('scale = scale * filters.soft_weights', 'scale = filters.soft_weights'),
    ('np.ones(len(scale) - len(selection.keep), bool)', 'np.zeros(len(scale) - len(selection.keep), bool)'),
    ('entropy=entropies / np.maximum(tokens, 1)', 'entropy=entropies'),
  ),
  *_of(
    'training/estimate.py', 'training/test_estimate.py',
    ('cut = np.isin(t.status, TRUNCATED)', 'cut = np.isin(t.status, TRUNCATED[:1])'),
    ('columns = (last + 1)[:, None]', 'columns = last[:, None]'),
    ('valued=np.asarray(estimate.value_mask)', 'valued=tokens.trained'),
    ('rows.mask) == state.iteration', 'rows.mask) != state.iteration'),
    ('kl_penalty(scores.old_logprobs, scores.ref_logprobs', 'kl_penalty(scores.ref_logprobs, scores.old_logprobs'),
    ('truncated_importance_weights(logprobs, recorded', 'truncated_importance_weights(recorded, logprobs'),
    ('values=scores.old_values,\n      bootstrap', 'values=scores.old_logprobs,\n      bootstrap'),
    ('if s.bootstrap_truncated else None', 'if False else None'),
    ('adv_mask=None if s.mask_advantages else tokens.through', 'adv_mask=None'),
    ('estimate.advantages * selection.scale[:, None]', 'estimate.advantages', 'training/test_selection.py'),
  ),
  *_of(
    'training/replay.py', 'training/test_replay.py',
    ('iteration - e.iteration <= self._max_age', 'iteration - e.iteration < self._max_age'),
    ('take_rows(rollout, rows), scale[rows]', 'take_rows(rollout, rows), scale[: len(rows)]'),
    ('[g for k, g in chosen if k == i]', '[g for _, g in chosen]'),
  ),
  *_of(
    'training/state.py', 'training/test_state.py',
    ("'policy': self.reference.raw_mapping}", "'policy': self.params.raw_mapping['policy']}"),
    ('jax.tree.map(jnp.copy, trained)', 'trained'),
  ),
  *_of(
    'algorithms/advantages.py', 'algorithms/test_advantages.py',
    ('mask, s.gamma, s.lam, x.bootstrap', 'mask, s.lam, s.gamma, x.bootstrap'),
    ('(s.gamma, s.lam, s.high_level_gamma, s.high_level_lam)', '(s.gamma, s.lam, s.gamma, s.lam)'),
    ("scale = name == 'grpo'", "scale = name == 'dr_grpo'"),
    ('length_weight=s.length_weight)', 'length_weight=False)'),
    ('whitens = s.whiten_advantages and estimator.whitens', 'whitens = estimator.whitens'),
  ),
  *_of(
    'algorithms/filters.py', 'algorithms/test_filters.py',
    ('candidates &= np.abs(scores) > ZERO', 'candidates &= scores > ZERO'),
    ('np.std(np.sort(x) - x.min(), ddof=1)', 'np.std(np.sort(x) - x.min())'),
    ('above >= bound - slack', 'above > bound'),
    ("-of if kind == 'largest' else of, kind", 'of, kind'),
    ('np.floor(value * len(scores) + 1e-9)', 'np.floor(value * len(index) + 1e-9)'),
    ('float(np.sqrt(kept_ratio))', 'float(kept_ratio) ** 2'),
    ('std / greatest if', 'std if'),
  ),
  *_of(
    'algorithms/losses.py', 'algorithms/test_losses.py',
    ('logprobs - jax.lax.stop_gradient(old_logprobs)', 'jax.lax.stop_gradient(old_logprobs) - logprobs'),
    ('jnp.minimum(loss, bound)', 'jnp.maximum(loss, bound)'),
    ('loss = jnp.maximum(plain, clipped)', 'loss = jnp.minimum(plain, clipped)'),
    ('1.0 - clip_ratio_low, 1.0 + clip_ratio_high', '1.0 - clip_ratio_high, 1.0 + clip_ratio_low'),
    ('jnp.expm1(-d) + d', 'jnp.expm1(d) - d'),
    ('0.5 * jnp.maximum(plain, clipped)', '0.5 * jnp.minimum(plain, clipped)'),
    ('mask / (sequences * lengths)', 'mask / lengths'),
    ('jnp.minimum(weights, cap)', 'jnp.maximum(weights, cap)'),
  ),
  *_of(
    'algorithms/rewards.py', 'algorithms/test_rewards.py',
    ('penalty = coef * jnp.where', 'penalty = -coef * jnp.where'),
    ('ASYM_CLIP = (-1.0, 3.0)', 'ASYM_CLIP = (-3.0, 1.0)'),
    ('jnp.where(std < EPSILON, 0.0, normalized / (std + EPSILON))', 'normalized / (std + EPSILON)'),
    ("'state': group, 'inductive': env", "'state': env, 'inductive': group"),
    ('final[None, :] > final[:, None]', 'final[None, :] < final[:, None]'),
  ),
  *_of(
    'algorithms/group_relative.py', 'algorithms/test_group_relative.py',
    ('others = count / jnp.maximum(count - 1.0, 1.0)', 'others = 1.0'),
    ('scores - jnp.where(single, 0.0, mean)', 'scores - mean'),
    ('weights * deviations**2) / jnp.maximum(count - 1.0, 1.0)', 'weights * deviations**2) / jnp.maximum(count, 1.0)'),
    ('of_episode + step_weight * at_tokens', 'of_episode + at_tokens'),
    ('return valid / jnp.maximum(sum_over(episode, valid), 1.0)', 'return valid'),
    ('* mean_length / jnp.maximum(lengths, 1.0)', '* jnp.maximum(lengths, 1.0) / mean_length'),
  ),
  *_of(
    'algorithms/gae.py', 'algorithms/test_gae.py',
    ('jnp.where(ends, 0.0, gamma * lam)', 'jnp.where(ends, 0.0, lam)'),
    ('jnp.where(ends, end_values, next_values)', 'next_values'),
    ('jnp.where(turn_ends, targets - inside, rewards)', 'jnp.where(turn_ends, targets, rewards)'),
    ('jnp.lexsort((turn.ravel(), episode.ravel()))', 'jnp.argsort(episode.ravel(), stable=True)'),
    ('high_level_lam = lam if high_level_lam is None else high_level_lam', 'high_level_lam = lam'),
  ),
  *_of(
    'algorithms/masks.py', 'algorithms/test_masks.py',
    ('(columns[None] > 0)', '(columns[None] >= 0)'),
    ('columns[None] < length[:, None]', 'columns[None] <= length[:, None]'),
    ('(following == columns) | (next_turn != turn)', 'next_turn != turn'),
    ('jnp.maximum(jnp.sum(mask) - 1, 1)', 'jnp.maximum(jnp.sum(mask), 1)'),
  ),
  *_of(
    'agent/trajectory.py', 'agent/test_trajectory.py',
    ('self.rewards[row, self.length[row] - 1]', 'self.rewards[row, self.length[row] - 2]'),
    ('columns = slice(start, self.length[row])', 'columns = slice(start + 1, self.length[row])'),
    ("_FILL = {'turn': -1, 'image': -1}", "_FILL = {'image': -1}"),
    ('rows += [(e, len(rows),', 'rows += [(e, -1,'),
  ),
  *_of(
    'agent/episode.py', 'agent/test_episode.py',
    ('(Status.OUT_OF_TURNS, Status.OUT_OF_ACTIONS,', '(Status.OUT_OF_TURNS,'),
    ('if actions_left <= 0', 'if actions_left < 0'),
    ('for t in self.turns for x in (*t.rewards, t.penalty)', 'for t in self.turns for x in t.rewards'),
  ),
  *_of(
    'agent/episode_log.py', 'agent/test_episode_log.py',
    ('last_turn=len(self.past(row)) >= self', 'last_turn=len(self.past(row)) > self'),
    ('reward_last_token(row, turn.score)', 'reward_last_token(row, turn.reward)'),
    ('anchor = int(envs.row_group[row]), before[row]', 'anchor = int(envs.row_group[row]), self.observations[row]'),
    ('penalty=0.0 if read.valid', 'penalty=0.0 if not read.valid'),
    ('actions_left=int(left[row])', 'actions_left=int(self.actions_left[row])'),
    ('min(limits.max_turns, s.budget.max_turns)', 's.budget.max_turns'),
  ),
  *_of(
    'agent/rollout.py', 'agent/test_rollout.py',
    ('turns - a.shape[1])), constant_values=-1', 'turns - a.shape[1])), constant_values=0'),
    ('int(p.anchors.max(initial=-1)) + 1', 'int(p.anchors.max(initial=-1))'),
    ('np.where(p.anchors < 0, -1, p.anchors + o)', 'p.anchors + o'),
    ('rollout.episode_scores[kept]', 'rollout.episode_scores[: len(kept)]'),
    ('int(t.group.max()) + 1', 'int(t.group.max())'),
  ),
  *_of(
    'sampling/draw.py', 'sampling/test_draw.py',
    ('keepdims=True) - 1\n', 'keepdims=True)\n'),
    ('min(top_k, logits.shape[-1])', 'min(top_k + 1, logits.shape[-1])'),
    ('before = jnp.cumsum(probs, axis=-1) - probs', 'before = jnp.cumsum(probs, axis=-1)'),
    ('jnp.sum(upto <= target[:, None], axis=-1)', 'jnp.sum(upto < target[:, None], axis=-1)'),
    ('jax.random.fold_in(key, position)', 'key'),
    ('probs = jax.nn.softmax(ordered, axis=-1)', 'probs = jnp.exp(ordered)'),
  ),
  *_of(
    'sampling/decode.py', 'sampling/test_decode.py',
    ('draw_position=state.draw_position + count', 'draw_position=state.draw_position + width'),
    ('< state.count[:, None, None]', '<= state.count[:, None, None]', 'sampling/test_sampler.py'),
    ('jnp.where(begins, 0, state.rotary)', 'state.rotary'),
    ('jnp.where(begins, 0, state.count)', 'state.count'),
    ('(done + 1 < budget)', '(done < budget)'),
    ('state.draw_position + done, sampling', 'state.draw_position, sampling'),
    ('[None, None, :] <= step)', '[None, None, :] < step)'),
    ('jnp.where(new, largest + 1, 0)', 'jnp.where(new, largest, 0)'),
    ('jnp.where((count > 0)[:, None], last, state.hidden)', 'last'),
    ('live & ~stopped', 'live', 'sampling/test_sampler.py'),
    ('vocab_limit, banned, -jnp.inf)', '0, (), -jnp.inf)', 'sampling/test_sampler.py'),
    ('logits / temperature if divided else logits', 'logits', 'sampling/test_sampler.py'),
    ('complete >= enough])', 'complete > enough])', 'sampling/test_sampler.py'),
  ),
  *_of(
    'sampling/kv_cache.py', 'sampling/test_kv_cache.py',
    ('v=write(layer.v, window.v)', 'v=write(layer.v, window.k)'),
    ('jnp.where(is_new, rows, b), at]', 'rows, at]'),
    ('from_window &= is_new[:, None, None]', 'from_window &= True'),
    ('jnp.where(is_new[i], own,', 'jnp.where(True, own,'),
    ('x.at[rows].set(own', 'x.at[rows].add(own'),
  ),
  *_of(
    'sampling/shapes.py', 'sampling/test_shapes.py',
    ('if n >= live', 'if n > live'),
    ('if size >= columns', 'if size > columns'),
    ('for m in (1, 3) for n', 'for m in (1, 2) for n'),
    ('if calls * self.fed < self.rows', 'if calls < self.rows'),
  ),
  *_of(
    'agent/sampler_speaker.py', 'agent/test_schedules.py',
    ('limits.max_response_tokens - len(self._open[r])', 'limits.max_response_tokens'),
    ('int(log.timeline.length[self._slots[still]].max(initial=0))', 'self._longest',
     'compilers/test_lengths.py'),
    ('self._selection(np.isin(self._slots, list(self._open)), decoded)', 'self._selection(self._slots >= 0, decoded)',
     'compilers/test_lengths.py'),
  ),
  *_of(
    'models/attention_kernels.py', 'models/test_attention_kernels.py',
    ('_padded(q * jnp.asarray(h**-0.5, q.dtype), k, v, segments, block)', '_padded(q, k, v, segments, block)'),
    ('ids = None if segments is None else', 'ids = None if True else'),
    ('sm_scale=h**-0.5, causal=True', 'sm_scale=h**-0.5, causal=False'),
    ('mha(q, k, v, segments,', 'mha(q, k, v, None,'),
    ('jnp.repeat(x.astype(jnp.float32), n // k.shape[2], axis=2)', 'jnp.tile(x, (1, 1, n // k.shape[2], 1))'),
    ('key=lambda block: -columns % block', 'key=lambda block: columns % block'),
  ),
  *_of(
    'models/attention.py', 'models/test_attention_kernels.py models/test_attention.py',
    ('segments[:, None, :] == segments[:, :, None]', 'segments[:, None, :] >= segments[:, :, None]'),
    ("PartitionSpec(ROW_AXES, None, 'tensor')", 'PartitionSpec(ROW_AXES)'),
    ('// settings.shards)', '// 1)'),
    ('k, v, mask=mask[:, None], implementation', 'k, v, implementation'),
    ('- block % _TILE', '- block % _PART'),
    ('lambda start, end: (mask[start:end], k.shape[0])', 'lambda start, end: (mask[: end - start], k.shape[0])'),
    ('before = jnp.where(kept_mask[:, None], before, _MASKED)', 'before = before'),
    ('new = jnp.where(mask[:, None], new, _MASKED)', 'new = new'),
    ('out /= (before.sum(axis=-1) + new.sum(axis=-1))', 'out /= before.sum(axis=-1)'),
  ),
  *_of(
    'models/attention_choice.py', 'models/test_attention_choice.py',
    ("platform == 'cpu' and mesh.size == 1", "platform == 'cpu'"),
    ('if needed != platform:', 'if False:'),
    ('if capability < _LEAST_CAPABILITY:', 'if capability > _LEAST_CAPABILITY:'),
    ("'gpu': ('cudnn', 'pallas', 'einsum')", "'gpu': ('pallas', 'cudnn', 'einsum')"),
  ),
  *_of(
    'serving/episodes.py',
    'serving/test_episodes.py',
    ('error = fault or (\'\' if counted else \'no reward was posted\')', 'error = fault'),
    ('math.fsum(telling) >= settings.success_score', 'math.fsum(telling) > settings.success_score'),
    ('own = [i for i in own if in_loss[i]] or own', 'own = own'),
    ('return own[-1]', 'return own[0]'),
    ('if calls[i].index <= of.index', 'if calls[i].index < of.index'),
    ('own = [i for i, call in enumerate(calls) if call.trained and', 'own = [i for i, call in enumerate(calls) if'),
    ('if call.row in rows else', 'if call.row not in rows else'),
    ('missing and settings.incomplete == \'drop\'', 'False'),
    ('c.generated.finish != Finish.ABORTED', 'True'),
    ('numbers.setdefault((group, call.agent, call.context)', 'numbers.setdefault((group, \'\', call.context)'),
    ('timeline.begin_row(e)', 'timeline.begin_row(0)'),
    ('if own == wanted or settings.off_policy == \'exclude\':', 'if True:'),
    ('len(attempt.calls) >= settings.max_calls', 'len(calls) >= settings.max_calls'),
  ),
  *_of(
    'serving/group_queue.py',
    'serving/test_group_queue.py',
    ('min(begun + k + 1, self._settings.iterations) * n', '(begun + k + 1) * n'),
    ('max(iteration, self._store.last_batch() + 1)', 'iteration'),
    ('or group.oldest >= last)', 'or group.oldest >= last - 1)'),
    ('if call.trained and', 'if'),
    ('oldest is not None and oldest < last', 'oldest is not None and oldest <= last'),
    (' or any(record.iteration is not None for record in records)', ''),
    (' if rollout_id not in group.cancelled]', ']'),
    ('call.generated.versions.min()', 'call.generated.versions.max()'),
    ('    self._store.return_batch(iteration)\n', ''),
    ("before['trial'] + 1", "before['trial'] + 2"),
    ('completed is not None and not succeeded and not cancelled:', 'completed is not None and not cancelled:'),
    ('if not any(self._store.rewards(', 'if any(self._store.rewards('),
  ),
  *_of(
    'serving/async_player.py',
    'serving/test_async_player.py',
    ('policy_version - self._repeatable', 'policy_version'),
    ('self._groups.fill(policy_version, first_seed, key)  # for', 'pass  # for'),
    ('groups = self._groups.taken(policy_version)', 'groups = []'),
  ),
  *_of(
    'serving/env_program.py',
    'serving/test_env_program.py',
    (', first_member=task.input[\'member\']', ''),
    ('if status != _BUSY or', 'if True or'),
    ('line.begin_row(row)', 'pass'),
  ),
  *_of(
    'serving/lifecycle.py',
    'serving/test_lifecycle.py',
    ('or (for_reward and attempt.state == AttemptState.SUCCEEDED)', 'or (for_reward and attempt.state in _REPORTED)'),
    ('(attempt.rollout_id) < limits.max_attempts', '(attempt.rollout_id) <= limits.max_attempts'),
    ('elif lost or (state in limits.retry_on and', 'elif (state in limits.retry_on and'),
    ('if attempt.state == state:', 'if False:'),
    ('tables.touch_running(self._clock())', 'pass'),
    ('if agent and found.agent != agent:', 'if False:'),
    ('if tables.held_since() is not None or not tables', 'if not tables'),
    ('  del fields[\'key\']\n', ''),
  ),
  *_of(
    'serving/matching.py',
    'serving/test_matching.py serving/test_sessions.py',
    ('link = self._first.get(link, link)', 'pass'),
    ('for count in range(len(chain), 0, -1):', 'for count in range(1, len(chain) + 1):'),
    ('if r.conversation.options == conversation.options]', 'if True]'),
    ('return agreeing[-1], sum(agreeing)', 'return True, 0'),
    ('reply.request, -reply.choice', '-reply.request, -reply.choice'),
  ),
  *_of(
    'serving/sessions.py',
    'serving/test_sessions.py',
    ('[: parent.end] + tuple(following)', ' + tuple(following)'),
    ('if packed.startswith(ids)]', 'if True]'),
    ('free = [r for r in begun if r not in reserved]', 'free = begun'),
    ('why = \'repeated\'', 'why = \'parallel\''),
    ('self._aborted[_digest(prompt)] += 1\n      return', 'self._aborted[_digest(prompt)] += 1'),
    ('closed=generated.ids[-1:] == (self._format.stop_id,)', 'closed=True'),
    ('_THOUGHT_END in generated.text or (parent is not None and parent.thinks)', '_THOUGHT_END in generated.text'),
    ('self._requests = max(self._requests, told[\'request\'] + 1)', 'pass'),
  ),
  *_of(
    'serving/slots.py',
    'serving/test_slots.py serving/test_scheduler.py',
    ('self.slot is not self.source or self.source.columns != self.kept', 'self.slot is not self.source'),
    ('key=lambda s: (s.length > 0, s.used, s.index)', 'key=lambda s: (s.index)'),
    ('return None if coming - best.kept >= self._worth else best', 'return best'),
    ('return common if whole else min(common, len(prompt) - 1)', 'return common'),
    ('if copied.kept - best.kept >= self._worth:', 'if copied.kept > best.kept:'),
    ('slot.current = slot.current and length >= slot.length', 'pass'),
  ),
  *_of(
    'serving/scheduler.py',
    'serving/test_scheduler.py serving/test_engine.py',
    ('if not keep_cache:', 'if False:'),
    ('[call.budget - len(call.ids) for call in calls]', '[call.budget for call in calls]'),
    ('slot.append(reply.tokens[i, : reply.count[i]])', 'slot.append(reply.tokens[i])'),
    ('top_k=np.asarray([p.top_k for p in params], np.int32)', 'top_k=np.asarray([0 for p in params], np.int32)'),
    ('begins=slot.length == 0)', 'begins=False)'),
    ('Finish.ABORTED if call.cancelled else finish', 'finish'),
  ),
  *_of(
    'serving/tables.py',
    'serving/test_lifecycle.py',
    ('max(? - max(?, started), 0)', 'max(? - ?, 0)'),
    ('(now if since is None else max(since, started))', 'now'),
    ('INSERT OR IGNORE INTO counters', 'INSERT OR REPLACE INTO counters'),
    ('max(? - max(?, last_heartbeat), 0)', 'max(? - ?, 0)'),
  ),
  *_of(
    'serving/records.py',
    'serving/test_rollout_api.py',
    ("isinstance(metadata, dict) and 'prompt' not in metadata", 'isinstance(metadata, dict)'),
  ),
  *_of(
    'training/run.py',
    'training/test_run.py::test_a_stop_in_a_rollout_saves_the_state_before_it '
    'training/test_run.py::test_a_stop_after_a_bad_iteration_saves_nothing',
    ('if new and not self._monitor.bad_iterations and', 'if new and'),
    (' and not (self._try_weights and self._try_weights()):', ':'),
    ('new = state.iteration > 0 and', 'new ='),
  ),
  *_of(
    'training/run.py',
    'training/test_run.py::test_an_error_that_ends_a_run_saves_the_state_before_it '
    'training/test_run.py::test_a_run_that_an_error_ends_tells_that_error_if_it_cannot_be_saved',
    ('return isinstance(error, Stopped) or processes.raised_by_all(error)', 'return True'),
    ("_log.warning('no checkpoint of iteration", "raise\n      _log.warning('no checkpoint of iteration"),
  ),
  *_of(
    'serving/engines.py',
    'serving/test_engines.py',
    ('expression.fullmatch(agent)', 'expression.match(agent)'),
    ('return self.policy if name is None else self.frozen[name]', 'return self.policy'),
    ('engine.pause(drain=drain)', 'engine.pause(drain=True)'),
    ("return {'': self.policy} | self.frozen", "return {'': self.policy}"),
    ('missing = {name for _, name in agents} - frozen.keys()', 'missing = set()'),
  ),
  *_of(
    'serving/agent_server.py',
    'serving/test_agent_server.py',
    ('self.lifecycle.hold()\n', 'pass\n'),
    ('    self.lifecycle.go_on()\n', ''),
    ('if known == version and', 'if'),
  ),
  *_of(
    'serving/watch.py',
    'serving/test_pool.py',
    ('more = self._time_left()', 'more = 0.0'),
  ),
  *_of(
    'serving/keys.py',
    'serving/test_keys.py',
    ('_CHOICE + choice if choice else None', '_ROW + choice if choice else None'),
    ('_MEMBER + member if member else None', '_ROW + member if member else None'),
    ('0x7FFFFFFF << 32 | seed & 0xFFFFFFFF', 'seed & 0xFFFFFFFF'),
  ),
  *_of(
    'prompt_search/wording.py',
    'prompt_search/test_wording.py',
    ("text.splitlines() or ['']", "text.split('\\n')"),
    ('key=lambda f: f.score', 'key=lambda f: -f.score'),
    ('len(quoted) - 2 * half', 'len(quoted) - half'),
    ("rpartition('</think>')[2]", "partition('</think>')[2]"),
    ('return prompt.strip() if closed', 'return prompt if closed'),
    ('    if left < len(turns[0]):\n      break\n', ''),
  ),
  *_of(
    'prompt_search/search.py',
    'prompt_search/test_search.py',
    ('key=lambda i: (-prompts[i].score.mean, i)', 'key=lambda i: (prompts[i].score.mean, i)'),
    ('candidates = [*before.beam, *range', 'candidates = [*range'),
    ('start = (number - 1) * s.beam * s.branches', 'start = 0'),
    ('for a in own if not a.success]', 'for a in own]'),
    ('if score.failed == score.attempts:', 'if False:'),
    ('if len(text) > max_chars:', 'if len(text) >= max_chars:'),
    ('/ math.sqrt(len(values))', '/ len(values)'),
    ('first=scores[-1])', 'first=scores[0])'),
  ),
  *_of(
    'prompt_search/journal.py',
    'prompt_search/test_journal.py',
    ('os.fsync(file.fileno())', 'pass'),
    ('os.truncate(self.path, len(content) - len(rest))', 'pass'),
  ),
  *_of(
    'prompt_search/tasks.py',
    'prompt_search/test_tasks.py',
    ('self.held_out_first, self.scored, count)', 'self.held_out_first, 0, count)'),
    ('Task(*tags[i % len(tags)], first + i)', 'Task(*tags[0], first + i)'),
    ('for task in self.for_critiques(0, critiqued):', 'for task in ():'),
  ),
  *_of(
    'prompt_search/player.py',
    'prompt_search/test_player.py',
    ('score = self._failed_score if failed', 'score = 0.0 if failed'),
    ('json.dumps([prompt, task.tag])', 'json.dumps([task.tag])'),
    ('keys.task_key(self._seed, task.number, member)', 'keys.task_key(self._seed, task.number, 0)'),
  ),
  *_of(
    'prompt_search/critic.py',
    'prompt_search/test_critic.py',
    ("if getattr(e.__cause__, 'status', 0) not in _OF_ONE_REQUEST:", 'if True:'),
  ),
  *_of(
    'prompt_search/report.py',
    'prompt_search/test_report.py',
    ('key=lambda p: (-p.score.mean, p.number)', 'key=lambda p: p.number'),
    ("f'    {line}'", "f'{line}'"),
  ),
  *_of(
    'models/vision/grids.py',
    'models/vision/test_grids.py',
    ('.transpose(0, 2, 1, 3, 4)', '.transpose(0, 1, 2, 3, 4)'),
    ('np.argsort(order).astype', 'order.astype'),
    ('np.minimum(low + 1, side - 1)', 'low + 1'),
  ),
  *_of(
    'models/vision/positions.py',
    'models/vision/test_positions.py::test_positions_of_a_row_by_hand '
    'models/vision/test_positions.py::test_a_later_part_goes_on_where_the_part_before_ended '
    'models/vision/test_positions.py::test_columns_read_the_features_of_their_image',
    ('advance[stop - 1] = max(rows, columns)', 'advance[stop - 1] = rows'),
    ('np.tile(np.arange(columns), rows)', 'np.repeat(np.arange(columns), rows)'),
    ('int(start + advance.sum())', 'int(advance.sum())'),
    ('= begin + np.arange(count)', '= np.arange(count)'),
  ),
  *_of(
    'models/vision/resize.py',
    'models/vision/test_resize.py',
    ('stretch = max(scale, 1.0)', 'stretch = 1.0'),
    ('1 << (_DIGITS - 1), np.int64)', '0, np.int64)'),
  ),
  *_of(
    'models/vision/processor.py',
    'models/vision/test_processor.py',
    ('rows, columns = round(height / factor), round(width / factor)',
     'rows, columns = height // factor, width // factor'),
    ('math.ceil(side * grow / factor)', 'math.floor(side * grow / factor)'),
    ('n, n + 3, n + 1, n + 4', 'n, n + 1, n + 3, n + 4'),
  ),
  *_of(
    'envs/drawing/tiles.py',
    'envs/drawing/test_tiles.py',
    ('[cells].swapaxes(1, 2).reshape', '[cells].reshape'),
    ('(sums + _SAMPLES**2 // 2)', 'sums'),
    ('< width / 2', '< width'),
    ('(dx**2 + dy**2)).clip(0, 1)', '(dx**2 + dy**2))'),
  ),
  *_of(
    'envs/drawing/sokoban.py',
    'envs/drawing/test_sokoban.py',
    ('jnp.where(targets, BOX_ON_TARGET, BOX)', 'BOX'),
    ('(jnp.arange(columns) == player[1])', '(jnp.arange(columns) == player[0])'),
  ),
  *_of(
    'envs/drawing/frozen_lake.py',
    'envs/drawing/test_frozen_lake.py',
    ('jnp.where(square == goal, ON_GOAL,', 'jnp.where(square == goal, PLAYER,'),
  ),
  *_of(
    'envs/drawing/game_2048.py',
    'envs/drawing/test_game_2048.py',
    ('if sum(colour) > 480 else', 'if sum(colour) < 480 else'),
    ('_colour(exponent / goal_exponent)', '_colour(exponent / 16)'),
  ),
  *_of(
    'envs/drawing/rubik.py',
    'envs/drawing/test_rubik.py',
    ('np.arange(4).reshape(2, 2)', 'np.arange(4).reshape(2, 2).T'),
  ),
  *_of(
    'envs/drawing/sudoku.py',
    'envs/drawing/test_sudoku.py',
    ('+ side * jnp.asarray(given)', ''),
    ('place[:, None] * 3 + place\n', 'place * 3 + place[:, None]\n'),
    ('np.where(at == box - 1, 2, 1)', '1'),
  ),
  *_of(
    'agent/world_model/state_reward.py',
    'agent/world_model/test_state_reward.py',
    ('(score - floor) / (1 - floor)', 'score - floor'),
    ('full = np.minimum(claimed, true)', 'full = 0 * true'),
    ('(row[:, None] == row) | (column[:, None] == column)', 'row[:, None] == row'),
  ),
  *_of(
    'agent/world_model/descriptions.py',
    'agent/world_model/test_descriptions.py',
    ('np.array(places) - scene.player', 'scene.player - np.array(places)'),
    ("' '.join(part.lower().split())", "' '.join(part.split())"),
  ),
  *_of(
    'models/attention_tpu.py', 'models/test_attention_tpu.py models/test_attention_kernels.py',
    ('(of_keys == of_queries) & (key <= query)', '(of_keys == of_queries) & (key < query)'),
    ('(of_keys == of_queries) & (key <= query)', 'key <= query'),
    ('+ (j - i) * BLOCK', '+ (i - j) * BLOCK'),
    ('first, at_once = first + calls * at_once, at_once // 2', 'first, at_once = first + calls * at_once, 0'),
    ('total_ref[...] * scale + jnp.sum', 'total_ref[...] + jnp.sum'),
    ('sum_ref[...] * scale + _dot', 'sum_ref[...] + _dot'),
    ('_apart(out_ref, sum_ref[...] / total)', '_apart(out_ref, sum_ref[...])'),
    ('most_ref[...] + jnp.log(total)', 'most_ref[...]'),
    ('(_dot(v, of_out) - means_ref[...])', '_dot(v, of_out)'),
    ('  @pl.when(i == 0)', '  @pl.when((row == 0) & (i == 0))'),
    ('of_k_sum[columns] += _dot(of_scores', 'of_k_sum[columns] = _dot(of_scores'),
    ('of_q_sum[...] += _dot(k', 'of_q_sum[...] = _dot(k'),
    ('start[:, ::BLOCK] // BLOCK', 'start[:, ::BLOCK] // BLOCK + 1'),
    ('jax.lax.cummax(jnp.where(begins, columns, 0), axis=1)', 'jnp.where(begins, columns, 0)'),
  ),
  *_of(
    'runs/stores.py', 'runs/test_stores.py',
    (", mode='create')", ')'),
    ("and 'Forbidden' not in str(e):", ':'),
    ("if key and not key.endswith('/')", "if key.endswith('/')"),
  ),
  *_of(
    'runs/store_lock.py', 'runs/test_store_lock.py',
    ('if waited >= self._silence:', 'if waited >= 0:'),
    ('if now is not None and now != first:', 'if False:'),
    ("or record['machine'] != _machine() or", 'or'),
    (".get('token') == self._record['token']:", ".get('token'):"),
    ("        self._record['renewals'] += 1\n", ''),
  ),
  *_of(
    'runs/staging.py', 'runs/test_staging.py',
    ('parts[2:] == [marker]', 'parts[2:]'),
    ('    if self.lock is not None:\n      self.lock.check()', '    pass'),
    ('      self.store.delete([record])', '      pass'),
    ("if key.endswith(f'/{COMMITTED}')]", 'if False]'),
    ("      (self.path / key).touch()", '      pass'),
    ('gone = self._copied.keys() - found.keys()', 'gone = set()'),
    ("key.startswith(_LOCAL_ONLY) and not key.endswith('.tmp')", "key.startswith(_LOCAL_ONLY)"),
  ),
  *_of(
    'runs/background.py', 'runs/test_background.py',
    ('(urgency, next(self._numbers), key, compile_program)', '(-urgency, next(self._numbers), key, compile_program)'),
    ('if key not in self._known and not self._closed', 'if not self._closed'),
    ('if key not in self._known and not self._closed', 'if key not in self._known'),
    ('self._changed.wait_for(lambda: key not in self._running)', 'pass'),
    ('        if key in self._needed:', '        if False:'),
    ('        if compiled:', '        if True:'),
    ('      self._waiting.clear()', '      pass'),
    ('thread.name.startswith(_NAME)', 'False'),
  ),
  *_of(
    'compilers/needed.py', 'compilers/test_needed.py compilers/test_ahead.py',
    ("{'gradient': 'apply'} if warmup < iterations else {}", "{'gradient': 'apply'}"),
    ("{'gradient_critic': 'apply_critic'} if warmup else {}", '{}'),
    ('if at < size or shape[2] > largest:', 'if at <= size or shape[2] > largest:'),
    ('if at < size or shape[2] > largest:', 'if at < size:'),
    ('      if (every, width, begin) in self._fed:', '      if False:'),
    ('rows < every or not parts or', 'rows < every or'),
    ('(whole and not (begin and at > size))', 'whole'),
    ('(whole and not (begin and at > size))', 'not (begin and at > size)'),
    ('if p[1][3] == shape[3])', ')'),
    ('smallest <= p[1][2] <= largest', 'p[1][2] <= largest'),
    ('for fed in self._fed if fed[0] == every for', 'for fed in self._fed for'),
    ('found += self._parts(every, size, size) if every in self._in_parts else ()', 'pass'),
    ('found += (x for fed in', 'found or (x for fed in'),
    ('for factor in (min(FACTORS), max(FACTORS))', 'for factor in (1, max(FACTORS))'),
    ('(length + (factor - 1) * scored).max', 'length.max'),
    ('.max(initial=0)) + chunk_columns(self._config)', '.max(initial=0))'),
    ('if abs(factor - 1) < 0.1', 'if True'),
    ('range(half, min(round_up(most, half)', 'range(2 * half, min(round_up(most, half)'),
    ('longest = config.agent.max_context + 1', 'longest = config.agent.max_context'),
    ('length = np.minimum(length - scored + more', 'length = np.minimum(length + more'),
    ('(GREEDY.compiled,) if config.eval.greedy_too', '(GREEDY.compiled,) if False'),
    ("'logprobs': trainer.settings.reference and separate", "'logprobs': False"),
    ('s.needs_critic and not s.records_values and not again', 's.needs_critic and not s.records_values'),
  ),
  *_of(
    'compilers/ahead.py', 'compilers/test_ahead.py',
    ('if processes > 1 or visual_columns(config)', 'if visual_columns(config)'),
    ('if processes > 1 or visual_columns(config)', 'if processes > 1'),
    ('    if not self._updates_follow:', '    if False:'),
    ("program, width = 'extend_first' if rest[1] else 'extend', rest[0]", "program, width = 'extend', rest[0]"),
    ('[program for program in wanted if program in self._listed]', 'wanted'),
    ("critic_only = abstract_batch(self._config, trainer, shape), name == 'gradient_critic'",
     'critic_only = abstract_batch(self._config, trainer, shape), False'),
    ("shape), gradient == 'gradient_critic'", 'shape), False'),
    ('self._updated |= name in needed.updates(self._config)', 'pass'),
    ('in self._caches.ended(', 'in () and self._caches.ended('),
  ),
  *_of(
    'compilers/lengths.py', 'compilers/test_lengths.py',
    ('awaited.update(program for program in met if program not in ready)', 'awaited.update(met)'),
    ('    if ahead:\n', '    if False:\n'),
    ('steps = min(chunk, int(left[held].max()))', 'steps = chunk'),
    ('      left[held] -= taken', '      left[held] -= steps'),
    ('used=int(taken.sum())', 'used=int(steps * len(taken))'),
    ('ends[:, -1] = True', 'ends[:, 0] = False'),
    ('+ sampled + (turns - 1) * lengths.observation', '+ sampled + turns * lengths.observation'),
  ),
  *_of(
    'models/vision/tower.py', 'models/vision/test_tower.py',
    ('x[:, split.order], angles[split.order]', 'x[:, split.order], angles'),
    ('      x = x[:, split.restored]', '      pass'),
    ('runs = split.runs if split is not None and last - 1 not in cfg.full_blocks else whole', 'runs = whole'),
    ('gelu(self.linear_fc1(x), approximate=False)', 'gelu(self.linear_fc1(x), approximate=True)'),
    ('self.deepstack_mergers[cfg.deepstack_blocks.index(last - 1)](x)', 'self.deepstack_mergers[0](x)'),
    ('      x = x + self._positions(grid).astype(x.dtype)', '      pass'),
  ),
  *_of(
    'models/vision/features.py', 'models/vision/test_features.py',
    ('x = jnp.where(is_image, features', 'x = jnp.where(~is_image, features'),
    ('features.deepstack[:, rows].astype(x.dtype), 0)', 'features.deepstack[:, rows].astype(x.dtype), x)'),
    ('jnp.moveaxis(part.deepstack, 1, 0) for part', 'part.deepstack for part',
     'whole/test_images.py training/test_images.py models/vision/test_features.py'),
  ),
  *_of(
    'models/vision/encoder.py', 'models/vision/test_encoder.py',
    ('    if self._keeps:', '    if True:'),
    ('      self._kept.move_to_end(key)', '      pass'),
    ('hashlib.blake2b(repr(image.shape).encode()', "hashlib.blake2b(b''"),
    ('for i in range(count)]', 'for i in range(len(images))]'),
  ),
  *_of(
    'agent/image_room.py', 'agent/test_image_room.py',
    ('(self.tokens + 2))', 'self.tokens)'),
    ('(fit if packed else min(fit, self.turns))', 'min(fit, self.turns)'),
    ('(fit if packed else min(fit, self.turns))', 'fit'),
    ('if size >= needed), needed)', 'if size >= needed), most)'),
    ('max(most.get(own.size, 1), rows * own', 'rows * max(0, own'),
    ('// processor.factor**2', '// processor.factor'),
    ('for n in _PARTS] if packed', 'for n in _PARTS] if True'),
  ),
  *_of(
    'agent/reply_lengths.py', 'agent/test_reply_lengths.py',
    ('sum(n > limit for n in found)', 'sum(n >= limit for n in found)'),
    ("_TAG.sub(' ', reply).split()", 'reply.split()'),
    ('counted = words if all(', 'counted = words if any('),
  ),
  *_of(
    'agent/eyes.py', 'agent/test_eyes.py',
    ('(np.cumsum(counts) - counts).tolist()', 'np.cumsum(counts).tolist()'),
    ('self.room.tokens(sum(counts), len(prompts)', 'self.room.tokens(sum(counts), len(parts)'),
    ('np.full((len(prompts), width), -1, np.int32)', 'np.zeros((len(prompts), width), np.int32)'),
  ),
  *_of(
    'agent/image_observations.py', 'agent/test_image_observations.py',
    ('range(processor.factor, MAX_TILE + 1, processor.factor)', 'range(MAX_TILE, 0, -processor.factor)'),
    ('size[0] * size[1] // processor.factor**2 + 2)', 'size[0] * size[1] // processor.factor**2)'),
    ('(ImageSegment(image, columns),), piece)', 'piece, (ImageSegment(image, columns),))'),
  ),
  *_of(
    'training/images.py', 'training/test_images.py',
    ('moved[image] = row - gallery.first[image]', 'moved[image] = row'),
    ("side='right') - 1)\n", "side='left'))\n"),
    ('first[i] = start + place * tokens', 'first[i] = place * tokens'),
    ('      start += len(images) * tokens', '      start += len(own) * tokens'),
    ('constant_values=-1)', 'constant_values=0)'),
    ('[int(first[i]) for i in own]', '[int(first[i]) for i in range(len(own))]'),
    ('& ~np.concatenate([[False], is_image[:-1]])', ''),
    ('self.by_trunk.get(name, self.by_trunk[POLICY])', 'self.by_trunk[POLICY]'),
  ),
  *_of(
    'agent/world_model/formats.py', 'agent/world_model/test_formats.py',
    ('    elif between.strip():', '    elif False:'),
    ('if number < len(expected) or reply[end:].strip()', 'if number < len(expected)'),
    ("reply.rpartition('</think>')[2]", "reply.partition('</think>')[2]"),
    ('opened = opened and not before.strip()', 'pass'),
  ),
  *_of(
    'sft/watch.py', 'sft/test_watch.py',
    ('reason=found.reason or reason', 'reason=reason'),
    ('max(x, found.metrics.get(name, 0.0))', 'x'),
    ('self._spikes = Spikes.from_state_dict(state)', 'pass'),
    ("{LOSS: 'loss', VALUE_LOSS: 'value_loss',", "{LOSS: 'loss',"),
    ('self.skipped_in_a_row + 1 if reason else 0', 'self.skipped_in_a_row + 1'),
  ),
  *_of(
    'sft/log.py', 'sft/test_log.py',
    ('self._skipped += len(found.skipped)', 'self._skipped = len(found.skipped)'),
    ('max(x, self._spikes.get(name, 0.0))', 'x'),
    ("self._skipped, self._spikes = state['skipped'], dict(state['spikes'])", 'pass'),
  ),
  *_of(
    'sft/trainer.py', 'sft/test_trainer.py::test_the_gradient_norm_of_a_step_is_that_which_is_clipped',
    ("jnp.hypot(norm, found['critic/grad_norm'])", 'norm'),
    ('if self._value_loss else {}', 'if True else {}'),
  ),
  *_of(
    'sampling/capacity.py', 'sampling/test_capacity.py',
    ('images = shards * image_tokens', 'images = image_tokens'),
    ('max(sampling, prompt) + images', 'max(sampling, prompt)'),
  ),
  *_of(
    'models/vision/processor.py', 'models/vision/test_processor.py',
    ('if found[0] > found[1]', 'if False'),
    ("(field == 'image_std' and min(found) <= 0)", 'False'),
    ('if not isinstance(size, dict)', 'if False'),
  ),
  *_of(
    'agent/world_model/descriptions.py', 'agent/world_model/test_descriptions.py',
    ('re.IGNORECASE | re.ASCII', 're.IGNORECASE'),
  ),
  *_of(
    'runs/checkpoints.py',
    'runs/test_checkpoints.py::test_threads_that_complete_after_a_failed_save_print_nothing',
    ('    yield\n    sys.unraisablehook = hook\n', '    yield\n'),
    ("== 'Event loop is closed'", "!= 'Event loop is closed'"),
  ),
  *_of(
    'distributed/watchdog.py',
    'distributed/test_watchdog.py',
    ('most = max(', 'most = min('),
    ('now - max(seen.points_at, arrived) > self._patience', 'now - seen.points_at > self._patience'),
    ('if paused:', 'if False:'),
    ('return [0] if self._index else []', 'return []'),
    ('if not self._patience or not behind:', 'if not behind:'),
    ('      self._verdict = message\n', ''),
    ('and not self._verdict and', 'and'),
  ),
  *_of(
    'envs/outside/images.py',
    'envs/outside/test_images.py',
    ('except Exception as e:  # noqa: BLE001, damaged', 'except (OSError, SyntaxError, ValueError) as e:  # damaged'),
  ),
  *_of(
    'utils/errors.py',
    'utils/test_errors.py',
    ("return printable(' '.join(write(value).split()))", "return ' '.join(write(value).split())"),
  ),
  *_of(
    'config/command_line.py',
    'config/test_command_line.py',
    ('handler.setFormatter(_Printable())', 'handler.setFormatter(logging.Formatter())'),
  ),
  *_of(
    'utils/threads.py',
    'utils/test_threads.py',
    ('call.thread.abandoned = True', 'call.thread.abandoned = False'),
    ('isinstance(t, _Worker) and t.owner is owner', 'isinstance(t, _Worker)'),
  ),
  *_of(
    'envs/outside/local.py',
    'envs/outside/test_local.py',
    ('owner=owner, always=True)', 'owner=owner)'),
  ),
  *_of(
    'serving/stall.py',
    'serving/test_stall.py',
    ('if not now.full or self._running():', 'if not now.full:'),
  ),
  *_of(
    'serving/open_server.py',
    'serving/test_open_server.py',
    ('http.call_soon(lambda: [', '(lambda f: f())(lambda: ['),
  ),
  *_of(
    'serving/http_protocol.py',
    'serving/test_http_protocol.py',
    ('(not kept or bool(self.conn.trailing_data[0]))', 'not kept'),
    ('if self.transport.is_closing() or not self._awaits():', 'if self.transport.is_closing():'),
    ('    if not self.transport.get_write_buffer_size():\n      return\n', ''),
    ('    self._clear_timer()\n    self._clear_unread()\n', '    self._clear_timer()\n'),
    ('min(self._bytes, self._largest_body)', 'self._bytes'),
    ('left > 0 and not self._drops', 'left > 0'),
    ('if self._taken <= before:', 'if False:'),
    ('    self._watch_reading()  # a rest', '    pass  # a rest'),
  ),
  *_of(
    'serving/agent_player.py',
    'serving/test_async_player.py',
    ('    if not self._has_learnt:', '    if True:'),
    ('calls=(), rewards=())', 'calls=(), rewards=()) if 0 else a'),
  ),
  *_of(
    'modes/sft.py',
    'modes/test_sft.py',
    ('if (save or stop) and not bad:', 'if save and not bad:'),
    ('          bad = bad or _bad_numbers(watch, trainer, micro_batches)', '          pass'),
  ),
  *_of(
    'models/checkpoint/save.py',
    'models/checkpoint/test_save.py',
    ('except (OSError, SafetensorError) as e:', 'except OSError as e:'),
    ('if len(olds) == 1 and not', 'if olds and not'),
    ('elif olds and _has_owner(target) is False:', 'elif not olds and _has_owner(target) is False:'),
  ),
  *_of(
    'viewer/page.py',
    'viewer/test_page.py',
    ('for step in chosen) <= max_bytes:', 'for step in chosen) <= 2 * max_bytes:'),
    ('read_episodes(workdir, frozenset(steps))', 'read_episodes(workdir)'),
  ),
  *_of(
    'runs/checkpoints.py',
    'runs/test_staging.py',
    ('until_reached(self._staged.before_checkpoint, str(self._staged))', 'self._staged.before_checkpoint()'),
  ),
  *_of(
    'runs/store_retries.py',
    'runs/test_store_retries.py',
    ('pause = min(2 * pause, _LONGEST_PAUSE)', 'pause = min(pause, _LONGEST_PAUSE)'),
  ),
  *_of(
    'runs/stores.py',
    'runs/test_stores.py',
    ('(UserError if self.lasting else StoreAway)(message)', 'UserError(message)'),
  ),
  *_of(
    'distributed/processes.py',
    'distributed/test_processes.py::test_an_error_of_another_process_keeps_its_exit_status',
    ('    shared.everywhere = True\n', ''),
    ('error = (str(e), e.status)', 'error = (str(e), 2)'),
  ),
  *_of(
    'runs/metrics.py',
    'runs/test_metrics.py',
    ('      if self._written:\n', '      if False:\n'),
    ('return parsed + _parse_spare(path)', 'return parsed'),
    ('self._file.tell(), step, {}, \'\'', 'self._file.tell(), step, {}, self._written'),
  ),
  *_of(
    'algorithms/masks.py',
    'training/test_estimate.py::test_rollouts_of_another_width_compile_nothing',
    ('columns = np.arange(', 'columns = jnp.arange('),
  ),
  *_of(
    'training/trainer.py',
    'training/test_trainer.py::test_a_process_passes_a_point_before_it_waits_for_each_step_and_for_the_end',
    ('      processes.passed()  # a process', '      # a process'),
    ('    processes.passed()\n    metrics =', '    metrics ='),
    ('    processes.passed()\n    _, sums =', '    _, sums ='),
  ),
  *_of(
    'training/run.py',
    'training/test_run.py::test_a_rollback_gives_the_best_checkpoint_smaller_steps_and_an_empty_buffer',
    ('jax.tree.map(lambda x: x.delete(), state.saved())', 'pass'),
  ),
  *_of(
    'distributed/processes.py',
    'distributed/test_processes.py',
    ('return jax.process_count() == 1 or error.everywhere', 'return error.everywhere'),
    ('return jax.process_count() == 1 or error.everywhere', 'return jax.process_count() == 1'),
  ),
  *_of(
    '__init__.py',
    'test_api.py::test_tpus_exchange_divided_products_at_once_unless_told_otherwise',
    ("if _WINDOWED_PRODUCTS not in os.environ.get('LIBTPU_INIT_ARGS', ''):", 'if True:'),
    ("""f'{os.environ.get("LIBTPU_INIT_ARGS", "")} {_WINDOWED""", "f' {_WINDOWED"),
  ),
  *_of(
    'distributed/sharding.py',
    'models/test_gathered.py',
    ('(weight_spec if _TOWER.search(path) else optimizer_spec)', 'optimizer_spec'),
    ('dtype is None or len(shape) < 2', 'dtype is None'),
    ('x.astype(sent), whole).astype(x.dtype)', 'x, whole)'),
    ('_, gradient: (gradient,))', '_, g: (g.astype(sent).astype(g.dtype),))'),
    ('PartitionSpec(*[None] * stacked, *spec)', 'PartitionSpec(*spec)'),
    ('if n != axis) for names in spec]', ') for names in spec]'),
  ),
  *_of(
    'models/layers.py',
    'models/test_gathered.py',
    ('    stacked = gathered(stacked, mesh, stacked=True)', '    pass'),
  ),
  *_of(
    'models/value_head.py',
    'models/test_gathered.py',
    ('or not trunk.scan_layers}', 'or trunk.scan_layers}'),
    ('None if trunk is None else trunk.dtype)', 'jnp.float16)'),
    ('trained, frozen = lora.partition(weights)', 'trained, frozen = weights, nnx.State({})'),
  ),
  *_of(
    'models/lora.py',
    'models/test_gathered.py',
    ('tree_shardings(frozen, mesh))', 'trained_shardings(frozen, mesh))'),
  ),
  *_of(
    'sampling/sampler.py',
    'models/test_gathered.py',
    ("without_axis(sharding.spec, 'data')", 'sharding.spec'),
    ("if name.startswith('critic/'):  # the", "if False:  # the"),
  ),
  *_of(
    'training/optimizer_step.py',
    'models/test_gathered.py',
    ('    weights, state = jax.lax.with_sharding_constraint((weights, state), divided)\n', ''),
  ),
  *_of(
    'training/learner.py',
    'whole/test_mesh.py',
    ('tree, trained_shardings(tree, self.mesh))', 'tree, NamedSharding(self.mesh, PartitionSpec()))'),
  ),
  *_of(
    'distributed/messages.py',
    'distributed/test_messages.py',
    ('.reshape(shape).copy()', '.reshape(shape)'),
    ('isinstance(value, np.generic)]', 'False]'),
  ),
  *_of(
    'config/agreement.py',
    'config/test_agreement.py',
    ('// (_BLOCKS - 1)', '// _BLOCKS'),
    ('if name not in _PATHS', 'if True'),
  ),
  *_of('runs/timing.py', 'runs/test_timing.py', ('    self._entered(phase)\n', '')),
  *_of(
    'training/run.py', 'training/test_run.py',
    ("    if not due and verdict.action != 'stop':\n", '    if False:\n'),
    ('      self._log.metrics.flush()  # the times, which include the save\'s\n', '      pass\n'),
    ('if saved < first)', 'if saved <= step)'),
    ("best = self._checkpointer.intact_best_step() if", "best = self._checkpointer.best_step() if"),
  ),
  *_of(
    'runs/checkpoints.py', 'runs/test_checkpoints.py',
    ('      while processes.is_first() and (step', '      while False and (step'),
    ('    self.reload()\n    return processes.gather(', '    return processes.gather('),
  ),
  *_of('runs/checkpoints.py', 'training/test_run.py', ('    self._verified.clear()', '    pass')),
  *_of(
    'runs/checkpoints.py',
    'runs/test_checkpoints.py::test_a_record_that_is_cut_short_is_told_once_and_by_its_file',
    ('        self._unread.add(step)\n', ''),
    ("damage or 'its meta is missing'", "'its meta is missing'"),
  ),
  *_of(
    'runs/interrupt.py', 'runs/test_interrupt.py',
    ('    if lost.exc_type is not KeyboardInterrupt:', '    if True:'),
    ('    timer.start()', '    pass'),
    ('    sys.unraisablehook = before', '    pass'),
  ),
  *_of(
    '__main__.py', 'runs/test_interrupt.py',
    ('with lost_interrupts_again():', 'if True:'),
  ),
  *_of(
    'sft/data.py', 'modes/test_sft.py::test_held_out_boards_are_not_demonstrated',
    ("    _log.info('%s, %s: the solver plays %d levels', spec.tag, form, spec.num_groups)\n", ''),
  ),
  *_of(
    'modes/sft.py', 'modes/test_sft.py::test_held_out_boards_are_not_demonstrated',
    ("  _log.info('finding the levels", "  _log.debug('finding the levels"),
    ("['this config', *config.sft", "[*config.sft"),
  ),
  *_of(
    'build.py', 'config/test_sft_checks.py',
    ('hint = several or did_you_mean(str(tag), config.envs)', 'hint = several'),
    ('hint = several or did_you_mean', 'hint = did_you_mean'),
  ),
  *_of(
    'runs/staging.py', 'runs/test_staging.py',
    ('      self.store.delete([committed])\n', ''),
    ('    self.store.delete([marker])  # first', '    pass  # first'),
    ('missing_ok=True)', 'missing_ok=False)'),
  ),
  *_of('runs/stores.py', 'runs/test_stores.py', ('if e.errno in _DISK_ERRORS or', 'if')),
  *_of(
    'sampling/kv_cache.py', 'sampling/test_kv_cache.py',
    ('jnp.where(kept[:, :, None, None], x, 0)', 'x'),
    ('< count[:, None]  # [b, S]', '<= count[:, None]'),
  ),
  *_of(
    'serving/scheduler.py', 'serving/test_scheduler.py',
    ('      slot.spoilt = True\n', '      pass\n'),
    ('    if slot.spoilt:\n', '    if False:\n'),
    ('if spoilt else []', 'if False else []'),
  ),
  *_of('serving/device_rows.py', 'serving/test_device_rows.py', ('    if not keep_cache:\n', '    if False:\n')),
  *_of('serving/slots.py', 'serving/test_scheduler.py', ('0 if s.spoilt else _common', '_common')),
  *_of(
    'envs/outside/local.py', 'envs/outside/test_local.py',
    ('_plain_observation(read_observation(game.reset(seed, member), form))', 'game.reset(seed, member)'),
    ('  read = read_step(game.step(action), form)\n', '  return game.step(action)\n'),
    ("info = {'success': read.success, 'effective': read.effective}", "info = {'success': read.success}"),
  ),
  *_of('training/run.py', 'training/test_run.py', ("      meta['config'] = dict(self._settings.config)\n", '')),
  *_of(
    'agent/templates.py', f'{_HOSTILE}[prompts]',
    ("return text.replace('<|', '< |')", 'return text'),
  ),
  *_of(
    'serving/messages.py', 'serving/test_messages.py',
    ("return _SURROGATE.sub('\\ufffd', text)", 'return text'),
  ),
  *_of(
    'serving/text.py', 'serving/test_text.py',
    ('if settled + self._decode(self._open[cut:]) == text:', 'if True:'),
  ),
  *_of(
    'viewer/tensorboard.py', f'{_HOSTILE}[transcripts]',
    ("_MARK = re.compile(r'[]!#$&*+<=>@", "_MARK = re.compile(r'[]!#$&*+=>@"),
  ),
  *_of(
    'envs/outside/images.py', f'{_LIES}every_lie_costs_one_episode_and_nothing_else',
    ('if length > LONGEST_OBSERVATION:', 'if False:'),
  ),
  *_of(
    'envs/outside/http.py', f'{_LIES}a_server_that_lies_costs_its_episodes',
    ("answer.get('id', episode) != episode", "answer.get('id', episode) is None"),
  ),
  *_of(
    'envs/outside/timed_http.py', 'envs/outside/test_timed_http.py',
    ('if left <= 0:', 'if left < -1e9:'),
    ('ProxyHandler({}), NoRedirect, ', 'ProxyHandler({}), '),
  ),
  *_of(
    'envs/outside/gymnasium.py', 'envs/outside/test_gymnasium.py::test_flags_that_are_text_are_not_taken_for_true',
    ('not isinstance(value, bool | int | float) or value not in (0, 1)', 'False'),
  ),
  *_of(
    'agent/endpoint_client.py', f'{_LIES}an_endpoint_that_lies_costs_a_reply',
    ("if encoding.strip().lower() != 'identity':", 'if False:'),
  ),
  *_of(
    'serving/runners.py', 'serving/test_runners.py::test_another_value_fails_the_attempt',
    ('if isinstance(reward, float):', 'if reward is not None:'),
  ),
  *_of(
    'serving/agent_player.py', 'whole/test_supply_chain.py::test_a_command_gets_no_secret_of_the_run',
    ('if k not in (*_SECRETS, *secrets)', 'if k not in _SECRETS'),
  ),
  *_of(
    'utils/errors.py', 'utils/test_errors.py',
    ('except BaseException as e:  # foreign', 'except Exception as e:  # foreign'),
  ),
  *_of(
    'training/bad_steps.py', 'training/test_bad_steps.py',
    ('jnp.square(x.astype(jnp.float32))', 'x.astype(jnp.float32)'),
    ('for i in number for r in rows[i]', 'for r in rows[0]'),
    ('      break\n', ''),
    ('if part in _MOMENTS), 0)', 'if part in ()), 0)'),
  ),
  *_of(
    'training/optimizer_step.py', 'training/test_bad_steps.py training/test_learner.py',
    ('flags = bad_steps.bad_arrays(state), bad', 'flags = bad_steps.bad_arrays(opt_state) & False, bad'),
    ('state), bad_steps.bad_arrays(weights)\n', 'state), bad_steps.bad_arrays(trained) & False\n'),
  ),
  *_of(
    'compilers/programs.py', 'compilers/test_programs.py',
    ('steps * p.times, resident', 'steps, resident'),
    ('resident = held - bytes_per_device(p.arrays)', 'resident = held'),
  ),
  *_of(
    'compilers/estimate.py', 'compilers/test_estimate.py',
    ("costs['apply'] = [sum(costs['apply'])]", 'pass'),
  ),
  *_of(
    'algorithms/spikes.py', 'algorithms/test_spikes.py',
    ('statistics.median(before)', 'max(before)'),
    ('usual > 0 and abs(x)', 'usual > 0 and x'),
    ('usual > 0 and abs', 'abs'),
    ('if spike and metric not in spiking:', 'if spike:'),
    ('[-settings.baseline_steps :]', ''),
    ('len(before) >= settings.baseline_steps', 'bool(before)'),
  ),
  *_of(
    'training/monitor.py', 'training/test_monitor.py',
    ('    self._spikes = Spikes()\n\n  def state_dict', '\n  def state_dict'),
    ("Spikes.from_state_dict(state['spikes']) if 'spikes' in state else Spikes()", 'Spikes()'),
    ('self.all_bad_iterations += bool(not_finite)', 'self.all_bad_iterations = self.bad_iterations'),
  ),
  *_of(
    'training/run.py', 'training/test_run.py::test_spikes_are_written_in_one_line_and_as_metrics',
    (
      '    if evaluation.not_finite:\n', '    if False:\n',
      'training/test_run.py::test_a_model_whose_numbers_are_not_finite_is_refused_before_training',
    ),
    ('    else:\n      watched, spikes', '    elif fresh:\n      watched, spikes'),
  ),
]  # fmt: skip


def _copy(to: pathlib.Path) -> None:
  for name in COPIED:
    if (ROOT / name).is_dir():
      shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns('__pycache__'))
    else:
      shutil.copy(ROOT / name, to / name)


def _pytest(copy: pathlib.Path, cache: str, tests: tuple[str, ...]) -> tuple[int, str]:
  """Runs tests of a copy: (exit status, output); status -1 is a time-out. `cache` holds compiled programs."""
  paths = [f'tests/{test}' for test in tests]
  options = ['-x', '-q', '-n', '0', '-m', '', '-p', 'no:cacheprovider', '--tb=line']
  command = [sys.executable, '-m', 'pytest', *options, *paths]
  # The tests use the cache that a pytest-xdist worker gets from its parent, because most programs are the same with and
  # without the break.
  environment = os.environ | {
    'PYTEST_XDIST_WORKER': 'gw0', 'JAX_COMPILATION_CACHE_DIR': cache, 'PYTHONPATH': str(copy),
    'PYTHONDONTWRITEBYTECODE': '1',
  }  # fmt: skip
  try:
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS)
  except subprocess.TimeoutExpired:
    return -1, ''
  return done.returncode, done.stdout + done.stderr


def run(mutation: Mutation, cache: str) -> dict[str, Any]:
  """Makes a break in a copy of the repository and runs its tests.

  Args:
    mutation: the break.
    cache: a directory for compiled programs.

  Returns:
    The break, its 'result' ('killed', 'survived', or 'broken' if the tests could not be collected or did not end in
    time), and the test that failed first.
  """
  start = time.monotonic()
  with tempfile.TemporaryDirectory(prefix='mutant-') as directory:
    copy = pathlib.Path(directory)
    _copy(copy)
    (copy / 'ragen_jax' / mutation.file).write_text(mutation.applied())
    status, output = _pytest(copy, cache, mutation.tests)
  failed = re.findall(r'^FAILED tests/(\S+)', output, re.MULTILINE)
  result = {0: 'survived', 1: 'killed'}.get(status, 'broken')
  if result == 'killed' and not failed:  # an error in a fixture is not a failed test
    result = 'broken'
  if result == 'broken':
    print(output[-2000:], file=sys.stderr)
  return {
    'file': mutation.file, 'old': mutation.old, 'new': mutation.new, 'result': result,
    'killed_by': failed[0] if failed else '', 'seconds': round(time.monotonic() - start, 1),
    'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
  }  # fmt: skip


def baseline(tests: list[str], cache: str) -> bool:
  """Whether the tests pass without a break, in a copy like those of the breaks."""
  with tempfile.TemporaryDirectory(prefix='mutant-') as directory:
    _copy(pathlib.Path(directory))
    status, output = _pytest(pathlib.Path(directory), cache, tuple(tests))
  if status:
    print(output[-4000:])
  return status == 0


def write(path: pathlib.Path, results: list[dict[str, Any]]) -> None:
  """Writes results in the order of the breaks. The file keeps the results of breaks that were not run."""

  def key(x):
    return x['file'], x['old'], x['new']

  before = json.loads(path.read_text())['results'] if path.is_file() else []
  found = {key(r): r for r in before + results}
  every = [found[key(vars(m))] for m in MUTATIONS if key(vars(m)) in found]
  killed = sum(r['result'] == 'killed' for r in every)
  command = f'python benchmarks/mutants.py --out={RESULT.relative_to(ROOT)}'
  path.write_text(
    json.dumps({'command': command, 'mutations': len(every), 'killed': killed, 'results': every}, indent=1) + '\n'
  )


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--only', default='', help='breaks whose file or text contains one of these, separated by commas')
  parser.add_argument('--jobs', type=int, default=2, help='number of breaks that run at a time')
  parser.add_argument('--check', action='store_true', help='only check that every break can be made')
  parser.add_argument('--no-baseline', action='store_true', help='do not run the tests without a break first')
  parser.add_argument('--out', default='', help='JSON file for the results; it keeps those of other breaks')
  args = parser.parse_args()
  chosen = [m for m in MUTATIONS if any(part in m.name for part in args.only.split(','))]
  for mutation in chosen:
    mutation.applied()
  if args.check:
    print(f'{len(chosen)} breaks can be made')
    return 0
  results = []
  with tempfile.TemporaryDirectory(prefix='mutants-cache-') as cache:
    files = sorted({test.split('::')[0] for m in chosen for test in m.tests})
    if not args.no_baseline and not baseline(files, cache):
      print('tests fail without any break')
      return 1
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
      for mutation, result in zip(chosen, pool.map(lambda m: run(m, cache), chosen), strict=True):
        results.append(result)
        print(f'{result["result"]:8} {result["seconds"]:6.1f} s  {mutation.name}  {result["killed_by"]}', flush=True)
  killed = sum(r['result'] == 'killed' for r in results)
  print(f'{killed} of {len(results)} killed')
  if args.out:
    write(pathlib.Path(args.out), results)
  return 0 if killed == len(results) else 1


if __name__ == '__main__':
  sys.exit(main())
