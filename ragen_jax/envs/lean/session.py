"""The episodes of the environment type 'lean': what is accepted, what is paid, and what the policy reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ragen_jax.envs.dataset.item import Item
from ragen_jax.envs.dataset.tools import cut
from ragen_jax.envs.lean import proofs
from ragen_jax.envs.lean.proofs import Outcome, Statement
from ragen_jax.envs.lean.server import LeanServer
from ragen_jax.envs.lean.statements import read_proof
from ragen_jax.envs.outside.base import Session
from ragen_jax.utils.errors import one_line
from ragen_jax.utils.threads import Fault

# What random play writes.
COMMON_TACTICS = (
  'rfl', 'trivial', 'simp', 'norm_num', 'ring', 'omega', 'linarith', 'positivity', 'decide', 'aesop', 'intro x',
  'constructor', 'left', 'right', 'simp_all', 'nlinarith', 'contradiction', 'ext x', 'push_neg', 'field_simp',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LeanSessionSettings:
  """Options of the environment that its sessions need, see `LeanEnvironment`."""

  preamble: str
  success_reward: float
  progress_reward: float
  most_progress: float
  rejected_reward: float
  step_reward: float
  max_goal_chars: int
  max_feedback_chars: int
  tactic_timeout_s: int


@dataclasses.dataclass
class _Row:
  """An episode.

  Attributes:
    tactics: the answers that were accepted.
    goals: that are left.
    seen: what was to be shown at some time.
    paid: the rewards of progress so far.
  """

  item: Item
  goals: tuple[str, ...]
  tactics: list[str] = dataclasses.field(default_factory=list)
  seen: set[tuple[str, ...]] = dataclasses.field(default_factory=set)
  paid: float = 0.0


class LeanSession(Session):
  """Rows that prove theorems. The texts of all rows of a step are checked together.

  Tactics that leave the goals as they are earn nothing, and progress is paid where what is to be shown has not been so
  before in the episode, up to `most_progress` in all: to bring in facts that nobody asked for does not pay.
  """

  def __init__(self, settings: LeanSessionSettings, item: Callable[[int], Item], server: LeanServer, rows: int):
    """Sends nothing.

    Args:
      item: from a seed to its item.
    """
    self._settings, self._item, self._server = settings, item, server
    self._rows: list[_Row | None] = [None] * rows
    self._first: dict[Statement, tuple[str, ...]] = {}  # -> its goals before the first tactic

  def reset(self, rows: Sequence[int], seeds: Sequence[int], members: Sequence[int]) -> list[Any]:
    """See `Session`: the theorem and its goals. A statement that Lean does not accept is a fault."""
    items = [self._item(seed) for seed in seeds]
    new = list(dict.fromkeys(item.gold for item in items if item.gold not in self._first))
    drafts = [proofs.write_draft(statement, [], self._settings.preamble) for statement in new]
    faults: dict[Statement, Fault] = {}
    for statement, outcome in zip(new, self._server.check(drafts), strict=True):
      if isinstance(outcome, Outcome) and outcome.kind == proofs.OPEN:
        self._first[statement] = outcome.goals
      else:
        faults[statement] = outcome if isinstance(outcome, Fault) else _refused(outcome)
    results: list[Any] = []
    for row, item in zip(rows, items, strict=True):
      fault = faults.get(item.gold)
      if fault is None:
        goals = self._first[item.gold]
        self._rows[row] = _Row(item, goals, seen={proofs.targets(goals)})
      results.append(fault or self._observation(self._rows[row], ''))
    return results

  def step(self, rows: Sequence[int], actions: Sequence[str]) -> list[Any]:
    """See `Session`: has Lean check the proofs with the new tactics."""
    blocks = [proofs.read_tactics(action) for action in actions]
    words = [proofs.forbidden(block) for block in blocks]
    asked = [i for i, word in enumerate(words) if not word]
    drafts = [self._draft(self._rows[rows[i]], blocks[i]) for i in asked]
    checked = dict(zip(asked, self._server.check(drafts), strict=True))
    results: list[Any] = []
    for i, (row, block) in enumerate(zip(rows, blocks, strict=True)):
      outcome = checked.get(i, Outcome(proofs.REJECTED, reason=f'It has the word {words[i]}, which is not allowed.'))
      results.append(outcome if isinstance(outcome, Fault) else self._answer(self._rows[row], block, outcome))
    return results

  def _draft(self, row: _Row, block: str) -> proofs.Draft:
    return proofs.write_draft(row.item.gold, [*row.tactics, block], self._settings.preamble)

  def _answer(self, row: _Row, block: str, outcome: Outcome) -> tuple[str, float, bool, dict[str, Any]]:
    """The result of an action."""
    s, accepted = self._settings, outcome.kind in (proofs.PROVED, proofs.OPEN)
    changed = accepted and not proofs.same_goals(outcome.goals, row.goals)
    reward, told, progress = s.step_reward, '', 0.0
    if outcome.kind == proofs.PROVED:
      reward, told = reward + s.success_reward, 'The proof is complete.'
    elif outcome.kind == proofs.OPEN:
      progress = self._progress(row, outcome.goals)
      reward += progress
      told = 'Accepted.' if changed else 'Accepted, but the goals are the same.'
    else:
      reward += s.rejected_reward
      reason = outcome.reason
      if outcome.kind == proofs.TIMED_OUT:
        reason = f'Lean took longer than {s.tactic_timeout_s} s.'
      told = f'Not accepted; nothing was added.\n{cut(reason, s.max_feedback_chars)}'
    if accepted:
      row.tactics.append(block)
      row.goals = outcome.goals
    info = {
      'success': outcome.kind == proofs.PROVED, 'effective': changed,
      'metrics': {
        'accepted': float(accepted), 'progress': progress, 'timeouts': float(outcome.kind == proofs.TIMED_OUT),
        'tactics': 1.0,
      },
    }  # fmt: skip
    return self._observation(row, told), reward, outcome.kind == proofs.PROVED, info

  def _progress(self, row: _Row, goals: tuple[str, ...]) -> float:
    """What progress pays, if any was made."""
    shown = proofs.targets(goals)
    if shown in row.seen:
      return 0.0
    row.seen.add(shown)
    pay = max(min(self._settings.progress_reward, self._settings.most_progress - row.paid), 0.0)
    row.paid += pay
    return pay

  def _observation(self, row: _Row, told: str) -> str:
    """What happened, the proof so far, and the goals that are left."""
    statement = row.item.gold
    text = proofs.show(statement, row.tactics)
    parts = [told] if told else [statement.informal] if statement.informal else []
    parts.append(f'```lean4\n{text}\n```')
    if row.goals:
      number = f'{len(row.goals)} goals are' if len(row.goals) > 1 else '1 goal is'
      parts.append(f'{number} left:\n' + cut('\n\n'.join(row.goals), self._settings.max_goal_chars))
    return '\n\n'.join(parts)

  def expert(self, rows: Sequence[int]) -> list[Any]:
    """See `Session`: the proof of the data, as one action, before the first tactic; none after it."""
    found = []
    for row in rows:
      state = self._rows[row]
      proof = read_proof(state.item.solution, state.item.gold)
      found.append([proof] if proof and not state.tactics else [])
    return found

  def legal_actions(self, rows: Sequence[int]) -> list[Any]:
    """See `Session`: common tactics, whether Lean accepts them or not."""
    return [list(COMMON_TACTICS)] * len(rows)


def _refused(outcome: Outcome) -> Fault:
  """Why no episode of a statement can begin."""
  reason = one_line(outcome.reason, str)[:200]
  return Fault('Lean does not accept the statement', reason or f'without tactics it is {outcome.kind}')
