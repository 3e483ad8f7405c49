"""For engines that read KV out of other servers' memory: pieces of buffers."""
