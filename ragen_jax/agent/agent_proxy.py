"""The rollout loop: extend, decode, parse, step, for all rows in lockstep, until every episode is over."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.agent.context_manager import ContextManager, PastTurn
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.trajectory import Episode, Status, Timeline, Trajectory, Turn, status_after_turn
from ragen_jax.distributed import processes
from ragen_jax.envs.outside.base import TextEnvironment
from ragen_jax.sampling.sampler import Sampler, Sampling
from ragen_jax.utils.errors import UserError


@dataclasses.dataclass(frozen=True)
class Limits:
  """What bounds a rollout, and the sizes that its programs are compiled for.

  Attributes:
    max_turns: replies an episode.
    max_response_tokens: tokens a reply.
    max_context: columns a row may use, its last reply included.
    format_penalty: added to the reward of a turn whose reply is not valid; 0 or negative.
    size_step: cache sizes and observation widths are rounded up to multiples of this.
    drop_finished: rows that are over leave the batch once half of those of every device are.
  """

  max_turns: int
  max_response_tokens: int
  max_context: int
  format_penalty: float
  size_step: int
  drop_finished: bool


@dataclasses.dataclass
class Rollout:
  """What a rollout gives.

  Attributes:
    trajectory: for the update.
    episodes: for people and statistics; none in what comes from a replay buffer.
    anchors: i32[B, max_turns], equal where two turns began from the same observation of the same level; -1 where the
      episode did not get there.
    episode_scores: f32[episodes], their raw scores, penalties included.
    tokens_sampled: how many tokens the policy sampled.
    pad_id: the token behind a row's last.
  """

  trajectory: Trajectory
  episodes: list[Episode]
  anchors: np.ndarray
  episode_scores: np.ndarray
  tokens_sampled: int
  pad_id: int

  @property
  def scores(self) -> np.ndarray:
    """f32[B], the raw score of each row's episode."""
    return self.episode_scores[self.trajectory.episode]


def round_up(n: int, step: int) -> int:
  """The smallest multiple of `step` that is at least n."""
  return -(-n // step) * step


class AgentProxy:
  """Plays episodes with a policy."""

  def __init__(self, envs: EnvStateManager, context: ContextManager, sampler: Sampler, limits: Limits):
    """Puts the parts together; nothing runs before `rollout`."""
    self.envs = envs
    self.context = context
    self.sampler = sampler
    self.limits = limits

  def _row_buckets(self) -> list[int]:
    """Rows a shard that programs are compiled for: halves of the full number, down to an eighth."""
    share = self.sampler.share
    sizes = [self.envs.rows // share.own]
    while self.limits.drop_finished and len(sizes) < 4 and sizes[-1] % 2 == 0 and sizes[-1] * share.shards > 8:
      sizes.append(sizes[-1] // 2)
    return sizes

  def rollout(
    self,
    params: Any,
    first_seed: int,
    key: jax.Array,
    sampling: Sampling,
    *,
    policy_version: int = 0,
    pictured: Collection[int] = (),
  ) -> Rollout:
    """Plays one episode a row; with many processes each plays its own, and all return the whole.

    Args:
      params: weights of the `ActorCritic`.
      first_seed: of the levels, see `EnvStateManager.reset`.
      key: for the tokens that are drawn.
      sampling: how they are drawn.
      policy_version: number of updates behind the weights, kept in the trajectory.
      pictured: rows of the whole batch whose boards are drawn, for those who want to look at them.

    Returns:
      The `Rollout`.

    Raises:
      UserError: a first prompt does not fit into the context.
    """
    envs, context, limits = self.envs, self.context, self.limits
    rows = envs.rows
    observations = envs.reset(first_seed)
    share = self.sampler.share
    row_keys = jax.random.split(key, rows * share.parts)[envs.first_row : envs.first_row + rows]
    timeline = Timeline(rows, limits.max_context)
    episodes = [
      Episode(envs.specs[e].tag, int(g), int(s), [], outside=isinstance(envs.specs[e].env, TextEnvironment))
      for e, g, s in zip(envs.row_env, envs.row_group, envs.level_seeds, strict=True)
    ]
    status = np.full((rows,), Status.RUNNING, np.int32)
    status[list(envs.faults)] = Status.ENV_ERROR
    drawn = [row - envs.first_row for row in pictured if 0 <= row - envs.first_row < rows]
    pictures = {row: envs.picture(row) for row in drawn}
    actions_left = envs.actions_left()
    turns_allowed = np.asarray([min(limits.max_turns, s.budget.max_turns) for s in envs.specs])[envs.row_env]
    anchors = np.full((rows, limits.max_turns), -1, np.int32)
    anchor_ids: dict[tuple[int, str], int] = {}
    past: list[list[PastTurn]] = [[] for _ in range(rows)]
    began = np.zeros((rows,), np.uint32)  # the turn that the timeline's row begins with
    room = limits.max_context - limits.max_response_tokens

    # batch[i]: the timeline's row that row i of the device's state belongs to. Rows are dealt to the shards in turn, so
    # that a level whose episodes are long is no shard's alone.
    state, batch = None, np.arange(rows).reshape(-1, share.own).T.reshape(-1)
    for turn in range(limits.max_turns):
      segments: dict[int, tuple[int, ...]] = {}
      goes_on = np.zeros((rows,), bool)  # its cache is that of the row that is written on
      with processes.same_errors() if turn == 0 else contextlib.nullcontext():
        for row in np.flatnonzero(status == Status.RUNNING):
          e, used = int(envs.row_env[row]), int(timeline.length[row])
          written = context.prompt(e, past[row], observations[row], int(actions_left[row]), used=used, room=room)
          if written is None:
            self._check_first_prompt(turn, e, observations[row], int(actions_left[row]))
            status[row] = Status.OUT_OF_CONTEXT
            continue
          segments[int(row)], fresh = written
          if fresh:
            timeline.begin_row(row)
            began[row] = turn
          goes_on[row] = not fresh
          anchors[row, turn] = anchor_ids.setdefault((int(envs.row_group[row]), observations[row]), len(anchor_ids))
      live = np.asarray(list(segments), np.int32)
      # Processes agree on shapes, and go on until the last of them is done.
      busiest, widest, longest = processes.largest(
        (
          int(np.bincount(live % share.own).max(initial=0)),
          max(map(len, segments.values()), default=0),
          int(timeline.length[live].max(initial=0)),
        )
      )
      if not busiest:
        break
      state, batch = self._make_room(state, batch, live, goes_on, busiest, widest, longest)
      # A draw's chance comes from its key and its position, which begins anew with a row.
      keys = _keys_of_rows(row_keys, began) if began.any() else row_keys
      state, reply = self._speak(params, state, batch, segments, keys, sampling)
      at = np.flatnonzero(np.isin(batch, live) & (reply.count > 0))
      for row in live:
        timeline.append_context(row, segments[int(row)], turn)
      timeline.append_reply(batch[at], jax.tree.map(operator.itemgetter(at), reply), turn)

      ids = [reply.tokens[i, : reply.count[i]].tolist() for i in at]
      texts = context.reply_texts(ids)
      parsed = {int(r): context.parse(int(envs.row_env[r]), t) for r, t in zip(batch[at], texts, strict=True)}
      left = actions_left
      result = envs.step([list(parsed[r].actions) if r in parsed else [] for r in range(rows)])
      actions_left = envs.actions_left()
      before, observations, faults = observations, envs.render(), envs.faults

      for row, text, sampled in zip(batch[at], texts, ids, strict=True):
        names = parsed[int(row)].names[: result.executed[row]]
        closed = sampled[-1] == self.sampler.stop_ids[0]
        past[row].append(
          PastTurn(before[row], int(left[row]), names, float(result.reward[row]), tuple(sampled), closed)
        )
        penalty = 0.0 if parsed[int(row)].valid else limits.format_penalty
        timeline.reward_last_token(row, float(result.reward[row]) + penalty)
        episodes[row].turns.append(
          Turn(
            observation=before[row],
            reply=text,
            actions=list(names),
            reward=float(result.reward[row]),
            penalty=penalty,
            valid=parsed[int(row)].valid,
            effective=int(result.effective[row]),
            picture=pictures.get(int(row)),
            tokens=len(sampled),
          )
        )
        status[row] = Status.ENV_ERROR if row in faults else status_after_turn(
          done=result.done[row], success=result.success[row], actions_left=actions_left[row],
          last_turn=turn + 1 >= turns_allowed[row],
        )  # fmt: skip
        if int(row) in pictures:
          pictures[int(row)] = envs.picture(int(row))

    for row, episode in enumerate(episodes):
      episode.status = Status(int(status[row]))
      episode.final_observation = observations[row]
      episode.error = str(envs.faults.get(row, ''))
      episode.final_picture = pictures.get(row)
    envs.end()
    trajectory = timeline.trajectory(
      group=envs.row_group,
      episode=envs.first_row + np.arange(rows),
      env=envs.row_env,
      status=status,
      policy_version=policy_version,
      pad_id=self.context.tokenizer.pad_id,
    )
    anchors = anchors[trajectory.episode - envs.first_row]
    scores = np.asarray([e.score for e in episodes], np.float32)
    own = Rollout(trajectory, episodes, anchors, scores, int(trajectory.loss_mask.sum()), context.tokenizer.pad_id)
    return concatenate(processes.gather_shares(own, share), renumber=False)

  def check_first_prompts(self, first_level: int) -> None:
    """Raises UserError where the first prompt of an environment does not fit; before anything large is compiled.

    Not where an environment is outside JAX, whose resets are not ours to spend.
    """
    if any(isinstance(spec.env, TextEnvironment) for spec in self.envs.specs):
      return
    observations, left = self.envs.reset(first_level), self.envs.actions_left()
    room = self.limits.max_context - self.limits.max_response_tokens
    for env, row in zip(*np.unique(self.envs.row_env, return_index=True), strict=True):
      prompt = int(env), observations[row], int(left[row])
      if len(self.context.first_segment(*prompt)) > room:
        self._check_first_prompt(0, *prompt)

  def _check_first_prompt(self, turn: int, env: int, observation: str, actions_left: int) -> None:
    """Raises UserError where a first prompt and its reply do not fit into the context, whatever is done.

    What an environment outside JAX says is not ours to foresee: there, only this episode is over.
    """
    if turn == 0 and not isinstance(self.envs.specs[env].env, TextEnvironment):
      ids, limits = self.context.first_segment(env, observation, actions_left), self.limits
      raise UserError(
        f'agent.max_context={limits.max_context}: a first prompt of {self.envs.specs[env].tag} and its reply need '
        f'{len(ids)} + {limits.max_response_tokens} tokens'
      )

  def _make_room(self, state, batch, live, goes_on, busiest, widest, longest):
    """The device's state for the next turn: live rows, dense, with columns for the observation and the reply.

    Args:
      state: the state before; None at the first turn.
      batch: i32[own shards * b], the timeline's rows that its rows belong to.
      live: the timeline's rows that take part.
      goes_on: bool[rows], those that are written on; the cache of the others is emptied.
      busiest: the most that any shard has of them.
      widest: tokens of the longest observation.
      longest: tokens of the longest live row.

    Returns:
      The state after, and its `batch`; -1 where a row is there to fill up.
    """
    limits = self.limits
    # Finer than the cache: every column of an observation is computed, filled or not.
    self._width = round_up(widest, max(limits.size_step // 4, 1))
    # Columns are written at the longest row's end, so a row may need more of them than it has tokens.
    size = round_up(longest + self._width + limits.max_response_tokens, limits.size_step)
    if state is None:
      return self.sampler.init(len(batch), size), batch
    shards = batch.reshape(self.sampler.share.own, -1)
    bucket = min(b for b in self._row_buckets() if b >= busiest)
    if bucket == shards.shape[1]:
      pick = np.tile(np.arange(bucket, dtype=np.int32), len(shards))
    else:
      order = np.argsort(~np.isin(shards, live), axis=1, kind='stable')[:, :bucket].astype(np.int32)
      batch = np.take_along_axis(shards, order, axis=1)
      batch, pick = np.where(np.isin(batch, live), batch, -1).reshape(-1), order.reshape(-1)
    return self.sampler.arrange(state, pick, size, np.isin(batch, live[goes_on[live]])), batch

  def _speak(self, params, state, batch, segments, row_keys, sampling):
    """Feeds each live row its segment and draws its reply; rows of `batch` that are -1 or over take no part."""
    tokens = np.full((len(batch), self._width), self.context.tokenizer.pad_id, np.int32)
    count = np.zeros((len(batch),), np.int32)
    for i, row in enumerate(batch):
      ids = segments.get(int(row))
      if ids is not None:
        tokens[i, : len(ids)] = ids
        count[i] = len(ids)
    state = self.sampler.extend(params, state, tokens, count)
    state, reply = self.sampler.decode(
      params,
      state,
      row_keys[jnp.asarray(np.maximum(batch, 0))],
      count > 0,
      max_new=self.limits.max_response_tokens,
      sampling=sampling,
    )
    return state, processes.own_rows(reply)


def _keys_of_rows(keys: jax.Array, began: np.ndarray) -> jax.Array:
  """The episodes' keys [B]; with the turn in those whose row does not begin with the first."""
  folded = jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, jnp.asarray(began)))
  return jax.random.wrap_key_data(jnp.where(jnp.asarray(began)[:, None] > 0, folded, jax.random.key_data(keys)))


def concatenate(parts: list[Rollout], *, renumber: bool) -> Rollout:
  """Rollouts as one, their rows in order.

  Args:
    parts: shares of one rollout, or several rollouts of fresh levels.
    renumber: their groups and episodes are counted from 0 in each, as those of several rollouts are.
  """
  if len(parts) == 1:
    return parts[0]
  if renumber:
    trajectories = [p.trajectory for p in parts]
    groups = np.cumsum([0] + [int(t.group.max()) + 1 for t in trajectories])
    episodes = np.cumsum([0] + [len(p.episode_scores) for p in parts])
    parts = [
      dataclasses.replace(
        p,
        trajectory=p.trajectory.replace(group=p.trajectory.group + g, episode=p.trajectory.episode + e),
        episodes=[dataclasses.replace(x, group=x.group + int(g)) for x in p.episodes],
      )
      for p, g, e in zip(parts, groups, episodes, strict=False)
    ]
  widths = [p.trajectory.tokens.shape[1] for p in parts]
  fill = Trajectory(**{f.name: 0 for f in dataclasses.fields(Trajectory)}).replace(turn=-1, tokens=parts[0].pad_id)

  def join(filler, *leaves):
    if leaves[0].ndim == 1:
      return np.concatenate(leaves)
    grown = [np.pad(x, ((0, 0), (0, max(widths) - x.shape[1])), constant_values=filler) for x in leaves]
    return np.concatenate(grown)

  trajectory = jax.tree.map(join, fill, *(p.trajectory for p in parts))
  # Numbers of anchors are each part's own.
  offsets = np.cumsum([0] + [int(p.anchors.max(initial=-1)) + 1 for p in parts])
  anchors = [np.where(p.anchors < 0, -1, p.anchors + o) for p, o in zip(parts, offsets, strict=False)]
  return Rollout(
    trajectory,
    [e for p in parts for e in p.episodes],
    np.concatenate(anchors),
    np.concatenate([p.episode_scores for p in parts]),
    sum(p.tokens_sampled for p in parts),
    parts[0].pad_id,
  )


def take_rows(rollout: Rollout, rows: np.ndarray) -> Rollout:
  """Some rows, i32[b], their groups and episodes counted from 0; texts are left behind."""
  t = rollout.trajectory
  kept, episode = np.unique(t.episode[rows], return_inverse=True)
  own = jax.tree.map(lambda x: x[rows], t)
  own = own.replace(
    group=np.unique(own.group, return_inverse=True)[1].astype(np.int32), episode=episode.astype(np.int32)
  )
  return Rollout(own, [], rollout.anchors[rows], rollout.episode_scores[kept], int(own.loss_mask.sum()), rollout.pad_id)


def pad_rows(rollout: Rollout, multiple: int) -> Rollout:
  """The rollout with empty rows behind it, up to a multiple of a number of rows."""
  more = -len(rollout.trajectory.length) % multiple
  fill = Trajectory(**{f.name: 0 for f in dataclasses.fields(Trajectory)}).replace(turn=-1, tokens=rollout.pad_id)

  def pad(filler, x):
    return np.pad(x, ((0, more),) + ((0, 0),) * (x.ndim - 1), constant_values=filler)

  return dataclasses.replace(
    rollout, trajectory=jax.tree.map(pad, fill, rollout.trajectory), anchors=pad(-1, rollout.anchors)
  )
