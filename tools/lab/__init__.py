"""The policy lab: the real scheduler, policies, caches and memory against a modelled device, in virtual time."""
