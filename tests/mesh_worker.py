"""Plays and updates once on the mesh that is asked for and writes down what came of it; run by test_mesh.py."""

from __future__ import annotations

import json
import os
import sys

import jax
import numpy as np

from ragen_jax import experiment
from ragen_jax.distributed import processes
from ragen_jax.trainer import Trainer
from tests import helpers


def main() -> None:
  data, fsdp, tensor, out = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
  if len(sys.argv) > 5:
    processes.connect(sys.argv[5], int(sys.argv[6]), int(sys.argv[7]))
  config = helpers.small_config(
    train__groups=8, train__group_size=4, optimizer__mini_batch_size=16, optimizer__micro_batch_size=8,
    agent__drop_finished=True, **json.loads(os.environ.get('CONFIG_FIELDS', '{}')),
  )  # fmt: skip
  config.mesh.data, config.mesh.fsdp, config.mesh.tensor = data, fsdp, tensor
  policy = experiment.load_policy(config)
  trainer = Trainer(config, policy)
  params, opt_state, _ = trainer.init()
  rollout, selection = trainer.collect(params, 0)
  batch, metrics = trainer.make_batch(params, selection)
  params, opt_state, more = trainer.update(params, opt_state, batch, selection, 0)
  embedding = params['policy']['embed_tokens'][...]
  weights = processes.all_rows(jax.tree.leaves(params))
  if not processes.is_first():
    return
  np.savez(
    out,
    tokens=rollout.trajectory.tokens,
    logprobs=rollout.trajectory.logprobs,
    advantages=batch.advantages,
    metrics=json.dumps(metrics | more),
    shards=len({str(index) for index in embedding.sharding.devices_indices_map(embedding.shape).values()}),
    **{f'w{i}': x for i, x in enumerate(weights)},
  )


if __name__ == '__main__':
  main()
