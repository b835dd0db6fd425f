"""A game that ends the process that it runs in, or makes copies of it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import time


class Deadly:
  """Does in its second step what `how` says; `where='init'` does it when an object is made."""

  rules = 'Say something.'

  def __init__(self, how: str, where: str = 'step'):
    self.how, self.steps = how, 0
    if where == 'init':
      self.die()

  def reset(self, seed):
    return 'go on'

  def step(self, action):
    self.steps += 1
    if self.steps == 2:
      self.die()
    return 'go on', 0.5, False, False

  def die(self):
    """Ends the process, or makes a child of it: at most one for each object."""
    if self.how == 'exit':
      os._exit(0)
    elif self.how == 'crash':
      ctypes.string_at(0)
    elif self.how == 'come back':
      os.fork()
    elif self.how == 'stay' and not os.fork():
      time.sleep(300)
    elif self.how == 'crash in a child' and not os.fork():
      ctypes.string_at(0)
    elif self.how == 'wait' and (pid := os.fork()):
      os.waitpid(pid, 0)
    elif self.how == 'wait':
      os._exit(3)
    elif self.how == 'stay in a process':
      multiprocessing.get_context('fork').Process(target=time.sleep, args=(300,)).start()
    elif self.how == 'daemon':
      self.worker = multiprocessing.get_context('fork').Process(target=time.sleep, args=(300,), daemon=True)
      self.worker.start()

  def close(self):
    """Ends the worker."""
    if hasattr(self, 'worker'):
      self.worker.terminate()
      self.worker.join()
