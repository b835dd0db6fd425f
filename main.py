"""Trains agents, and shows what they do. The logic is in `ragen_jax`, where it can be tested and imported.

python main.py --config=configs/frozenlake_ppo.py
"""

from __future__ import annotations

import importlib
import sys

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import config_flags

from ragen_jax.config import command_line
from ragen_jax.distributed import processes
from ragen_jax.utils.errors import UserError

_CONFIG = config_flags.DEFINE_config_file('config', None, 'The experiment: a file of configs/.', lock_config=True)
_KEPT = 'Where the run is kept, by default runs/<name of the config file> (sft: <name>-sft); plot takes several.'
_WORKDIR = flags.DEFINE_multi_string('workdir', None, _KEPT)
_OUTPUT = flags.DEFINE_string('output', None, 'Where plots go; by default plots/ in the run, or beside the first run.')
_MODES = {
  'train': 'train',
  'eval': 'modes.evaluate',
  'sft': 'modes.sft',
  'play': 'modes.play',
  'view': 'modes.view',
  'export': 'modes.export',
  'plan': 'modes.plan',
  'plot': 'modes.plot',
}
_TOLD = 'Learn; evaluate; warm-start; let a person play; page of episodes; export; plan memory; figures of runs.'
_MODE = flags.DEFINE_enum('mode', 'train', list(_MODES), _TOLD)
_COORDINATOR = flags.DEFINE_string('coordinator', None, "HOST:PORT of the first process; 'auto' on TPUs and Slurm.")
_NUM_PROCESSES = flags.DEFINE_integer('num_processes', None, 'How many processes there are; not with auto.')
_PROCESS_ID = flags.DEFINE_integer('process_id', None, 'Which of them this is, from 0; not with auto.')


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise UserError(f'unknown argument {argv[1]!r}; settings are given as --config.FIELD=VALUE')
  if not flags.FLAGS['verbosity'].present:  # of the libraries only warnings
    absl_logging.set_verbosity(absl_logging.WARNING)
  if _MODE.value in ('plan', 'view', 'play', 'plot') and _COORDINATOR.value:
    raise UserError(f'--coordinator has no effect with --mode={_MODE.value}')
  processes.connect(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
  if _MODE.value in ('play', 'plan') and _WORKDIR.value:
    raise UserError(f'--workdir has no effect with --mode={_MODE.value}')
  workdir, *more = command_line.workdirs(flags.FLAGS)
  mode = importlib.import_module(
    f'ragen_jax.{_MODES[_MODE.value]}'
  )  # now, so that --help and a misspelt flag answer at once
  if _MODE.value == 'sft':
    mode.train_sft(_CONFIG.value, workdir)
  elif _MODE.value == 'eval':
    mode.evaluate(_CONFIG.value, workdir, given=bool(_WORKDIR.value))
  elif _MODE.value == 'play':
    mode.play(_CONFIG.value, sys.stdin, sys.stdout)
  elif _MODE.value == 'view':
    mode.view(workdir)
  elif _MODE.value == 'export':
    mode.export(_CONFIG.value, workdir)
  elif _MODE.value == 'plan':
    mode.plan(_CONFIG.value, sys.stdout)
  elif _MODE.value == 'plot':
    mode.plot([workdir, *more], _OUTPUT.value)
  else:
    mode.train_and_evaluate(_CONFIG.value, workdir)


def run() -> None:
  """Runs `main`; what the user can mend is told in one line, with exit status 2."""
  command_line.set_up_logging()
  try:
    app.run(main, flags_parser=command_line.parse)
  except UserError as e:
    if not e.everywhere or processes.is_first():
      sys.stderr.write(f'error: {e}\n')
    processes.leave(2, together=e.everywhere)
  except KeyboardInterrupt as e:
    told = 'interrupted; the same command goes on from the last checkpoint, if there is one'
    sys.stderr.write((told if _MODE.value in ('train', 'sft') else 'interrupted') + '\n')
    processes.leave(getattr(e, 'status', 130))


if __name__ == '__main__':
  run()
