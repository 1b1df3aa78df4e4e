"""First prompts of live rollouts, sampled again as groups that training can compare."""
