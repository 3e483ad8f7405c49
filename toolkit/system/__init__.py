"""Processes, environments and folders of this machine."""
