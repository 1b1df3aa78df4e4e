#!/usr/bin/env bash
set -euo pipefail

python train.py \
    rllm/backend=verl \
    rllm.data.train_batch_size=16 \
    rllm.data.max_prompt_length=1024 \
    rllm.data.max_response_length=1024 \
    rllm.rollout.n=8 \
    rllm.trainer.total_epochs=3 \
    rllm.algorithm.use_rllm=true \
    algorithm.adv_estimator=grpo \
    +model.name=Qwen/Qwen3-0.6B \
    actor_rollout_ref.model.path=Qwen/Qwen3-0.6B \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.enable_auto_tool_choice=true \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.tool_call_parser=hermes \
    trainer.n_gpus_per_node=1
