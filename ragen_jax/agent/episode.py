"""Episodes: their turns, rewards and statuses, and the rule that decides when an episode ends.

Rewards are recorded for each action. Their sums are exact (`math.fsum`) and rounded once, so episodes with the same
rewards have the same score, whatever the order of the rewards and the division of the actions into turns.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping

import numpy as np

from ragen_jax.agent.segments import Observation
from ragen_jax.agent.world_model.state_reward import NO_REWARD, ReplyReward, ReplyRewardSettings
from ragen_jax.envs.scenes import Scene
from ragen_jax.envs.spec import EnvSpec

Chat = list[dict[str, str]]


class Status(enum.IntEnum):
  """Whether an episode is running, or how it ended."""

  RUNNING = 0
  SUCCESS = 1
  FAILURE = 2
  OUT_OF_TURNS = 3
  OUT_OF_ACTIONS = 4
  OUT_OF_CONTEXT = 5
  ENV_ERROR = 6  # the environment failed; unrelated to the policy
  ABANDONED = 7  # a person or a demonstrator left the level; never in training or evaluation


# Statuses of episodes that a limit ended before the game was over.
TRUNCATED = (Status.OUT_OF_TURNS, Status.OUT_OF_ACTIONS, Status.OUT_OF_CONTEXT)


# When the sampler feeds rows, see `Limits.schedule`.
SCHEDULES = ('lockstep', 'continuous')


def status_after_turn(*, done: bool, success: bool, actions_left: int, last_turn: bool) -> Status:
  """The status after a turn. If the game is over, the limits have no effect; nor if it is won and goes on."""
  if done:
    return Status.SUCCESS if success else Status.FAILURE
  if success and (actions_left <= 0 or last_turn):
    return Status.SUCCESS
  if actions_left <= 0:
    return Status.OUT_OF_ACTIONS
  return Status.OUT_OF_TURNS if last_turn else Status.RUNNING


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of the episodes of a rollout, and the sizes of its compiled programs.

  The limits in tokens apply only to speakers that write tokens. Fields of `config.agent`, and the following.

  Attributes:
    max_turns: maximum replies of an episode; an environment's own budget may be smaller.
    length_step: cache sizes are multiples of this, and observation widths of a quarter; see `sampling.shapes`.
    replies: the rewards of replies for their form and for described states.
  """

  max_turns: int
  max_response_tokens: int
  max_context: int
  format_penalty: float
  length_step: int
  drop_finished: bool
  schedule: str
  decode_chunk: int
  rows_in_flight: int
  env_threads: int
  episode_timeout: float
  rollout_timeout: float
  replies: ReplyRewardSettings

  def of(self, spec: EnvSpec) -> Limits:
    """The limits in one environment, whose replies may have a lower limit."""
    return dataclasses.replace(self, max_response_tokens=spec.max_response_tokens or self.max_response_tokens)

  @property
  def room(self) -> int:
    """Maximum number of columns of a row before a reply."""
    return self.max_context - self.max_response_tokens


@dataclasses.dataclass(frozen=True)
class TextReply:
  """A reply of a speaker.

  Attributes:
    text: the whole reply, with the forced prefix, without the stop token.
    tokens: number of tokens of the reply, including the stop token; None if the speaker does not count them.
    answered: False if the reply was lost.
    ids: the sampled ids, including the stop token, without the forced prefix; empty for speakers without tokens.
    closed: whether the reply ended with the chat format's stop token.
  """

  text: str
  tokens: int | None = None
  answered: bool = True
  ids: tuple[int, ...] = ()
  closed: bool = True


@dataclasses.dataclass
class Turn:
  """One turn of an episode, as prompts, statistics and the viewer need it; the other fields are those of `TextReply`.

  Attributes:
    observation: of the environment at the start of the turn: text, or segments if it contains images.
    reply: the whole reply, with the forced prefix, without the stop token.
    actions: the names of the executed actions.
    rewards: the environment's reward for each executed action, without the format penalty.
    penalty: the format penalty, 0 or negative.
    valid: whether the reply has the right form and all its actions exist.
    effective: number of executed actions that changed the state.
    picture: u8[H, W, 3], the board at the start of the turn; None in rows without pictures.
    tokens: number of tokens of the reply, including its stop token; 0 if the reply was lost.
    actions_left: actions that the episode had before the turn.
    chat: the conversation up to the reply; only in pictured rows of speakers without tokens.
    sections: innermost tag -> its text; empty if the reply is not of its form.
    scenes: the states before and after the turn, if the reply should describe one of them.
    metrics: the environment's own measurements, by name: sums over the executed actions.
    reply_reward: the rewards for the form of the reply and for described states. They are not part of `score`.
  """

  observation: Observation
  reply: str
  actions: list[str]
  rewards: tuple[float, ...]
  penalty: float
  valid: bool
  effective: int
  picture: np.ndarray | None = None
  tokens: int = 0
  answered: bool = True
  actions_left: int = 0
  ids: tuple[int, ...] = ()
  closed: bool = True
  chat: Chat | None = None
  sections: Mapping[str, str] = dataclasses.field(default_factory=dict)
  scenes: tuple[Scene, Scene] | None = None
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  reply_reward: ReplyReward = NO_REWARD

  @property
  def reward(self) -> float:
    """Sum of the environment's rewards."""
    return math.fsum(self.rewards)

  @property
  def score(self) -> float:
    """Sum of the environment's rewards and the format penalty; it is paid on the turn's last token."""
    return math.fsum((*self.rewards, self.penalty))


@dataclasses.dataclass
class Episode:
  """An episode as text, for statistics, the viewer and people.

  Attributes:
    tag: the environment's tag in the config.
    group: group id, as in the trajectory.
    final_observation: of the environment after the last action.
    outside: whether the environment is outside JAX.
    error: the fault, if the environment failed.
    final_picture: u8[H, W, 3], the board after the last action; None as in `Turn.picture`.
    form: the form of its replies, see `formats.FORMATS`; empty if they have none, as those of agent programs.
    graded: the sections of its replies that are compared with the environment's state.
  """

  tag: str
  group: int
  level_seed: int
  turns: list[Turn]
  final_observation: Observation = ''
  status: Status = Status.RUNNING
  outside: bool = False
  error: str = ''
  final_picture: np.ndarray | None = None
  form: str = ''
  graded: tuple[str, ...] = ()

  @property
  def success(self) -> bool:
    return self.status == Status.SUCCESS

  @property
  def env_return(self) -> float:
    """Sum of the environment's rewards."""
    return math.fsum(reward for t in self.turns for reward in t.rewards)

  @property
  def score(self) -> float:
    """Sum of the environment's rewards and of the format penalties, without the rewards of replies."""
    return math.fsum(x for t in self.turns for x in (*t.rewards, t.penalty))
