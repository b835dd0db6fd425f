"""Environments in JAX from outside this package are traced before anything is compiled: mistakes are one line."""

from __future__ import annotations

import contextlib
import inspect
import os
import traceback
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from ragen_jax.envs.base import Environment
from ragen_jax.utils.errors import one_line


def check_traced(env: Environment) -> None:
  """Traces `reset` and a step, without running them.

  Raises ValueError, with one line, if one of them raises an exception, or does not return what `Environment` says.
  """
  with one_line_errors('reset', type(env)):
    state = jax.eval_shape(lambda: env.reset(jax.random.key(0)))
  if not (hasattr(state, 'done') and hasattr(state, 'success')):
    raise ValueError(f'reset returned {type(state).__name__}; allowed: a subclass of State of ragen_jax.envs.base')

  def trace(step):
    return jax.eval_shape(lambda s: step(s, jnp.zeros(env.action_shape, jnp.int32), jax.random.key(0)), state)

  if type(env).step is Environment.step:
    with one_line_errors('_step', type(env)):
      pair = trace(env._step)
    parts = list(pair) if isinstance(pair, tuple) else [pair]
    wanted = len(parts) == 2 and type(parts[0]) is type(state) and hasattr(parts[1], 'reward')
    if not (wanted and hasattr(parts[1], 'effective')):
      found = ', '.join(type(part).__name__ for part in parts)
      raise ValueError(f'_step returned {found}; allowed: {type(state).__name__}, StepOutput')
    for name, leaf in (('reward', pair[1].reward), ('effective', pair[1].effective)):
      if leaf.shape:
        raise ValueError(f'_step returned {name} of shape {leaf.shape}; allowed: one number, of shape ()')
  with one_line_errors('step', type(env)):
    after, _ = trace(env.step)
  was, now = ({jax.tree_util.keystr(k): x for k, x in jax.tree.leaves_with_path(s)} for s in (state, after))
  for name in was:
    if name not in now or (was[name].shape, was[name].dtype) != (now[name].shape, now[name].dtype):
      found = _array(now[name]) if name in now else 'nothing'
      raise ValueError(f'after a step the state has {found} in {name[1:]}, after reset {_array(was[name])}')


@contextlib.contextmanager
def one_line_errors(what: str, cls: type, keep: type[Exception] | tuple[()] = ()) -> Iterator[None]:
  """Makes an exception of a class of the user's a ValueError of one line, with its place; those of `keep` stay."""
  try:
    yield
  except keep:
    raise
  except Exception as e:
    frames = traceback.extract_tb(e.__traceback__)
    with contextlib.suppress(OSError, TypeError):  # a class without a file
      frames = [f for f in frames if f.filename == inspect.getfile(cls)] or frames
    first = one_line(str(e).strip().partition('\n')[0], str)
    place = f'{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}'
    raise ValueError(f'{what} raised {type(e).__name__}: {first} ({place})') from e


def _array(leaf: jax.ShapeDtypeStruct) -> str:
  return f'{leaf.dtype}{list(leaf.shape)}'
