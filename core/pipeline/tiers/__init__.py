"""Moving KV between the device, the host and storages."""
