"""What is right and wrong in a description, claim by claim, for people; `state_reward` has the score."""

from __future__ import annotations

import collections
import dataclasses

from ragen_jax.agent.world_model.descriptions import Claim, find_claims, true_relations, write_claim
from ragen_jax.envs.scenes import Scene

RIGHT, HALF, WRONG = 'right', 'half', 'wrong'


@dataclasses.dataclass(frozen=True)
class Mark:
  """The verdict on a claim.

  Attributes:
    verdict: `RIGHT`; `HALF` if only one part is right; `WRONG`, also for a claim too many.
    truth: the true claim about the thing that a half-right claim is paired with; else empty.
  """

  claim: Claim
  verdict: str
  truth: str


def mark_description(text: str, scene: Scene) -> tuple[list[Mark], list[str]]:
  """Compares a text with a scene, with claims and things paired as for the score.

  Returns the verdicts on the claims, in their order, and true claims about the things that no claim is paired with.
  """
  claims = find_claims(text, scene.words)
  verdicts: dict[int, tuple[str, str]] = {}
  missing: list[str] = []
  for kind, counts in true_relations(scene).items():
    things = [place for place in zip(*counts.nonzero(), strict=True) for _ in range(int(counts[place]))]
    waiting = collections.defaultdict(list)
    for i, claim in enumerate(claims):
      if claim.kind == kind:
        waiting[claim.row, claim.column].append(i)
    left = []
    for place in things:
      if waiting[place]:
        verdicts[waiting[place].pop(0)] = (RIGHT, '')
      else:
        left.append(place)
    rest = sorted(i for indices in waiting.values() for i in indices)
    pairs = _pair(left, [(claims[i].row, claims[i].column) for i in rest])
    for at, place in enumerate(left):
      truth = write_claim(kind, *map(int, place), scene.words)
      if at in pairs:
        verdicts[rest[pairs[at]]] = (HALF, truth)
      else:
        missing.append(truth)
  return [Mark(claim, *verdicts.get(i, (WRONG, ''))) for i, claim in enumerate(claims)], missing


def _pair(things: list[tuple[int, int]], claims: list[tuple[int, int]]) -> dict[int, int]:
  """The most pairs of things and claims that share a row or a column: index of a thing -> index of its claim."""
  owner: dict[int, int] = {}  # claim -> thing
  for thing in range(len(things)):
    # Breadth-first search for a claim without an owner, along claims whose owners could take another.
    came: dict[int, int | None] = {}  # claim -> claim whose owner would take it; None from the new thing
    queue, end = [(thing, None)], None
    for own, through in queue:
      for i, (row, column) in enumerate(claims):
        if i not in came and (row == things[own][0] or column == things[own][1]):
          came[i] = through
          if i not in owner:
            end = i
            break
          queue.append((owner[i], i))
      if end is not None:
        break
    while end is not None:
      before = came[end]
      owner[end] = thing if before is None else owner[before]
      end = before
  return {thing: claim for claim, thing in owner.items()}
