"""What is trained, and on which loss: a file per algorithm, its paper and equations on top."""
