"""Engine programs: `python -m ppo_core.engines.<name>` serves jobs that are JSON documents; files carry the tensors."""
