"""What an episode is: its turns, what they earn, how it may end, and the rule that decides when it does.

Rewards are kept action by action, and sums of them are exact (`math.fsum`), rounded once. So episodes with the same
rewards have the same score, in whatever order the rewards came and however the actions were cut into turns.
"""

from __future__ import annotations

import dataclasses
import enum
import math

import numpy as np

Chat = list[dict[str, str]]


class Status(enum.IntEnum):
  """How an episode stands, or how it ended."""

  RUNNING = 0
  SUCCESS = 1
  FAILURE = 2
  OUT_OF_TURNS = 3
  OUT_OF_ACTIONS = 4
  OUT_OF_CONTEXT = 5
  ENV_ERROR = 6  # its environment failed; says nothing about the policy
  ABANDONED = 7  # a person chose another level; never in training or evaluation


# Ended by a limit, before the game was over.
TRUNCATED = (Status.OUT_OF_TURNS, Status.OUT_OF_ACTIONS, Status.OUT_OF_CONTEXT)


# When the sampler feeds rows, see `Limits.schedule`.
SCHEDULES = ('lockstep', 'continuous')


def status_after_turn(*, done: bool, success: bool, actions_left: int, last_turn: bool) -> Status:
  """The status after a turn. If the game is over, the limits have no effect.

  Args:
    done: the game is over.
    success: and won.
    actions_left: actions that the episode still has.
    last_turn: the turn was the last that the budget allows.
  """
  if done:
    return Status.SUCCESS if success else Status.FAILURE
  if actions_left <= 0:
    return Status.OUT_OF_ACTIONS
  return Status.OUT_OF_TURNS if last_turn else Status.RUNNING


@dataclasses.dataclass(frozen=True)
class Limits:
  """Bounds of the episodes of a rollout, and the sizes that its programs are compiled for.

  The lengths in tokens bind only speakers that write tokens.

  Attributes:
    max_turns: replies of an episode; an environment's own budget may be smaller.
    max_response_tokens: tokens of a reply.
    max_context: columns of a row, its last reply included.
    format_penalty: added to the reward of a turn whose reply is not valid; 0 or negative.
    length_step: cache sizes are rounded up to multiples of this, and observation widths to multiples of a quarter.
    drop_finished: finished rows leave the batch once half of the rows of every device are finished.
    schedule: one of `SCHEDULES`. 'lockstep' feeds the next prompts when all replies are complete; 'continuous' feeds a
      row when its reply is complete, while the others go on.
    decode_chunk: the most tokens of each row that are sampled before complete replies are looked for.
    rows_in_flight: the most episodes that are on the devices at a time, while the others wait; 0 for as many as their
      memory holds.
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

  @property
  def room(self) -> int:
    """The most columns that a row may have before a reply."""
    return self.max_context - self.max_response_tokens


@dataclasses.dataclass(frozen=True)
class TextReply:
  """A reply, from any speaker.

  Attributes:
    text: the whole reply, forced prefix included, stop token not.
    tokens: its number of tokens, stop token included; None where the speaker does not count them.
    answered: False where no reply came.
    ids: the reply as it was sampled, stop token included, forced prefix not; empty from speakers without tokens.
    closed: it ended with the chat format's stop token.
  """

  text: str
  tokens: int | None = None
  answered: bool = True
  ids: tuple[int, ...] = ()
  closed: bool = True


@dataclasses.dataclass
class Turn:
  """One turn of an episode: what prompts, statistics and the viewer need of it.

  Attributes:
    observation: the environment's text at the turn's start.
    reply: the whole reply, forced prefix included, stop token not.
    actions: the names of the actions that were carried out.
    rewards: from the environment, one for each of these actions, the format penalty not included.
    penalty: the format penalty, 0 or negative.
    valid: the reply had the right form and every action in it exists.
    effective: how many of the actions changed the state.
    picture: u8[H, W, 3], the board at the turn's start, in pictured rows of environments that draw one.
    tokens: the reply's number of tokens, its stop token included; 0 where no reply came.
    answered: a reply arrived; False only for a reply that was lost on a network.
    actions_left: actions that the episode had before the turn.
    ids: the reply as it was sampled, see `TextReply`.
    closed: the reply ended with the chat format's stop token.
    chat: in pictured rows of speakers without tokens, the conversation up to the reply.
  """

  observation: str
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

  @property
  def reward(self) -> float:
    """Sum of the environment's rewards."""
    return math.fsum(self.rewards)

  @property
  def score(self) -> float:
    """Sum of the environment's rewards and the format penalty: the reward of the turn's last token."""
    return math.fsum((*self.rewards, self.penalty))


@dataclasses.dataclass
class Episode:
  """An episode in words: for statistics, the viewer and people.

  Attributes:
    tag: the environment's tag in the config.
    group: group id, as in the trajectory.
    level_seed: the seed that the level was made from.
    turns: in their order.
    final_observation: the environment's text after the last action.
    status: how it ended.
    outside: its environment lives outside JAX, and may fail.
    error: the fault that ended it, where its environment failed.
    final_picture: u8[H, W, 3], the board after the last action, as for turns.
  """

  tag: str
  group: int
  level_seed: int
  turns: list[Turn]
  final_observation: str = ''
  status: Status = Status.RUNNING
  outside: bool = False
  error: str = ''
  final_picture: np.ndarray | None = None

  @property
  def success(self) -> bool:
    return self.status == Status.SUCCESS

  @property
  def env_return(self) -> float:
    """Sum of the environment's rewards."""
    return math.fsum(reward for t in self.turns for reward in t.rewards)

  @property
  def score(self) -> float:
    """Sum of the environment's rewards and of the format penalties: the score that is trained on."""
    return math.fsum(x for t in self.turns for x in (*t.rewards, t.penalty))
