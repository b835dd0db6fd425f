"""Rows of a data set as statements of Lean, and proofs that the data have."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ragen_jax.envs.dataset.item import Item
from ragen_jax.envs.dataset.items import ItemSettings
from ragen_jax.envs.dataset.verifiers import Verdict, Verifier
from ragen_jax.envs.lean import proofs
from ragen_jax.envs.lean.proofs import Statement
from ragen_jax.utils.threads import Fault


@dataclasses.dataclass(frozen=True)
class StatementSettings(ItemSettings):
  """`ItemSettings` of statements. `fields` may also name the fields 'header' and 'informal'."""

  further: ClassVar[tuple[str, ...]] = ('header', 'informal')
  options: ClassVar[Mapping[str, str]] = {'question': 'statement', 'answer': 'statement', 'solution': 'proof'}
  word: ClassVar[str] = 'statement'
  least: ClassVar[str] = 'one statement'
  again: ClassVar[str] = 'stand there before with another header or other words'

  @property
  def no_gold(self) -> str:
    return 'is no statement'

  def make_verifier(self) -> Verifier:
    return _StatementReader(json.loads(self.fields))


class _StatementReader(Verifier):
  """Reads the golds of items, which are statements."""

  needs_extra = False

  def __init__(self, fields: Mapping[str, str]):
    self._header, self._informal = fields['header'], fields['informal']

  def read_gold(self, raw: Any, row: Mapping[str, Any]) -> Statement:
    header, informal = (row[name] if name else '' for name in (self._header, self._informal))
    return proofs.read_statement(raw, header, informal)

  def identity(self, question: str, gold: Statement) -> str:
    return gold.identity

  def score(self, answers: Sequence[str], items: Sequence[Item]) -> list[Verdict | Fault]:
    """Not used: a server decides about proofs, with the tactics before."""
    raise NotImplementedError('proofs are checked by a server')


def read_proof(solution: str, statement: Statement) -> str:
  """The tactics in a proof of the data, which may repeat the theorem; '' for none."""
  text = solution.strip('\n')
  if statement.text in text:
    text = text.partition(statement.text)[2]
  tactics = proofs.read_tactics(text)
  return tactics if tactics.strip() else ''
