"""Searches for a better prompt: a beam of prompts, critiques of their failures, edits, and scores on held-out tasks.

  beam = [the first prompt]
  in each round:
    each prompt of the beam plays `branches` batches of training tasks
    for each batch with failed attempts, the critic writes a critique of them, and then a new prompt that follows it
    every new prompt is scored on the held-out tasks; tasks and random draws are the same for all prompts
    beam = the `beam` prompts with the best scores, of the beam and the new prompts; of equal ones the older
  the best prompt and the first one play tasks that were not used for scores

Every score and every reply of the critic is written to the journal when it is known. After an interruption, a search
takes the same steps again and reads their results from the journal.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import logging
import math
import statistics
from collections.abc import Callable, Sequence

from ragen_jax.agent.episode import Chat
from ragen_jax.prompt_search import wording
from ragen_jax.prompt_search.critic import Critic
from ragen_jax.prompt_search.journal import Journal
from ragen_jax.prompt_search.player import Attempt, PromptPlayer
from ragen_jax.prompt_search.tasks import Task, TaskRanges
from ragen_jax.utils.errors import UserError

_log = logging.getLogger(__name__)

# Why a batch of training tasks gave no new prompt: no attempt failed; the critique was lost or is empty; the reply
# with the new prompt was lost, or has none; or the new prompt is empty, too long, its parent's text, without a
# placeholder of its parent or with another one, or equal to an earlier prompt.
REASONS = (
  'nothing_failed', 'critique_lost', 'critique_empty', 'edit_lost', 'no_prompt', 'empty', 'too_long', 'unchanged',
  'placeholders', 'duplicate',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SearchSettings:
  """The size of a search. Fields of `config.prompt`."""

  rounds: int
  beam: int
  branches: int
  tasks: int
  final: int
  max_chars: int
  shown_chars: int

  @property
  def batches(self) -> int:
    """The most batches of training tasks of a search."""
    return self.rounds * self.beam * self.branches


@dataclasses.dataclass(frozen=True)
class Score:
  """Scores of a prompt on tasks."""

  tasks: tuple[float, ...]  # mean score of the attempts at each task
  attempts: int
  successes: int
  failed: int  # attempts that failed or got no reward
  error: str  # why the first of them failed; '' if none did

  @classmethod
  def of(cls, attempts: Sequence[Sequence[Attempt]]) -> Score:
    """The score of the attempts at each task."""
    flat = [a for own in attempts for a in own]
    failed = [a for a in flat if a.failed]
    return cls(
      tasks=tuple(math.fsum(a.score for a in own) / len(own) for own in attempts),
      attempts=len(flat),
      successes=sum(a.success for a in flat),
      failed=len(failed),
      error=failed[0].shown.error if failed else '',
    )

  @property
  def mean(self) -> float:
    """Mean over the tasks."""
    return statistics.fmean(self.tasks)

  @property
  def standard_error(self) -> float:
    """Standard error of the mean over the tasks; NaN for one task."""
    return standard_error(self.tasks)


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A prompt of the search; the one with number 0 is the first."""

  number: int  # place in the order of creation
  round: int  # the round that made it; 0 for the first prompt
  parent: int | None  # number of the prompt that it is a new version of; None for the first prompt
  text: str
  critique: str  # of the parent, which it answers; '' for the first prompt
  score: Score  # on the held-out tasks


@dataclasses.dataclass(frozen=True)
class Round:
  """What a round has led to."""

  number: int  # 0 before the first
  prompts: tuple[Prompt, ...]  # all prompts so far
  beam: tuple[int, ...]  # numbers of the prompts that survive, the best first
  rejected: dict[str, int]  # reason -> number of batches without a new prompt in this round

  @property
  def best(self) -> Prompt:
    """The prompt with the best score."""
    return self.prompts[self.beam[0]]


@dataclasses.dataclass(frozen=True)
class Final:
  """The comparison of the chosen prompt with the first one at the end, on tasks that no score has used."""

  best: Score
  first: Score

  @property
  def differences(self) -> tuple[float, ...]:
    """For each task, how much better the chosen prompt is."""
    return tuple(a - b for a, b in zip(self.best.tasks, self.first.tasks, strict=True))


def standard_error(values: Sequence[float]) -> float:
  """Standard error of the mean of independent values; NaN for one."""
  return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


class Search:
  """A search. `run` does all of it."""

  def __init__(
    self, settings: SearchSettings, journal: Journal, player: PromptPlayer, critic: Critic, tasks: TaskRanges
  ):
    """Plays and asks nothing."""
    self._settings, self._journal, self._player = settings, journal, player
    self._critic, self._tasks = critic, tasks

  def run(self, prompt: str, on_round: Callable[[Round], None]) -> tuple[Round, Final]:
    """Returns the last round and the final comparison; `on_round` is called before the first round and after each.

    Raises UserError if all attempts with the first prompt fail, or the critic cannot be reached.
    """
    (score,) = self._scores([prompt], self._tasks.for_scores(), 'score')
    if score.failed == score.attempts:
      raise UserError(f'all {score.attempts} attempts with the first prompt failed; the first with: {score.error}')
    now = Round(0, (Prompt(0, 0, None, prompt, '', score),), (0,), dict.fromkeys(REASONS, 0))
    on_round(now)
    for number in range(1, self._settings.rounds + 1):
      now = self._round(number, now)
      on_round(now)
    texts = list(dict.fromkeys([now.best.text, prompt]))
    scores = self._scores(texts, self._tasks.for_the_end(self._settings.final), 'final')
    return now, Final(best=scores[0], first=scores[-1])

  def _round(self, number: int, before: Round) -> Round:
    """Makes new prompts of the beam, scores them, and keeps the best."""
    s, rejected = self._settings, collections.Counter()
    parents = [before.prompts[i] for i in before.beam for _ in range(s.branches)]
    critiques = self._critiques(number, parents, rejected)
    edits = self._ask(
      {
        f'edit/{number}/{i}': wording.edit_request(parents[i].text, critique, s.max_chars, s.shown_chars)
        for i, critique in critiques.items()
      }
    )
    known, made = {p.text for p in before.prompts}, []
    for i, critique in critiques.items():
      text, reason = _checked(edits[f'edit/{number}/{i}'], parents[i].text, known, s.max_chars)
      if reason:
        rejected[reason] += 1
        continue
      known.add(text)
      made.append((parents[i].number, text, critique))
    scores = self._scores([text for _, text, _ in made], self._tasks.for_scores(), 'score')
    count = len(before.prompts)
    prompts = before.prompts + tuple(
      Prompt(count + i, number, parent, text, critique, score)
      for i, ((parent, text, critique), score) in enumerate(zip(made, scores, strict=True))
    )
    candidates = [*before.beam, *range(count, len(prompts))]
    beam = sorted(candidates, key=lambda i: (-prompts[i].score.mean, i))[: s.beam]
    _log.info(
      'round %d: %d new prompts, %d rejected; the best score is %.3f (prompt %d)', number, len(made),
      rejected.total(), prompts[beam[0]].score.mean, beam[0],
    )  # fmt: skip
    return Round(number, prompts, tuple(beam), {reason: rejected[reason] for reason in REASONS})

  def _critiques(self, number: int, parents: Sequence[Prompt], rejected: collections.Counter[str]) -> dict[int, str]:
    """The critique for each batch of a round that has one, by the index of the batch."""
    s, keys = self._settings, [f'critique/{number}/{i}' for i in range(len(parents))]
    start = (number - 1) * s.beam * s.branches
    missing = [i for i, key in enumerate(keys) if self._journal.find(key) is None]
    trials = [(parents[i].text, self._tasks.for_critiques((start + i) * s.tasks, s.tasks)) for i in missing]
    played = dict(zip(missing, self._player.try_prompts(trials), strict=True)) if trials else {}
    chats = {}
    for i, attempts in played.items():
      failures = [a.shown for own in attempts for a in own if not a.success]
      if failures:
        chats[keys[i]] = wording.critique_request(parents[i].text, failures, s.shown_chars)
      else:
        self._journal.add(keys[i], {'nothing_failed': True})
    self._ask(chats)
    found = {}
    for i, key in enumerate(keys):
      told = self._journal.find(key)
      critique = wording.without_thought(told.get('reply') or '')
      if critique:
        found[i] = critique
        continue
      lost = told.get('reply', '') is None
      if lost and not rejected['critique_lost']:
        _log.warning('round %d: the critic did not answer the request for critique %d', number, i)
      rejected['nothing_failed' if 'nothing_failed' in told else 'critique_lost' if lost else 'critique_empty'] += 1
    return found

  def _ask(self, chats: dict[str, Chat]) -> dict[str, str | None]:
    """The critic's replies by key, None for a lost one; asks for those that the journal does not have."""
    missing = [key for key in chats if self._journal.find(key) is None]
    for at in range(0, len(missing), self._critic.at_a_time):
      own = missing[at : at + self._critic.at_a_time]
      for key, reply in zip(own, self._critic.replies([chats[key] for key in own]), strict=True):
        self._journal.add(key, {'reply': reply})
    return {key: self._journal.find(key)['reply'] for key in chats}

  def _scores(self, texts: Sequence[str], tasks: Sequence[Task], purpose: str) -> list[Score]:
    """The scores of prompts on tasks; plays what the journal does not have."""
    keys = [f'{purpose}/{hashlib.sha256(text.encode()).hexdigest()[:20]}' for text in texts]
    missing = [i for i, key in enumerate(keys) if self._journal.find(key) is None]
    played = self._player.try_prompts([(texts[i], tasks) for i in missing]) if missing else []
    for i, attempts in zip(missing, played, strict=True):
      self._journal.add(keys[i], dataclasses.asdict(Score.of(attempts)))
    found = [self._journal.find(key) for key in keys]
    return [Score(**result | {'tasks': tuple(result['tasks'])}) for result in found]


def _checked(reply: str | None, parent: str, known: set[str], max_chars: int) -> tuple[str, str]:
  """The new prompt in a reply, and ''; or '' and the reason why there is none."""
  if reply is None:
    return '', 'edit_lost'
  text = wording.read_prompt(reply)
  if text is None:
    return '', 'no_prompt'
  if not text:
    return '', 'empty'
  if len(text) > max_chars:
    return '', 'too_long'
  if text == parent:
    return '', 'unchanged'
  if wording.placeholders(text) != wording.placeholders(parent):
    return '', 'placeholders'
  if text in known:
    return '', 'duplicate'
  return text, ''
