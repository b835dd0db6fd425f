"""Trains and evaluates agents, and shows their episodes.

python main.py --config=configs/frozenlake_ppo.py
"""

from ragen_jax.__main__ import run

if __name__ == '__main__':
  run()  # the modes and flags are in ragen_jax/__main__.py
