#!/usr/bin/env bash
set -euo pipefail

export PYTHONPATH="$PWD:$MEGATRON_DIR:$POLAR_DIR/src"
docker build -t warehouse-agent .
python prepare.py
source "$SLIME_DIR/scripts/models/qwen3-0.6B.sh"
python "$SLIME_DIR/tools/convert_hf_to_torch_dist.py" "${MODEL_ARGS[@]}" \
    --hf-checkpoint Qwen3-0.6B --save Qwen3-0.6B_torch_dist
ray start --head --num-gpus 2
trap 'kill $(jobs -p); ray stop' EXIT
polar serve_rollout -c topology.yaml &
polar serve_gateway -c topology.yaml --node-id node-1 &
python "$SLIME_DIR/train_async.py" "${MODEL_ARGS[@]}" \
    --actor-num-nodes 1 \
    --actor-num-gpus-per-node 1 \
    --rollout-num-gpus 1 \
    --rollout-num-gpus-per-engine 1 \
    --hf-checkpoint Qwen3-0.6B \
    --ref-load Qwen3-0.6B_torch_dist \
    --load Qwen3-0.6B_torch_dist \
    --save checkpoints \
    --save-interval 10 \
    --rollout-function-path slime_bridge.rollout.generate_rollout_polar_async \
    --custom-rm-path slime_bridge.reward.reward_func \
    --custom-reward-post-process-path slime_bridge.reward_post_process.post_process_rewards \
    --custom-config-path polar_config.yaml \
    --data-source-path slime_bridge.data_source.CeilEpochRolloutDataSourceWithBuffer \
    --prompt-data train.jsonl \
    --input-key prompt \
    --label-key label \
    --metadata-key metadata \
    --reward-key score \
    --num-epoch 3 \
    --rollout-batch-size 16 \
    --n-samples-per-prompt 8 \
    --global-batch-size 128 \
    --rollout-max-response-len 1024 \
    --dynamic-history \
    --use-dynamic-batch-size \
    --max-tokens-per-gpu 8192 \
    --advantage-estimator grpo \
    --use-tis \
    --lr 1e-6 \
    --sglang-tool-call-parser qwen25 \
    --sglang-router-port 8680
