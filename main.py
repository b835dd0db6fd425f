"""Trains and evaluates agents, and shows their episodes.

python main.py --config=configs/frozenlake_ppo.py
"""

import signal

if __name__ == '__main__' and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
  signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `run`: Ctrl-C during the imports leaves no traceback

from ragen_jax.__main__ import run

if __name__ == '__main__':
  run()  # the modes and flags are in ragen_jax/__main__.py
