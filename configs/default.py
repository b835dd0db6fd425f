"""Every field once, with what it means. The other files of this folder change some of them.

  python main.py --config=configs/frozenlake_ppo.py --config.algorithm.clip_ratio_high=0.3

sets a field by its name. A word behind the file's name, `configs/frozenlake_ppo.py:qwen2.5-0.5b`, chooses the model and
the settings that go with its size (`ragen_jax/models/presets.py` lists them).
"""

from ml_collections import ConfigDict

from ragen_jax.envs import bandit


def get_config(model: str = '') -> ConfigDict:
  """The defaults: the built-in model, or those of a real one.

  Args:
    model: a name from `ragen_jax.models.presets`; empty means 'tiny', the model in this repository. With '-lora' behind
      it, adapters are trained in place of the model's own weights.
  """
  model, adapters = model.removesuffix('-lora'), model.endswith('-lora')
  config = ConfigDict()

  # Seeds the draws of tokens, the order of minibatches and fresh weights. Runs that differ only in it train on
  # different levels too; the held-out levels stay the same. 0 to 428.
  config.seed = 0
  # Optimiser iterations: one rollout and one pass of updates each.
  config.num_iterations = 100

  config.model = ConfigDict()
  # Which model: 'tiny' or a name from ragen_jax/models/presets.py. The word behind the config file's name sets it.
  config.model.preset = model or 'tiny'
  # Directory of a Hugging Face checkpoint that is used in place of the preset's weights; empty for the preset's own.
  config.model.path = ''
  # Type that computations run in: 'float32' or 'bfloat16'; 'auto' is float32 on CPU and bfloat16 elsewhere.
  config.model.dtype = 'auto'
  # Type that weights are kept in: 'float32', or with LoRA also 'bfloat16' for those that are frozen.
  config.model.param_dtype = 'float32'
  # Recompute each layer's activations in the backward pass: less memory, about a third more work.
  config.model.remat = False
  # Whether the critic is a second model, which begins with the same weights (RAGEN's choice), or else a value head on
  # the policy's trunk. It takes the memory of a second policy with its optimiser's state, and a pass over the rollout.
  config.model.separate_critic = False
  # Token positions whose vocabulary log-probs are held at once in the update; 0 holds all of a micro-batch's.
  config.model.logits_chunk = 0

  # -- LoRA: low-rank adapters are trained, the policy's own weights are frozen. ---------------------------------------
  config.lora = ConfigDict()
  # Rank of the adapters; 0 is off and trains all weights. A variant that ends in '-lora' sets RAGEN's preset, 64. A
  # separate critic has no adapters and is trained whole, which asks for a tenth of the variant's optimizer.critic_lr.
  config.lora.rank = 0
  # What an adapter adds is multiplied with alpha / rank.
  config.lora.alpha = 64
  # Projections that have one: 'all-linear', or names with commas between them, such as 'q_proj,v_proj'.
  config.lora.targets = 'all-linear'
  # Directory of adapters, ours or PEFT's, to begin with; empty for fresh ones, which change nothing at first.
  config.lora.path = ''

  # -- Environments, by RAGEN's tags; `train.tags` and `eval.tags` choose among them. ---------------------------------
  # In each: `type` is the class (ragen_jax/envs), `max_turns` replies an episode, `max_actions` actions an episode,
  # `max_actions_per_turn` actions of one reply that are carried out, `max_words` the length that the prompt asks for.
  # The other fields are the options of the class. Values are those of RAGEN's first version, where it has the tag.
  config.envs = ConfigDict()
  config.envs.FrozenLake = ConfigDict(
    {
      'type': 'frozen_lake',
      # Rows and columns.
      'size': 4,
      # Probability that a square is ice; RAGEN-2 has 0.9.
      'p': 0.8,
      # Whether a move can slide off sideways.
      'is_slippery': True,
      # On slippery ice, the probability of moving as meant; the two right angles share the rest. RAGEN-2 has 0.8 or 1.
      'success_rate': 1 / 3,
      # How the state is told: 'grid', 'coord' or 'grid_coord'.
      'observation': 'grid',
      # What the grid shows for player, ice, hole, goal, player in a hole, player on the goal.
      'symbols': 'P_OGX√',
      'max_turns': 5,
      'max_actions': 10,
      'max_actions_per_turn': 5,
      'max_words': 100,
    }
  )
  # FrozenLake with the squares' coordinates beside the grid.
  config.envs.CoordFrozenLake = _like(config.envs.FrozenLake, observation='grid_coord', max_words=120)
  config.envs.SimpleSokoban = ConfigDict(
    {
      'type': 'sokoban',
      # Rows and columns, the outer walls included.
      'dim': (6, 6),
      # Boxes, and targets.
      'num_boxes': 1,
      # Actions after which the game itself ends, whatever the budget; at least max_actions.
      'max_steps': 100,
      # The most moves of the reverse play that makes a level.
      'search_depth': 300,
      # The fewest moves of a level's shortest solution; 0 for no bound.
      'min_solution': 0,
      # The most moves of a level's shortest solution; 0 for no bound. Both bounds choose the difficulty.
      'max_solution': 0,
      # A file of levels in Boxoban's format that are played instead of made ones (set dim and num_boxes to match);
      # empty for none.
      'levels': '',
      # How the state is told: 'grid', 'coord' or 'grid_coord'.
      'observation': 'grid',
      # What the grid shows for wall, floor, target, box on target, box, player, player on target.
      'symbols': ('#', '_', 'O', '√', 'X', 'P', 'S'),
      'max_turns': 5,
      'max_actions': 10,
      'max_actions_per_turn': 5,
      'max_words': 100,
    }
  )
  # Sokoban on a larger board with two boxes.
  config.envs.LargerSokoban = _like(config.envs.SimpleSokoban, dim=(8, 8), num_boxes=2, search_depth=10)
  # The same game in other symbols, to see whether the old ones were learned by heart.
  config.envs.SokobanDifferentGridVocab = _like(
    config.envs.SimpleSokoban, search_depth=30, symbols=('W', '.', 'G', 'C', 'B', 'A', '@')
  )
  # Sokoban with the cells' coordinates beside the grid, RAGEN-2's default.
  config.envs.CoordSokoban = _like(config.envs.SimpleSokoban, observation='grid_coord', max_words=120)
  config.envs.Bandit = ConfigDict(
    {
      'type': 'bandit',
      # Pairs of (safe arm, risky arm); a level shows one of them.
      'arms': bandit.PHOENIX_DRAGON,
      # What the safe arm pays; 0.15 in the paper's text.
      'low_reward': 0.1,
      # What the risky arm pays when it pays.
      'high_reward': 1.0,
      # How often it pays.
      'high_probability': 0.25,
      'max_turns': 1,
      'max_actions': 1,
      'max_actions_per_turn': 1,
      'max_words': 100,
    }
  )
  # What RAGEN tests a policy on that was trained on Bandit.
  config.envs.BanditTest = _like(config.envs.Bandit, arms=bandit.TRADER_LIBRARIAN)
  # The paper's test of generalisation: a pair of professions to train on, the risk where one expects it.
  config.envs.BanditProfessions = _like(config.envs.Bandit, arms=bandit.PROFESSIONS_TRAIN)
  # The pair to evaluate on after it.
  config.envs.BanditProfessionsTest = _like(config.envs.Bandit, arms=bandit.PROFESSIONS_TEST)
  # The same against expectation, where the quiet profession is the risky arm: the pair to train on.
  config.envs.BanditRev = _like(config.envs.Bandit, arms=bandit.REVERSED_TRAIN)
  # The pair to evaluate on after it.
  config.envs.BanditRevTest = _like(config.envs.Bandit, arms=bandit.REVERSED_TEST)
  # RAGEN-2's twelve pairs of professions to train on.
  config.envs.BanditPairs = _like(config.envs.Bandit, arms=bandit.RAGEN2_TRAIN)
  # Its eight other pairs to evaluate on.
  config.envs.BanditPairsTest = _like(config.envs.Bandit, arms=bandit.RAGEN2_TEST)
  # Arithmetic: an expression that uses every number once and gives the target.
  config.envs.Countdown = ConfigDict(
    {
      'type': 'countdown',
      # Fewest given numbers, 2 to 5.
      'min_numbers': 3,
      # Most given numbers, up to 5.
      'max_numbers': 4,
      # Given numbers are 1 to this; at most 999, 812, 127, 42 where max_numbers is 2, 3, 4, 5.
      'largest_number': 99,
      # Targets are 1 to this.
      'largest_target': 99,
      # What levels are made with: '+-' (as RAGEN's levels, which signs alone solve), '+-*' or '+-*/'.
      'level_operators': '+-*/',
      # Reward for the right numbers with a wrong value.
      'numbers_reward': 0.1,
      'max_turns': 1,
      'max_actions': 1,
      'max_actions_per_turn': 1,
      'max_words': 100,
    }
  )
  # Sliding tiles that double. RAGEN-2 plays up to the tile 2048 with 700 actions in 800 turns.
  config.envs.Game2048 = ConfigDict(
    {
      'type': 'game_2048',
      # The tile that wins, a power of two from 8 to 131072.
      'goal': 64,
      # A move's reward from the sum m of the tiles that it makes: 'log' is 0.1 * log2(1 + m), 'raw' is m.
      'reward': 'log',
      'max_turns': 20,
      'max_actions': 60,
      'max_actions_per_turn': 5,
      'max_words': 100,
    }
  )
  # The cube of 2 x 2 x 2.
  config.envs.Rubik2x2 = ConfigDict(
    {
      'type': 'rubik_2x2',
      # Random quarter turns that make a level, 1 to 14; no turn undoes the one before.
      'scramble_depth': 1,
      # Whether a level is exactly that many turns from solved (uniform over all such positions).
      'exact_distance': False,
      'max_turns': 5,
      'max_actions': 20,
      'max_actions_per_turn': 4,
      'max_words': 100,
    }
  )
  config.envs.Sudoku = ConfigDict(
    {
      'type': 'sudoku',
      # Cells in a row: 4 or 9.
      'side': 4,
      # Empty cells of a level, 1 to 12 (side 4) or 64 (side 9); the budget must be able to fill them.
      'empty_cells': 6,
      # What a wrong digit brings that breaks no rule, once for each cell and digit: -0.1, as any wrong one, to below 1;
      # RAGEN's is 0.5.
      'legal_reward': -0.1,
      # Whether the digits that break no rule are listed for each empty cell where at most 10 are empty, as in RAGEN-2.
      'hints': True,
      'max_turns': 5,
      'max_actions': 10,
      'max_actions_per_turn': 5,
      'max_words': 100,
    }
  )
  # Sudoku on the usual board of 9 x 9 cells; a prompt and ten turns of it need a long agent.max_context.
  config.envs.Sudoku9x9 = _like(config.envs.Sudoku, side=9, empty_cells=40, max_turns=10, max_actions=50)

  # -- Training rollouts. ---------------------------------------------------------------------------------------------
  config.train = ConfigDict()
  # Environments that are trained on.
  config.train.tags = ('FrozenLake',)
  # Prompt groups of an iteration; each is one level.
  config.train.groups = 64
  # How many of the groups play each tag, in the order of the tags; empty divides them equally.
  config.train.tag_groups = ()
  # Episodes a group: they share the level, and each has its own luck and its own tokens.
  config.train.group_size = 8
  # Iterations that learn from one rollout, RAGEN's Online-k: 1 is on-policy, more saves rollouts and learns from what
  # an older policy did. It must divide num_iterations and checkpoint.every.
  config.train.online_k = 1
  # Seed of the first training level. Group g of rollout i has seed + i * groups + g, and each `config.seed` its own
  # range of 10 million. A board that is among the held-out ones is drawn again from another seed.
  config.train.first_level = 10_000
  # Divides the logits when tokens are drawn, and in the loss.
  config.train.temperature = 1.0
  # Draw from the smallest set of tokens that has this much probability; 1 draws from all, as the loss assumes, and less
  # needs algorithm.old_logprobs='trainer'.
  config.train.top_p = 1.0
  # Draw from this many likeliest tokens; 0 draws from all, as the loss assumes, and other numbers need
  # algorithm.old_logprobs='trainer'.
  config.train.top_k = 0

  # -- Evaluation: the same held-out levels every time. ---------------------------------------------------------------
  config.eval = ConfigDict()
  # Environments that are evaluated on; they need not be those of training, and each has metrics of its own.
  config.eval.tags = ('FrozenLake',)
  # Held-out levels.
  config.eval.groups = 256
  # How many of the levels are of each tag, in the order of the tags; empty divides them equally.
  config.eval.tag_groups = ()
  # Episodes a level, each with its own luck.
  config.eval.group_size = 4
  # Seed of the first held-out level; their seeds must not overlap with those of training.
  config.eval.first_level = 123
  # Evaluate before training, after every so many iterations and after the last. 0 evaluates at the ends only.
  config.eval.every = 10
  # Divides the logits when tokens are drawn; 0 takes the likeliest.
  config.eval.temperature = 0.5
  # Draw from the smallest set of tokens that has this much probability; 1 draws from all.
  config.eval.top_p = 1.0
  # Draw from this many likeliest tokens; 0 draws from all.
  config.eval.top_k = 0
  # Evaluate a second time with the likeliest token everywhere.
  config.eval.greedy_too = True
  # This field and the next are for --mode=eval only. Which checkpoint: 'latest', 'best' by held-out success, or the
  # number of an iteration; 'base' is the model that the config names, without a checkpoint, and 'none' no model at all.
  config.eval.step = 'latest'
  # Who else plays the levels: 'random' (legal actions, in the right form) and 'solver' (the best play, where known).
  config.eval.baselines = ('random', 'solver')
  # Base address of an OpenAI-compatible server whose model plays too, such as 'http://localhost:8000/v1'; empty for
  # none. If it wants a key, that is read from the environment variable OPENAI_API_KEY.
  config.eval.endpoint = ''
  # Name of its model.
  config.eval.endpoint_model = ''
  # Seconds that one reply of it may take.
  config.eval.endpoint_timeout = 60.0
  # Replies that are asked for at a time.
  config.eval.endpoint_workers = 8
  # How often a reply is asked for that does not come; then the turn is lost, as one that is not valid.
  config.eval.endpoint_tries = 6
  # Tokens of one of its replies at most, as it counts them; 0 leaves that to the server.
  config.eval.endpoint_max_tokens = 512

  # -- How an episode goes. -------------------------------------------------------------------------------------------
  config.agent = ConfigDict()
  # Replies think before they answer: <think>...</think><answer>...</answer>; without, <answer>...</answer>.
  config.agent.think = True
  # The reply's first tag is put there for the policy; otherwise the policy has to write it.
  config.agent.force_prefix = True
  # What separates the actions of one reply.
  config.agent.action_sep = '||'
  # Tokens of one reply at most.
  config.agent.max_response_tokens = 32
  # What the policy sees of an episode: 'full', the whole conversation; 'limited_multi_turn', the conversation of the
  # last turns; 'single_turn', one message with a summary of the last turns. The latter two give a row for each turn.
  config.agent.context = 'full'
  # Turns that 'limited_multi_turn' and 'single_turn' show, the present one included.
  config.agent.context_turns = 5
  # Where the context is too long for another turn: 'end' the episode, or 'drop_oldest' turns from what is seen.
  config.agent.overlong = 'end'
  # Tokens of a row at most: of a whole episode with full context, of one turn and what it sees otherwise.
  config.agent.max_context = 512
  # Added to the reward of a turn whose reply has the wrong form or names an unknown action; 0 or negative.
  config.agent.format_penalty = -0.1
  # Episodes that are over leave the batch once half of those of every device are.
  config.agent.drop_finished = True

  # -- The update. ----------------------------------------------------------------------------------------------------
  config.algorithm = ConfigDict()
  # How advantages are estimated: 'gae' (PPO), 'turn_wise_gae', 'bi_level_gae', 'grpo', 'dr_grpo', 'rloo', 'brpo',
  # 'arpo', 'reinforce_plus_plus', 'reinforce_plus_plus_baseline' or 'gigpo'; see ragen_jax/algorithms/advantages.py.
  config.algorithm.adv_estimator = 'gae'
  # Which tokens are trained: those that the policy sampled, or (False) every token of the episode, prompts too.
  config.algorithm.mask_loss = True
  # Which tokens the advantages run through, by the same choice. False in either needs old_logprobs='trainer'.
  config.algorithm.mask_advantages = True
  # Discount for each sampled token.
  config.algorithm.gamma = 1.0
  # Decay of GAE for each sampled token.
  config.algorithm.lam = 1.0
  # Discount for each turn, in 'bi_level_gae' and 'turn_wise_gae'.
  config.algorithm.high_level_gamma = 0.95
  # Decay of GAE for each turn, in 'bi_level_gae' and 'turn_wise_gae'; negative for the same as `lam`.
  config.algorithm.high_level_lam = -1.0
  # Let an episode that a budget cut off be worth, behind its last token, what the critic says; otherwise it is worth 0,
  # as the budget is part of the task that the prompt states. For estimators with a critic.
  config.algorithm.bootstrap_truncated = False
  # Divide the advantage by the episode's length over the mean length, in 'grpo' and 'dr_grpo'.
  config.algorithm.length_weight = False
  # Discount for each turn in the step part of 'gigpo'.
  config.algorithm.step_gamma = 0.95
  # Weight of the step part of 'gigpo'.
  config.algorithm.step_weight = 1.0
  # Divide both parts of 'gigpo' by the standard deviations.
  config.algorithm.step_std = False
  # Whiten the advantages over the batch, for estimators that do so (the GAE and REINFORCE++ families).
  config.algorithm.whiten_advantages = True
  # What a probability ratio spans: a 'token', the whole 'sequence' (GSPO, with clip ratios of about 3e-4), or a 'turn'.
  config.algorithm.ratio_level = 'token'
  # How far below 1 the probability ratio may fall before its gradient is cut.
  config.algorithm.clip_ratio_low = 0.2
  # How far above 1 the probability ratio may rise ("clip-higher").
  config.algorithm.clip_ratio_high = 0.28
  # Bound of the dual clip for negative advantages, above 1; 0 is off.
  config.algorithm.clip_ratio_c = 3.0
  # How far a value may move from the one at sampling before its gradient is cut; 0 is off.
  config.algorithm.value_clip = 0.5
  # Weight of the value loss, whose gradient reaches the shared trunk too; with a separate critic it scales only that
  # one's gradient before it is clipped. Unused without a critic-based estimator.
  config.algorithm.value_coef = 0.1
  # Weight of the entropy bonus.
  config.algorithm.entropy_coef = 0.001
  # Weight of the KL to the model that training began with, in the loss; above 0 it costs a second copy of
  # the weights that are trained.
  config.algorithm.kl_loss_coef = 0.0
  # What the KL to the first weights takes from the reward of every sampled token.
  config.algorithm.kl_reward_coef = 0.0
  # How the KL is estimated from a token: 'k1' (log-ratio), 'abs', 'k2' (half its square) or 'k3' (low variance).
  config.algorithm.kl_kind = 'k3'
  # How token losses become one number: 'token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum' or
  # 'seq-mean-token-sum-norm' (over `loss_norm_length`).
  config.algorithm.loss_agg_mode = 'token-mean'
  # Tokens that 'seq-mean-token-sum-norm' divides by; 0 is the most that an episode can sample.
  config.algorithm.loss_norm_length = 0
  # Log-probs and values that the update starts from: 'sampler' as recorded when the tokens were drawn, 'trainer'
  # computed again by the update's own forward pass.
  config.algorithm.old_logprobs = 'sampler'
  # Weigh each token's loss with the trainer's probability over the sampler's, at most this; 0 is off. Needs
  # old_logprobs='trainer'.
  config.algorithm.tis_cap = 0.0
  # Passes over the rollout in an iteration.
  config.algorithm.ppo_epochs = 1

  # -- From what the environment pays to what the estimators read. ----------------------------------------------------
  config.reward = ConfigDict()
  # Where rewards lie: 'turn', on the last token of the turn that earned it, or 'trajectory', all on the episode's last.
  config.reward.credit = 'turn'
  # Among what scores are normalised: the 'state' (prompt group), 'inductive' (environment) or the whole 'batch'.
  config.reward.grouping = 'state'
  # How scores are normalised: 'identity' (not at all), 'mean', 'mean_std' or 'asym_clip' (mean_std, clamped to -1..3);
  # not with turn credit.
  config.reward.method = 'identity'

  # -- Which prompt groups an update learns from (StarPO-S). -----------------------------------------------------------
  config.filter = ConfigDict()
  # What groups are ranked by: 'reward_std', 'reward', 'reward_sum', 'entropy', 'entropy_variance' or 'length'.
  config.filter.metric = 'reward_std'
  # How many groups stay: 'top_k' (this share of them), 'top_k_abs' (this number), 'top_p' (until this share of the sum
  # of all scores is covered) or 'min_p' (those with at least this share of the greatest score).
  config.filter.strategy = 'top_p'
  # The share or number; 1 with 'top_p' keeps all.
  config.filter.value = 1.0
  # Keep the groups of the 'largest' or the 'smallest' score.
  config.filter.type = 'largest'
  # Whether groups of score 0 may stay; with False they go first, also where nothing else is filtered (DAPO).
  config.filter.include_zero = True
  # What 'top_p' adds up: the scores ('linear') or their 'softmax'.
  config.filter.top_p_mode = 'linear'
  # Make advantages smaller by the kept share of groups: 'none', 'linear' or 'sqrt'.
  config.filter.loss_scaling = 'none'
  # In place of dropping, weigh a group's advantages with its reward deviation over the greatest one.
  config.filter.soft = False
  # Divide what is kept over as many optimiser steps as without a filter, rather than over fewer.
  config.filter.fixed_steps = True
  # Rollouts of an iteration at most: with more than 1, fresh groups are played until train.groups of them are kept.
  config.filter.max_rollouts = 1

  # -- Learning again from what earlier iterations learnt from. Needs algorithm.tis_cap, the bound of its weights. ---
  config.replay = ConfigDict()
  # Prompt groups that are drawn from the buffer in addition to the fresh ones; 0 is off.
  config.replay.groups = 0
  # Iterations after which a rollout is too old to be drawn.
  config.replay.max_age = 2

  config.optimizer = ConfigDict()
  # Learning rate of the model.
  config.optimizer.actor_lr = 1e-3
  # Learning rate of the value head, or of the whole separate critic.
  config.optimizer.critic_lr = 1e-3
  # Iterations at the beginning in which the critic alone learns; with a shared trunk, the value head alone.
  config.optimizer.critic_warmup = 0
  # Steps over which both learning rates rise from 0.
  config.optimizer.warmup_steps = 0
  # Share of the learning rate that is left after all optimiser steps of the run, reached in a straight line; 1 keeps it
  # constant. A filter that makes for fewer steps leaves more of it.
  config.optimizer.final_lr_fraction = 1.0
  # AdamW's decay rate of the gradient's mean.
  config.optimizer.b1 = 0.9
  # AdamW's decay rate of the gradient's square.
  config.optimizer.b2 = 0.999
  # AdamW's weight decay; vectors (norms, biases) are not decayed.
  config.optimizer.weight_decay = 0.01
  # The gradient's greatest global norm; the policy's and a separate critic's are clipped each by its own.
  config.optimizer.grad_clip = 1.0
  # Episodes of one optimiser step.
  config.optimizer.mini_batch_size = 128
  # Episodes that go through the model at once; gradients add up to those of the whole mini-batch.
  config.optimizer.micro_batch_size = 64

  # -- Supervised warm start (--mode=sft): imitation of exact solvers, or of given conversations. ---------------------
  config.sft = ConfigDict()
  # Where the trained checkpoint is written, in Hugging Face format.
  config.sft.output = 'runs/sft/checkpoint'
  # A file of conversations to learn from, one JSON a line (docs/warm_start.md); empty for solvers' play.
  config.sft.data = ''
  # A file that the solvers' play is written to in that form; empty for none.
  config.sft.save_data = ''
  # Environments that are demonstrated. With `data`, this and all down to `discount` have no effect.
  config.sft.tags = ('FrozenLake',)
  # Levels of each, in the order of the tags.
  config.sft.levels = (4096,)
  # Demonstrations a level.
  config.sft.group_size = 1
  # Seed of the first level; their seeds must not overlap with those of evaluation.
  config.sft.first_level = 1_000_000_000
  # Demonstrate another level in place of one whose board is among the held-out ones of `eval`.
  config.sft.skip_held_out = True
  # Other shipped configs, by name, whose held-out levels are skipped as well.
  config.sft.skip_held_out_of = ()
  # Probability that a turn of a demonstration plays random actions, as many as the expert would.
  config.sft.noise = 0.0
  # Probability that a turn follows the plan of a beginner, who for instance does not know that ice is slippery.
  config.sft.beginner = 0.0
  # Probability that of a turn's actions only the first is played.
  config.sft.timid = 0.0
  # Probability that the expert plans a turn as if it were the last, with more actions at once than it would need to.
  config.sft.hurry = 0.5
  # Actions that the expert takes in one turn at most; 0 is as many as the environment lets it.
  config.sft.actions_per_turn = 0
  # What a success is worth to the expert after each further action; below 1 it does not wander.
  config.sft.discount = 0.97
  # Optimiser steps.
  config.sft.steps = 1000
  # Demonstrations, or conversations, a step.
  config.sft.batch_size = 64
  # Put several of them into one row, which none sees the others of: less padding where their lengths differ.
  config.sft.packing = False
  # Share of the levels, or of the conversations, that are not learnt from, to tell the loss on them.
  config.sft.val_fraction = 0.05
  # Evaluate after every so many steps, and after the last; 0 evaluates after the last only.
  config.sft.eval_every = 0
  # Save a checkpoint to go on from after every so many steps, and after the last; 0 saves after the last only.
  config.sft.checkpoint_every = 200
  # Peak learning rate; it rises over the first twentieth of the steps and falls to a tenth in a cosine.
  config.sft.learning_rate = 1e-4
  # Weight of the value head's loss: half the squared error of what the best play would still bring, over the mean
  # square of that in the environment. 0 leaves the head as it is.
  config.sft.value_coef = 0.0
  # Begin with fresh weights and a tokenizer made from the prompts of `tags`, instead of with `model`.
  config.sft.from_scratch = False
  # Shape of the fresh model: width, layers, query heads, key/value heads, width of a head, width of the MLP.
  config.sft.shape = (64, 2, 4, 2, 16, 192)

  # -- A run's checkpoint as a Hugging Face directory (--mode=export). -------------------------------------------------
  config.export = ConfigDict()
  # Where it is written; empty for <workdir>/export.
  config.export.output = ''
  # Which checkpoint: 'latest', 'best' by held-out success, or the number of an iteration.
  config.export.step = 'latest'
  # What a model with LoRA becomes: 'merged', a model as any other, or 'adapter', a directory for PEFT. Also for sft.
  config.export.lora = 'merged'
  # Type of the written weights: 'float32', 'bfloat16' or 'float16'. Also for sft.
  config.export.dtype = 'float32'

  # -- Devices. Rows are divided over data * fsdp, weights over fsdp and tensor. ---------------------------------------
  config.mesh = ConfigDict()
  # Copies of the weights, each with rows of its own; -1 for as many as there are devices left for.
  config.mesh.data = -1
  # Ways in which the weights and the optimiser's state are divided, also with rows of their own.
  config.mesh.fsdp = 1
  # Ways in which heads, MLP and vocabulary are divided.
  config.mesh.tensor = 1

  # -- Planning a machine's memory (--mode=plan). ----------------------------------------------------------------------
  config.plan = ConfigDict()
  # Devices of the machine that is planned for; `mesh` arranges them.
  config.plan.devices = 1
  # Memory of each in GiB.
  config.plan.memory_gb = 24.0
  # Tokens of the longest observation, a first prompt, where agent.context is 'full'; else they may fill the context.
  config.plan.prompt_tokens = 512

  # -- Watching for a collapse. ----------------------------------------------------------------------------------------
  config.monitor = ConfigDict()
  # Decay of the moving averages that are logged as `<metric>_ema`.
  config.monitor.ema_decay = 0.9
  # What an Echo-Trap warning does (docs/algorithms.md has the rule): 'warn', 'stop', or 'rollback' to the best
  # checkpoint with a smaller learning rate.
  config.monitor.echo_trap = 'warn'
  # Iterations whose means are the baselines of all rules.
  config.monitor.baseline_steps = 10
  # Signals at once that make a warning: of reward deviation, entropy, gradient norm, repeated replies.
  config.monitor.min_signals = 2
  # Iterations in a row with so many signals until the warning is given.
  config.monitor.patience = 3
  # What the learning rate is multiplied with at a rollback.
  config.monitor.rollback_lr = 0.5
  # Rollbacks of a run at most; the next warning after them stops it.
  config.monitor.max_rollbacks = 3
  # Stop after so many iterations in a row whose in-group reward deviation is below a tenth of its baseline; 0 is off.
  config.monitor.flat_reward_patience = 0
  # Stop after so many evaluations in a row with a success below 0.01 in all environments; 0 is off.
  config.monitor.hopeless_patience = 0
  # Stop after so many iterations in a row of which the filter left nothing; 0 is off.
  config.monitor.empty_patience = 5
  # Every so many iterations, how much the thoughts depend on the prompts (mutual information, RAGEN-2); 0 is off.
  config.monitor.information_every = 0
  # Replies, and prompts, that are scored under one another for the mutual information.
  config.monitor.information_samples = 32
  # Every so many iterations, gradient norms of the loss's parts by bucket of in-group reward deviation; 0 is off.
  config.monitor.gradients_every = 0
  # Buckets of reward deviation for these gradient norms.
  config.monitor.gradient_buckets = 4
  # How groups are dealt to the buckets: 'quantile' (equal numbers) or 'fixed_rv' (deviations 0 to 1, 1 to 2, ...).
  config.monitor.bucket_mode = 'quantile'

  config.checkpoint = ConfigDict()
  # Save after every so many iterations; after the last one always. 0 saves at the end only.
  config.checkpoint.every = 10
  # How many of the newest are kept, besides the best by held-out success among those saved right after an evaluation.
  config.checkpoint.keep = 2

  config.logging = ConfigDict()
  # Episodes of each environment that an evaluation, or an iteration, keeps for the trajectory viewer (--mode=view).
  config.logging.episodes = 16
  # Iterations between those whose training episodes are kept, the first one apart; 0: those of evaluations only.
  config.logging.episodes_every = 5
  # Of the episodes that are kept, how many of each environment go to TensorBoard too, as text and pictures.
  config.logging.trajectories = 4

  # Column counts (timelines, caches) are rounded up to multiples of this, so that few programs are compiled.
  config.length_step = 64
  # Directory of compiled programs that later runs start faster with; empty for none, 'auto' for <workdir>/xla_cache.
  config.compilation_cache = 'auto'

  if config.model.preset == 'tiny':
    for env in config.envs.values():
      env.max_words = 25  # its replies have at most 32 tokens
  else:
    _real_model(config)
  if adapters:
    _lora(config)
  return config


def _like(env: ConfigDict, **changes) -> ConfigDict:
  """An environment with some fields changed."""
  env = env.copy_and_resolve_references()
  env.update(changes)
  return env


def _real_model(config: ConfigDict) -> None:
  """What changes for a pretrained model: the paper's batch, lengths and learning rates."""
  config.num_iterations = 200
  config.model.remat = True
  config.model.logits_chunk = 2048
  config.train.groups = 8
  config.train.group_size = 16
  config.agent.max_response_tokens = 400
  config.agent.max_context = 3600
  config.optimizer.actor_lr = 1e-6
  config.optimizer.critic_lr = 1e-5
  config.optimizer.mini_batch_size = 32
  config.optimizer.micro_batch_size = 4
  config.length_step = 128


def _lora(config: ConfigDict) -> None:
  """RAGEN's preset (base-lora): rank and alpha 64, and for real models learning rates ten times as high."""
  config.lora.rank = 64
  config.lora.alpha = 64
  if config.model.preset != 'tiny':
    config.model.param_dtype = 'bfloat16'  # as the models are published
    config.optimizer.actor_lr = 1e-5
    config.optimizer.critic_lr = 1e-4
