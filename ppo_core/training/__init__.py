"""The training engine's parts: DeepSpeed, its exact state, the update, experience, SFT."""
