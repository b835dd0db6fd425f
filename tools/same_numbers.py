"""Records the numbers of short runs, and compares them bit for bit with those of another version.

  python tools/same_numbers.py --record=before.json     # before a change that must not change any number
  python tools/same_numbers.py --compare=before.json    # after it

Each run is one command of `main.py` on the CPU, in its own process and a new workdir. All runs take about ten minutes
on 2 cores; `--only=ppo,export` selects some. A recording contains the metrics of every iteration without times and
memory, digests of all checkpoints, episode files and written models, and the evaluations. Equal numbers can only be
expected on the same machine with the same version of JAX.

The exit status is 1 if a number differs or a run fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402

from ragen_jax.runs.metrics import read_metrics  # noqa: E402
from ragen_jax.runs.timing import MEASURED  # noqa: E402

# Fields that make all runs short.
SHORT = {
  'num_iterations': 3, 'train.groups': 16, 'train.group_size': 4, 'eval.groups': 16, 'eval.group_size': 2,
  'eval.every': 2, 'optimizer.mini_batch_size': 32, 'optimizer.micro_batch_size': 16, 'checkpoint.every': 2,
  'length_step': 256,
}  # fmt: skip
_PROBES = {'monitor.information_every': 2, 'monitor.information_samples': 4, 'monitor.gradients_every': 2}


@dataclasses.dataclass(frozen=True)
class Run:
  """A command of `main.py`.

  Attributes:
    config: name of a shipped config.
    fields: fields that differ from it and from `SHORT`; '{out}' stands for a directory for written files.
    mode: the mode of `main.py`.
    of: name of the run whose workdir is read; empty for a new workdir.
  """

  config: str
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  mode: str = 'train'
  of: str = ''


RUNS = {
  'ppo': Run('frozenlake_ppo', _PROBES),
  'grpo': Run('frozenlake_grpo', {'algorithm.loss_agg_mode': 'seq-mean-token-sum', 'train.temperature': 0.7}),
  'starpo_s': Run(
    'frozenlake_starpo_s',
    {
      'algorithm.kl_loss_coef': 0.01,
      'algorithm.kl_reward_coef': 0.01,
      'optimizer.warmup_steps': 3,
      'filter.max_rollouts': 2,
      'filter.include_zero': False,
    },
  ),
  'window': Run(
    'frozenlake_ppo',
    {
      'agent.context': 'limited_multi_turn',
      'agent.context_turns': 2,
      'algorithm.old_logprobs': 'trainer',
      'algorithm.tis_cap': 2.0,
      'replay.groups': 4,
    },
  ),
  'lora': Run('frozenlake_ppo:tiny-lora'),
  'critic': Run(
    'sokoban_ppo',
    {
      'model.separate_critic': True,
      'algorithm.adv_estimator': 'bi_level_gae',
      'algorithm.bootstrap_truncated': True,
      'optimizer.critic_warmup': 1,
      'agent.overlong': 'drop_oldest',
      'agent.max_context': 360,
      'eval.tags': ('SimpleSokoban',),
      'eval.tag_groups': (),
    },
  ),
  'mixed': Run(
    'frozenlake_ppo',
    {
      'train.tags': ('FrozenLake', 'Bandit'),
      'eval.tags': ('FrozenLake', 'SimpleSokoban'),
      'eval.temperature': 1.0,
      'eval.top_p': 0.9,
      'agent.context': 'single_turn',
      'agent.format': 'no_think',
      'algorithm.adv_estimator': 'gigpo',
    },
  ),
  'warm_start': Run(
    'sft_frozenlake',
    {
      'sft.levels': (128,),
      'sft.steps': 30,
      'sft.batch_size': 16,
      'sft.checkpoint_every': 10,
      'sft.value_coef': 0.5,
      'sft.output': '{out}/model',
      'sft.save_data': '{out}/data.jsonl',
    },
    mode='sft',
  ),
  'from_scratch': Run(
    'sft_tiny',
    {
      'sft.levels': (64, 64, 32),
      'sft.steps': 20,
      'sft.batch_size': 16,
      'sft.output': '{out}/model',
      'eval.groups': 18,
    },
    mode='sft',
  ),
  'evaluation': Run('frozenlake_ppo', mode='eval', of='ppo'),
  'export': Run('frozenlake_ppo', _PROBES | {'export.output': '{out}/model'}, mode='export', of='ppo'),
}


def command(name: str, directory: pathlib.Path) -> list[str]:
  """The command of a run; its workdir and its output are below `directory`."""
  run = RUNS[name]
  fields = SHORT | run.fields | {'compilation_cache': str(directory / 'xla_cache')}
  out = str(directory / 'out' / name)
  flags = [f'--config.{field}={value}'.replace('{out}', out) for field, value in fields.items()]
  workdir = f'--workdir={directory / (run.of or name)}'
  return [sys.executable, 'main.py', f'--mode={run.mode}', f'--config={run.config}', *flags, workdir]


def record(names: list[str], directory: pathlib.Path) -> dict[str, Any]:
  """Executes the runs, in the order of `RUNS`, and reads their numbers."""
  found: dict[str, Any] = {}
  for name in names:
    start = time.monotonic()
    (directory / 'out' / name).mkdir(parents=True)
    done = subprocess.run(
      command(name, directory), cwd=ROOT, env=os.environ | {'JAX_PLATFORMS': 'cpu'}, capture_output=True, text=True,
      check=False,
    )  # fmt: skip
    if done.returncode:
      raise SystemExit(f'{name} failed:\n{done.stderr[-3000:]}')
    found[name] = numbers(name, directory)
    print(f'{name}: {time.monotonic() - start:.0f} s', flush=True)
  return found


def numbers(name: str, directory: pathlib.Path) -> dict[str, Any]:
  """All parts of a run that must be equal, by name."""
  run, found = RUNS[name], {}
  workdir = directory / (run.of or name)
  if not run.of:
    for line in read_metrics(workdir):
      line = {metric: x for metric, x in line.items() if not metric.startswith(MEASURED)}
      found[f'metrics of step {line["step"]}'] = {metric: repr(x) for metric, x in line.items()}
    for state in sorted((workdir / 'checkpoints').glob('*/state')):
      found[f'checkpoint {state.parent.name}'] = weights(state)
    found['episodes'] = digests(workdir / 'episodes')
  if run.mode == 'eval':
    for path in sorted((workdir / 'evaluation').glob('*.json')):
      found[f'evaluation {path.name}'] = dict(flat(json.loads(path.read_text())))
  return found | {'written files': digests(directory / 'out' / name)}


def weights(state: pathlib.Path) -> dict[str, str]:
  """Digest of each array of a checkpoint, by name."""
  arrays = ocp.StandardCheckpointer().restore(state)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): digest(np.asarray(x).tobytes())
    for path, x in jax.tree_util.tree_flatten_with_path(arrays)[0]
  }


def digests(directory: pathlib.Path) -> dict[str, str]:
  """Digest of each file below a directory, by its relative path."""
  files = (path for path in sorted(directory.rglob('*')) if path.is_file())
  return {str(path.relative_to(directory)): digest(path.read_bytes()) for path in files}


def digest(content: bytes) -> str:
  """The first 16 hexadecimal digits of a SHA-256."""
  return hashlib.sha256(content).hexdigest()[:16]


def flat(value: Any, prefix: str = '') -> Iterator[tuple[str, str]]:
  """(path, value) of the leaves of a JSON value."""
  if isinstance(value, dict | list):
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
      yield from flat(part, f'{prefix}/{key}')
  else:
    yield prefix.lstrip('/'), repr(value)


def versions() -> dict[str, str]:
  """The versions and the machine, on which the last bits depend."""
  return {'jax': jax.__version__, 'numpy': np.__version__, 'machine': platform.machine(), 'cores': str(os.cpu_count())}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
  """One line for each number that differs between two recordings of a run."""
  lines = []
  for part in sorted(before.keys() | after.keys()):
    old, new = before.get(part, {}), after.get(part, {})
    for name in sorted(old.keys() | new.keys()):
      if old.get(name) != new.get(name):
        lines.append(f'{part}: {name} was {old.get(name, "absent")} and is {new.get(name, "absent")}')
  return lines


def compare(before: dict[str, Any], after: dict[str, Any], most: int = 10) -> bool:
  """Prints the differences between the runs of two recordings; True if there are none."""
  for name, was in before['versions'].items():
    if was != after['versions'][name]:
      print(f'note: {name} was {was} and is {after["versions"][name]}; the last bits may differ')
  equal = True
  for name, run in after['runs'].items():
    lines = differences(before['runs'].get(name, {}), run)
    equal &= not lines
    print(f'{name}: {f"{len(lines)} differences" if lines else "equal"}')
    for line in lines[:most]:
      print(f'  {line}')
  return equal


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  target = parser.add_mutually_exclusive_group(required=True)
  target.add_argument('--record', metavar='FILE', help='write the numbers of this version')
  target.add_argument('--compare', metavar='FILE', help='compare the numbers of this version with a recording')
  parser.add_argument('--only', metavar='NAMES', default=','.join(RUNS), help=f'some of {",".join(RUNS)}')
  parser.add_argument('--directory', help='keep the runs in this new directory; by default they are deleted')
  args = parser.parse_args()
  wanted = set(args.only.split(','))
  if unknown := wanted - RUNS.keys():
    parser.error(f'--only: unknown {", ".join(sorted(unknown))}; known: {", ".join(RUNS)}')
  wanted |= {RUNS[name].of for name in wanted} - {''}
  before = json.loads(pathlib.Path(args.compare).read_text()) if args.compare else None
  with tempfile.TemporaryDirectory() as temporary:
    directory = pathlib.Path(args.directory or temporary).resolve()
    after = {'versions': versions(), 'runs': record([name for name in RUNS if name in wanted], directory)}
  if before is None:
    pathlib.Path(args.record).write_text(json.dumps(after, indent=1) + '\n')
  elif not compare(before, after):
    sys.exit(1)


if __name__ == '__main__':
  main()
