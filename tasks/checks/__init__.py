"""What is looked at before a run starts anything: each file refuses one kind of thing, with its remedy."""
