"""The environment of type 'lean': an episode is a theorem, and its actions are tactics that a Lean server checks."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from ragen_jax.envs.dataset import selection, sources
from ragen_jax.envs.dataset.item import Item
from ragen_jax.envs.dataset.items import load_items
from ragen_jax.envs.lean import proofs
from ragen_jax.envs.lean.server import LeanServer, LeanServerSettings
from ragen_jax.envs.lean.session import LeanSession, LeanSessionSettings
from ragen_jax.envs.lean.statements import StatementSettings
from ragen_jax.envs.options import (
  check_choice,
  check_json,
  check_seconds,
  check_share,
  check_text,
  check_url,
  check_whole_number,
  is_number,
)
from ragen_jax.envs.outside.base import LARGEST_REWARD, TextEnvironment
from ragen_jax.utils.errors import UserError, one_line
from ragen_jax.utils.threads import Fault

# Field of `fields` -> the field of the data that it names by default.
FIELDS: Mapping[str, str] = {
  'statement': 'formal_statement', 'informal': '', 'header': '', 'proof': '', 'group': '', 'difficulty': ''
}  # fmt: skip
BAD_ROWS = ('refuse', 'drop')
_LEAST_CHARS = 100
_MOST_SECONDS = 3600


@dataclasses.dataclass(frozen=True, eq=False)
class LeanEnvironment(TextEnvironment):
  """Theorems to be proven. docs/lean.md describes the options for users.

  Making it checks its options; it reads no data and asks no server. `check` does both.

  Its options are those of the tag `Lean` in configs/environments.py, which says what they mean.
  """

  name: ClassVar[str] = 'lean'
  system: ClassVar[str] = 'You prove theorems in Lean 4.'
  state_label: ClassVar[str] = 'Proof'
  whole_answer: ClassVar[bool] = True
  any_thread: ClassVar[bool] = True
  has_legal_actions: ClassVar[bool] = True
  action_help: ClassVar[str] = 'An action is one or more tactics of Lean 4, one a line, which continue the proof.'

  path: str | tuple[str, ...] = ''
  hub: str = ''
  hub_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
  split: str = 'all'
  test_share: float = 0.1
  limit: int = 0
  max_question_chars: int = 0
  bad_rows: str = 'refuse'
  url: str = 'http://127.0.0.1:8000'
  preamble: str = (
    'import Mathlib\nimport Aesop\nset_option maxHeartbeats 400000\nopen BigOperators Real Nat Topology Rat'
  )
  success_reward: float = 10.0
  progress_reward: float = 1.0
  most_progress: float = 3.0
  rejected_reward: float = -1.0
  step_reward: float = -0.1
  max_goal_chars: int = 2000
  max_feedback_chars: int = 1000
  tactic_timeout_s: int = 30
  timeout_s: float = 600.0
  retries: int = 3
  backoff_s: float = 1.0
  batch_size: int = 64
  workers: int = 1

  def __post_init__(self):
    object.__setattr__(self, 'path', sources.check_paths(self.path, 'lean'))
    check_text('lean', 'hub', self.hub)
    object.__setattr__(self, 'hub_options', check_json('lean', 'hub_options', self.hub_options))
    sources.check_hub_options(self.hub_options, 'lean')
    if self.path and self.hub:
      raise ValueError(f"lean: path={', '.join(self.path)!r}, hub={self.hub!r}; allowed: one of them, the other ''")
    object.__setattr__(self, 'fields', sources.check_fields(self.fields, FIELDS, 'lean'))
    check_choice('lean', 'split', self.split, selection.SPLITS)
    check_share('lean', 'test_share', self.test_share)
    check_choice('lean', 'bad_rows', self.bad_rows, BAD_ROWS)
    check_url('lean', 'url', self.url)
    check_text('lean', 'preamble', self.preamble)
    for option, least in (
      ('limit', 0), ('max_question_chars', 0), ('retries', 0), ('batch_size', 1), ('workers', 1),
      ('max_goal_chars', _LEAST_CHARS), ('max_feedback_chars', _LEAST_CHARS), ('tactic_timeout_s', 1),
    ):  # fmt: skip
      check_whole_number('lean', option, getattr(self, option), least)
    if self.tactic_timeout_s > _MOST_SECONDS:
      raise ValueError(f'lean: tactic_timeout_s={self.tactic_timeout_s}; allowed: at most {_MOST_SECONDS}')
    for option in ('timeout_s', 'backoff_s'):
      check_seconds('lean', option, getattr(self, option))
    if self.timeout_s <= self.tactic_timeout_s:
      raise ValueError(
        f'lean: timeout_s={self.timeout_s}; allowed: above tactic_timeout_s={self.tactic_timeout_s}, since a request '
        'may hold many texts'
      )
    _check_rewards(self)
    try:
      object.__setattr__(self, '_server', LeanServer(self._server_settings()))
    except UserError as e:
      raise ValueError(f'lean: {e}') from e

  def _server_settings(self) -> LeanServerSettings:
    return LeanServerSettings(**{f.name: getattr(self, f.name) for f in dataclasses.fields(LeanServerSettings)})

  def rules(self) -> str:
    """The aim, what an answer is, and what it may not have."""
    return (
      'Prove a theorem in Lean 4 with Mathlib. Your answer continues the proof below `:= by`. Tactics that Lean '
      'accepts are added to the proof; if one of an answer is not accepted, nothing of the answer is added, and you '
      'read why. The proof is complete when no goal is left. `sorry`, commands and further axioms are not accepted.'
    )

  def parse_action(self, text: str) -> str | None:
    """The text, unless it has no tactics."""
    return text if proofs.read_tactics(text).strip() else None

  # -- the data --------------------------------------------------------------------------------------------------------

  @functools.cached_property
  def items(self) -> tuple[Item, ...]:
    """The statements, in the order of the source; ValueError, with one line, if it cannot be read."""
    if not (self.path or self.hub):
      raise ValueError("lean: path=''; allowed: a file of statements, such as mine.jsonl")
    stats = [sources.check_file(path, 'lean') for path in self.path]
    names = self.fields
    fields = {
      'question': names['statement'], 'answer': names['statement'], 'solution': names['proof'], 'group': names['group'],
      'difficulty': names['difficulty'], 'header': names['header'], 'informal': names['informal'],
    }  # fmt: skip
    return load_items(StatementSettings(
      paths=self.path, stamps=tuple((s.st_size, s.st_mtime_ns) for s in stats), generator='', generator_options='{}',
      hub=self.hub, hub_options=json.dumps(self.hub_options, sort_keys=True), fields=json.dumps(fields),
      answer_pattern='', split=self.split, test_share=self.test_share, limit=self.limit,
      max_question_chars=self.max_question_chars, bad_rows=self.bad_rows, verifier='lean', verifier_options='{}',
      timeout_s=1.0, workers=1, kind='lean',
    ))  # fmt: skip

  def item(self, seed: int) -> Item:
    """The item that a seed selects; its gold is a `Statement`."""
    return self.items[selection.select(seed, len(self.items), 'shuffled')]

  def level_id(self, seed: int) -> str:
    """The digest of the statement's group, or of the statement."""
    return self.item(seed).id

  @property
  def has_expert(self) -> bool:
    """Whether the data have proofs."""
    return bool(self.fields['proof'])

  def check(self) -> None:
    """Reads the statements, and has the server check a proof and a part of one; ValueError if anything is wrong."""
    usual = self.items[0].gold.preamble(self.preamble)
    asked = [
      (proofs.PROVED, 'theorem ragen_jax_check : True ∧ True := by', ['constructor', '· trivial\n· trivial']),
      (proofs.OPEN, 'theorem ragen_jax_check : True ∧ True := by', ['constructor', '· trivial']),
    ]
    drafts = [proofs.write_draft(proofs.read_statement(text), tactics, usual) for _, text, tactics in asked]
    for (expected, _, _), outcome in zip(asked, self._server.check(drafts), strict=True):
      if isinstance(outcome, Fault):
        where = 'url' if self.url in str(outcome) else f'url={self.url!r}'
        raise ValueError(f'lean: {where}: {outcome}; allowed: the address of kimina-lean-server, see docs/lean.md')
      if outcome.kind != expected:
        told = one_line(outcome.reason, str)[:200] or outcome.kind
        raise ValueError(
          f'lean: url={self.url!r}: the server takes a trial proof for {outcome.kind}, not for {expected} ({told}); '
          'allowed: a preamble that the Lean of the server can read'
        )

  def open(self, rows: int) -> LeanSession:
    """A session. Nothing is sent before the first reset."""
    settings = {f.name: getattr(self, f.name) for f in dataclasses.fields(LeanSessionSettings)}
    return LeanSession(LeanSessionSettings(**settings), self.item, self._server, rows)


# -- checks of the options ---------------------------------------------------------------------------------------------


def _check_rewards(env: LeanEnvironment) -> None:
  """Raises ValueError if a reward is out of range, or if progress could pay more than a proof."""
  for option, low, high in (
    ('success_reward', 0.0, LARGEST_REWARD), ('progress_reward', 0.0, LARGEST_REWARD),
    ('most_progress', 0.0, LARGEST_REWARD),
    ('rejected_reward', -LARGEST_REWARD, 0.0), ('step_reward', -LARGEST_REWARD, 0.0),
  ):  # fmt: skip
    value = getattr(env, option)
    if not is_number(value) or not low <= value <= high:
      allowed = 'numbers from 0' if high else 'numbers up to 0'
      raise ValueError(f'lean: {option}={one_line(value)}; allowed: {allowed}')
  if not env.most_progress < env.success_reward:
    raise ValueError(
      f'lean: most_progress={env.most_progress}; allowed: below success_reward={env.success_reward}, so that no '
      'unfinished proof pays as much as a proof'
    )
