"""The contracts: dataclasses and abstract classes, one file each. Nothing here imports torch at run time."""
