"""Policy, critic and reference as Hugging Face models."""
