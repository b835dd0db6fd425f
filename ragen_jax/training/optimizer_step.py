"""Turns the gradient of a mini-batch into new weights: in one program, or in programs that the layers share.

Compilers do not exploit that layers are identical. A model with `_FROM_LAYERS` layers or more is therefore updated in
parts: each layer is one, and all other weights are one. One program for all would need 4.5 times the bytes of the
weights in addition to its arguments (8 layers of Qwen2.5-0.5B's shape, compiled for memory on a CPU), the parts need
1.1. Parts whose arrays have the same names, shapes and types share programs. A step calls, in this order:

    squares   for each part: the sum of squares of each gradient
    norms     once: the norms of the gradient, which gradients are not finite, and whether norms and metrics are finite
    check     for each part: which new weights and which arrays of the optimiser's new state are not finite
    verdict   once: whether the step is taken, and its metrics
    update    for each part: the new weights and the new state, or the old ones
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax.distributed.sharding import optimizer_shardings, trained_shardings
from ragen_jax.training import bad_steps
from ragen_jax.training.optimizer import is_critic_weight
from ragen_jax.utils.alike import made_once

# Metric of a step: 1 if it was skipped, 0 if it was taken.
SKIPPED = 'train/skipped_steps'

# Models with fewer layers than this are updated in one program.
_FROM_LAYERS = 8

# Of the name of an array: what stands before the name of its weight, if it is a moment; and all up to its layer.
_MOMENT = re.compile(r'^(mu|nu)/')
_LAYER = re.compile(r'^((?:[^/]+/)*?(?:layers|blocks)/)\d+/')


@dataclasses.dataclass(frozen=True)
class _Trees:
  """Which leaves of weights and of the optimiser's state a program works on; compared by value, for `jax.jit`.

  Attributes:
    weights: structure of all weights.
    state: structure of the whole state of the optimiser.
    own_weights, own_state: positions of the part's leaves among all leaves of weights and state.
    shared: positions of the leaves of the state that belong to no weight, such as counters; () if `own_state` has them.
  """

  weights: Any
  state: Any
  own_weights: tuple[int, ...]
  own_state: tuple[int, ...]
  shared: tuple[int, ...]

  def of_weights(self, leaves: Sequence[Any]) -> Any:
    """The tree of all weights, with these leaves and `optax.MaskedNode` for the others."""
    return _partial_tree(self.weights, self.own_weights, leaves)

  def of_state(self, leaves: Sequence[Any], shared: Sequence[Any]) -> Any:
    """The tree of the optimiser's state, with these leaves and `optax.MaskedNode` for the others."""
    return _partial_tree(self.state, self.own_state + self.shared, [*leaves, *shared])

  def state_leaves(self, tree: Any) -> list[Any]:
    """The part's own leaves of a tree that `of_state` has made."""
    found = dict(zip(sorted(self.own_state + self.shared), jax.tree.leaves(tree), strict=True))
    return [found[i] for i in self.own_state]


@dataclasses.dataclass(frozen=True)
class _Part:
  """A part of the model.

  Attributes:
    trees: the trees of the first part with the same arrays, for which programs are compiled.
    own_weights, own_state: positions of its leaves among those of weights and state.
    trains_critic: whether some of its weights are the critic's.
  """

  trees: _Trees
  own_weights: tuple[int, ...]
  own_state: tuple[int, ...]
  trains_critic: bool


@dataclasses.dataclass(frozen=True)
class _Parts:
  """All parts of a model; the last is what is in no layer, with all leaves of the state that belong to no weight.

  Attributes:
    shared: positions of the leaves of the state that belong to no weight.
    floats: positions of the leaves of the optimiser's state that are floats, in the order of `parts`.
    critic: for each weight, whether it is the critic's.
  """

  parts: tuple[_Part, ...]
  shared: tuple[int, ...]
  floats: tuple[int, ...]
  critic: tuple[bool, ...]
  separate_critic: bool


@dataclasses.dataclass(frozen=True)
class StepProgram:
  """A program of an optimiser step.

  Attributes:
    name: unique among the programs of a step.
    weights: what it works on, in words.
    times: how often a step runs it.
    arrays: those of its arguments that are weights, gradients or optimiser state.
  """

  name: str
  weights: str
  times: int
  arrays: Any
  lower: Callable[[], jax.stages.Lowered]


class _Programs:
  """The compiled programs of a step; see the top of this file."""

  def __init__(self, optimizer: optax.GradientTransformation, mesh: Mesh | None, critic_only: bool):
    self._optimizer, self._mesh, self._critic_only = optimizer, mesh, critic_only
    self.whole = jax.jit(self._apply, donate_argnums=(0, 1))
    self.squares = jax.jit(self._apply_squares)
    self.norms = jax.jit(self._apply_norms, static_argnums=0)
    self.check = jax.jit(self._apply_check, static_argnums=0)
    self.verdict = jax.jit(self._apply_verdict, static_argnums=0)
    self.update = jax.jit(self._apply_update, static_argnums=0, donate_argnums=(1, 2))

  def _copied(self, tree: Any) -> Any:
    """Inside a program: gives every device all of it; with another layout, later programs would be compiled again."""
    if self._mesh is None:
      return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(self._mesh, PartitionSpec()))

  def _divided(self, weights: Any, state: Any) -> tuple[Any, Any]:
    """Inside a program: gives weights and state the layout that they have between programs."""
    if self._mesh is None:
      return weights, state
    # Divided first: between programs vision towers are whole, and the compiler would exchange them before and after.
    divided = optimizer_shardings((weights, state), self._mesh)
    weights, state = jax.lax.with_sharding_constraint((weights, state), divided)
    return jax.lax.with_sharding_constraint(weights, trained_shardings(weights, self._mesh)), state

  def _next(self, trained: Any, opt_state: Any, gradients: Any, norms: Any, lr_scale: Any) -> tuple[Any, Any]:
    """New weights and state, if the step is taken."""
    updates, state = self._optimizer.update(gradients, opt_state, trained, norms=norms)
    if lr_scale is not None:  # even a product with 1 would change how the sum with the weights is rounded
      updates = jax.tree.map(lambda u: lr_scale * u, updates)
    return optax.apply_updates(trained, updates), state

  def _taken(self, trained: Any, opt_state: Any, gradients: Any, norms: Any, finite: Any, lr_scale: Any) -> Any:
    """New weights and state; the old ones if the step is skipped, and for weights that the step does not train."""
    old = (trained, opt_state)
    new = self._next(trained, opt_state, gradients, norms, lr_scale)
    new = jax.tree.map(lambda x, before: jnp.where(finite, x, before), new, old)
    if self._critic_only:

      def select(path, x, before):
        return x if is_critic_weight(path) else before

      new = tuple(jax.tree_util.tree_map_with_path(select, x, before) for x, before in zip(new, old, strict=True))
    return self._divided(*new)

  def _apply(self, trained: Any, opt_state: Any, gradients: Any, found: Any, lr_scale: Any) -> Any:
    leaves = jax.tree_util.tree_leaves_with_path(trained)
    critic = tuple(is_critic_weight(path) for path, _ in leaves)
    squares = bad_steps.sums_of_squares(jax.tree.leaves(gradients))
    norms, bad = _norms(squares, critic), ~jnp.isfinite(squares)
    weights, state = self._next(trained, opt_state, gradients, norms, lr_scale)
    flags = bad_steps.bad_arrays(state), bad_steps.bad_arrays(weights)
    finite = ~bad_steps.not_finite((found, norms))
    metrics, finite = self._metrics(norms, bad, *flags, finite, 'critic' in trained)
    # The updates are computed a second time, because the compiler would otherwise hold all of them until it knows
    # whether the step is taken. The norm of the gradient is computed once.
    opt_state, trained, finite = jax.lax.optimization_barrier((opt_state, trained, finite))
    return *self._taken(trained, opt_state, gradients, norms, finite, lr_scale), metrics

  def _metrics(
    self, norms: Any, bad: jax.Array, state: jax.Array, weights: jax.Array, finite: jax.Array, separate_critic: bool
  ) -> tuple[dict[str, jax.Array], jax.Array]:
    """The metrics of the step, and whether it is taken. `finite`: whether all that has no flag is finite."""
    flags = {bad_steps.GRADIENT: bad, bad_steps.OPT_STATE: state, bad_steps.WEIGHTS: weights}
    finite &= ~jnp.concatenate(list(flags.values())).any()
    found = {'critic/grad_norm': norms['critic']}
    if not self._critic_only:
      found['actor/grad_norm'] = norms['policy' if separate_critic else 'all']
    return found | flags | {SKIPPED: 1 - finite.astype(jnp.int32)}, finite

  def _apply_squares(self, gradients: Sequence[Any]) -> jax.Array:
    return self._copied(bad_steps.sums_of_squares(gradients))

  def _apply_norms(self, parts: _Parts, squares: Sequence[Any], found: Any) -> Any:
    order = np.argsort([i for part in parts.parts for i in part.own_weights])
    squares = jnp.concatenate(squares)[order]
    norms = _norms(squares, parts.critic)
    return self._copied((norms, ~jnp.isfinite(squares), ~bad_steps.not_finite((found, norms))))

  def _apply_check(
    self,
    trees: _Trees,
    weights: Sequence[Any],
    state: Sequence[Any],
    gradients: Sequence[Any],
    shared: Sequence[Any],
    norms: Any,
    lr_scale: Any,
  ) -> Any:
    trained, opt_state = trees.of_weights(weights), trees.of_state(state, shared)
    new, new_state = self._next(trained, opt_state, trees.of_weights(gradients), norms, lr_scale)
    return self._copied(tuple(bad_steps.bad_arrays(x) for x in (trees.state_leaves(new_state), new)))

  def _apply_verdict(self, parts: _Parts, checked: Sequence[Any], norms: Any, bad: Any, finite: Any) -> Any:
    state, weights = (jnp.concatenate(flags) for flags in zip(*checked, strict=True))
    weights = weights[np.argsort([i for part in parts.parts for i in part.own_weights])]
    state = state[np.argsort(parts.floats)]
    return self._copied(self._metrics(norms, bad, state, weights, finite, parts.separate_critic))

  def _apply_update(
    self,
    trees: _Trees,
    weights: Sequence[Any],
    state: Sequence[Any],
    gradients: Sequence[Any],
    shared: Sequence[Any],
    norms: Any,
    finite: Any,
    lr_scale: Any,
  ) -> Any:
    trained, opt_state = trees.of_weights(weights), trees.of_state(state, shared)
    new, new_state = self._taken(trained, opt_state, trees.of_weights(gradients), norms, finite, lr_scale)
    return jax.tree.leaves(new), trees.state_leaves(new_state)


_programs = made_once(8)(_Programs)  # with and without the policy's weights


class OptimizerStep:
  """Applies gradients; a call takes one step.

  If a metric of the loss, a gradient, a new weight or a number of the new state is not finite, the step is skipped:
  weights and state stay as they are, to the last bit.
  """

  def __init__(self, optimizer: optax.GradientTransformation, mesh: Mesh | None, *, critic_only: bool = False):
    """Nothing is compiled before the first call.

    `optimizer` updates each weight on its own; of other weights it knows only `norms` (see `clip_by_norm`). With
    `critic_only`, nothing but the critic's weights and their state changes.
    """
    self._mesh, self._critic_only = mesh, critic_only
    self._known: dict[Any, _Parts | None] = {}
    self._programs = _programs(optimizer, mesh, critic_only)

  def __call__(
    self, trained: Any, opt_state: Any, gradients: Any, found: Any, lr_scale: np.float32 | None
  ) -> tuple[Any, Any, dict[str, jax.Array]]:
    """Takes a step; `trained` and `opt_state` are donated, and `lr_scale`, unless it is None, multiplies the update.

    `found` are metrics of the loss. The result is new weights and state, and metrics: 'critic/grad_norm', without
    `critic_only` also 'actor/grad_norm', `SKIPPED`, and the entries of `bad_steps` for gradients, state and weights.
    """
    parts = self._parts(trained, opt_state)
    if parts is None:
      return self._programs.whole(trained, opt_state, gradients, found, lr_scale)
    (weights, structure), (state, state_structure) = jax.tree.flatten(trained), jax.tree.flatten(opt_state)
    gradients = jax.tree.leaves(gradients)
    shared = [state[i] for i in parts.shared]

    def of(part):
      others = shared if part.trees.shared else []
      return (*(_at(part.own_weights, x) for x in (weights, gradients)), _at(part.own_state, state), others)

    squares = [self._programs.squares(of(part)[1]) for part in parts.parts]
    norms, bad, finite = self._programs.norms(parts, squares, found)
    checked = []
    for part in parts.parts:
      own, gradient, own_state, others = of(part)
      checked.append(self._programs.check(part.trees, own, own_state, gradient, others, norms, lr_scale))
    metrics, finite = self._programs.verdict(parts, checked, norms, bad, finite)
    for part in parts.parts:
      if self._critic_only and not part.trains_critic and part.trees.shared:
        continue
      own, gradient, own_state, others = of(part)
      new = self._programs.update(part.trees, own, own_state, gradient, others, norms, finite, lr_scale)
      for positions, into, leaves in zip((part.own_weights, part.own_state), (weights, state), new, strict=True):
        for i, x in zip(positions, leaves, strict=True):
          into[i] = x
    return jax.tree.unflatten(structure, weights), jax.tree.unflatten(state_structure, state), metrics

  @property
  def compiled(self) -> int:
    """The number of programs that calls have compiled so far, also those of other steps of the same optimiser."""
    p = self._programs
    return sum(x._cache_size() for x in (p.whole, p.squares, p.norms, p.check, p.verdict, p.update))

  def programs(self, trained: Any, opt_state: Any, gradients: Any, found: Any, lr_scale: Any) -> list[StepProgram]:
    """The programs of a step, in no order. The arguments are those of `__call__`, and may be abstract."""
    parts = self._parts(trained, opt_state)
    if parts is None:
      given = (trained, opt_state, gradients, found, lr_scale)
      return [StepProgram('apply', 'all weights', 1, given[:3], lambda: self._programs.whole.lower(*given))]
    weights, state, gradients = (jax.tree.leaves(x) for x in (trained, opt_state, gradients))
    shared = [state[i] for i in parts.shared]
    kinds: dict[_Trees, list[_Part]] = {}
    for part in parts.parts:
      kinds.setdefault(part.trees, []).append(part)
    scalar, flag = self._abstract(jnp.float32), self._abstract(jnp.bool_)
    norms = dict.fromkeys(('all', 'policy', 'critic'), scalar)
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in state]
    found_programs: list[StepProgram] = []

    def add(name: str, number: int, text: str, times: int, arrays: Any, lower: Callable[[], Any]) -> None:
      own = f'apply_{name}_{number + 1}' if number else f'apply_{name}'
      found_programs.append(StepProgram(own, text, times, arrays, lower))

    for number, (trees, same) in enumerate(kinds.items()):
      text = 'a layer' if trees.shared else 'the weights of no layer'
      own, gradient = (_at(trees.own_weights, x) for x in (weights, gradients))
      own_state, others, times = _at(trees.own_state, state), shared if trees.shared else [], len(same)
      updated = sum(not self._critic_only or part.trains_critic or not trees.shared for part in same)
      args = (trees, own, own_state, gradient, others, norms)
      add('squares', number, text, times, gradient, functools.partial(self._programs.squares.lower, gradient))
      add('check', number, text, times, args[1:5], functools.partial(self._programs.check.lower, *args, lr_scale))
      if updated:
        lower = functools.partial(self._programs.update.lower, *args, flag, lr_scale)
        add('update', number, text, updated, args[1:5], lower)
    squares = [self._abstract(jnp.float32, len(part.own_weights)) for part in parts.parts]
    bad = self._abstract(jnp.bool_, len(weights))
    checked = [
      tuple(self._abstract(jnp.bool_, n) for n in (sum(floats[i] for i in part.own_state), len(part.own_weights)))
      for part in parts.parts
    ]
    add('norms', 0, 'the norms of all', 1, (), lambda: self._programs.norms.lower(parts, squares, found))
    add('verdict', 0, 'the flags of all', 1, (), lambda: self._programs.verdict.lower(parts, checked, norms, bad, flag))
    return found_programs

  def _abstract(self, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    sharding = None if self._mesh is None else NamedSharding(self._mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  def _parts(self, trained: Any, opt_state: Any) -> _Parts | None:
    """The parts of a model with this tree of weights; None for a model that is updated in one program."""
    key = jax.tree.structure((trained, opt_state)), tuple(x.shape for x in jax.tree.leaves(trained))
    if key not in self._known:
      self._known[key] = _divide(trained, opt_state)
    return self._known[key]


def _divide(trained: Any, opt_state: Any) -> _Parts | None:
  weights, state = (
    [(bad_steps.name_of(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]
    for tree in (trained, opt_state)
  )
  layers: dict[str, tuple[list[int], list[int]]] = {}
  for which, named in enumerate((weights, state)):
    for i, (name, _) in enumerate(named):
      layer = _LAYER.match(name)
      layers.setdefault(_MOMENT.sub('', layer[0]) if layer else '', ([], []))[which].append(i)
  rest = layers.pop('', ([], []))
  if len(layers) < _FROM_LAYERS:
    return None
  names = {name for name, _ in weights}
  shared = tuple(i for i in rest[1] if _MOMENT.sub('', state[i][0]) not in names)
  structures = jax.tree.structure(trained), jax.tree.structure(opt_state)
  critic = tuple(is_critic_weight(path) for path, _ in jax.tree_util.tree_leaves_with_path(trained))
  kinds: dict[Any, _Trees] = {}
  parts = []
  for own_weights, own_state in (*layers.values(), rest):
    others = () if own_state is rest[1] else shared
    trees = _Trees(*structures, tuple(own_weights), tuple(own_state), others)
    arrays = tuple(
      (_LAYER.sub(r'\1', name), x.shape, x.dtype) for name, x in (*_at(own_weights, weights), *_at(own_state, state))
    )
    trees = kinds.setdefault((arrays, others), trees)
    parts.append(_Part(trees, tuple(own_weights), tuple(own_state), any(_at(own_weights, critic))))
  floats = [i for part in parts for i in part.own_state if jnp.issubdtype(state[i][1].dtype, jnp.floating)]
  return _Parts(tuple(parts), shared, tuple(floats), critic, 'critic' in trained)


def _partial_tree(structure: Any, positions: Sequence[int], leaves: Sequence[Any]) -> Any:
  found = [optax.MaskedNode()] * structure.num_leaves
  for i, x in zip(positions, leaves, strict=True):
    found[i] = x
  return jax.tree.unflatten(structure, found)


def _at(positions: Sequence[int], leaves: Sequence[Any]) -> list[Any]:
  return [leaves[i] for i in positions]


def _norms(squares: jax.Array, critic: Sequence[bool]) -> dict[str, jax.Array]:
  """Global norms of the gradients with these sums of squares: of all, of the policy's and of the critic's."""
  own = np.asarray(critic, bool)
  sums = {'all': jnp.sum(squares), 'policy': jnp.sum(squares[~own]), 'critic': jnp.sum(squares[own])}
  return {name: jnp.sqrt(x) for name, x in sums.items()}
