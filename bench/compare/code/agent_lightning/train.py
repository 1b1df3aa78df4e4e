import importlib.resources

from agentlightning.verl.entrypoint import run_ppo
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from warehouse import tasks

OVERRIDES = {
    "algorithm": {"adv_estimator": "grpo"},
    "data": {"train_batch_size": 16, "max_prompt_length": 1024, "max_response_length": 1024},
    "actor_rollout_ref": {
        "model": {"path": "Qwen/Qwen3-0.6B"},
        "rollout": {
            "name": "vllm",
            "n": 8,
            "multi_turn": {"format": "hermes"},
            "log_prob_micro_batch_size_per_gpu": 8,
        },
        "actor": {
            "ppo_mini_batch_size": 16,
            "ppo_micro_batch_size_per_gpu": 8,
            "optim": {"lr": 1e-6},
        },
        "ref": {"log_prob_micro_batch_size_per_gpu": 8},
    },
    "trainer": {"n_gpus_per_node": 1, "total_epochs": 3, "logger": ["console"]},
    "agentlightning": {
        "agl_base_url": "http://localhost:8080",
        "agl_key": "secret",
        "trace_aggregator": {"level": "trajectory"},
        "local": {
            "agent_class": "agent.Assistant",
            "env_map": {"QUESTION": "input.question", "EXPECTED": "input.expected"},
        },
    },
}

if __name__ == "__main__":
    folder = str(importlib.resources.files("agentlightning.verl"))
    with initialize_config_dir(config_dir=folder, version_base=None):
        config = compose(config_name="config")
    OmegaConf.set_struct(config, False)
    config = OmegaConf.merge(config, OmegaConf.create(OVERRIDES))
    run_ppo(config, train_dataset=tasks(), val_dataset=tasks())
