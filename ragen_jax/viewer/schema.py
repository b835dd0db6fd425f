"""The record of an episode, which `viewer.records` makes, `viewer.store` writes and page.html reads.

A record consists of JSON values and pictures, which are u8[H, W, 3] (None if the environment draws none). In a file and
in the page, a picture is an index into the file's list of PNG images, which has each distinct picture once.
"""

# No `from __future__ import annotations`: `__required_keys__` would ignore `NotRequired`.
from typing import Any, NotRequired, TypedDict


class EpisodeSummary(TypedDict):
  """The part of a record for the list of all episodes, which can be read without the rest.

  Attributes:
    step: number of iterations that led to the weights of the episode.
    split: 'train', 'val' (sampled), 'val-greedy', 'random', 'solver' or 'endpoint'.
    tag: the environment.
    level: seed of the level.
    group: number of the group in its batch.
    member: number of the episode in its group.
    status: how the episode ended, a name of `Status` in lower case.
    score: sum of rewards and penalties.
    actions: number of executed actions.
    error: the fault if the environment failed, else empty.
    learnt: whether the update learnt from the episode. This and the next are only in training episodes.
    prompts_trained: whether the loss covers all tokens, instead of sampled tokens only.
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


class DescriptionRecord(TypedDict):
  """A section of a reply that describes the board.

  Attributes:
    section: 'observation', which is compared with the board before the turn, or 'prediction', with the board after it.
    score: how well it describes the board, 0 to 1; None if it was not scored, because the actions are not valid.
    reward: the reward that was paid for it; None if it was not scored.
    parts: the text in parts, each with a verdict ('right', 'half', 'wrong', or '' for text that is no claim) and, for
      'half', the true claim.
    missing: true claims that the text does not have.
  """

  section: str
  score: float | None
  reward: float | None
  parts: list[tuple[str, str, str]]
  missing: list[str]


class TurnRecord(TypedDict):
  """One turn. `actions`, `valid`, `effective`, `reward` and `penalty` are those of `agent.episode.Turn`.

  Attributes:
    prompt: the text that was added to the context before `forced`.
    prompt_tokens: number of tokens of the prompt, including `forced`.
    fresh: whether the prompt begins a new context.
    forced: the beginning of the reply that was given to the policy.
    pieces: the text of each sampled token, including the stop token; parts of the reply if tokens are unknown.
    logprob, entropy, value, advantage: a number for each piece, None if not finite; absent if unknown.
    tokens: length of the reply if the pieces are not tokens.
    closed: whether the reply ended with a stop token; None if unknown.
    observation: the environment's text at the start of the turn.
    picture: the board at the start of the turn.
    reply_reward: the reward for the form of the reply and for its descriptions, not a part of the score; absent if 0.
    images: the images that the policy saw in the observation; absent if it saw none.
    metrics: what the environment reports of the turn's actions, by name; absent if nothing.
    descriptions: the sections that describe the board, if the reply is of its form and the board is known.
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
  reply_reward: NotRequired[float]
  images: NotRequired[list[Any]]
  descriptions: NotRequired[list[DescriptionRecord]]
  metrics: NotRequired[dict[str, float]]


class EpisodeRecord(EpisodeSummary):
  """An episode with its turns, and the environment's text and the board after the last action."""

  turns: list[TurnRecord]
  final_observation: str
  final_picture: Any


SUMMARY_KEYS = tuple(EpisodeSummary.__annotations__)
