"""Where batches run: arrays to the device, the forward pass, what it computed to the host. Knows no request."""
