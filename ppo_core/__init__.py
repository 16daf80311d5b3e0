"""The algorithm, on tensors and local files: PPO's arithmetic, the models and the programs that run them.

Nothing here knows of workflows, tracking, stores or the environment; everything per token is `[B, R]`,
response-aligned, right-padded and masked by a bool `response_mask` whose True means that the token counts.
"""
