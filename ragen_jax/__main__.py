"""The command line: `python main.py` in the repository, `ragen-jax` or `python -m ragen_jax` if it is installed.

python main.py --config=configs/frozenlake_ppo.py
"""

from __future__ import annotations

import gc
import io
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import ConfigDict, config_flags

from ragen_jax.config import command_line
from ragen_jax.distributed import processes
from ragen_jax.runs.interrupt import Stopped, lost_interrupts_again, raise_at_signals
from ragen_jax.utils import foreign, host_memory, streams
from ragen_jax.utils.background import still_compiling
from ragen_jax.utils.errors import UserError, out_of_memory

# -- Modes. Each imports its module when it starts, so that --help and errors about flags appear at once. --------------


def _train(config: ConfigDict, workdirs: Sequence[str]) -> None:
  from ragen_jax.train import train_and_evaluate

  train_and_evaluate(config, workdirs[0])


def _evaluate(config: ConfigDict, workdirs: Sequence[str]) -> None:
  from ragen_jax.modes.evaluate import evaluate

  evaluate(config, workdirs[0], given=bool(_WORKDIR.value))


def _warm_start(config: ConfigDict, workdirs: Sequence[str]) -> None:
  from ragen_jax.modes.sft import train_sft

  train_sft(config, workdirs[0])


def _play(config: ConfigDict, workdirs: Sequence[str]) -> None:
  from ragen_jax.modes.play import play

  if isinstance(sys.stdin, io.TextIOWrapper):
    sys.stdin.reconfigure(errors='replace')  # whatever is typed that is no text is an unknown action
  play(config, sys.stdin, sys.stdout, level=_LEVEL.value)


def _view(config: ConfigDict, workdirs: Sequence[str]) -> None:
  from ragen_jax.modes.view import view

  view(workdirs[0])


def _export(config: ConfigDict, workdirs: Sequence[str]) -> None:
  from ragen_jax.modes.export import export

  export(config, workdirs[0])


def _plan(config: ConfigDict, workdirs: Sequence[str]) -> None:
  from ragen_jax.modes.plan import plan

  plan(config, sys.stdout)


def _serve(config: ConfigDict, workdirs: Sequence[str]) -> None:
  from ragen_jax.modes.serve import serve

  raise_at_signals()  # it has no end of its own
  serve(config, workdirs[0], given=bool(_WORKDIR.value), stop=threading.Event())


def _optimize_prompt(config: ConfigDict, workdirs: Sequence[str]) -> None:
  from ragen_jax.modes.optimize_prompt import optimize_prompt

  optimize_prompt(config, workdirs[0], given=bool(_WORKDIR.value))


def _plot(config: ConfigDict, workdirs: Sequence[str]) -> None:
  from ragen_jax.modes.plot import plot

  plot(workdirs, _OUTPUT.value)


# Name -> function of the config and the workdirs, and its description in --help.
MODES: dict[str, tuple[Callable[[ConfigDict, Sequence[str]], None], str]] = {
  'train': (_train, 'train a policy, or resume the run in --workdir'),
  'eval': (_evaluate, 'evaluate a checkpoint and baselines'),
  'sft': (_warm_start, 'supervised warm start'),
  'play': (_play, 'play levels yourself'),
  'view': (_view, 'write a web page of the episodes in --workdir'),
  'export': (_export, 'write a checkpoint in Hugging Face format'),
  'plan': (_plan, 'estimate the memory per device'),
  'serve': (_serve, 'serve a checkpoint over an OpenAI-compatible endpoint'),
  'optimize_prompt': (_optimize_prompt, 'search for a better prompt of agent programs, or resume the search'),
  'plot': (_plot, 'draw the curves of runs'),
}
_WITHOUT_WORKDIR = ('play', 'plan')
_ONE_PROCESS = ('play', 'plan', 'view', 'plot')
_LEARN_OR_PLAY = ('train', 'eval', 'sft')
_RESUMES = 'interrupted; the same command resumes from the last checkpoint, if there is one'
# The last line of a mode that is interrupted; other modes have no more to say.
_INTERRUPTED = {
  'train': _RESUMES,
  'sft': _RESUMES,
  'optimize_prompt': 'interrupted; the same command goes on where this one stopped',
}

# -- Flags. ------------------------------------------------------------------------------------------------------------

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, "A config file, or the name of a shipped config such as frozenlake_ppo. Add ':MODEL' to choose "
  'another model: frozenlake_ppo:qwen2.5-0.5b.', lock_config=True,
)  # fmt: skip
_MODE = flags.DEFINE_enum(
  'mode', 'train', list(MODES), '; '.join(f'{name}: {about}' for name, (_, about) in MODES.items()) + '.'
)
_WORKDIR = flags.DEFINE_multi_string(
  'workdir',
  None,
  'Directory of the run. The default is runs/<name of the config>; for sft, runs/<name>-sft, unless the name of the '
  'config begins with sft_. --mode=plot accepts several',
)  # fmt: skip
_OUTPUT = flags.DEFINE_string(
  'output',
  None,
  'Directory of the figures (--mode=plot). The default is plots/ in the workdir; for several runs, next to the first.',
)
_LEVEL = flags.DEFINE_string(
  'level',
  None,
  'Text file with the level to play, written as the game shows it (--mode=play). The default is the training levels.',
)
_COORDINATOR = flags.DEFINE_string(
  'coordinator', None, "HOST:PORT of the first process, for several processes; 'auto' on TPU pods and Slurm."
)
_NUM_PROCESSES = flags.DEFINE_integer('num_processes', None, 'Number of processes; not with --coordinator=auto.')
_PROCESS_ID = flags.DEFINE_integer('process_id', None, 'Index of this process, from 0; not with --coordinator=auto.')
_PATIENCE = flags.DEFINE_float(
  'patience', 600.0, 'Seconds that processes wait for one that makes no progress, before all end; 0 for any time.'
)
_CONNECT_TIMEOUT = flags.DEFINE_float(
  'connect_timeout', 300.0, 'Seconds until all processes must be connected at the coordinator, before each gives up.'
)


def main(argv: list[str]) -> None:
  """Connects the processes and starts the mode; called after the flags are parsed."""
  if len(argv) > 1:
    raise UserError(f'unknown argument {argv[1]!r}; settings are given as --config.FIELD=VALUE')
  if not flags.FLAGS['verbosity'].present:
    absl_logging.set_verbosity(absl_logging.WARNING)  # libraries log through absl
  if not sys.flags.safe_path:
    sys.path.append('')  # classes and functions of the user's, by import path; config files find `configs` without it
  mode = _MODE.value
  if mode in _ONE_PROCESS and _COORDINATOR.value:
    raise UserError(f'--coordinator has no effect with --mode={mode}')
  if mode in _LEARN_OR_PLAY:
    _suit_allocator(_CONFIG.value)
  processes.connect(
    _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value, _PATIENCE.value, _CONNECT_TIMEOUT.value
  )
  if mode in _WITHOUT_WORKDIR and _WORKDIR.value:
    raise UserError(f'--workdir has no effect with --mode={mode}')
  if mode != 'play' and _LEVEL.value is not None:
    raise UserError(f'--level has no effect with --mode={mode}')
  start, _ = MODES[mode]
  try:
    start(_CONFIG.value, command_line.workdirs(flags.FLAGS))
    sys.stdout.flush()
  except RuntimeError as e:  # those of JAX are among them
    if line := out_of_memory(e):
      raise UserError(line) from e
    raise
  gc.collect()  # closes the environments that are no longer used
  if left := foreign.end_children():
    raise UserError(left)
  if still_compiling():
    processes.exit_process(0)


def _suit_allocator(config: ConfigDict) -> None:
  """Keeps freed memory for a built-in model, before the first device is used."""
  from ragen_jax.models import presets

  if not config.model.path and config.model.preset in presets.BUILT_IN:
    host_memory.keep_what_is_freed()


def run() -> None:
  """Runs `main` and exits: a `UserError` gives one line and its status, SIGINT the status 130, SIGTERM 143."""
  streams.open_missing()
  sys.stdout, sys.stderr = streams.Results(sys.stdout), streams.Messages(sys.stderr)
  try:
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by main.py
      signal.signal(signal.SIGINT, signal.default_int_handler)
    command_line.set_up_logging()
    command_line.show_in_help(
      _CONFIG, _MODE, _WORKDIR, _OUTPUT, _LEVEL, _COORDINATOR, _NUM_PROCESSES, _PROCESS_ID, _PATIENCE,
      _CONNECT_TIMEOUT,
    )  # fmt: skip
    with lost_interrupts_again():
      app.run(main, flags_parser=command_line.parse)
  except UserError as e:
    if not e.everywhere or processes.is_first():
      sys.stderr.write(f'error: {e}\n')
    processes.exit_process(e.status, together=e.everywhere, reason=str(e))
  except KeyboardInterrupt as e:
    mode = _MODE.value if flags.FLAGS.is_parsed() else None
    sys.stderr.write(_INTERRUPTED.get(mode, 'interrupted') + '\n')
    # All processes stop at the same place, unless one was interrupted before it could tell the others.
    processes.exit_process(getattr(e, 'status', 130), together=isinstance(e, Stopped), reason='interrupted')


if __name__ == '__main__':
  run()
