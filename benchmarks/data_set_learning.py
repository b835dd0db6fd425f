"""Trains the built-in model on a data set with several seeds, and writes a JSON file and a figure.

  python benchmarks/data_set_learning.py

Asks whether numbers of four digits are even or odd: 2,709 numbers for training, and 291 others, of which 256 are the
evaluation. The warm start, one for all seeds, imitates the answers until the model is right a little more often than by
chance; then GRPO learns from rewards. The times are those of whole processes, including compilation. `--quick` runs two
iterations of one seed, and writes to runs/quick.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import random
import resource
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning_curves import check_matplotlib, draw, hardware, run, seed_list  # noqa: E402

CONFIG = 'configs/dataset_grpo.py'
HELD_OUT = 256
# Short prompts, which the built-in tokenizer encodes byte by byte.
FLAGS = (
  '--config.envs.Dataset.instruction=Answer.', '--config.agent.request={form}', '--config.agent.format=no_think',
  '--config.agent.max_context=160', '--config.agent.max_response_tokens=8', f'--config.eval.groups={HELD_OUT}',
)  # fmt: skip
WARM_START = ('--config.sft.levels=(2600,)', '--config.sft.steps=90', '--config.sft.learning_rate=2e-3')
TRAINING = ('--config.num_iterations=15', '--config.eval.every=5')


def write_questions(path: pathlib.Path) -> None:
  """3,000 questions of equal length."""
  numbers = random.Random(0).sample(range(1000, 10000), 3000)
  rows = [{'question': f'Is {n} even or odd?', 'answer': 'odd' if n % 2 else 'even'} for n in numbers]
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def interval(share: float, count: int = HELD_OUT) -> list[float]:
  """Wilson's 95 % interval of a share of `count` questions."""
  z = 1.96
  middle, scale = (share + z * z / (2 * count)), 1 + z * z / count
  half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
  return [round(max(middle - half, 0.0) / scale, 4), round(min((middle + half) / scale, 1.0), 4)]


def cpu_s() -> float:
  """CPU seconds of the processes that have ended."""
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--seeds', type=seed_list, default='0,1,2')
  parser.add_argument('--quick', action='store_true')
  arguments = parser.parse_args()
  check_matplotlib()
  seeds = arguments.seeds[: 1 if arguments.quick else None]
  runs = []
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch)
    write_questions(folder / 'questions.jsonl')
    flags = [f'--config.envs.Dataset.path={folder / "questions.jsonl"}', *FLAGS]
    model = folder / 'warm_start'
    command = [sys.executable, 'main.py', '--mode=sft', f'--config={CONFIG}', f'--workdir={folder / "sft"}', *flags]
    subprocess.run([*command, *WARM_START, f'--config.sft.output={model}'], cwd=ROOT, check=True)
    flags += [f'--config.model.path={model}', *TRAINING]
    flags += ['--config.num_iterations=2'] if arguments.quick else []
    warm_start_cpu_s = round(cpu_s(), 1)
    for seed in seeds:
      before = cpu_s()
      runs.append(run(CONFIG, seed, folder / str(seed), flags))
      last = runs[-1]
      last['cpu_s'] = round(cpu_s() - before, 1)
      last['interval'] = {name: [interval(share) for share in last[name]] for name in ('sampled', 'greedy')}
      ends = ', '.join(f'{name} {last[name][0]:.3f} -> {last[name][-1]:.3f}' for name in ('sampled', 'greedy'))
      print(f'seed {seed}: {last["wall_s"]} s, {last["cpu_s"]} s of CPU, {ends}', flush=True)
  results, images = ROOT / 'benchmarks' / 'results', ROOT / 'docs' / 'images'
  if arguments.quick:
    results = images = ROOT / 'runs' / 'quick'
  results.mkdir(parents=True, exist_ok=True)
  record = {'command': ' '.join(sys.argv), 'hardware': hardware(), 'warm_start_cpu_s': warm_start_cpu_s, 'runs': runs}
  (results / 'data_set_learning.json').write_text(json.dumps(record, indent=1) + '\n')
  draw(runs, 'even or odd, GRPO', images / 'data_set_learning.png')


if __name__ == '__main__':
  main()
