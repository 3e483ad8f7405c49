"""What plugins build with, one package for each kind of plugin. Public, like the contracts."""
