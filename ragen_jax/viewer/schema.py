"""The record of an episode: what `viewer.records` makes, `viewer.store` writes and page.html reads.

A record is JSON but for its pictures, which are u8[H, W, 3] (None if the environment draws none). In a file, and in the
page, a picture is an index into the file's list of PNG images.
"""

# No `from __future__ import annotations`: `NotRequired` would not be seen in `__required_keys__`.
from typing import Any, NotRequired, TypedDict


class EpisodeSummary(TypedDict):
  """What the list of all episodes shows; it is the part of a record that is read without the rest.

  Attributes:
    step: iterations behind the weights that played.
    split: 'train', 'val' (sampled), 'val-greedy', 'random', 'solver' or 'endpoint'.
    tag: the environment.
    level: seed of the level.
    group: number of the group in its batch.
    member: number of the episode in its group.
    status: how it ended, a name of `Status` in lower case.
    score: sum of rewards and penalties.
    actions: number of actions carried out.
    error: what went wrong if the environment failed, else empty.
    learnt: the update learnt from it; of training only.
    prompts_trained: the loss is on all tokens, not on the sampled ones only; of training only.
  """

  step: int
  split: str
  tag: str
  level: int
  group: int
  member: int
  status: str
  score: float
  actions: int
  error: str
  learnt: NotRequired[bool]
  prompts_trained: NotRequired[bool]


class TurnRecord(TypedDict):
  """One turn.

  Attributes:
    prompt: the text that was added to the context, in front of `forced`.
    prompt_tokens: number of its tokens, those of `forced` included.
    fresh: the context began anew with this prompt.
    forced: the beginning of the reply that was given to the policy.
    pieces: the text of each sampled token, the stop token included; parts of the reply if tokens are unknown.
    logprob, entropy, value, advantage: a number for each piece, None if not finite; absent if unknown.
    tokens: length of the reply if the pieces are not tokens.
    closed: the reply ended with a stop token; None if unknown.
    observation: the environment's text at the turn's start.
    picture: the board at the turn's start.
    actions: names of the actions carried out.
    valid: the reply had the right form, and every action in it exists.
    effective: number of actions that changed the state.
    reward: from the environment.
    penalty: for the form of the reply; 0 or negative.
  """

  prompt: str
  prompt_tokens: int
  fresh: bool
  forced: str
  pieces: list[str]
  logprob: NotRequired[list[float | None]]
  entropy: NotRequired[list[float | None]]
  value: NotRequired[list[float | None]]
  advantage: NotRequired[list[float | None]]
  tokens: NotRequired[int]
  closed: bool | None
  observation: str
  picture: Any
  actions: list[str]
  valid: bool
  effective: int
  reward: float
  penalty: float


class EpisodeRecord(EpisodeSummary):
  """An episode with its turns.

  Attributes:
    turns: in order.
    final_observation: the environment's text after the last action.
    final_picture: the board after the last action.
  """

  turns: list[TurnRecord]
  final_observation: str
  final_picture: Any


SUMMARY_KEYS = tuple(EpisodeSummary.__annotations__)
