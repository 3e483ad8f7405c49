"""The parts of config composition: reading, merging, resolving, checking, describing; see `pegboard.core.compose`."""
