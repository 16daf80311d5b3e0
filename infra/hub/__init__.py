"""Models and data of the Hugging Face hub."""
