"""Networks. Each is an `nn.Module` that maps inputs to outputs."""
