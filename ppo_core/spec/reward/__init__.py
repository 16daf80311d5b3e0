"""The section `reward` of a spec: the kinds of rewards, and how they are weighed."""
