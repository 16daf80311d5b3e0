"""The training engine's parts: DeepSpeed, its exact state, the PPO update, experience, SFT."""
