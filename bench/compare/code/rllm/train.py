import hydra
from agent import score, solve
from omegaconf import DictConfig
from rllm.data.dataset import DatasetRegistry
from rllm.trainer import AgentTrainer
from warehouse import tasks


@hydra.main(config_path="pkg://rllm.trainer.config", config_name="unified", version_base=None)
def main(config: DictConfig) -> None:
    train = DatasetRegistry.register_dataset("warehouse", tasks(), "train")
    trainer = AgentTrainer(
        backend="verl",
        agent_flow=solve,
        evaluator=score,
        config=config,
        train_dataset=train,
        val_dataset=train,
    )
    trainer.train()


if __name__ == "__main__":
    main()
