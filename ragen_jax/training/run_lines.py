"""What a training run says of itself: its first line, the consequence of a verdict, and its end after bad numbers."""

from __future__ import annotations

# Action of a verdict -> its consequence, if the run is not rolled back.
CONSEQUENCES = {
  'warn': 'a warning only (monitor.echo_trap)',
  'stop': 'the run ends here',
  'bad': 'bad optimiser steps are skipped, and no checkpoint is saved',
  'rollback': 'there is no evaluated checkpoint to roll back to, or nothing left to train',
}


def greeting(workdir: str, model: str, done: int, num_iterations: int, stopped: str, *, unevaluated: bool) -> str:
  """The first line of a run; `stopped` is why it was stopped, '' if not; `unevaluated`: its evaluation was cut off."""
  if stopped:
    return f'{workdir} was stopped after iteration {done}: {stopped}'
  if unevaluated:
    return f'resuming {workdir} with the evaluation after iteration {done}'
  if done:
    finished = done >= num_iterations
    return f'{workdir} is finished: {done} iterations' if finished else f'resuming {workdir} after iteration {done}'
  return f'model {model}; the run is saved in {workdir}'


def diverged(first: int, last: int, not_finite: str, good: int | None) -> str:
  """The message of a run that is not finite since iteration `first`; `good` is the step of the newest checkpoint."""
  since = f'iteration {last}' if first == last else f'iterations {first} to {last}'
  left = 'there is no checkpoint' if good is None else f'start another run from checkpoint {good}'
  return (
    f'{since}: numbers are not finite, most recently {not_finite}; {left}; try a smaller optimizer.actor_lr, '
    'optimizer.critic_lr or optimizer.grad_clip'
  )
