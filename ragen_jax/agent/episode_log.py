"""The episodes of a running rollout: how they begin, are recorded and rewarded, and end."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

import numpy as np

from ragen_jax.agent.context_manager import ContextManager, ParsedReply, Prompt
from ragen_jax.agent.env_manager import EnvStateManager, StepResult
from ragen_jax.agent.episode import TRUNCATED, Chat, Episode, Limits, Status, TextReply, Turn, status_after_turn
from ragen_jax.agent.rollout import Rollout
from ragen_jax.agent.segments import Observation
from ragen_jax.agent.trajectory import Timeline
from ragen_jax.agent.world_model.formats import described_sections
from ragen_jax.agent.world_model.state_reward import ReplyReward, score_turn
from ragen_jax.utils.threads import Fault


class EpisodeLog:
  """One episode for each row. `AgentProxy.rollout` writes to it. A speaker reads it, and ends episodes with `leave`.

  Attributes:
    timeline: the token rows, which speakers with tokens write.
    observations: the current observations, one for each row, as prompts show them.
    actions_left: i32[B], actions that each episode still has.
    status: i32[B], the `Status` of each row.
    episodes: the episodes with their turns so far, one for each row.
    row_steps: see `Rollout`; a speaker that decodes adds to it.
  """

  def __init__(
    self,
    envs: EnvStateManager,
    context: ContextManager,
    limits: Limits,
    observations: list[Observation],
    *,
    writes_tokens: bool,
    pictured: Collection[int] = (),
  ):
    """Begins an episode in each row.

    Args:
      envs: the environments, right after a reset.
      writes_tokens: whether the speaker writes token rows.
      pictured: rows of the whole batch whose boards are drawn. Without tokens, their conversations are kept too.
    """
    rows = envs.rows
    self.envs, self.context, self.limits = envs, context, limits
    self._limits = [limits.of(spec) for spec in envs.specs]
    self.timeline = Timeline(rows, limits.max_context if writes_tokens else 0)
    self.observations = [context.shown(e, x) for e, x in zip(envs.row_env.tolist(), observations, strict=True)]
    self.actions_left = envs.actions_left()
    form = context.settings.format
    graded = [described_sections(form) if spec.env.scene_kinds else () for spec in envs.specs]
    self.episodes = [
      Episode(envs.specs[e].tag, int(g), int(s), [], outside=envs.pools[e].outside, form=form, graded=graded[e])
      for e, g, s in zip(envs.row_env.tolist(), envs.row_group, envs.level_seeds, strict=True)
    ]
    self._scenes = envs.scenes([row for row, episode in enumerate(self.episodes) if episode.graded])
    self.status = np.full((rows,), Status.RUNNING, np.int32)
    self.status[list(envs.faults)] = Status.ENV_ERROR
    self._turns_allowed = np.asarray([min(limits.max_turns, s.budget.max_turns) for s in envs.specs])[envs.row_env]
    own = [row - envs.first_row for row in pictured if 0 <= row - envs.first_row < rows]
    self._pictures = {row: envs.picture(row) for row in own}
    self._won: set[int] = set()  # rows that are won and go on
    self._keeps_chats = not writes_tokens
    self.row_steps = 0
    self._began = dict.fromkeys(range(rows), time.monotonic())
    self._late_at = min(self._began.values(), default=0.0) + (limits.rollout_timeout or np.inf)
    self._replied: dict[int, tuple[TextReply, ParsedReply]] = {}  # whose turns are not over
    self._anchors = np.full((rows, limits.max_turns), -1, np.int32)
    self._anchor_ids: dict[tuple[int, Observation], int] = {}

  @property
  def live(self) -> list[int]:
    """The rows whose episodes are not over and that wait for a reply, ascending."""
    return [row for row in np.flatnonzero(self.status == Status.RUNNING).tolist() if row not in self._replied]

  @property
  def away(self) -> Collection[int]:
    """The rows whose environments play."""
    return self._replied.keys()

  @property
  def turn(self) -> int:
    """Index of the current turn, if all running episodes have had the same number of turns, as with text speakers."""
    return max(len(episode.turns) for episode in self.episodes)

  def past(self, row: int) -> list[Turn]:
    return self.episodes[row].turns

  def limits_of(self, row: int) -> Limits:
    """The limits of a row's episode."""
    return self._limits[self.envs.row_env[row]]

  def prompts(self, rows: Collection[int], *, room: int | None = None) -> dict[int, Prompt]:
    """The token prompts of live rows that wait for a reply. An episode ends if its prompt needs more than `room`
    columns, by default the room of its limits; and if it has not begun when the rollout is late.

    Raises:
      UserError: a first prompt does not fit. For an environment outside JAX only the episode ends, because its prompts
        cannot be checked in advance.
    """
    prompts = {}
    for row in rows:
      if not self.past(row):
        self._began[row] = time.monotonic()
        self._end_if_late(row)
        if self.status[row] != Status.RUNNING:
          continue
      env, left = int(self.envs.row_env[row]), int(self.actions_left[row])
      used = int(self.timeline.length[row])
      own = self.limits_of(row).room if room is None else room
      prompt = self.context.prompt(env, self.past(row), self.observations[row], left, used=used, room=own)
      if prompt is not None:
        prompts[row] = prompt
        continue
      if not self.past(row):
        self.check_first_prompt(row)
      self.leave(row, Status.OUT_OF_CONTEXT)
    return prompts

  def check_first_prompt(self, row: int) -> None:
    """Raises UserError if the first prompt of a row does not fit, unless its environment is outside JAX."""
    env = int(self.envs.row_env[row])
    if not self.envs.pools[env].outside:
      self.context.check_first_prompt(env, self.observations[row], int(self.actions_left[row]), self.limits)

  def chat(self, row: int) -> Chat:
    """The conversation of a row up to the next reply, as messages."""
    env, left = int(self.envs.row_env[row]), int(self.actions_left[row])
    return self.context.messages(env, self.past(row), self.observations[row], left)

  def leave(self, row: int, status: Status) -> None:
    """Ends an episode before its current turn, which is not recorded. If it is won and went on, it is a success."""
    self.status[row] = Status.SUCCESS if status in TRUNCATED and row in self._won else status

  def replied(self, replies: Mapping[int, TextReply], parsed: Mapping[int, ParsedReply]) -> None:
    """Notes the replies of rows, which are `away` until `record`."""
    self._replied |= {row: (reply, parsed[row]) for row, reply in replies.items()}

  def record(self, rows: Collection[int], result: StepResult) -> None:
    """Records and rewards the turn of rows that have replied, and ends episodes that are over."""
    envs, context, before, left = self.envs, self.context, self.observations, self.actions_left
    replies, parsed = {}, {}
    for row in rows:
      replies[row], parsed[row] = self._replied.pop(row)
    chats = {row: self.chat(row) for row in self._pictures if row in replies} if self._keeps_chats else {}
    now, self.actions_left, faults = envs.render(), envs.actions_left(), envs.faults
    self.observations = [
      context.shown(int(envs.row_env[row]), x) if row in replies else before[row] for row, x in enumerate(now)
    ]
    scenes = self._scenes
    self._scenes = scenes | envs.scenes([row for row in replies if row in scenes])
    for row in sorted(replies):
      reply, read = replies[row], parsed[row]
      tokens = len(context.tokenizer.encode(reply.text)) if reply.tokens is None else reply.tokens
      turn = Turn(
        observation=before[row],
        reply=reply.text,
        actions=list(read.names[: result.executed[row]]),
        rewards=result.rewards[row],
        penalty=0.0 if read.valid else self.limits.format_penalty,
        valid=read.valid,
        effective=int(result.effective[row]),
        picture=self._pictures.get(row),
        tokens=tokens,
        answered=reply.answered,
        actions_left=int(left[row]),
        ids=reply.ids,
        closed=reply.closed,
        chat=chats.get(row),
        sections=read.sections.texts,
        scenes=(scenes[row], self._scenes[row]) if row in scenes else None,
        metrics=result.metrics[row],
        reply_reward=score_turn(read.sections, read.known, scenes.get(row), self._scenes.get(row), self.limits.replies),
      )
      self.episodes[row].turns.append(turn)
      if self.timeline.length[row]:
        self.timeline.reward_last_token(row, turn.score)
        self._pay(row, reply.ids, turn.reply_reward)
      anchor = int(envs.row_group[row]), before[row]
      self._anchors[row, len(self.past(row)) - 1] = self._anchor_ids.setdefault(anchor, len(self._anchor_ids))
      if result.success[row]:
        self._won.add(row)
      self.status[row] = Status.ENV_ERROR if row in faults else status_after_turn(
        done=result.done[row],
        success=result.success[row],
        actions_left=self.actions_left[row],
        last_turn=len(self.past(row)) >= self._turns_allowed[row],
      )  # fmt: skip
      if self.status[row] == Status.RUNNING:
        self._end_if_late(row)
      if row in self._pictures:
        self._pictures[row] = envs.picture(row)

  def _end_if_late(self, row: int) -> None:
    """Ends an episode that, or whose rollout, has taken too long: as an error of its environment, or won if it is.

    Episodes in JAX have no limit.
    """
    now, most = time.monotonic(), self.limits.episode_timeout
    if not self.envs.pool_of(row).outside:
      return
    if most and now - self._began[row] > most:
      why = f'the episode took longer than agent.episode_timeout={most:g}'
    elif now > self._late_at:
      why = f'the rollout took longer than agent.rollout_timeout={self.limits.rollout_timeout:g}'
    else:
      return
    if row in self._won:
      self.status[row] = Status.SUCCESS
      return
    self.envs.fail(row, Fault(why))
    self.status[row] = Status.ENV_ERROR

  def _pay(self, row: int, ids: tuple[int, ...], reward: ReplyReward) -> None:
    """Writes the rewards of a reply to the tokens where they are paid."""
    self.timeline.add_reply_reward(row, reward.format_reward, 0)
    for name, value in reward.rewards.items():
      at_section = self.limits.replies.state_place == 'section'
      end = self.context.tokenizer.count_until(ids, f'</{name}>') if at_section else len(ids)
      self.timeline.add_reply_reward(row, value, len(ids) - end)

  def end(self, policy_version: int = 0) -> Rollout:
    """Ends the rollout. `policy_version` is the number of updates that led to the sampling weights.

    Raises RuntimeError if an episode is not over.
    """
    envs, faults = self.envs, self.envs.faults
    if running := int((self.status == Status.RUNNING).sum()):
      raise RuntimeError(f'{running} of {envs.rows} episodes were not played to their end')
    for row, episode in enumerate(self.episodes):
      episode.status = Status(int(self.status[row]))
      episode.final_observation = self.observations[row]
      episode.error = str(faults.get(row, ''))
      episode.final_picture = self._pictures.get(row)
    pad_id = self.context.tokenizer.pad_id
    trajectory = self.timeline.trajectory(
      group=envs.row_group,
      episode=envs.first_row + np.arange(envs.rows),
      env=envs.row_env,
      status=self.status,
      policy_version=policy_version,
      pad_id=pad_id,
    )
    anchors = self._anchors[trajectory.episode - envs.first_row]
    scores = np.asarray([e.score for e in self.episodes], np.float32)
    tokens_sampled = int(trajectory.loss_mask.sum())
    images = tuple(self.timeline.images)
    return Rollout(trajectory, self.episodes, anchors, scores, tokens_sampled, pad_id, self.row_steps, images)
