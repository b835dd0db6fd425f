"""An item: a question, and what its answer is compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# The labels of choices, in their order.
LETTERS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZ'


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
  """A question and what its answer is compared with.

  Attributes:
    question: the text of the question.
    gold: what the verifier's `read_gold` returned.
    choices: the texts of the choices A, B, ...; empty for none.
    solution: a worked answer; '' for none.
    id: digest of the group, or of the question's identity to the verifier; equal for items that may not be on both
      sides of a split.
    extra: the other fields of the row, if the verifier needs them.
    difficulty: a number that a curriculum sorts by, larger for harder questions; None if no field has it.
  """

  question: str
  gold: Any
  choices: tuple[str, ...] = ()
  solution: str = ''
  id: str = ''
  extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  difficulty: float | None = None

  @property
  def text(self) -> str:
    """The question as the policy sees it, with its choices."""
    return '\n'.join([self.question, *(f'{LETTERS[i]}. {choice}' for i, choice in enumerate(self.choices))])
